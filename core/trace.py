"""Traces: what was asked of a server and when, one JSON object a line. Written by the `trace` observer and by hand; read
by `hotswap bench`, `hotswap recommend` and `hotswap simulate`.

    {"arrival": 0.0, "prompt_tokens": 231, "output_tokens": 64, "user": "alice", "prefix": "faq", "prefix_tokens": 180}

arrival, prompt_tokens and output_tokens are needed, the rest is not. No text: a trace can be shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from .errors import UsageError

MAX_LINE_BYTES = 64 * 1024
RowT = TypeVar("RowT", bound=msgspec.Struct)


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
        self.check(self.prompt_tokens)

    def check(self, prompt_tokens: int) -> None:
        """Raises ValueError for values that no request has. prompt_tokens: as the row means it."""
        if not 0 <= self.arrival < float("inf"):
            raise ValueError(f"arrival must be a number of seconds from 0 on, got {self.arrival}")
        if prompt_tokens < 1 or self.output_tokens < 0:
            raise ValueError(
                f"prompt_tokens must be at least 1 and output_tokens at least 0, got {prompt_tokens} and "
                f"{self.output_tokens}"
            )
        if not 0 <= self.prefix_tokens <= prompt_tokens:
            raise ValueError(f"prefix_tokens must be between 0 and prompt_tokens, got {self.prefix_tokens}")


def read_trace(path: str | Path) -> list[TraceRow]:
    """The rows in order of arrival. Raises UsageError naming file and line."""
    rows = [row for _, row in numbered_rows(path, TraceRow)]
    return sorted(rows, key=lambda row: row.arrival)


def numbered_rows(
    path: str | Path, kind: type[RowT], *, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, RowT]]:
    """(line number, row), in the file's order; at least one. Raises UsageError naming file and line."""
    decoder = msgspec.json.Decoder(kind)
    number = count = 0
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(max_line_bytes + 1), b""), start=1):
                if len(line) > max_line_bytes:
                    raise UsageError(f"trace {path}, line {number}: longer than {max_line_bytes} bytes")
                if line.strip():
                    count += 1
                    yield number, decoder.decode(line)
    except OSError as error:
        raise UsageError(f"trace {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"trace {path}, line {number}: {error}") from None
    if not count:
        raise UsageError(f"trace {path}: there is no request in it")


def write_trace(path: str | Path, rows: Iterable[TraceRow]) -> None:
    """Replaces the file."""
    encoder = msgspec.json.Encoder()
    with Path(path).open("wb") as file:
        for row in rows:
            file.write(encoder.encode(row) + b"\n")
