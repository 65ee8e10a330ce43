"""What will be asked, and when: built from flags, from a trace, or from a file of prompts. No text is made here."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from hotswap.core.errors import UsageError
from hotswap.core.load.arrivals import Process, arrival_times
from hotswap.core.load.lengths import Lengths
from hotswap.core.trace import TraceRow, read_trace


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request.

    prompt_tokens: the whole prompt's length; with `new_tokens` it is what it would be if every earlier answer had its
        planned length.
    new_tokens: of a later turn whose length follows from what was really answered: how much it adds. 0 elsewhere.
    prefix, prefix_tokens: requests with the same `prefix` begin with the same `prefix_tokens` tokens.
    session: requests of one conversation, in order; each waits for the answer to the one before.
    messages, text: what a dataset says; lengths are then unknown (0).
    """

    index: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    prefix: str = ""
    prefix_tokens: int = 0
    session: str = ""
    turn: int = 0
    new_tokens: int = 0
    user: str = ""
    priority: int = 0
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """What the flags ask for. rate: requests a second, may be infinite. turns: requests per conversation.

    input_lengths count what a request adds: a shared prefix, and a conversation's earlier turns, come on top.
    """

    num_requests: int
    input_lengths: Lengths
    output_lengths: Lengths
    rate: float = math.inf
    process: Process = "poisson"
    burstiness: float = 1.0
    shared_prefix_tokens: int = 0
    num_prefixes: int = 1
    turns: int = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """requests: in order of arrival. notes: what the reader should know about how it was made."""

    source: str
    requests: tuple[PlannedRequest, ...]
    notes: tuple[str, ...] = ()
    has_arrivals: bool = True

    @property
    def planned_rate(self) -> float | None:
        """Mean rate of the planned arrivals; None when they all come at once."""
        return mean_rate([request.arrival for request in self.requests])

    def at_once(self) -> Workload:
        """The same requests, all arriving at 0."""
        requests = tuple(dataclasses.replace(request, arrival=0.0) for request in self.requests)
        return dataclasses.replace(self, requests=requests, has_arrivals=False)

    def only(self, indices: Iterable[int]) -> Workload:
        """Those of the requests that have one of these indices."""
        wanted = set(indices)
        return dataclasses.replace(self, requests=tuple(r for r in self.requests if r.index in wanted))


def mean_rate(times: Sequence[float]) -> float | None:
    """Arrivals a second: gaps over the time they take. None for fewer than two arrivals, or all at one moment."""
    span = max(times, default=0.0) - min(times, default=0.0)
    return (len(times) - 1) / span if span > 0 else None


def synthetic(shape: Shape, seed: int) -> Workload:
    """Arrivals, lengths and prefixes each have a random source of their own: changing one leaves the others as they were.

    With several turns, request i is turn i // C of conversation i % C, where C = ceil(num_requests / turns): the
    arrival process holds for the requests taken together, and a turn that arrives before its predecessor was answered
    waits.
    """
    if shape.num_requests < 1 or shape.turns < 1 or shape.num_prefixes < 1 or shape.shared_prefix_tokens < 0:
        raise UsageError("numbers of requests, turns and prefixes start at 1, the length of a shared prefix at 0")
    times = arrival_times(
        shape.process, shape.rate, shape.num_requests, Random(f"{seed}/arrivals"), burstiness=shape.burstiness
    )
    inputs, outputs, prefixes = (Random(f"{seed}/{what}") for what in ("inputs", "outputs", "prefixes"))
    conversations = -(-shape.num_requests // shape.turns)
    lengths: dict[int, int] = defaultdict(int)  # conversation -> tokens so far, if answers come as planned
    prefix_of: dict[int, str] = {}
    requests = []
    for index, arrival in enumerate(times):
        number, turn = index % conversations, index // conversations
        new, output = shape.input_lengths.draw(inputs), shape.output_lengths.draw(outputs)
        if turn == 0:
            prefix_of[number] = str(prefixes.randrange(shape.num_prefixes)) if shape.shared_prefix_tokens else ""
            lengths[number] = shape.shared_prefix_tokens
        lengths[number] += new
        requests.append(
            PlannedRequest(
                index,
                arrival,
                lengths[number],
                output,
                prefix=prefix_of[number],
                prefix_tokens=shape.shared_prefix_tokens,
                session=f"session-{number}" if shape.turns > 1 else "",
                turn=turn,
                new_tokens=new if turn else 0,
            )
        )
        lengths[number] += output
    return Workload("synthetic", tuple(requests), has_arrivals=not math.isinf(shape.rate))


def from_trace(path: Path, *, speed: float = 1.0, limit: int | None = None) -> Workload:
    """The rows of a trace file, its first `limit` ones. speed: 2 halves every arrival time. Raises UsageError."""
    if not 0 < speed < math.inf:
        raise UsageError(f"the speed of a trace must be above 0, got {speed}")
    rows = read_trace(path)[:limit]
    turns: dict[str, int] = defaultdict(int)
    requests = []
    for index, row in enumerate(rows):
        turn = 0
        if row.session:
            turn = turns[row.session]
            turns[row.session] += 1
        requests.append(
            PlannedRequest(
                index,
                row.arrival / speed,
                row.prompt_tokens,
                max(1, row.output_tokens),
                prefix=row.prefix,
                prefix_tokens=row.prefix_tokens if row.prefix else 0,
                session=row.session,
                turn=turn,
                user=row.user,
                priority=row.priority,
            )
        )
    notes = []
    raised = sum(row.output_tokens < 1 for row in rows)
    if raised:
        notes.append(f"{raised} rows of the trace have no output; they ask for one token")
    return Workload(f"trace {path}", tuple(requests), tuple(notes))


def from_dataset(path: Path, shape: Shape, seed: int, *, given_number: int | None, given_output: bool) -> Workload:
    """Prompts of a JSONL file: each line a string, or an object with `prompt` or `messages` and perhaps `output_tokens`.

    All lines once, or the first `given_number` requests, going round. given_output: the flag's lengths beat the file's.
    """
    rows = _dataset_rows(path)
    count = given_number or len(rows)
    times = arrival_times(shape.process, shape.rate, count, Random(f"{seed}/arrivals"), burstiness=shape.burstiness)
    outputs = Random(f"{seed}/outputs")
    requests = []
    for index, arrival in enumerate(times):
        row = rows[index % len(rows)]
        output = shape.output_lengths.draw(outputs)
        if row.output_tokens is not None and not given_output:
            output = row.output_tokens
        requests.append(PlannedRequest(index, arrival, 0, output, text=row.text, messages=row.messages))
    notes: tuple[str, ...] = ()
    if count > len(rows):
        notes = (f"{path} has {len(rows)} prompts: they are asked again in turn, and a prefix cache will know them",)
    return Workload(f"dataset {path}", tuple(requests), notes, has_arrivals=not math.isinf(shape.rate))


@dataclass(frozen=True, slots=True)
class _Row:
    text: str | None
    messages: tuple[dict[str, Any], ...] | None
    output_tokens: int | None = None


def _dataset_rows(path: Path) -> list[_Row]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"dataset {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    rows = [_dataset_row(f"dataset {path}, line {n}", line) for n, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise UsageError(f"dataset {path}: there is no prompt in it")
    return rows


def _dataset_row(where: str, line: str) -> _Row:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not JSON ({error})") from None
    if isinstance(value, str):
        return _Row(value, None)
    if not isinstance(value, dict):
        raise UsageError(f"{where}: a string or an object is needed")
    output = value.get("output_tokens")
    if output is not None and (type(output) is not int or output < 1):
        raise UsageError(f"{where}: output_tokens must be a whole number from 1 on")
    prompt, messages = value.get("prompt"), value.get("messages")
    if isinstance(prompt, str) and messages is None:
        return _Row(prompt, None, output)
    if prompt is None and isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return _Row(None, tuple(messages), output)
    raise UsageError(f"{where}: either prompt (a text) or messages (a list of objects) is needed")


def check_window(requests: Iterable[PlannedRequest], max_model_len: int | None) -> None:
    """Raises UsageError when a request's prompt and answer cannot fit the server's window, naming the first one."""
    if max_model_len is None:
        return
    too_long = [r for r in requests if r.prompt_tokens + r.output_tokens > max_model_len]
    if too_long:
        first = too_long[0]
        raise UsageError(
            f"{len(too_long)} requests do not fit the window of {max_model_len} tokens; the first one is request "
            f"{first.index} with {first.prompt_tokens} prompt and {first.output_tokens} output tokens"
        )


@dataclass(slots=True)
class Sent:
    """What became of a planned request, as far as a trace tells it."""

    request: PlannedRequest
    sent: float
    prompt_tokens: int
    output_tokens: int


def trace_rows(sent: Iterable[Sent]) -> list[TraceRow]:
    """What was sent, as rows of a trace in order of sending. prefix_tokens never exceeds the real prompt."""
    ordered = sorted(sent, key=lambda item: item.sent)
    start = ordered[0].sent if ordered else 0.0
    return [
        TraceRow(
            arrival=round(item.sent - start, 6),
            prompt_tokens=max(1, item.prompt_tokens),
            output_tokens=item.output_tokens,
            user=item.request.user,
            priority=item.request.priority,
            prefix=item.request.prefix,
            prefix_tokens=min(item.request.prefix_tokens, max(1, item.prompt_tokens)),
            session=item.request.session,
        )
        for item in ordered
    ]
