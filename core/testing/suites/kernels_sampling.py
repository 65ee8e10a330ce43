"""The checks of `argmax`, `penalize`, `draw` and `gather_logprobs` in `KernelsSuite`: their definitions in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ...layers.sampling.noise import uniform

Kernel = Callable[..., Any]

WIDTHS = (1, 5, 64, 130, 1000)  # of the vocabulary
DRAW_WIDTHS = (1, 37, 1000)
ALWAYS, OFF = 2**62, 2.0  # a top_k and a top_p that are off
FLOOR = -9999.0
CLOSE = 2e-5  # relative to a row's total: what float32 may decide otherwise


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def check_argmax(kernel: Kernel, device: str) -> None:
    for width in WIDTHS:
        for rows in (1, 6):
            logits = numbers(rows, width, seed=width)
            _check_argmax(kernel, logits, device)
            _check_argmax(kernel, logits.mul(2).round(), device)  # many equal ones
            _check_argmax(kernel, torch.full_like(logits, -math.inf), device)
            _check_argmax(kernel, logits.masked_fill(logits > 0, math.inf), device)


def _check_argmax(kernel: Kernel, logits: Tensor, device: str) -> None:
    given = logits.clone().to(device)
    values, ids = kernel(given)
    assert torch.equal(given.cpu(), logits), "it changed its input"
    assert values.dtype == torch.float32 and ids.dtype == torch.int64, f"{values.dtype}, {ids.dtype}"
    for row, line in enumerate(logits):
        largest = float(line.max())
        lowest = int((line == largest).nonzero()[0])
        assert (float(values[row]), int(ids[row])) == (largest, lowest), f"row {row} of {list(logits.shape)}"


def check_argmax_of_nan(kernel: Kernel, device: str) -> None:
    for width in WIDTHS:
        for place in {0, width // 2, width - 1}:
            logits = numbers(3, width, seed=place)
            logits[1, place] = math.nan
            values, ids = (x.cpu() for x in kernel(logits.clone().to(device)))
            assert values[1].isnan(), f"a NaN at {place} of {width} does not show"
            assert 0 <= int(ids[1]) < width, f"the id {int(ids[1])} of a row with NaN is none of {width}"
            assert torch.equal(values[[0, 2]], logits[[0, 2]].amax(1)), "a NaN in one row changed another"


def check_penalize(kernel: Kernel, device: str) -> None:
    for width in WIDTHS:
        logits = numbers(5, width, seed=width, scale=3.0)
        logits[:, ::7] = -math.inf
        divisors, amounts = torch.ones(4, width), torch.zeros(4, width)
        seen = numbers(4, width, seed=1) > 0.3
        divisors[seen], amounts[seen] = 1.3, 0.75
        divisors[2] = 0.8
        for local, rows in (((0, 3, 1), (2, 0, 3)), ((4,), (1,))):
            given, pools = logits.clone().to(device), (divisors.clone().to(device), amounts.clone().to(device))
            result = kernel(given, torch.tensor(local, device=device), torch.tensor(rows, device=device), *pools)
            assert result is None, "it works in place and returns nothing"
            found = given.cpu()
            others = [row for row in range(5) if row not in local]
            assert torch.equal(found[others], logits[others]), "it changed a row that is not in `local`"
            for at, pool in zip(local, rows, strict=True):
                _check_penalized(found[at], logits[at], divisors[pool], amounts[pool])
            assert torch.equal(pools[0].cpu(), divisors) and torch.equal(pools[1].cpu(), amounts), "it changed a pool"


def _check_penalized(found: Tensor, logits: Tensor, divisors: Tensor, amounts: Tensor) -> None:
    untouched = (divisors == 1) & (amounts == 0)
    assert torch.equal(found[untouched], logits[untouched]), "a logit without a penalty is not what it was"
    wide, by = logits.double(), divisors.double()
    scaled = torch.where(wide > 0, wide / by, wide * by)
    wanted = scaled - amounts.double()
    infinite = logits.isinf()
    assert torch.equal(found[infinite].double(), wanted[infinite]), "minus infinity did not stay"
    error = (found.double() - wanted)[~infinite].abs()
    limit = 2.0**-22 * (scaled.abs() + amounts.double())[~infinite]
    assert (error <= limit).all(), f"wrong by up to {float(error.max())}"


@dataclass(frozen=True, slots=True)
class Draws:
    """The arguments of one call of `draw`, on the CPU; row by row."""

    logits: Tensor
    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    positions: Tensor

    def rows(self, ids: list[int]) -> Draws:
        return Draws(**{field.name: getattr(self, field.name)[ids] for field in fields(self)})

    def call(self, kernel: Kernel, device: str, ordered: bool = True, with_min_p: bool = True) -> Tensor:
        columns = [getattr(self, field.name).clone().to(device) for field in fields(self)]
        logits, temperature, min_p = columns[:3]
        before = logits.clone()
        drawn: Tensor = kernel(
            logits, logits.amax(1), temperature, min_p if with_min_p else None, *columns[3:], ordered
        )
        assert drawn.dtype == torch.int64 and drawn.shape == self.seeds.shape, f"{drawn.dtype} {list(drawn.shape)}"
        assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "it changed the logits"
        return drawn.cpu()


def draws(rows: int, width: int, seed: int, scale: float = 2.0) -> Draws:
    """Random rows with all filters off."""
    generator = torch.Generator().manual_seed(seed)
    return Draws(
        logits=torch.randn(rows, width, generator=generator) * scale,
        temperature=torch.rand(rows, generator=generator) * 1.5 + 0.3,
        min_p=torch.zeros(rows),
        top_k=torch.full((rows,), ALWAYS),
        top_p=torch.full((rows,), OFF, dtype=torch.float64),
        seeds=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        positions=torch.randint(0, 5000, (rows,), generator=generator),
    )


def kept_weights(case: Draws, row: int) -> tuple[Tensor, bool]:
    """What the filters leave of a row: (weights in vocabulary order, whether float32 must come to the same set)."""
    logits = case.logits[row].double()
    weights = ((logits - logits.max()) / case.temperature[row].double()).exp()
    order = torch.sort(logits, descending=True, stable=True).indices
    best_first = weights[order]
    min_p, top_k, top_p = float(case.min_p[row]), int(case.top_k[row]), float(case.top_p[row])
    kept = (torch.arange(len(order)) < top_k) & (best_first >= min_p)
    clear = not bool(((best_first / min_p - 1).abs() < CLOSE).any()) if min_p else True
    left = torch.where(kept, best_first, 0.0)
    before, total = left.cumsum(0) - left, left.sum()
    # Equal weights are summed exactly; others may come out on either side of a sum as near as this.
    exact = bool((left[left > 0] == 1.0).all())
    clear = clear and (exact or not bool(((before / total - top_p).abs() < CLOSE).any()))
    kept &= before < top_p * total
    kept[0] = True
    return torch.zeros_like(weights).scatter(0, order, torch.where(kept, best_first, 0.0)), clear


def check_draws(case: Draws, drawn: Tensor, where: str) -> tuple[int, int]:
    """Fails on a token that the filters took away, and on another one than the noise picks; (rows that were clear, rows
    whose number lies clear of a boundary)."""
    uniforms = uniform(case.seeds, case.positions)
    clear_rows = exact_rows = 0
    for row, token in enumerate(drawn.tolist()):
        assert 0 <= token < case.logits.shape[1], f"{where}, row {row}: {token} is no token"
        weights, clear = kept_weights(case, row)
        if not clear:
            continue
        clear_rows += 1
        assert weights[token] > 0, f"{where}, row {row}: the filters had taken token {token} away"
        cumulative = weights.cumsum(0)
        target = uniforms[row] * cumulative[-1]
        if (cumulative - target).abs().min() < CLOSE * cumulative[-1]:
            continue
        exact_rows += 1
        wanted = int((cumulative > target).nonzero()[0])
        assert token == wanted, f"{where}, row {row}: {token} was drawn, the noise picks {wanted}"
    return clear_rows, exact_rows


def filtered(rows: int, width: int, seed: int, name: str) -> Draws:
    """Rows with one filter, or "all" of them, at varied settings."""
    case, generator = draws(rows, width, seed), torch.Generator().manual_seed(seed + 1)
    changes: dict[str, Tensor] = {}
    if name in ("min_p", "all"):
        changes["min_p"] = torch.rand(rows, generator=generator) * 0.2
    if name in ("top_k", "all"):
        changes["top_k"] = torch.randint(1, max(width, 2), (rows,), generator=generator)
        changes["top_k"][::3] = torch.randint(1, 9, (len(changes["top_k"][::3]),), generator=generator)
    if name in ("top_p", "all"):
        changes["top_p"] = torch.rand(rows, generator=generator, dtype=torch.float64) * 0.98 + 0.01
    return replace(case, **changes)


def check_draw(kernel: Kernel, device: str, name: str) -> None:
    """Enough rows must be clear, or the check would say nothing."""
    for width in DRAW_WIDTHS:
        case = filtered(6, width, width, name)
        case.logits[:, 1::5] = -math.inf
        drawn = case.call(kernel, device, ordered=name not in ("none", "min_p"), with_min_p=name in ("min_p", "all"))
        clear, exact = check_draws(case, drawn, f"{name}, {width} tokens")
        assert clear >= 4 and exact >= 3, f"{clear} and {exact} rows of 6 are clear: choose other numbers"


def check_flat_nucleus(kernel: Kernel, device: str) -> None:
    """A nucleus of thousands of tokens."""
    case = replace(draws(3, 9000, 5, scale=0.3), top_p=torch.tensor([0.9, 0.3, OFF], dtype=torch.float64))
    case.top_k[2] = 6000
    clear, _ = check_draws(case, case.call(kernel, device), "a flat row")
    assert clear, "no row is clear: choose other numbers"


def check_draw_ties(kernel: Kernel, device: str) -> None:
    """Of 40 equal tokens top_k 3, and top_p 0.1, keep the lowest ids; every kept one is drawn at some position."""
    for top_k, top_p, count in ((3, OFF, 3), (ALWAYS, 0.1, 4), (30, 0.1, 3), (1, OFF, 1)):
        case = replace(
            draws(24, 50, 3), top_k=torch.full((24,), top_k), top_p=torch.full((24,), top_p, dtype=torch.float64)
        )
        case.logits.fill_(-3.0)[:, 7:47] = 1.5
        case.temperature.fill_(0.01)  # the others weigh nothing
        drawn = set(case.call(kernel, device).tolist())
        assert drawn == set(range(7, 7 + count)), f"top_k {top_k}, top_p {top_p}: {sorted(drawn)} were drawn"


def check_faulty_rows(kernel: Kernel, device: str) -> None:
    """Rows with NaN or an infinite best logit give a valid id, and the rows beside them what they would without."""
    for ordered in (False, True):
        case = filtered(6, 130, 4, "all" if ordered else "none")
        alone = case.call(kernel, device, ordered)
        case.logits[1, 7], case.logits[3, 0], case.logits[4] = math.nan, math.inf, -math.inf
        drawn = case.call(kernel, device, ordered)
        assert drawn[[0, 2, 5]].tolist() == alone[[0, 2, 5]].tolist(), "a faulty row changed another"
        assert all(0 <= token < 130 for token in drawn.tolist()), f"no token: {drawn.tolist()}"


def check_gather(kernel: Kernel, device: str, count: int) -> None:
    for width in WIDTHS:
        logits = numbers(4, width, seed=width, scale=4.0)
        logits[1] = logits[1].round()  # many equal ones
        logits[2, 1::3] = -math.inf
        logits[3] = 2.0
        chosen = torch.randint(0, width, (4,), generator=torch.Generator().manual_seed(width))
        given = logits.clone().to(device)
        ids, logprobs, ranks = (x.cpu() for x in kernel(given, chosen.to(device), count))
        assert torch.equal(given.cpu(), logits), "it changed the logits"
        assert (ids.dtype, logprobs.dtype, ranks.dtype) == (torch.int64, torch.float64, torch.int64)
        most = min(count, width)
        assert ids.shape == logprobs.shape == ranks.shape == (4, 1 + most), f"{list(ids.shape)} for {count} of {width}"
        best = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :most]
        wanted_ids = torch.cat((chosen[:, None], best), 1)
        assert torch.equal(ids, wanted_ids), f"{count} of {width}: ids {ids.tolist()}, not {wanted_ids.tolist()}"
        picked = logits.gather(1, wanted_ids)
        greater = (logits[:, None, :] > picked[:, :, None]).sum(2)
        assert torch.equal(ranks, 1 + greater), f"{count} of {width}: ranks"
        exact = logits.double().log_softmax(1).gather(1, wanted_ids).clamp(min=FLOOR)
        error = (logprobs - exact).abs().max()
        assert error <= 1e-5, f"{count} of {width}: log-probabilities are wrong by up to {float(error)}"


def check_gather_of_nan(kernel: Kernel, device: str) -> None:
    logits = numbers(3, 130)
    logits[1, 64] = math.nan
    ids, logprobs, ranks = (
        x.cpu() for x in kernel(logits.clone().to(device), torch.tensor([4, 5, 6], device=device), 3)
    )
    assert (logprobs[1] == FLOOR).all(), f"a row with NaN has log-probabilities {logprobs[1].tolist()}"
    assert ((ids >= 0) & (ids < 130)).all() and (ranks >= 1).all()
    wanted = logits[[0, 2]].double().log_softmax(1).gather(1, ids[[0, 2]])
    assert (logprobs[[0, 2]] - wanted).abs().max() <= 1e-5, "a NaN in one row changed another"
