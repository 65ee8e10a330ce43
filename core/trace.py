"""Traces: what was asked of a server and when, one JSON object a line. Written by the `trace` observer and by hand; read
by `hotswap bench` and `hotswap recommend`.

    {"arrival": 0.0, "prompt_tokens": 231, "output_tokens": 64, "user": "alice", "prefix": "faq", "prefix_tokens": 180}

arrival, prompt_tokens and output_tokens are needed, the rest is not. No text: a trace can be shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from .errors import UsageError

MAX_LINE_BYTES = 64 * 1024


class TraceRow(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One request. Times are seconds, lengths are tokens.

    arrival: from the trace's beginning. prefix, prefix_tokens: rows with the same `prefix` share their first
    `prefix_tokens` prompt tokens. session: rows of one conversation; each waits for the answer to the one before.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    user: str = ""
    priority: int = 0
    prefix: str = ""
    prefix_tokens: int = 0
    session: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.arrival < float("inf"):
            raise ValueError(f"arrival must be a number of seconds from 0 on, got {self.arrival}")
        if self.prompt_tokens < 1 or self.output_tokens < 0:
            raise ValueError(
                f"prompt_tokens must be at least 1 and output_tokens at least 0, got {self.prompt_tokens} and "
                f"{self.output_tokens}"
            )
        if not 0 <= self.prefix_tokens <= self.prompt_tokens:
            raise ValueError(f"prefix_tokens must be between 0 and prompt_tokens, got {self.prefix_tokens}")


def read_trace(path: str | Path) -> list[TraceRow]:
    """The rows in order of arrival. Raises UsageError naming file and line."""
    path = Path(path)
    try:
        rows = list(_rows(path))
    except OSError as error:
        raise UsageError(f"trace {path}: {error.strerror}") from error
    if not rows:
        raise UsageError(f"trace {path}: there is no request in it")
    return sorted(rows, key=lambda row: row.arrival)


def _rows(path: Path) -> Iterator[TraceRow]:
    decoder = msgspec.json.Decoder(TraceRow)
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            if len(line) > MAX_LINE_BYTES:
                raise UsageError(f"trace {path}, line {number}: longer than {MAX_LINE_BYTES} bytes")
            if line.strip():
                try:
                    yield decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise UsageError(f"trace {path}, line {number}: {error}") from None


def write_trace(path: str | Path, rows: Iterable[TraceRow]) -> None:
    """Replaces the file."""
    encoder = msgspec.json.Encoder()
    with Path(path).open("wb") as file:
        for row in rows:
            file.write(encoder.encode(row) + b"\n")
