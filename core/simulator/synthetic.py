"""Workloads out of a line of text: `requests=2000,rate=8,seed=1,prompt=lognormal:500,0.8,output=exponential:150,users=20`."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, fields
from random import Random
from typing import Any, Final

from ..errors import UsageError
from ..load.arrivals import PROCESSES, arrival_times
from ..load.lengths import Lengths, parse_lengths
from .requests import SimulatedRequest, Workload
from .traces import SharedNames

_NEXT: Final = re.compile(
    r",(?=\s*[a-z_]+=)"
)  # a comma inside a value, as in lognormal:500,0.8, is not followed by KEY=
MAX_REQUESTS: Final = 10_000_000
_PROMPT: Final = parse_lengths("256")
_OUTPUT: Final = parse_lengths("128")


@dataclass(frozen=True, slots=True)
class Spec:
    """requests: how many. rate: arrivals a second; inf is all at once. arrival, burstiness: as in `hotswap bench`.
    prompt: tokens that a request adds; a shared prefix and earlier turns come on top. users: each request is of one
    of so many; user_skew: the chance of user k is proportional to k ** -user_skew, 0 is all alike. priorities:
    classes, drawn alike. shared_prefix: tokens of a prefix, one of `prefixes`. turns: requests of a conversation."""

    requests: int = 1000
    rate: float = 1.0
    seed: int = 0
    arrival: str = "poisson"
    burstiness: float = 1.0
    prompt: Lengths = _PROMPT
    output: Lengths = _OUTPUT
    users: int = 1
    user_skew: float = 0.0
    priorities: int = 1
    shared_prefix: int = 0
    prefixes: int = 1
    turns: int = 1


_LENGTHS: Final = ("prompt", "output")
_NUMBERS: Final = ("rate", "burstiness", "user_skew")
_FROM_ZERO: Final = ("shared_prefix", "seed")


def parse_spec(text: str) -> Spec:
    """Raises UsageError naming the key."""
    known = [field.name for field in fields(Spec)]
    values: dict[str, Any] = {}
    for part in _NEXT.split(text.strip()) if text.strip() else []:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in known:
            raise UsageError(f"--synthetic {part.strip()!r}: write KEY=VALUE,... with {', '.join(known)}")
        if name in values:
            raise UsageError(f"--synthetic: {name} is given twice")
        values[name] = _value(name, value)
    return Spec(**values)


def _value(name: str, text: str) -> Any:
    if name in _LENGTHS:
        return parse_lengths(text, f"--synthetic {name}")
    if name == "arrival":
        if text not in PROCESSES:
            raise UsageError(f"--synthetic arrival={text}: one of {', '.join(PROCESSES)}")
        return text
    try:
        number = float(text) if name in _NUMBERS else int(text)
    except ValueError:
        number = float("nan")
    least = 0 if name in (*_NUMBERS, *_FROM_ZERO) else 1
    most = MAX_REQUESTS if name not in ("seed", "rate") else float("inf")
    if not least <= number <= most or (name in ("rate", "burstiness") and not number):
        kind = "a number above 0" if name in ("rate", "burstiness") else f"a number from {least} to {most}"
        raise UsageError(f"--synthetic {name}={text}: {kind} is needed")
    return number


def synthetic_workload(text: str) -> Workload:
    """Arrivals, lengths, users, classes and prefixes each have a random source of their own: changing one leaves the
    others as they were. With several turns, request i is turn i // C of conversation i % C, where C = ceil(requests
    / turns). Raises UsageError."""
    spec = parse_spec(text)
    process: Any = spec.arrival
    times = arrival_times(
        process, spec.rate, spec.requests, Random(f"{spec.seed}/arrivals"), burstiness=spec.burstiness
    )
    sources = {what: Random(f"{spec.seed}/{what}") for what in ("prompt", "output", "user", "priority", "prefix")}
    weights = [rank**-spec.user_skew for rank in range(1, spec.users + 1)]
    users = sources["user"].choices(range(spec.users), weights, k=spec.requests) if spec.users > 1 else None
    names, conversations = SharedNames(), -(-spec.requests // spec.turns)
    lengths: dict[int, int] = defaultdict(int)  # conversation -> tokens so far
    requests = []
    for index, arrival in enumerate(times):
        number, turn = index % conversations, index // conversations
        shared: tuple[tuple[int, int], ...] = ()
        if turn == 0 and spec.shared_prefix:
            shared = names.prefix(str(sources["prefix"].randrange(spec.prefixes)), spec.shared_prefix)
            lengths[number] = spec.shared_prefix
        lengths[number] += spec.prompt.draw(sources["prompt"])
        output = spec.output.draw(sources["output"])
        requests.append(
            SimulatedRequest(
                arrival,
                lengths[number],
                output,
                shared,
                user=f"user-{users[number if spec.turns > 1 else index]}" if users is not None else "",
                priority=sources["priority"].randrange(spec.priorities) if spec.priorities > 1 else 0,
                session=f"session-{number}" if spec.turns > 1 else "",
            )
        )
        lengths[number] += output
    return Workload(f"synthetic {text}", tuple(requests))
