"""`hotswap bench throughput [MODEL]`: an engine of the command's own, without HTTP, under the same workloads as
`bench serve`. The way to compare plugins: the same requests, another `--plugin`."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING, Any

from hotswap.core.config import EngineConfig
from hotswap.core.errors import UsageError

from .bench_flags import add_result_flags, add_workload_flags, check_flags, make_workload, warmup_workload
from .flags import add_flags
from .settings import Settings, add_config_flag, read_settings

if TYPE_CHECKING:
    from hotswap.core.engine.wire import EngineInfo

    from ..bench.workload import Workload


def configure(parser: argparse.ArgumentParser) -> None:
    add_workload_flags(parser, own_seed=False)
    group = parser.add_argument_group("Run")
    group.add_argument("--paced", action="store_true", help="Keep arrival times; without it all requests come at once.")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Answers are as long as asked (default: on).",
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="(default: 0)")
    group.add_argument("--detokenize", action="store_true", help="Make text as well, as a server does.")
    add_result_flags(parser)
    add_config_flag(parser)
    add_flags(parser, EngineConfig)


def run(arguments: argparse.Namespace) -> int:
    """0 when at least one request was answered, else 1. Raises HotswapError."""
    check_flags(arguments)
    given_pace = any(getattr(arguments, name) is not None for name in ("request_rate", "arrival", "trace_speed"))
    if not arguments.paced and given_pace:
        raise UsageError("arrival times count only with --paced: add it, or leave out the rate, arrival and speed")
    if arguments.paced and arguments.trace is None and arguments.request_rate is None:
        raise UsageError("--paced needs arrivals: --trace FILE or --request-rate R")
    settings = read_settings(arguments, EngineConfig)
    from .local_engine import quiet_config

    config = quiet_config(settings)
    workload = make_workload(arguments, config.model.seed)
    if not arguments.paced:
        workload = workload.at_once()
    return asyncio.run(_measure(arguments, settings, config, workload))


async def _measure(arguments: argparse.Namespace, settings: Settings, config: EngineConfig, workload: Workload) -> int:
    from ..bench.engine_target import EngineTarget, EngineWatch, token_pool
    from ..bench.prompts import DatasetPrompts, PromptMaker, TokenIdPrompts
    from ..bench.runner import Runner
    from ..bench.workload import check_window
    from .bench_run import publish, warm_up, with_progress
    from .local_engine import local_engine

    seed = config.model.seed
    sampling: dict[str, Any] = {"temperature": arguments.temperature, "ignore_eos": arguments.ignore_eos}
    async with local_engine(settings, config) as engine:
        check_window(workload.requests, engine.info.max_model_len)
        prompts: PromptMaker
        if arguments.dataset is not None:
            prompts = DatasetPrompts(chat=any(request.messages is not None for request in workload.requests))
        else:
            prompts = TokenIdPrompts(token_pool(engine), seed)
        target = EngineTarget(engine, sampling, detokenize=arguments.detokenize)
        await warm_up(target, prompts, warmup_workload(arguments, seed), arguments.max_concurrency)
        runner = Runner(target, prompts, workload, max_concurrency=arguments.max_concurrency)
        async with EngineWatch(engine) as watch:
            run = await with_progress(runner, enabled=not arguments.no_progress)
        info = engine.info
    figures = watch.report().as_dict()
    plugins = active_plugins(info)
    figures["plugins"] = plugins
    figures["info"] = {name: getattr(info, name) for name in INFO_FIELDS}
    model = (config.model.served_model_name or [config.model.model])[0]
    chosen = ", ".join(f"{kind}={plugins[kind]}" for kind in ("scheduler", "policy", "victim") if kind in plugins)
    title = (
        f"{model} ({info.device}, {info.dtype}), {chosen or 'offline'}, {'paced' if arguments.paced else 'all at once'}"
    )
    notes = [f"prompts: {prompts.how}", "tokens: by the engine", "no HTTP: an engine process, asked directly"]
    if any(request.priority for request in workload.requests) and not info.uses_priority:
        notes.append("the policy does not serve by priority: those of the trace are not used")
    return publish(
        arguments,
        "hotswap-bench-throughput",
        title,
        workload,
        run,
        notes,
        exact_lengths=arguments.ignore_eos,
        engine=figures,
        more_settings={"seed": seed},
    )


INFO_FIELDS = (
    "model",
    "architecture",
    "dtype",
    "device",
    "max_model_len",
    "num_blocks",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "startup_seconds",
)


def active_plugins(info: EngineInfo) -> dict[str, str]:
    """kind -> name of what is at work in the engine; several of one kind are joined by a plus sign."""
    found: dict[str, str] = {}
    for row in info.inventory:
        if row.get("state") == "active":
            kind, name = str(row.get("kind")), str(row.get("name"))
            found[kind] = f"{found[kind]}+{name}" if kind in found else name
    return found
