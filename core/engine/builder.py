"""Builds the engine inside its process: device, kernels, model, weights, cache, scheduler, each out of those before it."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import msgspec
import torch

from ..clock import Clock
from ..compatibility import refuse_incompatible
from ..config import EngineConfig
from ..contracts.attention import AttentionBackend, AttentionContext, CacheSpec
from ..contracts.executor import Executor, ExecutorContext
from ..contracts.kernels import OPS, KernelContext
from ..contracts.loader import Checkpoint
from ..contracts.logits_processor import LogitsProcessorContext, LogitsProcessorProvider
from ..contracts.model import Model, ModelContext, ModelProvider
from ..contracts.observer import ObserverContext
from ..contracts.platform import Platform, PlatformContext
from ..contracts.policy import Policy, PolicyContext
from ..contracts.provider import BuildContext, DeviceInfo, ModelInfo
from ..contracts.quantization import QuantizationContext, QuantizationMethod
from ..contracts.scheduler import Scheduler, SchedulerContext
from ..contracts.victim import VictimContext, VictimRule
from ..errors import ModelLoadError, UsageError
from ..kv_cache.manager import KVCacheManager
from ..layers.ops import OpTable
from ..layers.reference import ReferenceLinear
from ..model_window import model_window
from ..plugin_manager import PluginManager, Suits
from ..runner.kv_cache import CacheGroup, CachePlan, MemoryTable, group_layers
from ..runner.memory_report import guard_part
from ..runner.processors import ActiveProcessor
from ..scheduling.limits import SchedulingLimits, limits_of
from ..scheduling.mechanism import Mechanism
from .admin import EngineAdmin
from .assembly import AssembledEngine, Report, cache_dir
from .engine_core import EngineCore
from .observers import ObserverSet
from .request_processors import RequestProcessors
from .wire import EngineInfo
from .worker_builder import WorkerBuilder

logger = logging.getLogger("hotswap.engine")

DEFAULT_MAX_MODEL_LEN = 8192  # when neither model nor operator says how long a context may be


class EngineBuilder:
    """Used once. The checkpoint stays the caller's to close."""

    def __init__(
        self, manager: PluginManager, config: EngineConfig, checkpoint: Checkpoint, clock: Clock, report: Report | None
    ) -> None:
        self._manager = manager
        self._config = config
        self._checkpoint = checkpoint
        self._clock = clock
        self._report = report
        self._seconds: dict[str, float] = {}
        self._memory = MemoryTable()

    def build(self) -> AssembledEngine:
        """Raises PluginError, ModelLoadError or UsageError in one line, before weights are read where that is possible."""
        platform = self._platform()
        architecture = self._architecture()
        dtype = self._dtype(platform)
        refuse_incompatible(self._config, model_dtype=dtype)
        window = self._window()
        self._model_info = ModelInfo(
            self._checkpoint.config, architecture, dtype, _vocab_size(self._checkpoint.config), 0, window
        )
        with self._guarded_weights(platform):
            model = self._model(platform, architecture, dtype, window)
        specs = self._cache_specs(model)
        groups = group_layers(specs)
        if len(groups) != 1:
            raise ModelLoadError(
                f"{architecture}: its layers keep {len(groups)} kinds of cache; this version serves models with one"
            )
        self._model_info = dataclasses.replace(
            self._model_info, cache_specs=tuple(specs), logits_width=self._model_info.vocab_size
        )
        backends = [self._attention(group, model) for group in groups]
        policy, victim = self._policy()
        processors = self._processors()
        observers = self._observers()
        self._refuse_combinations(dtype)
        with self._guarded_weights(platform):
            self._load_weights(model, platform)
        limits = self._limits(window, model)
        device_side = self._device_side(platform, model, groups, backends, limits)
        cache_plan = device_side.plan_cache(processes_logits=bool(processors))
        kv = KVCacheManager(
            cache_plan.num_blocks, cache_plan.block_size, enable_prefix_caching=self._config.cache.enable_prefix_caching
        )
        mechanism = Mechanism(limits, kv, policy, self._clock)
        scheduler = self._scheduler(mechanism, policy, victim)
        worker = device_side.worker(cache_plan, processors)
        executor: Executor = self._manager.build("executor", self._context(ExecutorContext, make_worker=worker))
        self._log_sizes(mechanism, cache_plan)
        core = EngineCore(
            mechanism,
            scheduler,
            executor,
            self._clock,
            max_steps_in_flight=2 if self._config.scheduler.async_scheduling else 1,
            logits_width=self._model_info.logits_width,
            processors=RequestProcessors.of(self._manager),
            observers=observers,
        )
        info = self._info(mechanism, cache_plan, limits)
        return AssembledEngine(core, info, EngineAdmin(self._manager, core, info, self._config, self._context))

    def _context(self, kind: type[Any], **fields: Any) -> Any:
        """A kind's context with the common fields filled."""
        return kind(
            options=None,
            config=self._config,
            device=self._device,
            clock=self._clock,
            model=getattr(self, "_model_info", None),
            seed=self._config.model.seed,
            cache_dir=cache_dir(self._config),
            resolve=self._resolve,
            **fields,
        )

    def _resolve(self, kind: str, name: str) -> Any:
        return self._manager.build_named(kind, name, self._context(BuildContext))

    def _platform(self) -> Platform:
        started = time.monotonic()
        self._device = DeviceInfo(kind="host", name="host")
        platform: Platform = self._manager.build("platform", self._context(PlatformContext))
        platform.initialize()
        self._device = platform.probe()
        self._torch_device = platform.torch_device()
        self._seconds["device"] = time.monotonic() - started
        return platform

    def _architecture(self) -> str:
        names = self._checkpoint.config.get("architectures") or []
        if len(names) != 1:
            raise ModelLoadError(f"{self._checkpoint.path}: config.json must name one architecture, it names {names!r}")
        if self._checkpoint.needs_remote_code and not self._config.model.trust_remote_code:
            logger.info(
                "%s names Python code of its own; it is not run (--trust-remote-code is off)", self._checkpoint.path
            )
        return str(names[0])

    def _dtype(self, platform: Platform) -> str:
        asked = self._config.model.dtype
        if asked != "auto":
            return asked
        config = self._checkpoint.config
        stored = config.get("dtype") or config.get("torch_dtype") or "float32"
        return platform.default_dtype(str(stored).removeprefix("torch."))

    def _window(self) -> int:
        from_model = model_window(self._checkpoint.config)
        asked = self._config.model.max_model_len
        if asked is None:
            return from_model or DEFAULT_MAX_MODEL_LEN
        if from_model is not None and asked > from_model:
            raise UsageError(f"--max-model-len {asked}: the model was made for {from_model} tokens; give at most that")
        return asked

    def _choose_ops(self, dtype: str) -> OpTable:
        """The chosen kernel of each op; torch's reference where none can run."""
        table: dict[str, Any] = {}
        reference = OpTable.reference()
        for op in OPS:
            context = self._context(KernelContext, op=op, dtype=dtype)
            choice = self._manager.choose_or_none("kernels", context, op=op)
            table[op] = getattr(reference, op) if choice is None else self._manager.build_choice(choice, context)
        return OpTable(**table)

    def _model(self, platform: Platform, architecture: str, dtype: str, window: int) -> Model:
        started = time.monotonic()
        torch_dtype = getattr(torch, dtype)
        activation_dtype = platform.activation_dtype(dtype)
        ops = self._ops = self._choose_ops(activation_dtype)
        if self._config.deterministic and platform.is_asynchronous and isinstance(ops.linear, ReferenceLinear):
            raise UsageError(
                "--deterministic: no kernel of this device's multiplies the same way for every batch size (torch's own products"
                " do not); install one (pip install 'hotswap[triton]') or leave --deterministic out"
            )
        hf_config = self._checkpoint.config
        quantization: QuantizationMethod = self._manager.build(
            "quantization",
            self._context(
                QuantizationContext, linear=ops.linear, torch_device=self._torch_device, torch_dtype=torch_dtype
            ),
            suits=Suits("this checkpoint's quantization", lambda provider: provider.detect(hf_config)),
        )
        context = self._context(
            ModelContext,
            hf_config=hf_config,
            ops=ops,
            quantization=quantization,
            torch_dtype=torch_dtype,
            activation_dtype=getattr(torch, activation_dtype),
            torch_device=self._torch_device,
            max_model_len=window,
            model_path=str(self._checkpoint.path),
        )
        providers = [cast(ModelProvider, found.provider) for found in self._manager.providers("model")]
        native = any(architecture in provider.architectures for provider in providers)
        suits = Suits(
            f"architecture {architecture!r}",
            lambda provider: architecture in provider.architectures if native else provider.fallback,
        )
        model: Model = self._manager.build("model", context, suits=suits)
        self._seconds["model"] = time.monotonic() - started
        return model

    def _cache_specs(self, model: Model) -> Sequence[CacheSpec]:
        specs = model.cache_specs()
        dtype = self._config.cache.kv_cache_dtype
        return specs if dtype == "auto" else [dataclasses.replace(spec, dtype=dtype) for spec in specs]

    def _attention(self, group: CacheGroup, model: Model) -> AttentionBackend:
        layers = tuple(layer for layer in model.attention_layers() if layer.index in group.layers)
        context = self._context(
            AttentionContext, spec=group.spec, block_size=self._config.cache.block_size, layers=layers
        )

        def resolve(kind: str, name: str) -> Any:
            """An attention plugin made of others builds them for the same cache group."""
            return self._manager.build_named(kind, name, context) if kind == "attention" else self._resolve(kind, name)

        backend: AttentionBackend = self._manager.build("attention", dataclasses.replace(context, resolve=resolve))
        return backend

    def _policy(self) -> tuple[Policy, VictimRule]:
        policy: Policy = self._manager.build("policy", self._context(PolicyContext))
        victim: VictimRule = self._manager.build("victim", self._context(VictimContext))
        return policy, victim

    def _processors(self) -> list[ActiveProcessor]:
        context = self._context(
            LogitsProcessorContext,
            torch_device=self._torch_device,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            logits_width=self._model_info.logits_width,
        )
        return [
            ActiveProcessor(
                choice.name,
                choice.described,
                processor,
                cast(LogitsProcessorProvider, choice.provider).arguments is None,
            )
            for choice, processor in self._manager.build_all("logits_processor", context)
        ]

    def _observers(self) -> ObserverSet:
        built = self._manager.build_all("observer", self._context(ObserverContext))
        return ObserverSet([(choice.described, observer) for choice, observer in built])

    def _refuse_combinations(self, dtype: str) -> None:
        """The compatibility table, with every plugin that will be active; weights are not read yet."""
        plugins = {(choice.kind, choice.name) for choice in self._manager.chosen.values()}
        for kind in ("scheduler", "executor"):  # built later, out of what does not exist yet
            choice = self._manager.preview(kind, self._context(BuildContext))
            if choice is not None:
                plugins.add((kind, choice.name))
        refuse_incompatible(self._config, model_dtype=dtype, plugins=plugins, more_rows=self._manager.rows())

    def _scheduler(self, mechanism: Mechanism, policy: Policy, victim: VictimRule) -> Scheduler:
        scheduler: Scheduler = self._manager.build(
            "scheduler", self._context(SchedulerContext, mechanism=mechanism, policy=policy, victim=victim)
        )
        return scheduler

    def _guarded_weights(self, platform: Platform) -> AbstractContextManager[None]:
        return guard_part("weights", self._memory, platform, self._config, self._checkpoint.total_bytes or None)

    def _device_side(
        self,
        platform: Platform,
        model: Model,
        groups: Sequence[CacheGroup],
        backends: Sequence[AttentionBackend],
        limits: SchedulingLimits,
    ) -> WorkerBuilder:
        return WorkerBuilder(
            self._config,
            platform,
            model,
            self._ops,
            groups,
            backends,
            limits,
            self._model_info.logits_width,
            self._memory,
            self._seconds,
            self._report,
        )

    def _load_weights(self, model: Model, platform: Platform) -> None:
        started = time.monotonic()
        total = self._checkpoint.total_bytes
        done = 0
        dtype = getattr(torch, self._model_info.dtype)

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal done
            made = self._checkpoint.weights_for(
                model.weight_specs(), dtype, self._config.model.seed, self._torch_device
            )
            for name, tensor in made:
                yield name, tensor
                done += tensor.numel() * tensor.element_size()
                if self._report is not None:
                    self._report("weights", min(done, total), total)

        report = model.load_weights(tensors())
        for name in report.unexpected[:8]:
            logger.warning("the checkpoint's tensor %s is not used by this model", name)
        platform.synchronize()
        self._memory.add("weights", done)
        self._seconds["weights"] = time.monotonic() - started

    def _limits(self, window: int, model: Model) -> SchedulingLimits:
        return limits_of(
            self._config.scheduler, window, on_cpu=self._device.kind == "cpu", model_is_chunkable=model.chunkable
        )

    def _log_sizes(self, mechanism: Mechanism, plan: CachePlan) -> None:
        kind = "CPU" if self._device.kind == "cpu" else "GPU"
        logger.info("# %s blocks: %d (%d tokens each; %s)", kind, plan.num_blocks, plan.block_size, plan.reason)
        logger.info("longest request that fits: %d tokens", mechanism.window)
        for line in self._memory.lines():
            logger.info("memory  %s", line)
        if mechanism.window < mechanism.limits.max_model_len:
            logger.warning(
                "the KV cache holds %d tokens, less than the model's window of %d: longer requests are refused. "
                "Give the cache more with --kv-cache-memory-bytes, or lower --max-model-len",
                mechanism.window,
                mechanism.limits.max_model_len,
            )

    def _info(self, mechanism: Mechanism, plan: CachePlan, limits: SchedulingLimits) -> EngineInfo:
        return EngineInfo(
            model=self._config.model.model,
            architecture=self._model_info.architecture,
            dtype=self._model_info.dtype,
            max_model_len=mechanism.window,
            max_prompt_len=mechanism.window - 1,
            logits_width=self._model_info.logits_width,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            device=self._device.name,
            inventory=[msgspec.to_builtins(row) for row in self._manager.inventory(self._context(BuildContext))],
            startup_seconds={name: round(seconds, 3) for name, seconds in self._seconds.items()},
            uses_priority=bool(mechanism.policy.uses_priority),
        )


def _vocab_size(config: dict[str, Any]) -> int:
    inner = config.get("text_config") or config
    size = inner.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ModelLoadError(f"config.json: vocab_size is {size!r}; a positive number is needed")
    return size
