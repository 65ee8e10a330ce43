"""The persistent batch against a model of it that forgets nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.core.contracts.attention import BatchGeometry
from hotswap.core.contracts.plan import NewRequest, ScheduledRequest, StepPlan
from hotswap.core.layers.ops import OpTable
from hotswap.core.runner.input_batch import InputBatch
from hotswap.core.runner.step_buffers import StepBuffers
from hotswap.core.runner.transfer import Transfers
from hotswap.core.sampling_params import SamplingParams

BLOCK = 4
MAX_LEN = 40


def make_batch(max_num_seqs: int, num_groups: int = 1) -> InputBatch:
    return InputBatch(max_num_seqs, MAX_LEN, BLOCK, num_groups, OpTable.reference(), Transfers())


@dataclass
class Inputs:
    """What a step's tensors are, however they were made."""

    buffers: StepBuffers
    geometries: list[BatchGeometry]


def build(batch: InputBatch, plan: StepPlan) -> Inputs:
    rows = batch.advance(plan.scheduled)
    buffers = batch.lay_out(rows)
    return Inputs(buffers, batch.geometries(buffers, rows))


@dataclass
class Shadow:
    """What a request is, in plain lists. tables: per cache group."""

    tokens: list[int]
    computed: int
    tables: list[list[int]] = field(default_factory=list)


class Machine:
    """Applies random steps to an InputBatch and checks every tensor of each."""

    def __init__(self, rng: random.Random, num_groups: int) -> None:
        self.rng = rng
        self.num_groups = num_groups
        self.batch = make_batch(6, num_groups)
        self.shadows: dict[int, Shadow] = {}
        self.next_id = 0
        self.next_block = 1

    def blocks(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def admit(self) -> tuple[NewRequest, ScheduledRequest]:
        rng = self.rng
        tokens = [rng.randrange(1000) for _ in range(rng.randint(1, 20))]
        computed = rng.randrange(0, len(tokens), BLOCK)
        count = rng.randint(1, len(tokens) - computed)
        tables = [self.blocks(-(-(computed + count) // BLOCK)) for _ in range(self.num_groups)]
        self.next_id += 1
        self.shadows[self.next_id] = Shadow(tokens, computed, [list(table) for table in tables])
        new = NewRequest(self.next_id, tokens, len(tokens), SamplingParams(), tables, computed)
        return new, ScheduledRequest(self.next_id, count, computed, computed + count == len(tokens))

    def go_on(self, request_id: int) -> ScheduledRequest | None:
        shadow = self.shadows[request_id]
        left = len(shadow.tokens) - shadow.computed
        if left == 0:
            return None
        count = self.rng.randint(1, left)
        new_blocks = None
        missing = -(-(shadow.computed + count) // BLOCK) - len(shadow.tables[0])
        if missing > 0:
            new_blocks = [self.blocks(missing) for _ in range(self.num_groups)]
            for table, blocks in zip(shadow.tables, new_blocks, strict=True):
                table += blocks
        return ScheduledRequest(request_id, count, shadow.computed, count == left, new_blocks)

    def step(self, step_id: int) -> None:
        removed = [i for i in self.shadows if self.rng.random() < 0.15]
        for request_id in removed:
            del self.shadows[request_id]
            self.batch.remove(request_id)
        rows = [row for i in self.shadows if self.rng.random() < 0.8 and (row := self.go_on(i)) is not None]
        news = []
        while len(self.shadows) < 6 and self.rng.random() < 0.5:
            new, row = self.admit()
            news.append(new)
            rows.append(row)
        self.batch.add(news)
        if not rows:
            return
        self.rng.shuffle(rows)
        plan = StepPlan(step_id, [], removed, rows, sum(row.num_tokens for row in rows))
        inputs = build(self.batch, plan)
        self.check(inputs, rows)
        sampling = [place for place, row in enumerate(rows) if row.samples]
        if sampling:
            drawn = [self.rng.randrange(1000) for _ in sampling]
            at = torch.tensor(sampling)
            slots, lengths = inputs.buffers.slots.long(), inputs.buffers.seq_lens.long()
            self.batch.write(slots[at], lengths[at], torch.tensor(drawn))
            for place, token in zip(sampling, drawn, strict=True):
                self.shadows[rows[place].request_id].tokens.append(token)

    def check(self, inputs, rows: list[ScheduledRequest]) -> None:  # type: ignore[no-untyped-def]
        ids, positions, starts = [], [], [0]
        mappings: list[list[int]] = [[] for _ in range(self.num_groups)]
        for row in rows:
            shadow = self.shadows[row.request_id]
            for position in range(shadow.computed, shadow.computed + row.num_tokens):
                ids.append(shadow.tokens[position])
                positions.append(position)
                for mapping, table in zip(mappings, shadow.tables, strict=True):
                    mapping.append(table[position // BLOCK] * BLOCK + position % BLOCK)
            shadow.computed += row.num_tokens
            starts.append(len(ids))
        assert inputs.buffers.input_ids.tolist() == ids and inputs.buffers.input_ids.dtype == torch.int64
        assert inputs.buffers.positions.tolist() == positions and inputs.buffers.positions.dtype == torch.int64
        lengths = [self.shadows[row.request_id].computed for row in rows]
        for group, geometry in enumerate(inputs.geometries):
            assert geometry.query_start_loc.tolist() == starts
            assert geometry.seq_lens.tolist() == lengths
            assert geometry.slot_mapping.tolist() == mappings[group]
            assert geometry.slot_mapping.dtype == torch.int64
            for tensor in (geometry.query_start_loc, geometry.seq_lens, geometry.block_table):
                assert tensor.dtype == torch.int32
            for row, blocks in zip(rows, geometry.block_table.tolist(), strict=True):
                table = self.shadows[row.request_id].tables[group]
                assert blocks[: len(table)] == table
                assert not any(blocks[len(table) :])  # the null block
            assert (geometry.num_tokens, geometry.num_requests) == (len(ids), len(rows))
            assert geometry.max_query_len == max(row.num_tokens for row in rows)
            assert geometry.max_seq_len == max(lengths)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), num_groups=st.sampled_from([1, 1, 2]))
def test_any_sequence_of_deltas_gives_the_same_tensors_as_the_model(seed: int, num_groups: int) -> None:
    machine = Machine(random.Random(seed), num_groups)
    for step_id in range(14):
        machine.step(step_id)
    assert len(machine.batch) == len(machine.shadows)


def _new(request_id: int, length: int = 3, blocks: int = 1) -> NewRequest:
    return NewRequest(request_id, [7] * length, length, SamplingParams(), [list(range(1, blocks + 1))], 0)


def _plan(*rows: ScheduledRequest) -> StepPlan:
    return StepPlan(0, [], [], list(rows), sum(row.num_tokens for row in rows))


def test_a_slot_is_reused_and_its_old_blocks_are_gone() -> None:
    batch = make_batch(1)
    batch.add([_new(1, 20, 5)])
    batch.remove(1)
    batch.add([_new(2, 3, 1)])
    table = build(batch, _plan(ScheduledRequest(2, 3, 0, True))).geometries[0].block_table
    assert table.tolist() == [[1]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ScheduledRequest(9, 1, 0, False), "never added"),
        (ScheduledRequest(1, 5, 0, False), "do not fit"),
        (ScheduledRequest(1, 0, 0, False), "do not fit"),
    ],
)
def test_a_plan_that_contradicts_the_batch_is_refused(row: ScheduledRequest, message: str) -> None:
    batch = make_batch(2)
    batch.add([_new(1)])
    with pytest.raises(RuntimeError, match=message):
        build(batch, _plan(row))


def test_the_scheduled_count_is_an_upper_bound_of_the_computed_one() -> None:
    batch = make_batch(2)
    batch.add([_new(1)])
    build(batch, _plan(ScheduledRequest(1, 2, 0, False)))
    assert build(batch, _plan(ScheduledRequest(1, 1, 3, False))).buffers.positions.tolist() == [2]
    with pytest.raises(RuntimeError, match="do not fit"):
        build(batch, _plan(ScheduledRequest(1, 1, 2, False)))


def test_seats_and_lengths_are_bounded() -> None:
    batch = make_batch(1)
    with pytest.raises(RuntimeError, match="at most 40"):
        batch.add([_new(1, MAX_LEN + 1, 11)])
    batch.add([_new(1, MAX_LEN, 10)])
    with pytest.raises(RuntimeError, match="in the batch already"):
        batch.add([_new(1)])
    with pytest.raises(RuntimeError, match="no seat"):
        batch.add([_new(2)])
    batch.remove(77)  # aborted before it ever came here
    batch.clear()
    assert len(batch) == 0 and 1 not in batch
    batch.add([_new(2)])
    assert 2 in batch
