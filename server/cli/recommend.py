"""`hotswap recommend --trace FILE [MODEL] --device NAME`: settings for a load, with the arithmetic."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from hotswap.core.config import EngineConfig
from hotswap.core.devices import DEVICES, GIB, Device, find_device
from hotswap.core.errors import UsageError
from hotswap.core.trace import read_trace

from ..recommend.derivation import BUSY_SECONDS, Assumed, Derivation, derive
from ..recommend.model_facts import ModelFacts, StoredModel, facts_of, from_index
from .flags import add_flags
from .main import configure_logging
from .progress import ProgressLine
from .settings import Settings, add_config_flag, read_settings

_FIELDS = {
    *EngineConfig.model_fields["plugins"].annotation.model_fields,  # type: ignore[union-attr]  # a Section
    "model",
    "revision",
    "dtype",
    "load_format",
    "quantization",
    "trust_remote_code",
    "download_dir",
    "block_size",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "log_level",
}
_ASSUMES = (
    f"the load is that of the trace: its busiest {BUSY_SECONDS:.0f} s are as busy as it gets, its p95 and p99 are yours",
    "one server on one device; nothing else uses it",
    "decode is bound by memory: it reads weights and KV cache at 60 % of the peak bandwidth (--tpot replaces this)",
    "prefill is bound by arithmetic: 40 % of the peak (--prefill-rate replaces this), and decode waits meanwhile",
    "prefixes of the trace that were seen before cost no prefill, but their blocks are counted for each request",
    "every layer keeps its whole cache; weights are of a dense model, all of them read for each token",
)
_CANNOT_KNOW = (
    "what latency you need: more requests at once means more seconds a token for each",
    "kernels, drivers and quantization as they will be; measure with `hotswap bench serve --trace FILE`",
)


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("The load and the device")
    group.add_argument("--trace", metavar="FILE", help="What was asked of a server and when, one JSON object a line.")
    group.add_argument("--device", metavar="NAME", help=f"One of {', '.join(DEVICES)}; cpu is this machine.")
    group.add_argument("--device-memory", type=float, metavar="GIB", help="Memory of another device, or less of one.")
    group.add_argument("--tpot", type=float, metavar="SECONDS", help="Seconds an output token takes, as measured.")
    group.add_argument("--prefill-rate", type=float, metavar="RATE", help="Prompt tokens a second, as measured.")
    group.add_argument(
        "--workspace", type=float, default=1.0, metavar="GIB", help="For activations and the runtime (default: 1)."
    )
    group.add_argument(
        "--max-stall",
        type=float,
        default=0.2,
        metavar="SECONDS",
        help="How long the prompt tokens of a step may hold up the other requests (default: 0.2).",
    )
    group.add_argument("--json", action="store_true", help="Print one object.")
    add_config_flag(parser)
    add_flags(parser, EngineConfig, only=_FIELDS.__contains__)


def run(arguments: argparse.Namespace) -> int:
    """Raises HotswapError."""
    settings = read_settings(arguments, EngineConfig)
    config = settings.build(EngineConfig)
    configure_logging("warning" if "log_level" not in settings.command_line else config.log_level)
    if arguments.trace is None:
        raise UsageError("--trace FILE is needed: what was asked of a server (docs/operators/recommend.md)")
    rows = read_trace(arguments.trace)
    device = _device(arguments)
    assumed = _assumed(arguments, settings, config)
    model = model_facts(settings, config, on_cpu=device.name == "cpu")
    found = derive(rows, model, device, assumed)
    command = _command(found, model, device, settings)
    if arguments.json:
        print(json.dumps(_as_json(found, model, device, command, arguments.trace), indent=2))
    else:
        print("\n".join(_report(found, model, device, command)))
    return 0


def model_facts(settings: Settings, config: EngineConfig, *, on_cpu: bool) -> ModelFacts:
    """Out of the folder's index where there is one; else the model is fetched, if need be, and opened."""
    name, dtype = config.model.model, config.model.dtype
    stored = from_index(Path(name).expanduser())
    if stored is not None:
        return facts_of(name, stored, "safetensors", dtype=dtype, on_cpu=on_cpu)
    from hotswap.core.engine.assembly import open_checkpoint, resolve_model

    manager = settings.manager()
    progress = ProgressLine()
    resolved = resolve_model(manager, config, progress)
    progress.close()
    with open_checkpoint(manager, config, resolved.path, resolved.loader) as checkpoint:
        stored = StoredModel(checkpoint.config, checkpoint.total_bytes)
    return facts_of(name, stored, resolved.loader, dtype=dtype, on_cpu=on_cpu)


def _device(arguments: argparse.Namespace) -> Device:
    memory = arguments.device_memory
    if arguments.device is None and memory is None:
        raise UsageError(f"--device NAME or --device-memory GIB is needed (devices: {', '.join(DEVICES)}, cpu)")
    for name in ("device_memory", "tpot", "prefill_rate", "max_stall"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    if not 0 <= arguments.workspace < float("inf"):
        raise UsageError(f"--workspace must be at least 0, got {arguments.workspace:g}")
    if arguments.device is None:
        return Device(f"of {memory:g} GiB", int(memory * GIB), None, None)
    device = find_device(arguments.device)
    if memory is None:
        return device
    return Device(device.name, int(memory * GIB), device.bandwidth, device.flops, device.utilization, device.guessed)


def _assumed(arguments: argparse.Namespace, settings: Settings, config: EngineConfig) -> Assumed:
    given = {**settings.config_file, **settings.command_line}
    return Assumed(
        block_size=config.cache.block_size,
        utilization=given.get("gpu_memory_utilization"),
        workspace_bytes=int(arguments.workspace * GIB),
        stall_seconds=arguments.max_stall,
        tpot=arguments.tpot,
        prefill_rate=arguments.prefill_rate,
        prefix_caching=config.cache.enable_prefix_caching,
    )


def _command(found: Derivation, model: ModelFacts, device: Device, settings: Settings) -> str:
    words = ["hotswap", "serve", model.name]
    words += ["--max-model-len", str(found.max_model_len), "--max-num-seqs", str(found.max_num_seqs)]
    words += ["--max-num-batched-tokens", str(found.max_num_batched_tokens)]
    if device.name == "cpu":  # where the engine would not measure the device's memory, but take its own careful share
        words += ["--kv-cache-memory-bytes", str(found.kv_cache_bytes)]
    else:
        words += ["--gpu-memory-utilization", f"{found.utilization:g}"]
    for name in ("revision", "dtype", "block_size", "download_dir", "load_format", "quantization"):
        if name in settings.command_line:
            words += ["--" + name.replace("_", "-"), str(settings.command_line[name])]
    if settings.command_line.get("enable_prefix_caching") is False:
        words.append("--no-enable-prefix-caching")
    return shlex.join(words)


def _report(found: Derivation, model: ModelFacts, device: Device, command: str) -> list[str]:
    lines: list[str] = []
    heading = ""
    for group, line in found.lines:
        if group != heading:
            lines += ["", group] if lines else [group]
            heading = group
        lines.append(f"  {line}")
    lines += ["", "Assumed"]
    lines += [f"  {line}" for line in _assumptions(device)]
    lines += ["", "Not known"]
    lines += [f"  {line}" for line in _CANNOT_KNOW]
    if found.warnings:
        lines += ["", *(f"WARNING: {warning}" for warning in found.warnings)]
    return [*lines, "", command]


def _assumptions(device: Device) -> list[str]:
    guess = "the speed of this machine is a guess: measure it, then give --tpot and --prefill-rate"
    other = f"this version serves on CPUs only: what it says for {device.name} is for a version with that platform"
    return [*_ASSUMES, guess if device.guessed else other]


def _as_json(found: Derivation, model: ModelFacts, device: Device, command: str, trace: str) -> dict[str, Any]:
    return {
        "command": command,
        "max_model_len": found.max_model_len,
        "max_num_seqs": found.max_num_seqs,
        "max_num_batched_tokens": found.max_num_batched_tokens,
        "kv_cache_bytes": found.kv_cache_bytes,
        "weight_bytes": model.weight_bytes,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "refused": found.refused,
        "cut_short": found.cut_short,
        "model": model.name,
        "device": device.name,
        "trace": trace,
        "derivation": [{"about": group, "line": line} for group, line in found.lines],
        "assumed": _assumptions(device),
        "not_known": list(_CANNOT_KNOW),
        "warnings": found.warnings,
    }
