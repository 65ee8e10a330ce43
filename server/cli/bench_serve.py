"""`hotswap bench serve --url URL`: load on a running OpenAI-compatible server, ours or another, and what came of it."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import os
from typing import TYPE_CHECKING, Any

from hotswap.core.errors import UsageError

from .bench_flags import add_result_flags, add_workload_flags, check_flags, make_workload, warmup_workload

if TYPE_CHECKING:
    from ..bench.http_client import Server, ServerFacts
    from ..bench.http_target import RequestOptions
    from ..bench.prompts import PromptMaker
    from ..bench.workload import Workload


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Server")
    add = group.add_argument
    add("--url", metavar="URL", help="Its address, with or without /v1. Needed.")
    add("--api-key", metavar="KEY", help="HOTSWAP_API_KEY when not given.")
    add("--model", metavar="NAME", help="The first one of /v1/models when not given.")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="(default: completions)")
    add("--no-stream", action="store_true", help="Ask for whole answers: only E2E is measured then.")
    add("--ignore-eos", action="store_true", help="Have every answer be as long as asked, where the server can.")
    add("--chunk-usage", action="store_true", help="Ask for a token count with each chunk; exact ITL, more work.")
    add("--temperature", type=float, default=0.0, metavar="T", help="(default: 0)")
    add("--extra-body", metavar="JSON", help="Request fields put over all others; null takes one away.")
    add("--timeout", type=float, default=3600.0, metavar="SECONDS", help="For one request (default: 3600).")
    add_workload_flags(parser, own_seed=True)
    add_result_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """0 when at least one request was answered, else 1. Raises HotswapError."""
    if not arguments.url:
        raise UsageError("--url is needed: the address of the server to measure")
    check_flags(arguments)
    if not 0 < arguments.timeout < math.inf:
        raise UsageError(f"--timeout {arguments.timeout:g}: seconds above 0 are needed")
    extra = parse_extra_body(arguments.extra_body)
    workload = make_workload(arguments, arguments.seed)
    return asyncio.run(_measure(arguments, workload, extra))


def parse_extra_body(text: str | None) -> dict[str, Any]:
    """Raises UsageError."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--extra-body: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UsageError("--extra-body: a JSON object is needed")
    return value


async def _measure(arguments: argparse.Namespace, workload: Workload, extra: dict[str, Any]) -> int:
    from ..bench.http_client import Server, ask_about
    from ..bench.http_target import HttpTarget
    from ..bench.runner import Runner
    from ..bench.workload import check_window
    from .bench_run import publish, warm_up, with_progress

    key = arguments.api_key or os.environ.get("HOTSWAP_API_KEY")
    chat = arguments.endpoint == "chat"
    async with Server(arguments.url, key) as server:
        facts = await ask_about(
            server,
            model=arguments.model,
            chat=chat,
            want=_wanted_extras(arguments, workload),
            want_ids=arguments.dataset is None,
        )
        check_window(workload.requests, facts.max_model_len)
        options, notes = _options(arguments, facts, extra)
        prompts = _prompt_maker(arguments, server, facts, chat=chat)
        target = HttpTarget(server, facts, options)
        await warm_up(target, prompts, warmup_workload(arguments, arguments.seed), arguments.max_concurrency)
        runner = Runner(target, prompts, workload, max_concurrency=arguments.max_concurrency)
        run = await with_progress(runner, enabled=not arguments.no_progress)
    notes = [f"prompts: {prompts.how}", *notes, *facts.notes]
    described = dataclasses.asdict(facts)
    del described["token_pool"]
    title = f"{facts.model} at {server.base} ({facts.software}), {arguments.endpoint}"
    exact = "ignore_eos" in options.extras
    return publish(arguments, "hotswap-bench-serve", title, workload, run, notes, exact_lengths=exact, server=described)


def _wanted_extras(arguments: argparse.Namespace, workload: Workload) -> list[str]:
    wanted = [] if arguments.no_stream else ["continuous_usage" if arguments.chunk_usage else "include_usage"]
    if arguments.ignore_eos:
        wanted.append("ignore_eos")
    if any(request.session for request in workload.requests) and arguments.endpoint == "completions":
        wanted.append("return_token_ids")
    wanted += [name for name in ("priority", "user") if any(getattr(r, name) for r in workload.requests)]
    return wanted


def _options(
    arguments: argparse.Namespace, facts: ServerFacts, extra: dict[str, Any]
) -> tuple[RequestOptions, list[str]]:
    """What is sent with each request, and what the reader should know of it."""
    from ..bench.http_target import RequestOptions

    notes = []
    for name, taken in facts.extras.items():
        if not taken:
            notes.append(f"the server does not take {name.replace('_', ' ')}: it is not sent")
    taken_extras = tuple(name for name, taken in facts.extras.items() if taken)
    if "include_usage" in taken_extras or "continuous_usage" in taken_extras:
        notes.append("tokens: by the server's usage, where it sends one")
    options = RequestOptions(
        chat=arguments.endpoint == "chat",
        stream=not arguments.no_stream,
        temperature=arguments.temperature,
        extras=taken_extras,
        extra=extra,
        timeout=arguments.timeout,
    )
    return options, notes


def _prompt_maker(arguments: argparse.Namespace, server: Server, facts: ServerFacts, *, chat: bool) -> PromptMaker:
    from ..bench.prompts import ChatPrompts, DatasetPrompts, TokenIdPrompts, WordPrompts

    if arguments.dataset is not None:
        return DatasetPrompts(chat=chat)
    if chat:
        count = (lambda messages: server.count_messages(facts.model, messages)) if facts.counts_messages else None
        return ChatPrompts(arguments.seed, count)
    if facts.token_pool:
        return TokenIdPrompts(facts.token_pool, arguments.seed, lambda text: server.tokenize(facts.model, text))
    return WordPrompts(arguments.seed)
