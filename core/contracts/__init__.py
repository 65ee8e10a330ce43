"""Everything that a plugin author imports: `from hotswap.core.contracts import hookimpl, PolicyProvider`. No torch."""

from __future__ import annotations

from ..errors import EngineDeadError, ModelLoadError, PlanError, PluginError, RequestError, UsageError
from ..sampling_params import SamplingParams
from ..trace import TraceRow
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
from .logits_processor import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    LogitsProcessorContext,
    LogitsProcessorProvider,
    LogitsRows,
)
from .model import ForwardContext, LoadReport, Model, ModelContext, ModelProvider, WeightSpec
from .observer import FinishedRequest, Observer, ObserverContext, StepObservation
from .plan import NewRequest, PositionLogprobs, RowResult, ScheduledRequest, StepPlan, StepResult
from .platform import MemorySnapshot, Platform, PlatformContext, PlatformProvider
from .policy import Budget, KeyedPolicy, Policy, PolicyContext, PolicyProvider, RequestView, Shed
from .provider import BuildContext, CompatibilityRow, DeviceInfo, ModelInfo, Provider, always_available
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
from .tool_parser import (
    ToolCallDelta,
    ToolCallStream,
    ToolParser,
    ToolParserContext,
    ToolParserOutput,
    ToolParserProvider,
)
from .victim import VictimContext, VictimRule

__all__ = [
    "AddedRequest",
    "always_available",
    "AttentionBackend",
    "AttentionContext",
    "AttentionLayer",
    "BatchGeometry",
    "BatchUpdate",
    "Budget",
    "BuildContext",
    "CacheSpec",
    "Capabilities",
    "Checkpoint",
    "CompatibilityRow",
    "DeviceInfo",
    "EngineDeadError",
    "Executor",
    "ExecutorContext",
    "FinishedRequest",
    "ForwardContext",
    "hookimpl",
    "KernelContext",
    "KernelFunction",
    "KernelProvider",
    "KeyedPolicy",
    "KVLayout",
    "LayerCache",
    "LayerMethod",
    "LayerSpec",
    "LinearKernel",
    "Loader",
    "LoaderContext",
    "LoadReport",
    "LogitsProcessor",
    "LogitsProcessorContext",
    "LogitsProcessorProvider",
    "LogitsRows",
    "MemorySnapshot",
    "Model",
    "ModelContext",
    "ModelInfo",
    "ModelLoadError",
    "ModelProvider",
    "NewRequest",
    "Observer",
    "ObserverContext",
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
    "StepObservation",
    "StepPlan",
    "StepResult",
    "TokenizerSpec",
    "ToolCallDelta",
    "ToolCallStream",
    "ToolParser",
    "ToolParserContext",
    "ToolParserOutput",
    "ToolParserProvider",
    "TraceRow",
    "UsageError",
    "VictimContext",
    "VictimRule",
    "WeightSpec",
    "Worker",
]
