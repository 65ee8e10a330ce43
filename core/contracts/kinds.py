"""The plugin kinds as data: one row each. The plugin manager, the docs tests and `hotswap plugins` read this table.

A row names its classes by dotted path, so that reading the table imports no contract.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from .provider import Provider

Active = Literal["one", "one per cache group", "one per op", "any"]
ChosenBy = Literal["automatic", "default", "policy", "checkpoint", "model argument", "operator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One plugin kind.

    name: what `--plugin KIND=NAME` calls it; the hook is `hotswap_<name>`.
    abstract, provider, context: "module:Class" under hotswap.core.contracts: what `build` must return, what the hook
        must yield, what `build` gets.
    current, oldest_supported: versions of the contract. A provider written for another version is refused.
    active: how many work at once.
    chosen_by: who decides when the operator names none.
    third_parties_automatic: whether plugins that are not built in take part in that choice.
    default: the name that is chosen when nobody names one; None when priorities decide.
    fallback: the name of the core's own implementation, which serves when no plugin can; None when there is none.
    """

    name: str
    abstract: str
    provider: str
    context: str
    current: int = 1
    oldest_supported: int = 1
    active: Active = "one"
    chosen_by: ChosenBy = "automatic"
    third_parties_automatic: bool = False
    default: str | None = None
    fallback: str | None = None

    @property
    def hook(self) -> str:
        return f"hotswap_{self.name}"

    @property
    def docs(self) -> str:
        """The section of the docs that describes the contract and what changed in each version."""
        return f"docs/plugins/contracts.md#{self.name}"

    def provider_class(self) -> type[Provider[Any]]:
        loaded: type[Provider[Any]] = _load(self.provider)
        return loaded

    def context_class(self) -> type[Any]:
        loaded: type[Any] = _load(self.context)
        return loaded

    def ops(self) -> tuple[str, ...]:
        """The ops of a kind with one active per op; empty for the others."""
        if self.active != "one per op":
            return ()
        loaded: tuple[str, ...] = _load(f"{self.name}:OPS")
        return loaded

    def product_class(self, op: str | None = None) -> type[Any]:
        """What `build` must return an instance of. Kernels of any op but `linear` are plain callables."""
        if self.active == "one per op" and op != "linear":
            return Callable  # type: ignore[return-value]  # isinstance() accepts this ABC
        loaded: type[Any] = _load(self.abstract)
        return loaded


def _load(dotted: str) -> Any:
    module, _, attribute = dotted.partition(":")
    return getattr(importlib.import_module(f"hotswap.core.contracts.{module}"), attribute)


_TABLE = (
    Kind(
        name="platform",
        abstract="platform:Platform",
        provider="platform:PlatformProvider",
        context="platform:PlatformContext",
        current=2,
        third_parties_automatic=True,
    ),
    Kind(
        name="executor", abstract="executor:Executor", provider="provider:Provider", context="executor:ExecutorContext"
    ),
    Kind(
        name="scheduler",
        abstract="scheduler:Scheduler",
        provider="provider:Provider",
        context="scheduler:SchedulerContext",
    ),
    Kind(
        name="policy",
        abstract="policy:Policy",
        provider="policy:PolicyProvider",
        context="policy:PolicyContext",
        chosen_by="default",
        default="fcfs",
    ),
    Kind(
        name="victim",
        abstract="victim:VictimRule",
        provider="provider:Provider",
        context="victim:VictimContext",
        chosen_by="policy",
    ),
    Kind(
        name="attention",
        abstract="attention:AttentionBackend",
        provider="provider:Provider",
        context="attention:AttentionContext",
        active="one per cache group",
    ),
    Kind(
        name="kernels",
        abstract="kernels:LinearKernel",
        provider="kernels:KernelProvider",
        context="kernels:KernelContext",
        active="one per op",
        fallback="reference",
    ),
    Kind(
        name="quantization",
        abstract="quantization:QuantizationMethod",
        provider="quantization:QuantizationProvider",
        context="quantization:QuantizationContext",
        chosen_by="checkpoint",
        third_parties_automatic=True,
    ),
    Kind(
        name="model",
        abstract="model:Model",
        provider="model:ModelProvider",
        context="model:ModelContext",
        chosen_by="checkpoint",
        third_parties_automatic=True,
    ),
    Kind(
        name="loader",
        abstract="loader:Loader",
        provider="provider:Provider",
        context="loader:LoaderContext",
        chosen_by="model argument",
        third_parties_automatic=True,
    ),
    Kind(
        name="source",
        abstract="source:Source",
        provider="provider:Provider",
        context="source:SourceContext",
        chosen_by="model argument",
    ),
    Kind(
        name="logits_processor",
        abstract="logits_processor:LogitsProcessor",
        provider="logits_processor:LogitsProcessorProvider",
        context="logits_processor:LogitsProcessorContext",
        active="any",
        chosen_by="operator",
    ),
    Kind(
        name="observer",
        abstract="observer:Observer",
        provider="provider:Provider",
        context="observer:ObserverContext",
        active="any",
        chosen_by="operator",
    ),
    Kind(
        name="tool_parser",
        abstract="tool_parser:ToolParser",
        provider="tool_parser:ToolParserProvider",
        context="tool_parser:ToolParserContext",
        chosen_by="checkpoint",
        fallback="none",
    ),
)

KINDS: Final = MappingProxyType({kind.name: kind for kind in _TABLE})
