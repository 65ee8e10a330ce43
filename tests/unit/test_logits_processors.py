"""Logits processors: what they are told, which rows they get, and whose request ends when one of them fails."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, field_validator
from torch import Tensor

from hotswap import LLM, RequestOutput, SamplingParams
from hotswap.core.clock import ManualClock
from hotswap.core.contracts.logits_processor import AddedRequest, BatchUpdate, LogitsProcessor, LogitsRows
from hotswap.core.contracts.plan import NewRequest
from hotswap.core.engine.input_processor import InputLimits, InputProcessor
from hotswap.core.engine.request_processors import RequestProcessors
from hotswap.core.engine.wire import EngineInfo
from hotswap.core.errors import PluginError, RequestError
from hotswap.core.runner.processors import ActiveProcessor, ProcessorChain
from hotswap.core.runner.transfer import Transfers
from hotswap.core.testing.tiny_models import make_tiny_model
from hotswap.plugins.logits.no_repeat_ngram import NoRepeatNgram, ban_repeats

SETTINGS: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory_bytes": 2**21}
PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42], [5, 6, 7, 8, 50, 51, 52]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


# The chain by itself.


class Recorder(LogitsProcessor):
    """Writes down what it hears; forces the token that its argument names; fails where it is told to."""

    def __init__(self) -> None:
        self.updates: list[BatchUpdate] = []
        self.calls: list[tuple[int, ...]] = []
        self.force: dict[int, int] = {}
        self.fails_on: set[int] = set()
        self.refuses: set[int] = set()

    def update_batch(self, update: BatchUpdate) -> None:
        self.updates.append(update)
        for added in update.added:
            if added.request_id in self.refuses:
                raise ValueError(f"no {added.request_id}")

    def apply(self, logits: Tensor, rows: LogitsRows) -> None:
        self.calls.append(rows.request_ids)
        logits += 1.0  # left half-done when it raises
        for place, request_id in enumerate(rows.request_ids):
            if request_id in self.fails_on:
                raise ValueError(f"bad row {request_id}")
            if request_id in self.force:
                logits[place, self.force[request_id]] = 1000.0


def new(request_id: int, **asked: Mapping[str, Any]) -> NewRequest:
    return NewRequest(request_id, [1, 2, 3], 3, SamplingParams(logits_processors=dict(asked)), [[1]], 0)  # type: ignore[arg-type]


def chain_of(*active: tuple[str, LogitsProcessor, bool]) -> ProcessorChain:
    return ProcessorChain([ActiveProcessor(name, f"plugin {name}", p, serves_all) for name, p, serves_all in active])


def apply(chain: ProcessorChain, request_ids: list[int], logits: Tensor, edited: list[int] | None = None) -> Tensor:
    places = list(range(len(request_ids))) if edited is None else edited
    count = torch.arange(len(request_ids))
    groups = chain.group(request_ids, places, count, torch.full_like(count, 3))
    return chain.apply(logits, groups, torch.zeros((8, 9), dtype=torch.int32), torch.full_like(count, 4))


def test_places_go_to_the_device_with_the_others() -> None:
    """Through `Transfers`: on a card, `torch.tensor(..., device=)` waits for all that is queued."""
    uploads: list[list[int]] = []

    class Noting(Transfers):
        def upload(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
            uploads.append(list(values))
            return super().upload(values, dtype)

    active = [ActiveProcessor("named", "named", Recorder(), False)]
    chain = ProcessorChain(active, Noting())
    chain.add(new(1), 0)
    chain.add(new(2, named={}), 1)
    chain.flush()
    count = torch.arange(2)
    (group,) = chain.group([1, 2], [0, 1], count, count)
    assert uploads == [[1], [1]] and group.rows.tolist() == [1]
    assert group.at is not None and group.at.tolist() == [1]


def test_only_what_a_processor_serves_reaches_it() -> None:
    everything, named = Recorder(), Recorder()
    chain = chain_of(("all", everything, True), ("named", named, False))
    assert chain.add(new(1), 0) == (0,)
    assert chain.add(new(2, named={"x": 1}), 1) == (0, 1)
    chain.flush()
    assert [a.request_id for update in everything.updates for a in update.added] == [1, 2]
    (added,) = named.updates[0].added
    assert (added.request_id, added.slot, list(added.token_ids), added.num_prompt_tokens) == (2, 1, [1, 2, 3], 3)
    assert added.arguments == {"x": 1}
    logits = torch.zeros((2, 9))
    result = apply(chain, [1, 2], logits)
    assert (everything.calls, named.calls) == ([(1, 2)], [(2,)])
    assert result.tolist() == [[1.0] * 9, [2.0] * 9]


def test_nothing_is_said_when_nothing_changed_and_a_request_may_come_back() -> None:
    recorder = Recorder()
    chain = chain_of(("r", recorder, True))
    chain.flush()
    chain.add(new(1), 0)
    chain.flush()
    chain.flush()
    assert len(recorder.updates) == 1
    chain.remove(1)
    chain.add(new(1), 5)  # preempted and admitted again in one plan
    chain.flush()
    removed, added = recorder.updates[1:]
    assert (removed.removed, removed.added) == ((1,), ())
    assert [(a.request_id, a.slot) for a in added.added] == [(1, 5)]
    chain.clear()
    assert recorder.updates[-1].removed == (1,)


def test_one_that_raises_is_asked_row_by_row_and_only_the_culprit_fails() -> None:
    recorder, after = Recorder(), Recorder()
    chain = chain_of(("r", recorder, True), ("after", after, True))
    for request_id in (1, 2, 3):
        chain.add(new(request_id), request_id)
    chain.flush()
    recorder.fails_on = {2}
    logits = torch.arange(27, dtype=torch.float32).view(3, 9)
    result = apply(chain, [1, 2, 3], logits.clone())
    assert recorder.calls == [(1, 2, 3), (1,), (2,), (3,)]
    assert chain.failures == {2: "plugin r failed on this request; the engine's log says why"}
    assert torch.equal(result[[0, 2]], logits[[0, 2]] + 2), "each is served once by each processor"
    assert torch.equal(result[1], logits[1] + 1), "the half-done edit is gone"
    recorder.calls.clear()
    apply(chain, [1, 2, 3], logits.clone())
    assert recorder.calls == [(1, 3)], "who failed is not processed again"
    chain.remove(2)
    assert chain.failures == {}


def test_a_request_that_cannot_be_taken_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    recorder.refuses = {2}
    chain = chain_of(("r", recorder, True))
    for request_id in (1, 2, 3):
        chain.add(new(request_id), request_id)
    chain.flush()
    assert chain.failures == {2: "plugin r failed on this request; the engine's log says why"}
    said = [record.getMessage() for record in caplog.records]
    assert said == ["plugin r: update_batch() raised", "request 2 ends: plugin r: ValueError: no 2"]
    apply(chain, [1, 2, 3], torch.zeros((3, 9)))
    assert recorder.calls == [(1, 3)]
    chain.remove(2)
    chain.flush()
    assert all(2 not in update.removed for update in recorder.updates), "it never had it"


def test_rows_that_are_not_edited_are_not_copied() -> None:
    recorder = Recorder()
    chain = chain_of(("named", recorder, False))
    chain.add(new(7), 0)
    chain.add(new(8, named={}), 1)
    chain.flush()
    edited = torch.zeros((1, 9))
    result = apply(chain, [7, 8], edited, edited=[1])
    assert recorder.calls == [(8,)]
    assert result.shape == (1, 9)


# Names and arguments.


class Arguments(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    size: int = Field(ge=1)
    mode: str = Field("soft", alias="Mode")
    when: set[int] = Field(default_factory=set)


class Broken(BaseModel):
    value: int = 0

    def __init__(self, **values: Any) -> None:
        raise TypeError("a secret")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"other": {}}, "no active processor 'other' that a request can name (allowed: broken, mine)"),
        ({"mine": {"size": 0}}, "'mine': argument 'size': should be greater than or equal to 1"),
        ({"mine": {"sizes": 2}}, "'mine' has no argument 'sizes'; did you mean 'size'"),
        ({"mine": {}}, "'mine': argument 'size' is required"),
        ({"mine": 3}, "the arguments of 'mine' must be an object"),
        ({"mine": {1: 2}}, "the arguments of 'mine' must be an object"),
        (["mine"], "must be an object"),
        ({3: {}}, "no active processor '3'"),
        ({"x" * 4000: {}}, "no active processor"),
    ],
)
def test_s04_requests_name_processors_of_an_allow_list(asked: Any, expected: str) -> None:
    processors = RequestProcessors({"mine": Arguments, "broken": Broken})
    with pytest.raises(RequestError) as caught:
        processors.check(asked)
    assert expected in caught.value.message
    assert (caught.value.param, caught.value.status) == ("logits_processors", 400)
    assert len(caught.value.message) < 300


def test_arguments_are_plain() -> None:
    processors = RequestProcessors({"mine": Arguments})
    given = {"mine": {"size": 2, "when": [3]}}
    assert processors.check(given) == {"mine": {"size": 2, "mode": "soft", "when": [3]}}
    assert processors.check({}) == {}


class OneWay(BaseModel):
    """Takes nothing of what it gives: validated twice, each field would be refused or changed."""

    model_config = ConfigDict(strict=True)
    size: int = Field(validation_alias=AliasChoices("n", AliasPath("sizes", 0)))
    pair: tuple[int, int] = (1, 2)

    @field_validator("size")
    @classmethod
    def _next(cls, value: int) -> int:
        return value + 1


@pytest.mark.parametrize("given", [{"n": 3}, {"sizes": [3]}])
def test_arguments_travel_as_they_were_asked(given: dict[str, Any]) -> None:
    processors = RequestProcessors({"one": OneWay})
    params = SamplingParams(logits_processors={"one": given})
    info = EngineInfo("tiny", "Tiny", "float32", 64, 63, 512, 16, 16, 4, 64, "cpu")
    inputs = InputProcessor(info, None, (), ManualClock(), InputLimits(), processors=processors)
    (request,) = inputs.process([5], params)
    assert request.sampling.logits_processors == {"one": given}
    assert processors.check(request.sampling.logits_processors) == {"one": {"size": 4, "pair": [1, 2]}}
    with pytest.raises(RequestError, match=r"no argument 'size'.*\(arguments: n, pair, sizes\)"):
        inputs.process([5], SamplingParams(logits_processors={"one": {"size": 3}}))


def test_an_arguments_model_that_raises_ends_that_request_only() -> None:
    with pytest.raises(RequestError, match="failed to check its arguments: TypeError") as caught:
        RequestProcessors({"broken": Broken}).check({"broken": {}})
    assert caught.value.status == 500 and "secret" not in caught.value.message


# In an engine.

PLUGIN = """
from hotswap.core.contracts import LogitsProcessor, LogitsProcessorProvider, hookimpl
from pydantic import BaseModel

class Arguments(BaseModel):
    token: int = 77
    fail_at: int = -1
    nothing: bool = False
    nan: bool = False

class Forces(LogitsProcessor):
    def __init__(self):
        self.arguments = {}
    def update_batch(self, update):
        for gone in update.removed:
            del self.arguments[gone]
        for added in update.added:
            assert added.request_id not in self.arguments
            self.arguments[added.request_id] = added.arguments
            if added.arguments["token"] == 99:
                raise ValueError("not 99")
    def apply(self, logits, rows):
        steps = (rows.positions - rows.num_prompt_tokens).tolist()  # a test may wait for the device
        for row, (request_id, step) in enumerate(zip(rows.request_ids, steps)):
            mine = self.arguments[request_id]
            history = rows.token_ids[rows.slots[row], : rows.positions[row]]
            assert history[-1] == mine["token"] or step == 0
            if step == mine["fail_at"]:
                logits.zero_()
                raise RuntimeError("cannot")
            logits[row] = float("nan") if mine["nan"] else float("-inf")
            if not mine["nothing"] and not mine["nan"]:
                logits[row, mine["token"]] = 0.0

class Plus(LogitsProcessor):
    def apply(self, logits, rows):
        logits += 0.0

@hookimpl
def hotswap_logits_processor():
    yield LogitsProcessorProvider(name="forces", build=lambda context: Forces(), arguments=Arguments)
    yield LogitsProcessorProvider(name="plus", build=lambda context: Plus())
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plugin") / "forces.py"
    path.write_text(PLUGIN)
    return str(path)


@pytest.fixture(scope="module")
def llm(model: str, plugin: str) -> Iterator[LLM]:
    with LLM(model, plugins=[plugin, "no_repeat_ngram"], **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(model: str) -> Iterator[LLM]:
    with LLM(model, **SETTINGS) as engine:
        yield engine


def forcing(**arguments: Any) -> SamplingParams:
    return GREEDY.clone(logits_processors={"forces": arguments})


def generate(llm: LLM, params: list[SamplingParams], prompts: list[list[int]] = PROMPTS) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def test_a_request_that_names_one_is_served_and_its_neighbours_keep_every_bit(llm: LLM, plain: LLM) -> None:
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, logprobs=3, top_p=0.9)
    expected = generate(plain, [GREEDY, GREEDY, sampled])
    got = generate(llm, [forcing(), GREEDY, sampled])
    assert tokens(got[0]) == [77] * 6
    assert tokens(got[1]) == tokens(expected[1]) and tokens(got[2]) == tokens(expected[2])
    assert got[2].outputs[0].logprobs == expected[2].outputs[0].logprobs


def test_it_works_on_drawn_rows_too_and_raw_logprobs_stay_the_models(llm: LLM, plain: LLM) -> None:
    drawn = forcing(token=12).clone(temperature=1.0, seed=1, logprobs=2, max_tokens=1)
    (got,) = generate(llm, [drawn], PROMPTS[:1])
    (raw,) = generate(plain, [GREEDY.clone(logprobs=20, max_tokens=1)], PROMPTS[:1])
    assert tokens(got) == [12]
    assert got.outputs[0].logprobs is not None and raw.outputs[0].logprobs is not None
    best = next(iter(raw.outputs[0].logprobs[0].items()))
    assert got.outputs[0].logprobs[0][best[0]].logprob == best[1].logprob
    assert got.outputs[0].logprobs[0][12].logprob < -1.0


@pytest.mark.parametrize(
    ("arguments", "expected", "count"),
    [
        ({"fail_at": 2}, "logits_processor 'forces' of forces.py failed on this request", 2),
        ({"fail_at": 0}, "logits_processor 'forces' of forces.py failed on this request", 0),
        ({"token": 99}, "logits_processor 'forces' of forces.py failed on this request", 0),
        ({"nothing": True}, "no token can be drawn: logits_processor 'forces'", 0),
        ({"nan": True}, "no token can be drawn: logits_processor 'forces'", 0),
    ],
)
def test_only_the_request_at_fault_ends(
    llm: LLM, plain: LLM, arguments: dict[str, Any], expected: str, count: int
) -> None:
    alone = generate(plain, [GREEDY] * 3)
    got = generate(llm, [GREEDY, forcing(**arguments), forcing(token=70)])
    assert got[1].error is not None and expected in got[1].error.replace(str(Path.cwd()), "")
    assert not any(secret in got[1].error for secret in ("cannot", "not 99")), "what a plugin raises may hold anything"
    assert got[1].outputs[0].finish_reason == "error" and tokens(got[1]) == [77] * count
    assert (tokens(got[0]), got[0].error) == (tokens(alone[0]), None)
    assert (tokens(got[2]), got[2].error) == ([70] * 6, None)
    llm.check_integrity()


def test_preemption_and_coming_back(model: str, plugin: str) -> None:
    """Too few blocks for all: requests lose their slot and return with their outputs."""
    settings = {**SETTINGS, "kv_cache_memory_bytes": None, "num_gpu_blocks_override": 7, "block_size": 4}
    params = [
        SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logits_processors={"forces": {"token": 60 + i}})
        for i in range(3)
    ]
    with LLM(model, plugins=[plugin], **settings) as small:
        got = generate(small, params)
        assert small.stats.num_preemptions_recompute > 0
    assert [tokens(output) for output in got] == [[60 + i] * 14 for i in range(3)]


def test_the_front_end_refuses_what_is_not_active_or_takes_no_arguments(llm: LLM, plain: LLM) -> None:
    for engine, name, allowed in ((llm, "plus", "forces, no_repeat_ngram"), (plain, "no_repeat_ngram", "none")):
        with pytest.raises(RequestError, match=f"allowed: {allowed}") as caught:
            engine.generate([PROMPTS[0]], GREEDY.clone(logits_processors={name: {}}), use_tqdm=False)
        assert caught.value.param == "logits_processors"


def test_one_processor_with_two_sets_of_options_is_refused(model: str, plugin: str) -> None:
    with pytest.raises(PluginError, match="takes no options"):
        LLM(model, plugins=[plugin, "logits_processor=plus,a=1"], **SETTINGS)


# The built-in one.


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_repeat_ngram_is_hugging_faces(size: int) -> None:
    from transformers import NoRepeatNGramLogitsProcessor

    generator = torch.Generator().manual_seed(size)
    for length in (1, size - 1, size, size + 1, 40):
        if length < 1:
            continue
        ids = torch.randint(0, 6, (7, length), generator=generator)
        logits = torch.randn((7, 9), generator=generator)
        logits[0, 0] = -0.0
        expected = NoRepeatNGramLogitsProcessor(size)(ids, logits.clone())
        history = torch.cat((ids, torch.full((7, 5), 2**31 - 1)), 1).to(torch.int32)  # undefined beyond the positions
        got = logits.clone()
        ban_repeats(got, history, torch.full((7,), length), size)
        assert torch.equal(got, expected)
        assert torch.equal(torch.signbit(got), torch.signbit(expected))


def test_no_repeat_ngram_with_mixed_sizes_and_lengths() -> None:
    from transformers import NoRepeatNGramLogitsProcessor

    generator = torch.Generator().manual_seed(0)
    processor = NoRepeatNgram()
    sizes, lengths = [2, 3, 2, 1], [9, 4, 12, 1]
    table = torch.randint(0, 4, (6, 30), generator=generator).to(torch.int32)
    slots = torch.tensor([5, 0, 3, 1])
    for request_id, (size, length) in enumerate(zip(sizes, lengths, strict=True)):
        ids = table[slots[request_id], :length].tolist()
        added = AddedRequest(request_id, 0, ids, 1, SamplingParams(), {"size": size})
        processor.update_batch(BatchUpdate(added=(added,)))
    for step in range(6):
        positions = torch.tensor(lengths) + step
        logits = torch.randn((4, 5), generator=generator)
        got = logits.clone()
        processor.apply(
            got, LogitsRows((0, 1, 2, 3), (0,) * 4, table, slots, positions, torch.ones(4, dtype=torch.int64))
        )
        for row in range(4):
            history = table[slots[row], : positions[row]].to(torch.int64).unsqueeze(0)
            expected = NoRepeatNGramLogitsProcessor(sizes[row])(history, logits[row : row + 1].clone())
            assert torch.equal(got[row : row + 1], expected)
    processor.update_batch(BatchUpdate(removed=(0, 1, 2, 3)))
    assert not processor._sizes and not processor._longest


def test_no_repeat_ngram_in_an_engine(llm: LLM) -> None:
    params = GREEDY.clone(max_tokens=40, logits_processors={"no_repeat_ngram": {"size": 2}})
    (output,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
    whole = PROMPTS[0] + tokens(output)
    pairs = list(itertools.pairwise(whole))
    assert len(pairs) == len(set(pairs))
