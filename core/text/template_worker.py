"""Renders a request's template in a process that can be killed: the sandbox stops escapes, not endless loops.

The parent talks to it in JSON over pipes. It has a deadline, an address-space limit and a cap on its output.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ..errors import RequestError

DEADLINE_SECONDS = 2.0
START_ALLOWANCE_SECONDS = 8.0  # importing the template engine on a busy machine
EXTRA_MEMORY_BYTES = 512 << 20
MAX_OUTPUT_CHARS = 4 << 20

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hotswap.core.text.template_worker import main; main()"
)


def render_in_worker(
    source: str, named: Mapping[str, str], conversation: tuple[Any, Any, Any], error_class: type[RequestError]
) -> str:
    """What `ChatTemplate.complete` makes of `conversation` with the template `source`.

    Raises `error_class` when the template fails, takes too long or makes too much.
    """
    message = json.dumps(
        {"source": source, "named": dict(named), "conversation": conversation, "deadline": DEADLINE_SECONDS}
    )
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _BOOT, json.dumps(sys.path)],
            check=False,
            input=message,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS + START_ALLOWANCE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise error_class("the request's chat template takes too long", param="chat_template") from None
    if done.returncode != 0:
        raise error_class("the request's chat template takes too long or too much memory", param="chat_template")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise error_class(answer["error"], param="chat_template")
    text: str = answer["text"]
    return text


def main() -> None:
    """The child: one message in, one out. Compiling and rendering happen under the limits."""
    import signal

    from .chat_template import ChatTemplate, TemplateError

    message = json.loads(sys.stdin.read())
    _limit_memory()
    signal.setitimer(signal.ITIMER_REAL, message["deadline"])  # SIGALRM's default action ends the process
    try:
        text = ChatTemplate(message["source"], named_special_tokens=message["named"]).complete(*message["conversation"])
        answer = {"text": text}
        if len(text) > MAX_OUTPUT_CHARS:
            answer = {"error": f"the request's chat template makes more than {MAX_OUTPUT_CHARS} characters"}
    except TemplateError as error:
        answer = {"error": error.message}
    json.dump(answer, sys.stdout)


def _limit_memory() -> None:
    """EXTRA_MEMORY_BYTES above what importing has taken."""
    import resource
    from pathlib import Path

    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):  # not Linux: the deadline alone holds
        return
    limit = pages * resource.getpagesize() + EXTRA_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
