"""What every plugin kind shares: the descriptor that a hook yields and the context that a build receives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ..clock import Clock
    from ..config import EngineConfig
    from .attention import CacheSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Plain facts about the device, found without opening a context on it."""

    kind: str  # "cpu", "cuda", "rocm"
    name: str  # "AMD EPYC 9B14", "NVIDIA H200"
    capability: tuple[int, int] = (0, 0)  # CUDA compute capability; (0, 0) elsewhere
    memory_bytes: int = 0
    count: int = 1
    features: frozenset[str] = frozenset()  # instruction sets and the like: "avx2", "avx512_bf16", ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Plain facts about the model being served."""

    hf_config: dict[str, Any]
    architecture: str
    dtype: str  # "float32", "bfloat16", "float16"
    vocab_size: int  # rows of the embedding
    logits_width: int  # the width of a logits row: the bound of every token id
    max_model_len: int
    cache_specs: tuple[CacheSpec, ...] = ()  # one per layer


@dataclass(frozen=True, slots=True)
class CompatibilityRow:
    """Two features and whether they go together. A feature is a word of core/compatibility.py ("prefix_caching") or
    "KIND=NAME" for an active plugin. reason: for the reader: what is wrong, and what to do."""

    first: str
    second: str
    allowed: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What a provider's `build` gets. Each kind subclasses it; a new field with a default breaks nobody."""

    options: BaseModel | None  # the plugin's own options, validated; None when the provider declares none
    config: EngineConfig
    device: DeviceInfo
    clock: Clock
    model: ModelInfo | None = None  # None in `unavailable` for `hotswap plugins`, which knows no model
    role: str = "engine"  # "api", "engine", "worker"
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("hotswap"))
    metrics_namespace: str = "hotswap"
    cache_dir: Path = Path("~/.cache/hotswap")
    resolve: Callable[[str, str], Any] | None = (
        None  # resolve(kind, name) -> built object; for the few cross-kind needs
    )


def always_available(context: BuildContext) -> Sequence[str]:
    """The `unavailable` of a provider that runs everywhere."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider(Generic[T]):
    """A cheap, lazy description of one implementation. Hooks yield these; nothing heavy is imported until `build`.

    name: unique within its kind; lower case, digits, `_`.
    build: imports the implementation and returns an instance of its kind's abstract class. Called at most once an engine
        (kernels and attention: once per op or cache group).
    contract: the version of the kind's contract that it was written for.
    options: a pydantic model of the plugin's own options, or None when it takes none.
    unavailable: every reason why it cannot run in this context, all at once; empty when it can. Must not open a device, and
        must work with `context.model` None.
    priority: for automatic choice; the highest without a reason against it wins, equal ones are refused.
    automatic: False for one that is used only when somebody names it, however well it would fit.
    combines: rows that it adds to the compatibility table; each is about itself: `first` is "KIND=NAME" of this provider.
    summary: one line for `hotswap plugins`.
    """

    name: str
    build: Callable[[Any], T]
    contract: int = 1
    options: type[BaseModel] | None = None
    unavailable: Callable[[Any], Sequence[str]] = always_available
    priority: int = 0
    automatic: bool = True
    combines: tuple[CompatibilityRow, ...] = ()
    summary: str = ""
