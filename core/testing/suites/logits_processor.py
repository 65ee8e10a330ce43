"""What every logits processor must hold: a request's edits depend on that request alone.

    from hotswap.core.testing.suites import LogitsProcessorSuite

    class TestMyProcessor(LogitsProcessorSuite):
        plugin = "hotswap_my_processor"
        arguments = ({"size": 2}, {"size": 3})     # what requests say; optional where there are defaults

The truth is the processor itself on one request alone, served without interruption. Batches that form, shrink, move and
come back after preemption must give the same bits.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import pytest
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...contracts.logits_processor import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    LogitsProcessorProvider,
    LogitsRows,
)
from ...contracts.provider import ModelInfo
from ...sampling_params import SamplingParams
from .base import ConformanceSuite

SLOTS = 5
STRIDE = 64  # tokens of a slot
WIDTH = 24  # of the logits: small, so that tokens repeat
STEPS = 14  # outputs of a request
GROWTH_REQUESTS = 150
GROWTH_TURNS = 4
MAX_GROWTH_BYTES = 20 * GROWTH_REQUESTS  # less than one integer a request
_NUMBERS = ("integer", "number")
_POISON = (2**31 - 1, -1)
_WAITING = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "is_nonzero", "equal"} | {
    f"__{name}__" for name in ("bool", "int", "float", "index")
}


@dataclass
class SampleRequest:
    """A request whose tokens are known from the start: outputs are what was drawn, whatever the logits said."""

    request_id: int
    prompt: list[int]
    outputs: list[int]
    arguments: Mapping[str, Any]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    _logits: Tensor | None = None

    def tokens(self, step: int) -> list[int]:
        return self.prompt + self.outputs[:step]

    def logits(self, step: int) -> Tensor:
        """float32 [V] before the processor: some tokens are forbidden already, as by `allowed_token_ids`."""
        if self._logits is None:
            generator = torch.Generator().manual_seed(self.request_id)
            self._logits = 4 * torch.randn(STEPS + 4, WIDTH, generator=generator)
            self._logits[1::3, : WIDTH // 2] = float("-inf")
        return self._logits[step]


class PersistentBatch:
    """The engine's side: slots, their tokens, and what changed since the last call."""

    def __init__(self, processor: LogitsProcessor, seed: int = 0) -> None:
        self.processor = processor
        self.rng = random.Random(seed)
        self.slots: dict[int, int] = {}  # request -> slot
        self.requests: dict[int, SampleRequest] = {}
        self.steps: dict[int, int] = {}  # request -> confirmed outputs
        self._table = torch.zeros(SLOTS, STRIDE, dtype=torch.int32)
        self._noise = torch.Generator().manual_seed(seed)
        self._removed: list[int] = []
        self._moved: list[tuple[int, int]] = []
        self._added: list[AddedRequest] = []

    @property
    def free(self) -> list[int]:
        return [slot for slot in range(SLOTS) if slot not in self.slots.values()]

    def remove(self, request_id: int) -> None:
        self._removed.append(request_id)
        del self.slots[request_id], self.requests[request_id]

    def move(self, request_id: int, slot: int) -> None:
        self._moved.append((self.slots[request_id], slot))
        self.slots[request_id] = slot

    def add(self, request: SampleRequest, slot: int) -> None:
        """For the first time, or again: after so many steps as it has had."""
        step = self.steps.setdefault(request.request_id, 0)
        self.slots[request.request_id], self.requests[request.request_id] = slot, request
        self._added.append(
            AddedRequest(
                request.request_id,
                slot,
                request.tokens(step),
                len(request.prompt),
                request.sampling,
                dict(request.arguments),
            )
        )

    def update(self) -> None:
        """Tells the processor; nothing when nothing changed."""
        if self._removed or self._moved or self._added:
            update = BatchUpdate(tuple(self._added), tuple(self._removed), tuple(self._moved))
            self.processor.update_batch(update)
            self._removed, self._moved, self._added = [], [], []

    def apply(self, wanted: Sequence[tuple[int, int]], poison: int | None = None) -> dict[int, list[Tensor]]:
        """One call for rows of (request, drafts), in that order. Gives the rows of each request: one, and one per draft."""
        self.update()
        rows, logits = self._rows(wanted, poison)
        around = torch.cat((torch.full((2, WIDTH), 7.0), logits, torch.full((2, WIDTH), 7.0)))
        view = around[2:-2]
        kept = [x.clone() for x in (rows.token_ids, rows.slots, rows.positions, rows.num_prompt_tokens)]
        result: Any = cast(Any, self.processor).apply(view, rows)
        assert result is None, "apply works in place and returns nothing"
        assert view.shape == logits.shape and view.dtype == torch.float32
        assert (around[:2] == 7).all() and (around[-2:] == 7).all(), "it wrote outside its rows"
        now = (rows.token_ids, rows.slots, rows.positions, rows.num_prompt_tokens)
        assert all(torch.equal(a, b) for a, b in zip(now, kept, strict=True)), "it changed `rows`, which are read only"
        found: dict[int, list[Tensor]] = {}
        for request_id, row in zip(rows.request_ids, view, strict=True):
            found.setdefault(request_id, []).append(row.clone())
        return found

    def _rows(self, wanted: Sequence[tuple[int, int]], poison: int | None) -> tuple[LogitsRows, Tensor]:
        if poison is None:
            self._table.random_(0, WIDTH, generator=self._noise)
        else:
            self._table.fill_(poison)
        ids, offsets, positions, logits = [], [], [], []
        for request_id, slot in self.slots.items():  # every slot's history, also of those without a row in this call
            tokens = self.requests[request_id].tokens(self.steps[request_id])
            self._table[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        for request_id, drafts in wanted:
            request, step = self.requests[request_id], self.steps[request_id]
            tokens = request.tokens(step + drafts)
            self._table[self.slots[request_id], : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            for offset in range(drafts + 1):
                ids.append(request_id)
                offsets.append(offset)
                positions.append(len(request.prompt) + step + offset)
                logits.append(request.logits(step + offset))
        rows = LogitsRows(
            request_ids=tuple(ids),
            draft_offsets=tuple(offsets),
            token_ids=self._table,
            slots=torch.tensor([self.slots[request_id] for request_id in ids]),
            positions=torch.tensor(positions),
            num_prompt_tokens=torch.tensor([len(self.requests[request_id].prompt) for request_id in ids]),
        )
        return rows, torch.stack(logits)


class LogitsProcessorSuite(ConformanceSuite):
    """arguments: what requests may say, one after the other; without it the defaults (or the least that validates), and
    those with another number or flag in each place that has one.
    """

    kind: ClassVar[str] = "logits_processor"
    arguments: ClassVar[Sequence[Mapping[str, Any]]] = ()
    scripts: ClassVar[int] = 6  # random histories of a batch

    def context_fields(self) -> dict[str, Any]:
        info = ModelInfo({}, "LlamaForCausalLM", "float32", WIDTH, WIDTH, STRIDE)
        return {"max_num_seqs": SLOTS, "logits_width": WIDTH, "model": info}

    def requests(self, count: int, seed: int = 0) -> list[SampleRequest]:
        """Requests with few different tokens, so that what is repeated is noticed."""
        rng = random.Random(seed)
        arguments = self.validated_arguments()
        made = []
        for request_id in range(1, count + 1):
            few = rng.sample(range(WIDTH), 6)
            prompt = [rng.choice(few) for _ in range(rng.choice((1, 2, 7, 20)))]
            outputs = [rng.choice(few) for _ in range(STEPS + 4)]
            made.append(SampleRequest(request_id, prompt, outputs, arguments[request_id % len(arguments)]))
        return made

    def validated_arguments(self) -> list[dict[str, Any]]:
        """`arguments` as the engine hands them over: validated, with defaults filled."""
        model = cast(LogitsProcessorProvider, self.registered().provider).arguments
        if model is None:
            return [{}]
        asked = self.arguments or _some(model)
        try:
            return [model.model_validate(dict(one)).model_dump() for one in asked]
        except ValidationError as error:
            pytest.fail(f"set `arguments` to what a request may say: {error}", pytrace=False)

    def batch(self, seed: int = 0) -> PersistentBatch:
        return PersistentBatch(self.build(), seed)

    def alone(self, request: SampleRequest) -> list[Tensor]:
        """What the processor makes of each step of a request that nobody disturbs."""
        batch = self.batch()
        batch.add(request, 0)
        rows = []
        for _ in range(STEPS + 4):
            rows.append(batch.apply([(request.request_id, 0)])[request.request_id][0])
            batch.steps[request.request_id] += 1
        return rows

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    # The tests.

    def test_arguments_are_documented(self, provider: LogitsProcessorProvider) -> None:
        """What a request may say is a pydantic model whose fields have descriptions."""
        if provider.arguments is None:
            pytest.skip("it takes no arguments")
        for name, info in provider.arguments.model_fields.items():
            assert info.description, f"argument {name!r} has no description"
        assert self.validated_arguments()

    def test_rows_are_edited_in_place(self) -> None:
        """`apply` edits its rows of logits and nothing else: it returns nothing, keeps shape and dtype, and leaves the
        tokens and positions as they are."""
        (request,) = self.requests(1)
        assert len(self.alone(request)) == STEPS + 4

    def test_it_changes_something(self) -> None:
        """Some logit of some step is not as it was. When none is, the edits may have gone into a copy of the rows."""
        for request in self.requests(6):
            for step, row in enumerate(self.alone(request)):
                if not torch.equal(row, request.logits(step)):
                    return
        if self.arguments or not _has_unvaried(cast(LogitsProcessorProvider, self.registered().provider).arguments):
            pytest.fail("no logit was changed: set `arguments` to some that have an effect, or is it lost in a copy?")
        pytest.skip("no logit was changed: set `arguments` to some that have an effect")

    def test_forgets_requests_that_ended(self) -> None:
        """What it keeps of a request goes when `removed` names it: an engine runs for months."""
        batch = self.batch()
        (pattern,) = self.requests(1)
        pattern.logits(0)  # made once for all

        def serve(numbers: range) -> None:
            for number in numbers:
                batch.add(replace(pattern, request_id=number), number % SLOTS)
                batch.apply([(number, 0)])
                batch.remove(number)
                batch.update()
                del batch.steps[number]

        serve(range(GROWTH_REQUESTS))
        kept = []
        tracemalloc.start()
        try:
            for turn in range(1, GROWTH_TURNS + 1):
                gc.collect()
                before, _ = tracemalloc.get_traced_memory()
                serve(range(turn * GROWTH_REQUESTS, (turn + 1) * GROWTH_REQUESTS))
                gc.collect()
                after, _ = tracemalloc.get_traced_memory()
                kept.append(after - before)
        finally:
            tracemalloc.stop()
        # A leak is in every turn. What caches of Python and torch keep for once is in some only.
        assert min(kept) <= MAX_GROWTH_BYTES, (
            f"{GROWTH_REQUESTS} requests that ended left {min(kept)} bytes, every time"
        )

    def test_it_makes_no_nan(self) -> None:
        """A forbidden token (-inf) stays forbidden or gets a number; no logit becomes NaN or +inf."""
        for request in self.requests(6):
            for step, row in enumerate(self.alone(request)):
                assert not row.isnan().any(), f"step {step}: NaN"
                assert not (row == float("inf")).any(), f"step {step}: +inf"

    def test_a_row_does_not_depend_on_the_others(self) -> None:
        """A request gets the same bits alone and in a batch, whatever the order of the rows and whoever else is there."""
        requests = self.requests(SLOTS)
        truth = {request.request_id: self.alone(request) for request in requests}
        for seed in range(4):
            batch = self.batch(seed)
            order = requests[:]
            batch.rng.shuffle(order)
            for slot, request in enumerate(order):
                batch.add(request, slot)
            for step in range(STEPS):
                wanted = [(request.request_id, 0) for request in batch.rng.sample(requests, SLOTS)]
                self._check(batch.apply(wanted), truth, batch, f"step {step}")
                for request in requests:
                    batch.steps[request.request_id] += 1

    def test_batches_may_change_in_any_way(self) -> None:
        """Requests come, finish, move to other slots, are preempted and come back; steps have rows of some of them, with
        and without drafts. Each row is as it is alone."""
        for seed in range(self.scripts):
            self._script(seed if self.seed is None else self.seed + seed)

    def _script(self, seed: int) -> None:
        requests = self.requests(9, seed)
        truth = {request.request_id: self.alone(request) for request in requests}
        batch = self.batch(seed)
        waiting, rng = requests[:], batch.rng
        for turn in range(3 * STEPS):
            for request_id in [one for one in batch.slots if rng.random() < 0.12]:
                request = batch.requests[request_id]
                batch.remove(request_id)
                if batch.steps[request_id] < STEPS and rng.random() < 0.7:
                    waiting.insert(rng.randrange(len(waiting) + 1), request)  # preempted: it comes back
            for request_id in list(batch.slots):
                if batch.free and rng.random() < 0.15:
                    batch.move(request_id, rng.choice(batch.free))
            while waiting and batch.free and rng.random() < 0.6:
                batch.add(waiting.pop(0), rng.choice(batch.free))
            batch.update()
            running = [one for one in batch.slots if batch.steps[one] < STEPS and rng.random() < 0.8]
            rng.shuffle(running)
            if not running:
                continue
            wanted = [(request_id, rng.choice((0, 0, 1, 3))) for request_id in running]
            self._check(batch.apply(wanted), truth, batch, f"script {seed}, turn {turn}")
            for request_id, drafts in wanted:
                batch.steps[request_id] += 1 + rng.randint(0, drafts)
            for request_id in [one for one in batch.slots if batch.steps[one] >= STEPS]:
                batch.remove(request_id)

    def test_coming_back_after_preemption_changes_nothing(self) -> None:
        """A request that was preempted goes on as if it had not been: its tokens so far come with it."""
        for request in self.requests(4):
            truth = {request.request_id: self.alone(request)}
            batch = self.batch()
            batch.add(request, 0)
            for step in range(STEPS):
                self._check(batch.apply([(request.request_id, 0)]), truth, batch, f"step {step}")
                batch.steps[request.request_id] += 1
                if step % 3 == 2:
                    batch.remove(request.request_id)
                    if step % 2:
                        batch.update()  # it may be told of both at once, or one after the other
                    batch.add(request, (step + 1) % SLOTS)

    def test_a_used_slot_keeps_nothing(self) -> None:
        """A request in a slot that another one has left is as it is alone."""
        first, second = self.requests(2)
        truth = {request.request_id: self.alone(request) for request in (first, second)}
        batch = self.batch()
        batch.add(first, 0)
        for _ in range(STEPS):
            batch.apply([(first.request_id, 0)])
            batch.steps[first.request_id] += 1
        batch.remove(first.request_id)
        batch.add(second, 0)
        for step in range(STEPS):
            self._check(batch.apply([(second.request_id, 0)]), truth, batch, f"step {step}")
            batch.steps[second.request_id] += 1

    def test_drafts_are_seen_as_tokens(self) -> None:
        """Under speculation a request has several rows: row i is edited as if the i drafts before it were its tokens, and
        no draft is taken for confirmed."""
        for request in self.requests(4):
            truth = {request.request_id: self.alone(request)}
            batch = self.batch()
            batch.add(request, 1)
            while batch.steps[request.request_id] < STEPS:
                self._check(batch.apply([(request.request_id, 3)]), truth, batch, "with 3 drafts")
                batch.steps[request.request_id] += batch.rng.randint(1, 4)

    def test_tokens_beyond_the_position_are_not_read(self) -> None:
        """`token_ids` at and beyond a row's position are undefined: whatever they hold, the result is the same."""
        for request in self.requests(4):
            truth = {request.request_id: self.alone(request)}
            for poison in _POISON:
                batch = self.batch()
                batch.add(request, 0)
                for step in range(STEPS):
                    found = batch.apply([(request.request_id, 0)], poison)
                    self._check(found, truth, batch, f"step {step}, with {poison} beyond the position")
                    batch.steps[request.request_id] += 1

    def test_it_does_not_wait_for_the_device(self) -> None:
        """`apply` never asks for a value (`.item()`, `nonzero`, a mask as an index): on a GPU each would stall the step."""
        batch = self.batch()
        for slot, request in enumerate(self.requests(3)):
            batch.add(request, slot)
        batch.update()
        rows, logits = batch._rows([(1, 0), (2, 0), (3, 1)], None)
        with _NoWaiting():
            batch.processor.apply(logits, rows)

    def _check(
        self, found: dict[int, list[Tensor]], truth: dict[int, list[Tensor]], batch: PersistentBatch, where: str
    ) -> None:
        for request_id, rows in found.items():
            for offset, row in enumerate(rows):
                wanted = truth[request_id][batch.steps[request_id] + offset]
                same = torch.equal(row.view(torch.int32), wanted.view(torch.int32)) or torch.equal(row, wanted)
                assert same, f"{where}: request {request_id}, draft {offset}, is not as it is alone"


class _NoWaiting(TorchFunctionMode):
    """Fails on the calls that wait for a device's result."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _WAITING or (name in ("__getitem__", "__setitem__") and _asks_for_values(args[1])):
            raise AssertionError(f"apply waits for the device: Tensor.{name}")
        return func(*args, **(kwargs or {}))


def _asks_for_values(index: Any) -> bool:
    """Masks and single numbers on the device are read back before anything is picked by them."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(part, Tensor) and (part.dtype in (torch.bool, torch.uint8) or part.ndim == 0) for part in parts
    )


def _some(model: type[BaseModel]) -> list[dict[str, Any]]:
    """The least that validates, and it with another value for each number or flag, where that validates too."""
    found = [_least(model)]
    schema = model.model_json_schema()
    for name, rule in schema.get("properties", {}).items():
        now = model.model_validate(found[0]).model_dump().get(name)
        for value in _others(rule, now):
            changed = {**found[0], name: value}
            try:
                model.model_validate(changed)
            except ValidationError:  # a rule of the model's own, which the schema does not tell
                continue
            found.append(changed)
    return found


def _others(rule: Mapping[str, Any], now: Any) -> Sequence[Any]:
    if rule.get("type") == "boolean":
        return (not now,)
    if rule.get("type") not in _NUMBERS:
        return ()
    low, high = rule.get("minimum", rule.get("exclusiveMinimum")), rule.get("maximum", rule.get("exclusiveMaximum"))
    tried = [2 * (now or 0) + 1, (now or 0) / 2 if rule["type"] == "number" else (now or 0) // 2]
    return [
        value for value in tried if value != now and (low is None or value >= low) and (high is None or value <= high)
    ]


def _has_unvaried(model: type[BaseModel] | None) -> bool:
    """Whether there is an argument that `_some` leaves as it is."""
    rules = {} if model is None else model.model_json_schema().get("properties", {})
    return any(rule.get("type") not in (*_NUMBERS, "boolean") for rule in rules.values())


def _least(model: Any) -> dict[str, Any]:
    """A value for each required field out of its JSON schema: plain types only."""
    return dict(_values(model.model_json_schema()))


def _values(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in schema.get("required", ()):
        rule = schema["properties"][name]
        if "enum" in rule:
            yield name, rule["enum"][0]
        elif rule.get("type") in ("integer", "number"):
            low, high = rule.get("minimum", rule.get("exclusiveMinimum", 0)), rule.get("maximum", 2)
            yield name, max(min(2, high), low)
        else:
            yield name, {"string": "a", "boolean": True, "array": [], "object": {}}.get(rule.get("type", ""))
