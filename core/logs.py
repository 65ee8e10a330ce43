"""Log records as lines: JSON for machines, one line a record; text for people. No text in a record can forge another one.

Both processes use this. In the API process every line that is written while a request is served carries its id.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any, Literal, TextIO

LogFormat = Literal["auto", "json", "text"]

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The label of the request that is being served; set by the server."""


def configure(level: str, log_format: LogFormat, stream: TextIO | None = None) -> None:
    """The root logger writes lines to `stream` (standard error). auto: text on a terminal, else JSON."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    as_text = log_format == "text" or (log_format == "auto" and stream.isatty())
    handler.setFormatter(TextLines() if as_text else JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("asyncio").setLevel(logging.WARNING)


class JsonLines(logging.Formatter):
    """{"time": ISO 8601 in UTC, "level", "logger", "message"}, and where there are any "request_id" and "exception"."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        label = request_id.get()
        if label is not None:
            line["request_id"] = label
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line)  # ASCII only: no character can be taken for the end of a line


class TextLines(logging.Formatter):
    """HH:MM:SS LEVEL logger: message [request id]. A traceback follows on lines of its own, each of them indented, so
    that none can be taken for a record."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        label = request_id.get()
        head = f"{self.formatTime(record, self.datefmt)} {record.levelname} {record.name}: {record.getMessage()}"
        if label is not None and label not in head:
            head += f" [{label}]"
        lines = [_visible(head)]
        if record.exc_info:
            lines += [f"  {_visible(line)}" for line in self.formatException(record.exc_info).splitlines()]
        if record.stack_info:
            lines += [f"  {_visible(line)}" for line in record.stack_info.splitlines()]
        return "\n".join(lines)


def _visible(text: str) -> str:
    """Without a character that could begin a new line or move a terminal's cursor."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
