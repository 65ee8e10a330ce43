"""Every hook of hotswap: the table of contents of the system. One per plugin kind (contracts/kinds.py), all of one
form.

A hook takes no argument and yields `Provider` descriptors: cheap, lazy, with nothing heavy imported. It is called once
in every process that loads plugins (API, engine, simulator, `hotswap plugins`), at start-up; never while requests are
served. The order of plugins means nothing: the selection rule chooses by name and priority. What a hook yields is taken
whole or not at all: an error in one hook makes the plugin `failed`, which is a warning, or a refusal when the operator
asked for it.

`build(context)` is called in the process named below, only for the provider that was chosen, with the kind's own
context. `unavailable(context)` may be asked in any process and before the pieces exist that `build` gets: it may read
the fields of the common `BuildContext`, and `spec`, `block_size` and `layers` (attention) or `op` and `dtype` (kernels);
nothing else.

    from hotswap.core.contracts import PolicyProvider, hookimpl

    @hookimpl
    def hotswap_policy():
        yield PolicyProvider(name="shortest_job", build=lambda context: ShortestJob(context.options))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

from .contracts.hooks import HOOK_PROJECT

if TYPE_CHECKING:
    from .contracts.attention import AttentionBackend
    from .contracts.executor import Executor
    from .contracts.kernels import KernelProvider
    from .contracts.loader import Loader
    from .contracts.logits_processor import LogitsProcessorProvider
    from .contracts.model import ModelProvider
    from .contracts.observer import Observer
    from .contracts.platform import PlatformProvider
    from .contracts.policy import PolicyProvider
    from .contracts.provider import Provider
    from .contracts.quantization import QuantizationProvider
    from .contracts.scheduler import Scheduler
    from .contracts.source import Source
    from .contracts.tool_parser import ToolParserProvider
    from .contracts.victim import VictimRule

hookspec = pluggy.HookspecMarker(HOOK_PROJECT)


# The device and the processes on it.


@hookspec
def hotswap_platform() -> Iterable[PlatformProvider]:  # type: ignore[empty-body]
    """Device families. One is active, chosen first, before torch touches a device; built in the engine process.

    Automatic: the highest priority that can run on this host; third parties take part. `unavailable` looks at the host
    (files, drivers) and opens nothing.
    """


@hookspec
def hotswap_executor() -> Iterable[Provider[Executor]]:  # type: ignore[empty-body]
    """Ways to carry step plans to workers. One is active; built in the engine process after the model is known.

    Automatic: the highest priority among the built-in ones that can run here. Alias: --distributed-executor-backend.
    """


# What runs next.


@hookspec
def hotswap_scheduler() -> Iterable[Provider[Scheduler]]:  # type: ignore[empty-body]
    """Composers of mechanism, policy and victim rule into step plans. One is active; built in the engine process, and
    by the simulator.

    Automatic: the highest priority among the built-in ones.
    """


@hookspec
def hotswap_policy() -> Iterable[PolicyProvider]:  # type: ignore[empty-body]
    """Orders of service: who of the waiting goes next, and each request's share of a step. One is active; built in the
    engine process, and by the simulator.

    `fcfs` unless the operator names another. Alias: --scheduling-policy.
    """


@hookspec
def hotswap_victim() -> Iterable[Provider[VictimRule]]:  # type: ignore[empty-body]
    """Rules that pick who yields when KV blocks run out. One is active; built in the engine process, and by the
    simulator.

    The policy's `default_victim` unless the operator names another.
    """


# What runs on the device.


@hookspec
def hotswap_attention() -> Iterable[Provider[AttentionBackend]]:  # type: ignore[empty-body]
    """Attention backends over the paged KV cache. One is active per cache group; built in each worker, before weights
    are read.

    Automatic: the highest priority among the built-in ones that serve the group's cache spec here. Alias:
    --attention-backend.
    """


@hookspec
def hotswap_kernels() -> Iterable[KernelProvider]:  # type: ignore[empty-body]
    """Fast implementations of ops. One is active per op (`KernelProvider.op`); built in each worker, before the model.

    Automatic: the highest priority among the built-in ones that can run here, else the core's torch reference.
    `--plugin kernels=NAME` chooses NAME for every op that it offers, `--plugin kernels.OP=NAME` for one op; the name
    `reference` asks for the torch reference.
    """


@hookspec
def hotswap_quantization() -> Iterable[QuantizationProvider]:  # type: ignore[empty-body]
    """Ways in which weights are stored and multiplied. One is active for the model; built in each worker, before the
    model.

    Automatic: the one whose `detect` recognises the checkpoint's config; third parties take part. Alias:
    --quantization.
    """


@hookspec
def hotswap_model() -> Iterable[ModelProvider]:  # type: ignore[empty-body]
    """Model families. One is active; built in each worker.

    Automatic: the one that lists the checkpoint's architecture, else one that is a `fallback`; third parties take part.
    """


# Where weights come from.


@hookspec
def hotswap_loader() -> Iterable[Provider[Loader]]:  # type: ignore[empty-body]
    """Checkpoint formats. One is active; built in the API process (config, tokenizer) and in each worker (weights).

    Automatic: the highest priority that accepts the checkpoint; third parties take part. Alias: --load-format.
    """


@hookspec
def hotswap_source() -> Iterable[Provider[Source]]:  # type: ignore[empty-body]
    """Places that a model argument may name (a folder, a hub, a package). One is active; built in the process that
    starts the engine, before any device is opened.

    Automatic: the highest priority among the built-in ones that accept the argument.
    """


# What is added on top.


@hookspec
def hotswap_logits_processor() -> Iterable[LogitsProcessorProvider]:  # type: ignore[empty-body]
    """Changes to logits before a token is drawn. Any number are active, in the order in which the operator named them;
    built in each worker.

    None unless the operator names some.
    """


@hookspec
def hotswap_observer() -> Iterable[Provider[Observer]]:  # type: ignore[empty-body]
    """Listeners to requests and steps, which change nothing. Any number are active, in the order in which the operator
    named them; built in the engine process.

    None unless the operator names some.
    """


# What the server makes of text.


@hookspec
def hotswap_tool_parser() -> Iterable[ToolParserProvider]:  # type: ignore[empty-body]
    """Formats in which models write tool calls. One is active for the model, or none; built in the API process.

    Automatic: the built-in one whose `detect` recognises the chat template, else none: the name `none` asks for that.
    Alias: --tool-call-parser.
    """


def hook_names() -> tuple[str, ...]:
    """Every hook on this page, in its order."""
    return tuple(name for name, value in globals().items() if name.startswith("hotswap_") and callable(value))
