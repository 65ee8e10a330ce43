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
MEMORY_BYTES = 1 << 30
MAX_OUTPUT_CHARS = 4 << 20

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from hotswap.core.text.template_worker import main; main()"
)


def render_in_worker(source: str, variables: Mapping[str, Any], error_class: type[RequestError]) -> str:
    """The rendered text. Raises `error_class` when the template fails, takes too long or makes too much."""
    message = json.dumps({"source": source, "variables": dict(variables)})
    command = [sys.executable, "-I", "-c", _BOOT, json.dumps(sys.path)]
    try:
        done = subprocess.run(
            command,
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
    """The child: one message in, one out."""
    import resource
    import signal

    from .chat_template import TemplateError, make_environment, render_template

    message = json.loads(sys.stdin.read())
    template = make_environment().from_string(message["source"])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_SECONDS)  # SIGALRM's default action ends the process
    try:
        text = render_template(template, message["variables"])
        answer = {"text": text}
        if len(text) > MAX_OUTPUT_CHARS:
            answer = {"error": f"the request's chat template makes more than {MAX_OUTPUT_CHARS} characters"}
    except TemplateError as error:
        answer = {"error": error.message}
    json.dump(answer, sys.stdout)
