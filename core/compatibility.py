"""Which features combine, as data. Start-up checks the table; docs/plugins/compatibility.md is generated from it.

A feature is a word: "swap", "speculation", or "KIND=NAME" for a plugin that is active. A row forbids two features
together, or one feature altogether while the engine lacks what it needs (its partner is then ALWAYS).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from .config import EngineConfig
from .contracts.provider import CompatibilityRow as Row
from .errors import UsageError

ALWAYS: Final = "always"


_NOT_YET = "is not in this version yet"

ROWS: Final[tuple[Row, ...]] = (
    Row(
        "swap_space",
        ALWAYS,
        False,
        f"--swap-space: the host memory tier {_NOT_YET}; leave it out, preempted requests are recomputed",
    ),
    Row(
        "preemption_mode=swap",
        ALWAYS,
        False,
        f"--preemption-mode swap: the host memory tier {_NOT_YET}; use recompute, or auto, which recomputes",
    ),
    Row(
        "tensor_parallel",
        ALWAYS,
        False,
        f"--tensor-parallel-size above 1: more than one device {_NOT_YET}; use 1",
    ),
    Row(
        "pipeline_parallel",
        ALWAYS,
        False,
        f"--pipeline-parallel-size above 1: more than one device {_NOT_YET}; use 1",
    ),
    Row(
        "data_parallel",
        ALWAYS,
        False,
        "--data-parallel-size above 1: replicas are not in this version yet; start several engines, one a port",
    ),
    Row(
        "kv_cache_dtype_differs",
        ALWAYS,
        False,
        f"--kv-cache-dtype: a KV cache of another data type than the model's {_NOT_YET}; use auto",
    ),
    Row(
        "skip_tokenizer_init",
        "chat_template",
        False,
        "--chat-template with --skip-tokenizer-init: without a tokenizer there is no text for a template; drop one",
    ),
    Row(
        "skip_tokenizer_init",
        "tokenizer",
        False,
        "--tokenizer with --skip-tokenizer-init: the tokenizer would not be used; drop one",
    ),
    Row("prefix_caching", "chunked_prefill", True, "a prompt that hits the cache is computed from there on, in chunks"),
    Row("policy=priority", "victim=newest", True, "the newest request yields, whatever its class"),
    Row("policy=fcfs", "victim=lowest_priority", True, "without priorities in requests, the same as newest"),
)


def rows_about(feature: str, rows: Iterable[Row]) -> list[Row]:
    """The rows that mention a feature."""
    return [row for row in rows if feature in (row.first, row.second)]


def active_features(
    config: EngineConfig, *, model_dtype: str | None = None, plugins: Iterable[tuple[str, str]] = ()
) -> set[str]:
    """The words that a configuration turns on.

    model_dtype: the resolved data type, once it is known. plugins: (kind, name) of what was chosen.
    """
    model, cache, scheduler, parallel = config.model, config.cache, config.scheduler, config.parallel
    dtype = model_dtype or (None if model.dtype == "auto" else model.dtype)
    conditions = {
        "swap_space": cache.swap_space > 0,
        f"preemption_mode={scheduler.preemption_mode}": True,
        "tensor_parallel": parallel.tensor_parallel_size > 1,
        "pipeline_parallel": parallel.pipeline_parallel_size > 1,
        "data_parallel": parallel.data_parallel_size > 1,
        "kv_cache_dtype_differs": dtype is not None and cache.kv_cache_dtype not in ("auto", dtype),
        "skip_tokenizer_init": model.skip_tokenizer_init,
        "chat_template": model.chat_template is not None,
        "tokenizer": model.tokenizer is not None,
        "prefix_caching": cache.enable_prefix_caching,
        "chunked_prefill": scheduler.enable_chunked_prefill,
        "deterministic": config.deterministic,
    }
    return {name for name, on in conditions.items() if on} | {f"{kind}={name}" for kind, name in plugins}


def check(active: Collection[str], rows: Sequence[Row] = ROWS) -> list[str]:
    """Every reason why these features do not go together; empty when they do."""
    on = {*active, ALWAYS}
    return [row.reason for row in rows if not row.allowed and row.first in on and row.second in on]


def refuse_incompatible(
    config: EngineConfig,
    *,
    model_dtype: str | None = None,
    plugins: Iterable[tuple[str, str]] = (),
    more_rows: Iterable[Row] = (),
) -> None:
    """Raises UsageError with every reason. Asked at start, and again when the model's data type and the plugins are known.

    more_rows: those of the plugins.
    """
    reasons = check(active_features(config, model_dtype=model_dtype, plugins=plugins), (*ROWS, *more_rows))
    if reasons:
        raise UsageError("; ".join(reasons))


def as_markdown(rows: Sequence[Row] = ROWS) -> str:
    """The table of docs/plugins/compatibility.md."""
    lines = ["| feature | with | |", "|---|---|---|"]
    for row in rows:
        partner = "anything" if row.second == ALWAYS else f"`{row.second}`"
        lines.append(f"| `{row.first}` | {partner} | {'works' if row.allowed else 'refused'}: {row.reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
