"""Builds a replica out of chosen plugins: as EngineBuilder does, without a device, a model and torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..clock import ManualClock
from ..compatibility import refuse_incompatible
from ..config import EngineConfig
from ..contracts.observer import FinishedRequest, ObserverContext
from ..contracts.policy import Policy, PolicyContext
from ..contracts.provider import BuildContext, DeviceInfo, ModelInfo
from ..contracts.scheduler import Scheduler, SchedulerContext
from ..contracts.victim import VictimContext, VictimRule
from ..devices import Device
from ..errors import PluginError, UsageError
from ..plugin_discovery import root_cause
from ..plugin_manager import PluginManager
from ..scheduling.limits import limits_of
from ..scheduling.mechanism import Mechanism
from .model_shape import ModelShape
from .replica import EngineSize, Replica
from .step_cost import StepCost
from .variants import KINDS_AT_WORK

WORKSPACE_BYTES = 2 << 30  # beside weights and KV cache: activations, logits, graphs, the runtime
CPU_CACHE_BYTES = 4 << 30  # what the CPU platform takes when memory is plenty


@dataclass(frozen=True, slots=True)
class Setup:
    """What all variants have in common."""

    config: EngineConfig
    shape: ModelShape
    device: Device
    cost: StepCost
    size: EngineSize


def engine_size(config: EngineConfig, shape: ModelShape, device: Device) -> EngineSize:
    """What an engine with these settings would have. Raises UsageError when the cache has no room."""
    cache, asked = config.cache, config.model.max_model_len
    if asked is not None and asked > shape.window:
        raise UsageError(f"--max-model-len {asked}: the model was made for {shape.window} tokens; give at most that")
    num_blocks = cache.num_gpu_blocks_override or _num_blocks(config, shape, device)
    if num_blocks < 1:
        raise UsageError(
            f"--device {device.name}: no room for a KV cache beside {shape.weight_bytes / 2**30:.1f} GiB of weights "
            "(--num-gpu-blocks-override N simulates one all the same)"
        )
    return EngineSize(
        limits=limits_of(config.scheduler, asked or shape.window, on_cpu=device.name == "cpu"),
        num_blocks=num_blocks,
        block_size=cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        max_steps_in_flight=2 if config.scheduler.async_scheduling else 1,
    )


def _num_blocks(config: EngineConfig, shape: ModelShape, device: Device) -> int:
    """One block is the null block, as in the engine."""
    given = config.cache.kv_cache_memory_bytes
    if given is None and device.name == "cpu":
        given = CPU_CACHE_BYTES
    if given is None:
        room = device.memory_bytes * config.cache.gpu_memory_utilization
        given = int(room) - shape.weight_bytes - WORKSPACE_BYTES
    return given // (config.cache.block_size * shape.kv_bytes_per_token) - 1


class ReplicaBuilder:
    """For one variant: `check` says what is wrong with it before anything runs, `build` makes a replica, any number of
    times."""

    def __init__(self, manager: PluginManager, setup: Setup) -> None:
        self._manager = manager
        self._setup = setup

    def check(self) -> dict[str, str]:
        """kind -> name of what will be at work. Raises PluginError or UsageError."""
        context = self._context(BuildContext, ManualClock())
        names: dict[str, str] = {}
        for kind in KINDS_AT_WORK:
            if kind == "observer":
                chosen = [found.name for found in self._manager.named_providers(kind)]
            else:
                chosen = [self._manager.choose(kind, context).name]
            if chosen:
                names[kind] = "+".join(chosen)
        plugins = set(names.items())
        refuse_incompatible(self._setup.config, plugins=plugins, more_rows=self._manager.rows())
        return names

    def build(self, on_end: Callable[[FinishedRequest], None], *, max_tokens: int | None = None) -> Replica:
        """See Replica. Raises PluginError."""
        clock, manager = ManualClock(), self._manager
        policy: Policy = manager.build("policy", self._context(PolicyContext, clock))
        victim: VictimRule = manager.build("victim", self._context(VictimContext, clock))
        observers = manager.build_all("observer", self._context(ObserverContext, clock))

        def make_scheduler(mechanism: Mechanism) -> Scheduler:
            context = self._context(SchedulerContext, clock, mechanism=mechanism, policy=policy, victim=victim)
            scheduler: Scheduler = manager.build("scheduler", context)
            return scheduler

        return Replica(
            self._setup.size,
            self._setup.cost,
            clock,
            policy,
            make_scheduler,
            on_end,
            observers=[(choice.described, observer) for choice, observer in observers],
            max_tokens=max_tokens,
        )

    def blame(self, error: Exception) -> PluginError | None:
        """The error to show when a plugin's code raised `error`; None when it was the core's own."""
        owner = self._manager.owner_of(error)
        return (
            None if owner is None else PluginError(f"{owner.described} failed in the simulation: {root_cause(error)}")
        )

    def _context(self, kind: type[Any], clock: ManualClock, **fields: Any) -> Any:
        setup = self._setup
        on_cpu = setup.device.name == "cpu"
        return kind(
            options=None,
            config=setup.config,
            device=DeviceInfo(
                kind="cpu" if on_cpu else "cuda", name=setup.device.name, memory_bytes=setup.device.memory_bytes
            ),
            clock=clock,
            model=_model_info(setup.shape, setup.size.limits.max_model_len),
            seed=setup.config.model.seed,
            resolve=lambda kind, name: self._manager.build_named(kind, name, self._context(BuildContext, clock)),
            **fields,
        )


def _model_info(shape: ModelShape, window: int) -> ModelInfo:
    vocabulary = int(shape.config.get("vocab_size") or 0)
    architectures = shape.config.get("architectures") or [""]
    return ModelInfo(dict(shape.config), str(architectures[0]), shape.dtype, vocabulary, vocabulary, window)
