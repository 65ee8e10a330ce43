"""Everything that a plugin author imports: `from hotswap.core.contracts import hookimpl, PolicyProvider`. No torch."""

from __future__ import annotations

from ..errors import EngineDeadError, ModelLoadError, PlanError, PluginError, RequestError, UsageError
from ..sampling_params import SamplingParams
from .attention import (
    AttentionBackend,
    AttentionContext,
    AttentionLayer,
    BatchGeometry,
    CacheSpec,
    Capabilities,
    KVLayout,
    LayerCache,
)
from .executor import Executor, ExecutorContext, Worker
from .hooks import hookimpl
from .kernels import OPS, KernelContext, KernelFunction, KernelProvider, LinearKernel, PackedWeight
from .loader import Checkpoint, Loader, LoaderContext, TokenizerSpec
from .model import ForwardContext, LoadReport, Model, ModelContext, ModelProvider, WeightSpec
from .plan import NewRequest, PositionLogprobs, RowResult, ScheduledRequest, StepPlan, StepResult
from .platform import MemorySnapshot, Platform, PlatformContext, PlatformProvider
from .policy import Budget, KeyedPolicy, Policy, PolicyContext, PolicyProvider, RequestView, Shed
from .provider import BuildContext, DeviceInfo, ModelInfo, Provider, always_available
from .quantization import (
    LayerMethod,
    LayerSpec,
    ParamSpec,
    QuantizationContext,
    QuantizationMethod,
    QuantizationProvider,
)
from .scheduler import PlanBuilder, PoolView, RequestUpdate, Scheduler, SchedulerContext, SchedulingMechanism
from .source import Report, Source, SourceContext
from .victim import VictimContext, VictimRule

__all__ = [
    "AttentionBackend",
    "AttentionContext",
    "AttentionLayer",
    "BatchGeometry",
    "Budget",
    "BuildContext",
    "CacheSpec",
    "Capabilities",
    "Checkpoint",
    "DeviceInfo",
    "EngineDeadError",
    "Executor",
    "ExecutorContext",
    "ForwardContext",
    "KVLayout",
    "KernelContext",
    "KernelFunction",
    "KernelProvider",
    "KeyedPolicy",
    "LayerCache",
    "LayerMethod",
    "LayerSpec",
    "LinearKernel",
    "LoadReport",
    "Loader",
    "LoaderContext",
    "MemorySnapshot",
    "Model",
    "ModelContext",
    "ModelInfo",
    "ModelLoadError",
    "ModelProvider",
    "NewRequest",
    "OPS",
    "PackedWeight",
    "ParamSpec",
    "PlanBuilder",
    "PlanError",
    "Platform",
    "PlatformContext",
    "PlatformProvider",
    "PluginError",
    "Policy",
    "PolicyContext",
    "PolicyProvider",
    "PoolView",
    "PositionLogprobs",
    "Provider",
    "QuantizationContext",
    "QuantizationMethod",
    "QuantizationProvider",
    "Report",
    "RequestError",
    "RequestUpdate",
    "RequestView",
    "RowResult",
    "SamplingParams",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerContext",
    "SchedulingMechanism",
    "Shed",
    "Source",
    "SourceContext",
    "StepPlan",
    "StepResult",
    "TokenizerSpec",
    "UsageError",
    "VictimContext",
    "VictimRule",
    "WeightSpec",
    "Worker",
    "always_available",
    "hookimpl",
]
