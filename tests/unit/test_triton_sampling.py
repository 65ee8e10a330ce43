"""The sampling kernels against the torch references; without a GPU under Triton's interpreter, which takes tens of
milliseconds a program: few rows and small vocabularies, cut into chunks that are smaller still."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hotswap.core.layers.sampling import blockwise, draw, logprobs, penalties
from hotswap.core.layers.sampling.noise import uniform
from hotswap.plugins.kernels.triton import sampling
from hotswap.plugins.kernels.triton.sampling_logprobs import MAX_LISTED

OFF, ALWAYS = draw.OFF, draw.ALWAYS
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Draws:
    """The arguments of `draw` for some rows, on the host."""

    logits: Tensor
    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    positions: Tensor

    def row(self, place: int) -> Draws:
        return Draws(*(getattr(self, field.name)[place : place + 1] for field in fields(self)))

    def found(self, ordered: bool, chunk: int | None, *, with_min_p: bool = True) -> list[int]:
        """By the kernels."""
        best = self.logits.amax(1)
        columns = [self.logits, best, self.temperature, self.min_p, self.top_k, self.top_p, self.seeds, self.positions]
        on_device = [column.to(DEVICE) for column in columns]
        given: list[Tensor | None] = [*on_device]
        if not with_min_p:
            given[3] = None
        ids: list[int] = sampling.draw(*given, ordered, chunk=chunk).tolist()  # type: ignore[arg-type, misc]
        return ids

    def wanted(self, ordered: bool, *, with_min_p: bool = True) -> list[int]:
        """By the reference."""
        ids: list[int] = draw.draw(
            self.logits,
            self.logits.amax(1),
            self.temperature,
            self.min_p if with_min_p else None,
            self.top_k,
            self.top_p,
            self.seeds,
            self.positions,
            ordered,
        ).tolist()
        return ids


def draws(logits: Tensor, **settings: list[float] | list[int]) -> Draws:
    """Rows with the settings given, one a row; off where none are."""
    count = len(logits)
    generator = torch.Generator().manual_seed(count)
    return Draws(
        logits,
        torch.tensor(settings.get("temperature", [1.0] * count), dtype=torch.float32),
        torch.tensor(settings.get("min_p", [0.0] * count), dtype=torch.float32),
        torch.tensor(settings.get("top_k", [ALWAYS] * count), dtype=torch.int64),
        torch.tensor(settings.get("top_p", [OFF] * count), dtype=torch.float64),
        torch.randint(-(2**62), 2**62, (count,), generator=generator),
        torch.randint(0, 10_000, (count,), generator=generator),
    )


def rows_of(kind: str, count: int, width: int) -> Tensor:
    """Logits of a kind."""
    logits = torch.randn((count, width), generator=torch.Generator().manual_seed(width)) * 2
    if kind == "tied":
        return logits.round()
    if kind == "mostly impossible":
        return logits.masked_fill_(torch.arange(width) % 7 != 3, -math.inf)
    if kind == "flat":
        return logits * 1e-3
    if kind == "zeros":
        return torch.zeros_like(logits) * logits.sign()  # of both signs
    return logits


KINDS = ("random", "tied", "mostly impossible", "flat", "zeros")


# argmax


@pytest.mark.parametrize(("width", "chunk"), [(1, None), (37, None), (300, 64), (1000, None), (3001, 512)])
def test_argmax_is_the_references(width: int, chunk: int | None) -> None:
    logits = torch.cat([rows_of(kind, 1, width) for kind in KINDS])
    values, ids = sampling.argmax(logits.to(DEVICE), chunk=chunk)
    wanted_values, wanted_ids = blockwise.row_max(logits)
    assert torch.equal(values.cpu(), wanted_values) and torch.equal(ids.cpu(), wanted_ids)


def test_argmax_of_rows_that_are_not_finite() -> None:
    logits = torch.randn((5, 200), generator=torch.Generator().manual_seed(1))
    logits[0, 150], logits[1, 3], logits[2], logits[3, 70] = math.nan, -math.nan, -math.inf, math.inf
    values, ids = (found.cpu() for found in sampling.argmax(logits.to(DEVICE), chunk=64))
    assert values[:2].isnan().all() and values[2] == -math.inf and values[3] == math.inf
    assert ids[2:].tolist() == [0, 70, int(logits[4].argmax())] and bool(((ids >= 0) & (ids < 200)).all())


def test_argmax_of_strided_rows() -> None:
    wide = torch.randn((3, 500), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    for part in (wide[:, 100:400], wide[:, 5:7].t()):
        values, ids = sampling.argmax(part, chunk=128)
        assert torch.equal(values, part.amax(1)) and torch.equal(ids, part.argmax(1))


def test_nothing_to_do_is_done() -> None:
    logits, nothing = torch.zeros((0, 50), device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert [len(found) for found in sampling.argmax(logits)] == [0, 0]
    assert [found.shape for found in sampling.gather_logprobs(logits, nothing, 3)] == [(0, 4)] * 3
    assert draws(torch.zeros((0, 50))).found(True, None) == []
    sampling.penalize(logits, nothing, nothing, logits, logits)


# penalize


@pytest.mark.parametrize(("width", "chunk"), [(37, None), (1001, 256)])
def test_penalize_is_the_reference_bit_for_bit(width: int, chunk: int | None) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn((5, width), generator=generator) * 5
    logits[:, ::5] = -math.inf
    divisors = torch.rand((4, width), generator=generator) + 0.5
    amounts = torch.randn((4, width), generator=generator)
    local, rows = torch.tensor([4, 0, 2]), torch.tensor([1, 3, 0])
    given = [tensor.to(DEVICE) for tensor in (logits, local, rows, divisors, amounts)]
    found = given[0].clone()
    sampling.penalize(found, *given[1:], chunk=chunk)
    wanted = logits.clone()
    penalties.penalize(wanted, local, rows, divisors, amounts)
    assert torch.equal(found.cpu(), wanted)


def test_penalize_refuses_what_it_cannot_change_in_place() -> None:
    square, one = torch.zeros((4, 4), device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="contiguous"):
        sampling.penalize(square.t(), one, one, square, square)


# draw


@pytest.mark.parametrize(("width", "chunk"), [(37, None), (700, 256)])
@pytest.mark.parametrize("kind", KINDS)
def test_draw_without_filters_is_the_references(kind: str, width: int, chunk: int | None) -> None:
    rows = draws(rows_of(kind, 5, width), temperature=[1.0, 0.3, 1.7, 1e-5, 1e6], min_p=[0.0, 0.1, 0.02, 0.0, 0.5])
    assert rows.found(False, chunk) == rows.wanted(False)
    assert rows.found(False, chunk, with_min_p=False) == rows.wanted(False, with_min_p=False)


def test_draw_with_filters_is_the_references() -> None:
    rows = draws(
        torch.cat([rows_of(kind, 1, 37) for kind in KINDS]),
        temperature=[1.0, 0.7, 1.3, 2.0, 1.0],
        min_p=[0.0, 0.0, 0.05, 0.0, 0.0],
        top_k=[ALWAYS, 5, ALWAYS, 12, 30],
        top_p=[0.9, OFF, 0.3, 0.6, OFF],
    )
    together = rows.found(True, None)
    assert together == rows.wanted(True)
    assert rows.row(3).found(True, None)[0] == together[3], "alone it draws another token"


def test_draw_with_filters_over_several_chunks() -> None:
    rows = draws(rows_of("tied", 2, 600), top_k=[300, ALWAYS], top_p=[0.95, 0.8])
    assert rows.found(True, 256, with_min_p=False) == rows.wanted(True, with_min_p=False)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "chunk"), [(211, 64), (3000, None), (1537, 512)])
def test_many_draws_with_filters_are_the_references(kind: str, width: int, chunk: int | None) -> None:
    count = 24
    generator = torch.Generator().manual_seed(width)
    top_k = torch.randint(1, width, (count,), generator=generator)
    top_k[::2] = ALWAYS
    top_p = torch.rand(count, generator=generator, dtype=torch.float64)
    top_p[1::4] = OFF
    rows = draws(
        rows_of(kind, count, width),
        temperature=(torch.rand(count, generator=generator) + 0.3).tolist(),
        min_p=(torch.rand(count, generator=generator) * 0.02).tolist(),
        top_k=top_k.tolist(),
        top_p=top_p.tolist(),
    )
    assert rows.found(True, chunk) == rows.wanted(True)
    assert rows.found(True, chunk, with_min_p=False) == rows.wanted(True, with_min_p=False)


def test_ties_are_cut_by_id() -> None:
    """Of equal tokens the filters keep the first, so only those are ever drawn."""
    rows = draws(torch.zeros((4, 128)), top_k=[3, 3, ALWAYS, ALWAYS], top_p=[OFF, OFF, 3 / 128, 3 / 128])
    found = rows.found(True, None, with_min_p=False)
    assert found == rows.wanted(True, with_min_p=False) and max(found) < 3


def test_a_row_draws_alone_what_it_draws_in_a_batch() -> None:
    free = draws(rows_of("random", 3, 300))
    assert [free.row(place).found(False, 128)[0] for place in range(3)] == free.found(False, 128)
    filtered = draws(rows_of("random", 3, 300), top_k=[40, ALWAYS, 7], top_p=[0.8, 0.6, OFF])
    assert filtered.row(1).found(True, 256) == filtered.found(True, 256)[1:2]


@pytest.mark.parametrize("ordered", [False, True])
def test_rows_that_are_not_finite_draw_some_valid_id(ordered: bool) -> None:
    logits = rows_of("random", 4, 37)
    logits[0, 5], logits[1], logits[2, 9] = math.nan, -math.inf, math.inf
    rows = draws(logits, top_k=[5, ALWAYS, ALWAYS, 4], top_p=[OFF, 0.5, 0.9, 0.9]) if ordered else draws(logits)
    found = rows.found(ordered, None)
    assert all(0 <= token < 37 for token in found)
    assert found[3] == rows.wanted(ordered)[3]


def test_noise_is_that_of_the_reference() -> None:
    """Over a flat vocabulary of a power of two a draw is the noise's leading bits."""
    rows = draws(torch.zeros((8, 512)))
    rows.seeds = torch.tensor([0, 1, -1, 2, 12345, 2**63 - 1, -(2**63), 77])
    rows.positions = torch.tensor([0, 1, 7, 8191, 2**31, 2**40, 5, 0])
    wanted = (uniform(rows.seeds, rows.positions) * 512).to(torch.int64)
    assert rows.found(False, None, with_min_p=False) == wanted.tolist()


# gather_logprobs


@pytest.mark.parametrize(("width", "chunk", "count"), [(37, None, 0), (37, None, 50), (700, 256, 5), (300, 128, 200)])
def test_gather_logprobs_is_the_references(width: int, chunk: int | None, count: int) -> None:
    logits = torch.cat([rows_of(kind, 1, width) for kind in KINDS])
    chosen = torch.tensor([width - 1, 0, 5, 7, 20])
    found = [part.cpu() for part in sampling.gather_logprobs(logits.to(DEVICE), chosen.to(DEVICE), count, chunk=chunk)]
    wanted = logprobs.gather_logprobs(logits, chosen, count)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[2], wanted[2])
    assert [part.dtype for part in found] == [part.dtype for part in wanted]
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=1e-6)


def test_long_lists_are_the_same_made_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.cat([rows_of(kind, 2, 90) for kind in KINDS])
    chosen = torch.arange(len(logits))
    monkeypatch.setattr("hotswap.plugins.kernels.triton.sampling_logprobs.SORTED", 1)
    found = sampling.gather_logprobs(logits.to(DEVICE), chosen.to(DEVICE), MAX_LISTED + 8)
    wanted = logprobs.gather_logprobs(logits, chosen, MAX_LISTED + 8)
    assert torch.equal(found[0].cpu(), wanted[0]) and torch.equal(found[2].cpu(), wanted[2])
    torch.testing.assert_close(found[1].cpu(), wanted[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [3, MAX_LISTED + 1])
def test_logprobs_of_rows_that_are_not_finite_are_the_floor(count: int) -> None:
    logits = rows_of("random", 4, 90)
    logits[0, 70], logits[1], logits[2, 3] = math.nan, -math.inf, math.inf
    ids, values, _ = sampling.gather_logprobs(
        logits.to(DEVICE), torch.tensor([1, 2, 3, 4], device=DEVICE), count, chunk=32
    )
    assert (values[:3] == logprobs.FLOOR).all() and (values[3] > logprobs.FLOOR).all()
    assert ids.shape == (4, 1 + count) and bool(((ids >= 0) & (ids < 90)).all())


def test_logprobs_do_not_depend_on_the_batch() -> None:
    logits, chosen = rows_of("random", 3, 500).to(DEVICE), torch.tensor([4, 5, 6], device=DEVICE)
    together = sampling.gather_logprobs(logits, chosen, 3, chunk=128)
    for row in range(3):
        alone = sampling.gather_logprobs(logits[row : row + 1], chosen[row : row + 1], 3, chunk=128)
        assert all(torch.equal(one[0], all_of[row]) for one, all_of in zip(alone, together, strict=True))
