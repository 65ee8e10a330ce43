"""Flags of vLLM that belong on a command line from there although nothing here answers to them: what they turn on is
not in this version, or is always so. The value that asks for what is so anyway is accepted; any other is refused in one
line that says what to do instead.

The same names are keys of the config file. What is meaningless here at any value is in foreign_flags.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from hotswap.core.errors import UsageError

from .spelling import JSON

ANY: Final = "*"
_NOT_YET: Final = "not in this version yet"


@dataclass(frozen=True, slots=True)
class KnownFlag:
    """name: in the form of a setting, `enable_lora`. reason: what to say when it is refused. neutral: the values, in lower
    case, that are accepted without effect; ANY accepts all. short: another spelling. switch: takes no value, and can be
    turned off with `--no-`; its values are "true" and "false". many: takes several values."""

    name: str
    reason: str
    neutral: tuple[str, ...] = ()
    short: str | None = None
    switch: bool = False
    many: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def later(self) -> bool:
        """Whether it is a feature that is still to come, not one that is meaningless at other values."""
        return _NOT_YET in self.reason

    def check(self, value: Any) -> None:
        """Raises UsageError unless the value, text or out of YAML, is a neutral one."""
        if value is None or ANY in self.neutral or _as_text(value) in self.neutral:
            return
        if self.name == "limit_mm_per_prompt" and _only_zeros(value):
            return
        raise UsageError(self.refusal)

    @property
    def refusal(self) -> str:
        return f"{self.flag}: {self.reason}"


def _as_text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.strip().lower()


def _only_zeros(value: Any) -> bool:
    """Whether {"image": 0, "video": 0} or image=0,video=0 asks for a server of text alone."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            pairs = [pair.partition("=") for pair in value.split(",")]
            value = {name: int(count) if count.isdigit() else count for name, _, count in pairs}
    return isinstance(value, dict) and all(count == 0 for count in value.values())


def _switch(name: str, reason: str, neutral: str = "false", short: str | None = None) -> KnownFlag:
    return KnownFlag(name, reason, (neutral,), short, switch=True)


_DRAFTS = f"speculative decoding is {_NOT_YET}; leave it out, the answers are the same"
_LORA = f"serving adapters is {_NOT_YET}; merge the adapter into the model and serve that"
_ONE_HOST = f"more than one host is {_NOT_YET}; start one server on each, behind a load balancer"
_CONTEXT_PARALLEL = f"more than one device is {_NOT_YET}; use 1"
_OFFLOAD = f"a tier of host memory is {_NOT_YET}; leave it out"
_TEXT_ONLY = f"only text is served, images are {_NOT_YET}; leave it out"
_TRACES = f"OpenTelemetry traces are {_NOT_YET}; scrape /metrics, and find a request in the log by its X-Request-Id"

KNOWN_FLAGS: Final[tuple[KnownFlag, ...]] = (
    KnownFlag("speculative_config", _DRAFTS, ("{}", "null", ""), short="-sc"),
    KnownFlag("speculative_model", _DRAFTS, ("none",)),
    KnownFlag("num_speculative_tokens", _DRAFTS, ("0",)),
    KnownFlag("spec_method", _DRAFTS),
    KnownFlag("spec_model", _DRAFTS),
    KnownFlag("spec_tokens", _DRAFTS, ("0",)),
    _switch("enable_lora", _LORA),
    KnownFlag("lora_modules", _LORA, many=True),
    KnownFlag("max_loras", _LORA, ("0",)),
    KnownFlag("max_lora_rank", _LORA, ("0",)),
    KnownFlag("max_cpu_loras", _LORA, ("0",)),
    KnownFlag("lora_dtype", _LORA, ("auto",)),
    _switch("enable_expert_parallel", f"experts on several devices are {_NOT_YET}; leave it out", short="-ep"),
    KnownFlag("kv_transfer_config", f"moving KV blocks between servers is {_NOT_YET}; leave it out", ("{}", "null")),
    KnownFlag("kv_events_config", f"a stream of KV cache events is {_NOT_YET}; leave it out", ("{}", "null")),
    KnownFlag("kv_offloading_size", _OFFLOAD, ("0", "0.0")),
    KnownFlag("cpu_offload_gb", f"weights in another memory are {_NOT_YET}; leave it out", ("0", "0.0")),
    KnownFlag("limit_mm_per_prompt", _TEXT_ONLY, ("{}", "null")),
    KnownFlag("mm_processor_kwargs", _TEXT_ONLY, ("{}", "null")),
    _switch("enable_mm_embeds", _TEXT_ONLY),
    _switch("enable_prompt_embeds", f"embeddings as a prompt are {_NOT_YET}; send text or token ids"),
    KnownFlag(
        "reasoning_parser",
        f"taking the thinking apart from the answer is {_NOT_YET}; it stays in `content`, split it in the client",
    ),
    KnownFlag("otlp_traces_endpoint", _TRACES),
    KnownFlag("collect_detailed_traces", _TRACES, many=True),
    _switch("enable_sleep_mode", f"putting the engine to sleep is {_NOT_YET}; stop the server and start it again"),
    KnownFlag("decode_context_parallel_size", _CONTEXT_PARALLEL, ("1",), short="-dcp"),
    KnownFlag("prefill_context_parallel_size", _CONTEXT_PARALLEL, ("1",), short="-pcp"),
    KnownFlag(
        "data_parallel_size_local", f"replicas are {_NOT_YET}; start several servers, one a port", ("1",), "-dpl"
    ),
    KnownFlag("data_parallel_rank", f"replicas are {_NOT_YET}; start several servers, one a port", ("0",), "-dpr"),
    KnownFlag("nnodes", _ONE_HOST, ("1",)),
    KnownFlag("node_rank", _ONE_HOST, ("0",)),
    _switch("headless", _ONE_HOST),
    KnownFlag("api_server_count", "one process serves HTTP here; leave it out", ("1",), short="-asc"),
    KnownFlag("tokenizer_mode", "a tokenizer.json is read whatever the model; leave it out", ("auto", "hf")),
    KnownFlag("runner", f"pooling models are {_NOT_YET}; use auto or generate", ("auto", "generate")),
    KnownFlag("convert", f"pooling models are {_NOT_YET}; use auto or none", ("auto", "none")),
    KnownFlag("task", f"pooling models are {_NOT_YET}; use auto or generate", ("auto", "generate")),
    KnownFlag("device", "the device is a plugin: --plugin platform=NAME; leave it out", ("auto",)),
    KnownFlag(
        "model_impl", "the family is a plugin: --plugin model=NAME (transformers is one); leave it out", ("auto",)
    ),
    KnownFlag("config_format", "config.json or GGUF metadata is what is read; leave it out", ("auto", "hf")),
    KnownFlag("response_role", "an answer's role is assistant; leave it out", ("assistant",)),
    KnownFlag(
        "chat_template_content_format", "the template decides what it does with content parts; use auto", ("auto",)
    ),
    KnownFlag("max_log_len", "prompts are never logged", (ANY,)),
    KnownFlag("disable_access_log_for_endpoints", "there is no access log", (ANY,)),
    _switch("disable_uvicorn_access_log", "there is no access log; --enable-log-requests logs sizes", "true"),
    _switch("disable_fastapi_docs", "there are no schema pages to enable; leave it out", "true"),
    _switch("enable_request_id_headers", "X-Request-Id is always sent; leave it out", "true"),
    _switch("enable_prompt_tokens_details", "usage always has prompt_tokens_details; leave it out", "true"),
    _switch("enable_log_outputs", "answers are never logged; have the client do it"),
    _switch("disable_cascade_attn", "there is no cascade attention to enable; leave it out", "true"),
    _switch("disable_custom_all_reduce", "there is one device and no all-reduce to enable; leave it out", "true"),
    _switch(
        "disable_hybrid_kv_cache_manager", "every layer keeps its whole cache in this version; leave it out", "true"
    ),
    KnownFlag("stream_interval", "every token is streamed as it comes; leave it out", ("1",)),
    KnownFlag("long_prefill_token_threshold", "a step's tokens are capped by --max-num-batched-tokens alone", ("0",)),
    KnownFlag("max_num_partial_prefills", "the policy shares a step among prompts; leave it out", ("1",)),
    KnownFlag("num_scheduler_steps", "steps overlap under --async-scheduling, one token each; leave it out", ("1",)),
)
_BY_NAME: Final = {known.name: known for known in KNOWN_FLAGS}


def known_flag(name: str) -> KnownFlag | None:
    """By the name of a setting; `disable_lora` is another word for `enable_lora`, as it is in vLLM."""
    return _BY_NAME.get(name)


def inverse(name: str) -> str | None:
    """enable_x <-> disable_x, for names that have such a prefix."""
    for prefix, other in (("enable_", "disable_"), ("disable_", "enable_")):
        if name.startswith(prefix):
            return other + name.removeprefix(prefix)
    return None


def add_known_flags(parser: argparse.ArgumentParser) -> None:
    """Adds them all, unseen in --help: they do nothing."""
    for known in KNOWN_FLAGS:
        flags = [known.flag, *([known.short] if known.short else [])]
        if known.switch:
            flags += _negations(known)
        taken = {option for action in parser._actions for option in action.option_strings}
        flags = [
            flag for flag in flags if flag not in taken
        ]  # the day a setting of that name exists, it is the setting
        if known.flag in flags:
            nargs: Any = 0 if known.switch else "+" if known.many else None
            parser.add_argument(*flags, action=_Neutral, nargs=nargs, known=known, dest=argparse.SUPPRESS)


def _negations(known: KnownFlag) -> list[str]:
    other = inverse(known.name)
    return [f"--no-{known.flag[2:]}", *(["--" + other.replace("_", "-")] if other else [])]


class _Neutral(argparse.Action):
    """Leaves nothing behind, or refuses."""

    def __init__(self, option_strings: Sequence[str], dest: str, known: KnownFlag, nargs: Any) -> None:
        super().__init__(
            option_strings, dest, nargs=nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS, metavar=JSON
        )
        self._known = known

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if self._known.switch:
            values = "false" if option in _negations(self._known) else "true"
        self._known.check(values)
