"""Traces and synthetic loads of the simulator: what is read, what is refused, which prompts begin alike."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.errors import UsageError
from hotswap.core.simulator.replica import prompt_of
from hotswap.core.simulator.requests import OWN_TOKENS, SimulatedRequest, Workload, tokens_of
from hotswap.core.simulator.synthetic import parse_spec, synthetic_workload
from hotswap.core.simulator.traces import read_workload
from hotswap.core.trace import TraceRow, write_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.9799600,0,8
2023-11-16 18:17:04.4799600,110,0
"""


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(workload: Workload) -> list[list[int]]:
    return [tokens_of(prompt_of(request, n, ())) for n, request in enumerate(workload.requests)]


def shared(one: list[int], other: list[int]) -> int:
    """How many first tokens are the same."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_our_own_form(tmp_path: Path) -> None:
    """As the `trace` observer writes it, out of order."""
    path = tmp_path / "trace.jsonl"
    write_trace(
        path,
        [
            TraceRow(2.0, 30, 5, user="bob", priority=2, prefix="faq", prefix_tokens=20),
            TraceRow(0.5, 40, 0, prefix="faq", prefix_tokens=25),
            TraceRow(1.0, 10, 7, session="s"),
        ],
    )
    workload = read_workload(path)
    assert [r.arrival for r in workload.requests] == [0.5, 1.0, 2.0]
    assert [r.prompt_tokens for r in workload.requests] == [40, 10, 30]
    assert [r.output_tokens for r in workload.requests] == [1, 7, 5]
    assert (workload.requests[2].user, workload.requests[2].priority) == ("bob", 2)
    assert workload.requests[1].session == "s"
    assert workload.notes == ("1 requests of the trace have no prompt or no output; they count with one token",)
    found = prompts(workload)
    assert [len(prompt) for prompt in found] == [40, 10, 30]
    assert shared(found[0], found[2]) == 20
    assert shared(found[0], found[1]) == 0


def test_hash_ids_of_our_own_form(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"arrival": 0, "output_tokens": 1, "hash_ids": [7, 8]},
        {"arrival": 1, "output_tokens": 1, "prompt_tokens": 600, "hash_ids": [7, 9]},
    ]
    workload = read_workload(lines(tmp_path / "t", rows))
    found = prompts(workload)
    assert [len(prompt) for prompt in found] == [1024, 600]
    assert shared(*found) == 512
    found = prompts(read_workload(lines(tmp_path / "t", [rows[0] | {"prompt_tokens": 30}]), hash_block_tokens=16))
    assert len(found[0]) == 30


def test_mooncake(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"timestamp": 0, "input_length": 1500, "output_length": 10, "hash_ids": [0, 1, 2]},
        {"timestamp": 2500, "input_length": 1200, "output_length": 20, "hash_ids": [0, 1, 5], "type": "text"},
        {"timestamp": 3000, "input_length": 1500, "output_length": 20, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 9, "output_length": 2},
    ]
    workload = read_workload(lines(tmp_path / "moon.jsonl", rows))
    assert "(Mooncake)" in workload.source
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in workload.requests] == [
        (0.0, 1500, 10),
        (2.5, 1200, 20),
        (3.0, 1500, 20),
        (3.0, 9, 2),
    ]
    first, second, third, fourth = prompts(workload)
    assert [len(first), len(second), len(third), len(fourth)] == [1500, 1200, 1500, 9]
    assert shared(first, second) == 1024
    assert first == third
    assert fourth == [OWN_TOKENS + 3] * 9


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    workload = read_workload(path)
    assert [r.arrival for r in workload.requests] == pytest.approx([0.0, 0.5, 2.0])
    assert [(r.prompt_tokens, r.output_tokens) for r in workload.requests] == [(4808, 10), (110, 1), (1, 8)]
    assert workload.notes[0].startswith("2 requests")
    path.write_text("\ufeff" + AZURE.replace(".9799600", ".979960+00:00"))  # as the trace of 2024 has it
    assert len(read_workload(path).requests) == 3


GOOD = '{"arrival": 0, "prompt_tokens": 5, "output_tokens": 5}\n'
MOON = '{"timestamp": 0, "input_length": 5, "output_length": 5}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no request"),
        ("\n\n", "no request"),
        ("hello\n", "line 1: neither"),
        (GOOD + '{"arrival": 0, "prompt_tokens": "x", "output_tokens": 5}\n', r"line 2: .*\$\.prompt_tokens"),
        (GOOD + "\n" + '{"arrival": 0, "prompt_tokens": 5}\n', "line 3: .*output_tokens"),
        (GOOD + '{"arrival": 0, "prompt_tokens": 0, "output_tokens": 5}\n', "line 2: prompt_tokens must be at least 1"),
        (GOOD + '{"arrival": -1, "prompt_tokens": 1, "output_tokens": 5}\n', "line 2: arrival must be"),
        (GOOD + '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 5, "tokens": 3}\n', "line 2: .*tokens"),
        (
            GOOD + '{"arrival": 0, "prompt_tokens": 900, "output_tokens": 5, "hash_ids": [1]}\n',
            "line 2: hash_ids: 1 ids",
        ),
        (GOOD + '{"arrival": 0, "output_tokens": 5, "hash_ids": [1], "prefix": "x"}\n', "hash_ids and prefix"),
        (GOOD + "{\n", "line 2: "),
        (MOON + '{"timestamp": 0, "input_length": 5, "output_length": null}\n', r"line 2: .*\$\.output_length"),
        (MOON + '{"timestamp": -3, "input_length": 5, "output_length": 5}\n', "line 2: timestamp must be"),
        (MOON + '{"timestamp": 0, "input_length": 0, "output_length": 5}\n', "line 2: input_length must be"),
        (AZURE.replace("110", "11x"), "line 4: ContextTokens: .*'11x'"),
        (AZURE.replace(",10\n", "\n"), "line 2: GeneratedTokens"),
        (AZURE.replace("2023-11-16 18:17:05.9799600", "yesterday"), "line 3: TIMESTAMP: .*'yesterday'"),
        (AZURE.splitlines()[0], "no request"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_workload(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl: No such file"):
        read_workload(tmp_path / "none.jsonl")


def test_less_of_a_trace_and_faster() -> None:
    requests = tuple(SimulatedRequest(float(n), 10, 10) for n in range(4))
    workload = Workload("x", requests).first(3).faster(2)
    assert [r.arrival for r in workload.requests] == [0.0, 0.5, 1.0]
    with pytest.raises(UsageError, match="above 0"):
        workload.faster(0)


# Synthetic loads.


def test_a_spec() -> None:
    spec = parse_spec("requests=20,rate=inf,prompt=lognormal:500,0.8,output=uniform:3,5, users=4")
    assert (spec.requests, spec.rate, spec.users) == (20, float("inf"), 4)
    assert (spec.prompt.text, spec.output.text) == ("lognormal:500,0.8", "uniform:3,5")
    assert parse_spec("").requests == 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("requests", "KEY=VALUE"),
        ("speed=3", "KEY=VALUE"),
        ("requests=3,requests=4", "twice"),
        ("requests=0", "requests=0"),
        ("rate=0", "rate=0"),
        ("rate=fast", "rate=fast"),
        ("prompt=many", "prompt 'many'"),
        ("arrival=monthly", "poisson"),
        ("users=1.5", "users=1.5"),
        ("shared_prefix=-1", "shared_prefix=-1"),
    ],
)
def test_a_spec_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        synthetic_workload(text)


def test_synthetic_loads_are_what_was_asked_and_the_same_again() -> None:
    text = "requests=2000,rate=10,seed=3,prompt=uniform:10,30,output=4"
    text += ",users=3,user_skew=1,priorities=2,shared_prefix=50,prefixes=2"
    workload = synthetic_workload(text)
    assert workload == synthetic_workload(text)
    assert workload != synthetic_workload(text.replace("seed=3", "seed=4"))
    assert workload.requests[-1].arrival == pytest.approx(200, rel=0.1)
    assert {r.prompt_tokens for r in workload.requests} == set(range(60, 81))
    assert {r.output_tokens for r in workload.requests} == {4}
    assert {r.priority for r in workload.requests} == {0, 1}
    assert {r.shared for r in workload.requests} == {((0, 50),), ((1, 50),)}
    users = Counter(r.user for r in workload.requests)
    assert users["user-0"] / users["user-2"] == pytest.approx(3, rel=0.25)


def test_changing_one_thing_leaves_the_others_as_they_were() -> None:
    plain = synthetic_workload("requests=50,rate=5,prompt=uniform:10,30,output=uniform:1,9")
    other = synthetic_workload("requests=50,rate=5,prompt=uniform:10,30,output=77,users=5")
    assert [r.arrival for r in plain.requests] == [r.arrival for r in other.requests]
    assert [r.prompt_tokens for r in plain.requests] == [r.prompt_tokens for r in other.requests]


def test_turns_of_a_conversation_hold_those_before() -> None:
    workload = synthetic_workload("requests=6,rate=inf,prompt=10,output=5,turns=3,shared_prefix=7")
    by_session: dict[str, list[int]] = {}
    for request in workload.requests:
        by_session.setdefault(request.session, []).append(request.prompt_tokens)
    assert by_session == {"session-0": [17, 32, 47], "session-1": [17, 32, 47]}
