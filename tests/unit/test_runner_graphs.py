"""Steps replayed from graphs: which steps are, what becomes of their results, and models that cannot be recorded."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hash_worker import (
    MAX_GRAPH_TOKENS,
    PROMPT,
    WIDTH,
    Driver,
    HashAttention,
    HashModel,
    HostGraphs,
    Tracked,
    check,
    make_runner,
)
from torch import Tensor

from hotswap.core.contracts.attention import Capabilities
from hotswap.core.runner.graphs import GraphRunner, GraphStep, decode_sizes, forward_sizes, kept_bytes
from hotswap.core.runner.input_batch import StepRows
from hotswap.core.runner.model_runner import ModelRunner

MAX_SEQS = 8


@dataclass
class Replays:
    """What was asked of the graphs: (decode, tokens), with the result of the one before destroyed."""

    asked: list[tuple[bool, int]] = field(default_factory=list)
    last: GraphStep | None = None

    @property
    def decoded(self) -> list[bool]:
        return [decode for decode, _ in self.asked]

    def destroy(self) -> None:
        if self.last is not None:
            for tensor in results_of(self.last):
                tensor.fill_(math.nan if tensor.is_floating_point() else -7)


def results_of(step: GraphStep) -> list[Tensor]:
    decoded = step.decoded
    return [step.hidden] if decoded is None else [decoded.logits, decoded.token_ids, decoded.best, step.hidden]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    found, run = Replays(), GraphRunner.run

    def recorded(self: GraphRunner, rows: StepRows, *, decode: bool) -> GraphStep | None:
        found.destroy()
        found.last = run(self, rows, decode=decode)
        assert found.last is not None, "every step of these tests is small enough"
        assert (found.last.decoded is not None) == decode
        found.asked.append((decode, rows.num_tokens))
        return found.last

    monkeypatch.setattr(GraphRunner, "run", recorded)
    return found


def captured(**settings: Any) -> ModelRunner:
    runner, _ = make_runner(MAX_SEQS, graphs=True, **settings)
    assert runner.capture_graphs() == len(decode_sizes(MAX_SEQS)) + len(forward_sizes(MAX_GRAPH_TOKENS, MAX_SEQS))
    return runner


# Results.


def test_results_are_read_before_the_next_replay(replays: Replays) -> None:
    """Of any graph, of whatever kind: all graphs leave them in the same memory."""
    driver = Driver(captured())
    wanted: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.0, "seed": 1, "frequency_penalty": 0.5, "logprobs": 0},
    ]
    requests = [driver.add(at, PROMPT[: 5 + at], **params) for at, params in enumerate(wanted)]
    driver.run({0: 5, 1: 3})
    driver.run({0: 1, 1: 3, 2: 7})
    for _ in range(3):
        driver.run({0: 1, 1: 1, 2: 1})
    driver.run({0: 1, 1: 1})  # another graph
    assert replays.decoded == [False, False, True, True, True, True]
    for request in requests:
        assert len(request.outputs) >= 4
        check(request)


class Lending(HostGraphs):
    """Gives results for others, so that it shows who still holds them. lent: what it was given."""

    def __init__(self, backend: HashAttention) -> None:
        super().__init__(backend)
        self.lent: list[weakref.ref[Tensor]] = []

    def graph_result(self, tensor: Tensor) -> Tensor:
        self.lent.append(weakref.ref(tensor))
        return tensor.clone()


def test_no_graph_holds_results_that_are_lent() -> None:
    runner, platform = make_runner(MAX_SEQS, graphs=True, platform_type=Lending)
    assert isinstance(platform, Lending)
    num_graphs = runner.capture_graphs()
    num_decode = len(decode_sizes(MAX_SEQS))
    assert len(platform.lent) == 4 * num_decode + (num_graphs - num_decode)
    gc.collect()
    assert all(result() is None for result in platform.lent)


def test_what_results_take_where_memory_is_not_lent() -> None:
    runner, platform = make_runner(MAX_SEQS, graphs=True)
    runner.capture_graphs()
    large = [tensor for tensor in platform.results if tensor.dim() == 2]
    sizes = [tensor.numel() * tensor.element_size() for tensor in large]
    assert sum(sizes) == kept_bytes(MAX_SEQS, MAX_GRAPH_TOKENS, MAX_SEQS, 4 * WIDTH, 4)
    logits = [tensor for tensor in large if tensor.shape[1] == WIDTH]
    assert kept_bytes(MAX_SEQS, 0, MAX_SEQS, 4 * WIDTH, 0) == sum(tensor.numel() * 4 for tensor in logits)


# Which step is decoded by a graph.


def test_a_request_with_prompt_logprobs_is_decoded_by_graphs_once_its_prompt_is_done(replays: Replays) -> None:
    driver = Driver(captured())
    asking = driver.add(1, PROMPT, temperature=0.0, prompt_logprobs=2)
    other = driver.add(2, PROMPT[:3], temperature=0.0)
    driver.run({2: 3, 1: 6})
    driver.run({2: 1, 1: 5})
    for _ in range(4):
        driver.run({2: 1, 1: 1})
    assert replays.asked == [(True, 2)] * 4
    check(asking)
    check(other)


@pytest.mark.parametrize("chunks", [[10, 1], [9, 1, 1], [1] * 11])
def test_a_last_chunk_of_one_token_owes_no_prompt_logprobs(chunks: list[int], replays: Replays) -> None:
    """It draws the first output; the prompt's last token was described by the chunk before. Those before it owe some, for which
    all their hidden states are wanted: no graph leaves them."""
    driver = Driver(captured())
    asking = driver.add(1, PROMPT, temperature=0.0, logprobs=1, prompt_logprobs=2)
    other = driver.add(2, PROMPT[:3], temperature=0.0)
    driver.run({2: 3})
    for chunk in chunks:
        driver.run({1: chunk, 2: 1})
    assert replays.decoded == [False, True]
    assert len(asking.outputs) == 1
    assert sorted(asking.prompt_logprobs) == list(range(1, len(PROMPT)))
    driver.run({2: 1, 1: 1})
    check(asking)
    check(other)


def test_a_prompt_of_one_token_is_decoded_by_a_graph(replays: Replays) -> None:
    driver = Driver(captured())
    request = driver.add(1, PROMPT[:1], temperature=0.0, prompt_logprobs=2)
    assert driver.run({1: 1}).rows[0].prompt_logprobs is None
    driver.run({1: 1})
    assert replays.decoded == [True, True]
    check(request)


def preempted_within_its_prompt(driver: Driver, request: Tracked) -> Iterator[dict[int, int]]:
    yield {1: 10}
    driver.leave(1)
    yield {1: 10}
    yield {1: 1}
    yield {1: 1}


def preempted_with_an_output(driver: Driver, request: Tracked) -> Iterator[dict[int, int]]:
    yield {1: 11}
    yield {1: 1}
    driver.leave(1)
    assert len(request.outputs) == 2
    yield {1: 12}
    yield {1: 1}


@pytest.mark.parametrize(
    ("story", "decoded"),
    [(preempted_within_its_prompt, [True, True]), (preempted_with_an_output, [True, False, True])],
)
def test_preempted_requests_have_all_their_prompt_logprobs(story: Any, decoded: list[bool], replays: Replays) -> None:
    driver = Driver(captured())
    request = driver.add(1, PROMPT, temperature=0.0, prompt_logprobs=1)
    for work in story(driver, request):
        driver.run(work)
    assert replays.decoded == decoded
    check(request)


# Who has no graphs.


class LooksAtValues(HashModel):
    supports_graphs = False


def refused(runner: ModelRunner, caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.INFO, "hotswap.runner"):
        assert runner.capture_graphs() == 0
    assert len(caplog.messages) == 1
    return caplog.messages[0]


def test_a_model_that_says_no_gets_no_graphs(caplog: pytest.LogCaptureFixture, replays: Replays) -> None:
    runner, platform = make_runner(graphs=True, model=LooksAtValues())
    assert refused(runner, caplog) == (
        "no graphs are captured: the model (LooksAtValues) says that it cannot be recorded"
    )
    driver = Driver(runner)
    request = driver.add(1, PROMPT, temperature=0.0, prompt_logprobs=1)
    for count in (11, 1, 1):
        driver.run({1: count})
    check(request)
    assert replays.asked == [] and platform.results == []


def test_a_property_may_say_so(caplog: pytest.LogCaptureFixture) -> None:
    class Depends(HashModel):
        @property
        def supports_graphs(self) -> bool:  # type: ignore[override]  # the contract allows either
            return self.layer.num_heads > 1

    assert "(Depends)" in refused(make_runner(graphs=True, model=Depends())[0], caplog)


def test_attention_that_cannot_be_recorded_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HashAttention, "capabilities", Capabilities(("float32",), graph_capture="none"))
    message = refused(make_runner(graphs=True)[0], caplog)
    assert message == "no graphs are captured: the attention backend (HashAttention) says that it cannot be recorded"


def test_nothing_is_said_where_nobody_asked_for_graphs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hotswap.runner"):
        assert make_runner(graphs=False, model=LooksAtValues())[0].capture_graphs() == 0
    assert caplog.messages == []
