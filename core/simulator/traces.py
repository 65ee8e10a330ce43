"""Traces of three forms, told apart by their content:

    ours       JSON lines: arrival, prompt_tokens or hash_ids, output_tokens, user, priority, ... (core/trace.py)
    Mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids of blocks of 512 tokens
               (github.com/kvcache-ai/Mooncake, FAST25-release/traces)
    Azure      CSV: TIMESTAMP,ContextTokens,GeneratedTokens (github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace_*)
No text is in any of them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from ..errors import UsageError
from ..trace import TraceRow, numbered_rows
from .requests import OWN_TOKENS, Run, SimulatedRequest, Workload

HASH_BLOCK_TOKENS: Final = 512  # of a Mooncake trace
MAX_LINE_BYTES: Final = 1 << 20
AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class HashedRow(TraceRow, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A row of ours. hash_ids: of the prompt's blocks, of which equal ones behind equal ones hold equal tokens; the
    last one may be shorter than the others. prompt_tokens may then be left out: all blocks are full."""

    prompt_tokens: int = 0
    hash_ids: list[int] = []

    def __post_init__(self) -> None:
        if self.hash_ids and self.prefix:
            raise ValueError("hash_ids and prefix: a row has one of them")
        self.check(self.prompt_tokens or len(self.hash_ids))


class MooncakeRow(msgspec.Struct):
    """Fields that are not here are passed over. timestamp: milliseconds."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []

    def __post_init__(self) -> None:
        if not 0 <= self.timestamp < float("inf"):
            raise ValueError(f"timestamp must be a number of milliseconds from 0 on, got {self.timestamp}")
        if self.input_length < 1 or self.output_length < 0:
            raise ValueError(
                f"input_length must be at least 1 and output_length at least 0, got {self.input_length} and "
                f"{self.output_length}"
            )


def read_workload(path: str | Path, *, hash_block_tokens: int = HASH_BLOCK_TOKENS) -> Workload:
    """A trace file of any form. Raises UsageError naming file, line and field."""
    path = Path(path)
    first = _first_line(path)
    if first.lstrip("\ufeff").startswith("{"):
        form, requests, notes = _read_json(path, first, hash_block_tokens)
    elif all(name in first for name in AZURE_COLUMNS):
        form, requests, notes = "Azure", *_read_azure(path)
    else:
        raise UsageError(
            f"trace {path}, line 1: neither a JSON object nor the columns {','.join(AZURE_COLUMNS)}: {first.strip()!r:.60}"
        )
    ordered = tuple(sorted(requests, key=lambda request: request.arrival))
    return Workload(f"trace {path} ({form})", ordered, tuple(notes))


def _first_line(path: Path) -> str:
    """The first one that is not empty."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in iter(lambda: file.readline(MAX_LINE_BYTES), ""):
                if line.strip():
                    return line
    except OSError as error:
        raise UsageError(f"trace {path}: {error.strerror}") from None
    raise UsageError(f"trace {path}: there is no request in it")


def _read_json(path: Path, first: str, block: int) -> tuple[str, list[SimulatedRequest], list[str]]:
    names = SharedNames(block)
    mooncake = _is_mooncake(first)
    requests, raised = [], 0
    for number, row in _mooncake_rows(path) if mooncake else _our_rows(path):
        raised += row.output_tokens < 1
        try:
            requests.append(_request(row, names))
        except ValueError as error:
            raise UsageError(f"trace {path}, line {number}: {error}") from None
    return "Mooncake" if mooncake else "JSON lines", requests, _raised(raised)


def _our_rows(path: Path) -> Iterator[tuple[int, HashedRow]]:
    return numbered_rows(path, HashedRow, max_line_bytes=MAX_LINE_BYTES)


def _mooncake_rows(path: Path) -> Iterator[tuple[int, HashedRow]]:
    for number, row in numbered_rows(path, MooncakeRow, max_line_bytes=MAX_LINE_BYTES):
        yield (
            number,
            HashedRow(
                arrival=row.timestamp / 1e3,
                prompt_tokens=row.input_length,
                output_tokens=row.output_length,
                hash_ids=row.hash_ids,
            ),
        )


def _is_mooncake(line: str) -> bool:
    try:
        value = json.loads(line)
    except ValueError:
        return False  # whoever reads the line says what is wrong with it
    return isinstance(value, dict) and "input_length" in value


def _request(row: HashedRow, names: SharedNames) -> SimulatedRequest:
    """Raises ValueError naming the field."""
    prompt_tokens = row.prompt_tokens
    shared: tuple[Run, ...] = ()
    if row.hash_ids:
        prompt_tokens = prompt_tokens or len(row.hash_ids) * names.block
        shared = names.blocks(row.hash_ids, prompt_tokens)
    elif row.prefix and row.prefix_tokens:
        shared = names.prefix(row.prefix, row.prefix_tokens)
    return SimulatedRequest(
        row.arrival, prompt_tokens, max(1, row.output_tokens), shared, row.user, row.priority, row.session
    )


class SharedNames:
    """Token ids of what prompts share, given out in the order of appearance. block: tokens that a hash id stands for."""

    def __init__(self, block: int = HASH_BLOCK_TOKENS) -> None:
        self.block = block
        self._ids: dict[str | int, int] = {}

    def prefix(self, name: str, count: int) -> tuple[Run, ...]:
        """The first `count` tokens of a named prefix."""
        return ((self._id(name), count),) if count else ()

    def blocks(self, hash_ids: Sequence[int], prompt_tokens: int) -> tuple[Run, ...]:
        """Raises ValueError when there are more or fewer ids than the prompt has blocks."""
        wanted = -(-prompt_tokens // self.block)
        if len(hash_ids) != wanted:
            raise ValueError(
                f"hash_ids: {len(hash_ids)} ids for {prompt_tokens} tokens, which are {wanted} blocks of {self.block} "
                "(--hash-block-tokens)"
            )
        last = prompt_tokens - (wanted - 1) * self.block
        ids = [self._id(hash_id) for hash_id in hash_ids]
        return (*((token, self.block) for token in ids[:-1]), (ids[-1], last))

    def _id(self, name: str | int) -> int:
        found = self._ids.setdefault(name, len(self._ids))
        if found >= OWN_TOKENS:
            raise UsageError(f"more than {OWN_TOKENS} different prefixes or blocks")
        return found


def _read_azure(path: Path) -> tuple[list[SimulatedRequest], list[str]]:
    rows = list(_azure_rows(path))
    if not rows:
        raise UsageError(f"trace {path}: there is no request in it")
    begin = min(moment for moment, _, _ in rows)
    requests = [
        SimulatedRequest((moment - begin).total_seconds(), max(1, prompt), max(1, output))
        for moment, prompt, output in rows
    ]
    return requests, _raised(sum(prompt < 1 or output < 1 for _, prompt, output in rows))


def _azure_rows(path: Path) -> Iterator[tuple[datetime, int, int]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            for row in reader:
                where = f"trace {path}, line {reader.line_num}"
                prompt, output = (_count(where, name, row.get(name)) for name in AZURE_COLUMNS[1:])
                yield _moment(where, row.get("TIMESTAMP")), prompt, output
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"trace {path}: {getattr(error, 'strerror', None) or error}") from None


def _count(where: str, name: str, text: str | None) -> int:
    try:
        count = int(text or "")
    except ValueError:
        count = -1
    if count < 0:
        raise UsageError(f"{where}: {name}: a whole number from 0 on is needed, got {text!r}")
    return count


def _moment(where: str, text: str | None) -> datetime:
    """With or without a zone, which is the same for all rows; fractions of a second have up to 7 digits."""
    try:
        return datetime.fromisoformat(text or "").replace(tzinfo=None)
    except ValueError:
        raise UsageError(f"{where}: TIMESTAMP: a date and time is needed, got {text!r}") from None


def _raised(count: int) -> list[str]:
    return [f"{count} requests of the trace have no prompt or no output; they count with one token"] if count else []
