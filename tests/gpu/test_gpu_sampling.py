"""Sampling on the card: the CPU reference's tokens, without once waiting for the device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from hotswap.core.contracts.platform import Platform
from hotswap.core.layers.ops import OpTable
from hotswap.core.layers.sampling.draw import ALWAYS, OFF
from hotswap.core.runner.edits import History
from hotswap.core.runner.penalties import PenaltyPool, penalties_of
from hotswap.core.runner.processed import processed_logits
from hotswap.core.runner.sampler import Drawn, sample
from hotswap.core.runner.sampling_rows import SamplingBatch, build_batch, resolve_row
from hotswap.core.runner.transfer import Transfers
from hotswap.core.runner.trial_sampling import SamplingDemands, try_sampling
from hotswap.core.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

EOS = [2, 11]
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 50},
    {"temperature": 1.3, "top_k": 300, "top_p": 0.8, "min_p": 0.001},
    {"min_p": 0.05, "logprobs": 5},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"top_p": 0.5, "repetition_penalty": 0.8, "logprobs": 20},
    {"logit_bias": {3: 4.5, 5: -100.0, 9: 1.0}},
    {"logit_bias": {40: 100.0, 41: 100.0}, "top_p": 0.95},
    {"bad_words_token_ids": [[7], [5, 6, 8]], "temperature": 0.0},
    {"min_tokens": 9, "stop_token_ids": [17], "temperature": 0.0},
    {"ignore_eos": True, "top_k": 5},
    {"allowed_token_ids": list(range(0, 400, 3)), "top_p": 0.7},
    {"temperature": 1e-4, "top_p": 0.9},
    {"temperature": 1e6, "logprobs": 0},
)
PROMPT, OUTPUTS = [4, 4, 12, 30], [30, 5, 6]


@pytest.fixture
def forbid_waiting() -> Iterator[Any]:
    """Calls a function with every wait for the device an error."""

    def call(function: Any, *args: Any, **options: Any) -> Any:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*args, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    yield call


def triton_ops() -> OpTable:
    from hotswap.plugins.kernels.triton import sampling

    return dataclasses.replace(
        OpTable.reference(),
        argmax=sampling.argmax,
        penalize=sampling.penalize,
        draw=sampling.draw,
        gather_logprobs=sampling.gather_logprobs,
    )


class Sampled:
    """A pool, a history and a batch of rows with SETTINGS, over and over."""

    def __init__(self, device: str, count: int, width: int) -> None:
        platform = cast(Platform, SimpleNamespace(is_asynchronous=True)) if device == "cuda" else None
        self.transfers = Transfers(device, platform)
        self.ops = triton_ops() if device == "cuda" else OpTable.reference()
        self.width = width
        self.pool = PenaltyPool(width, self.transfers)
        self.rows = []
        for place in range(count):
            params = SamplingParams(seed=place * 7919, eos_token_ids=EOS, **SETTINGS[place % len(SETTINGS)])
            found = penalties_of(params)
            pool_row = None
            if found is not None:
                upload = self.transfers.upload
                pool_row = self.pool.add(found, upload(PROMPT, torch.int64), upload(OUTPUTS, torch.int64))
            self.rows.append(resolve_row(params, place, width, self.transfers, pool_row))
        upload = self.transfers.upload
        known = [(PROMPT + OUTPUTS + [0] * 20)[:20]] * count
        self.history = History(
            upload(known, torch.int32),
            upload(list(range(count)), torch.int64),
            upload([len(PROMPT + OUTPUTS)] * count, torch.int64),
            upload([len(PROMPT)] * count, torch.int64),
        )

    def batch(self) -> SamplingBatch:
        mask = self.transfers.to_device(torch.arange(self.width) % 2 == 0)
        return build_batch(self.rows, {0: mask, 2: mask}, self.width, self.transfers)

    def step(self, logits: Tensor, batch: SamplingBatch) -> tuple[Drawn, tuple[Tensor, Tensor, Tensor], Tensor]:
        drawn = sample(logits, batch, self.history, self.pool, self.ops)
        described = self.ops.gather_logprobs(logits, drawn.token_ids, max(batch.num_logprobs, default=1))
        return drawn, described, processed_logits(logits.clone(), drawn.edited, batch)


def logits_of(kind: str, count: int, width: int) -> Tensor:
    logits = torch.randn((count, width), generator=torch.Generator().manual_seed(width)) * 3
    if kind == "bfloat16":
        return logits.to(torch.bfloat16).float()
    return logits * 1e-3 if kind == "flat" else logits


@pytest.mark.parametrize("width", [5003, 128_256])
@pytest.mark.parametrize("kind", ["random", "bfloat16", "flat"])
def test_every_feature_gives_the_references_tokens_without_waiting(kind: str, width: int, forbid_waiting: Any) -> None:
    count = 2 * len(SETTINGS)
    logits = logits_of(kind, count, width)
    host, card = Sampled("cpu", count, width), Sampled("cuda", count, width)
    on_card = logits.cuda()
    card.step(on_card, card.batch())  # compiles
    card = Sampled("cuda", count, width)
    host_batch, card_batch = host.batch(), forbid_waiting(card.batch)
    # In a flat row each of 100,000 tokens is as likely: rounding at the edge of top_p may move one draw.
    steps, allowed = (1, 1) if kind == "flat" else (3, 0)
    for _ in range(steps):  # penalties count what was drawn
        wanted, _, wanted_processed = host.step(logits, host_batch)
        found, described, processed = forbid_waiting(card.step, on_card, card_batch)
        assert int((found.token_ids.cpu() != wanted.token_ids).sum()) <= allowed
        assert found.faults.tolist() == wanted.faults.tolist() == [0] * count
        wanted_described = host.ops.gather_logprobs(logits, found.token_ids.cpu(), max(host_batch.num_logprobs))
        assert torch.equal(described[0].cpu(), wanted_described[0])
        assert torch.equal(described[2].cpu(), wanted_described[2])
        torch.testing.assert_close(described[1].cpu(), wanted_described[1], rtol=0, atol=1e-6)
        torch.testing.assert_close(processed.cpu().exp(), wanted_processed.exp(), rtol=1e-5, atol=1e-6)
    assert torch.equal(on_card.cpu(), logits), "sampling changed the logits"


def test_penalty_rows_are_taken_without_waiting(forbid_waiting: Any) -> None:
    forbid_waiting(Sampled, "cuda", len(SETTINGS), 1000)


def card_transfers() -> Transfers:
    platform = SimpleNamespace(
        is_asynchronous=True,
        pinned=lambda shape, dtype: torch.empty(shape, dtype=dtype, pin_memory=True),
        event=torch.cuda.Event,
    )
    return Transfers("cuda", cast(Platform, platform))


def compiled() -> int:
    """Variants of the sampling kernels that there are."""
    from hotswap.plugins.kernels.triton import sampling, sampling_argmax, sampling_draw, sampling_logprobs

    kernels = [
        found
        for module in (sampling, sampling_argmax, sampling_draw, sampling_logprobs)
        for found in vars(module).values()
        if hasattr(found, "device_caches")
    ]
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def test_nothing_is_compiled_after_the_trial() -> None:
    width, ops = 7001, triton_ops()
    before = compiled()
    try_sampling(torch.randn((3, width), device="cuda"), SamplingDemands(40, True), ops, card_transfers())
    after = compiled()
    assert after > before
    for count in (1, 5, 2 * len(SETTINGS)):
        sampled = Sampled("cuda", count, width)
        sampled.step(logits_of("random", count, width).cuda(), sampled.batch())
    assert compiled() == after


@pytest.mark.parametrize("demands", [SamplingDemands(20), SamplingDemands(100), SamplingDemands(20, True)])
def test_sampling_takes_a_few_times_its_logits(demands: SamplingDemands) -> None:
    """The KV cache pays for it."""
    logits, ops, transfers = torch.randn((256, 128_256), device="cuda"), triton_ops(), card_transfers()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try_sampling(logits, demands, ops, transfers)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 3.5 * logits.nbytes


def random_draws(count: int, width: int) -> list[Any]:
    """The arguments of `draw` on the card, filters of all kinds."""
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn((count, width), generator=generator) * 2
    logits[::3] = logits[::3].to(torch.bfloat16).float()
    top_k = torch.randint(1, width, (count,), generator=generator)
    top_k[::2] = ALWAYS
    top_p = torch.rand(count, generator=generator, dtype=torch.float64)
    top_p[1::4] = OFF
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    positions = torch.randint(0, 9000, (count,), generator=generator)
    temperature = torch.rand(count, generator=generator) + 0.3
    min_p = torch.where(torch.rand(count, generator=generator) < 0.5, 0.0, 1e-4)
    columns = (logits, logits.amax(1), temperature, min_p, top_k, top_p, seeds, positions)
    return [column.cuda() for column in columns]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_row_draws_the_same_in_every_batch(ordered: bool) -> None:
    given = random_draws(70, 49_152)
    kernel = triton_ops().draw
    together = kernel(*given, ordered)
    assert torch.equal(together, kernel(*given, ordered)), "the same call gave another result"
    for rows in (slice(0, 1), slice(3, 8), slice(69, 70), slice(20, 70)):
        assert torch.equal(kernel(*(column[rows] for column in given), ordered), together[rows])


@pytest.mark.parametrize("width", [131, 4097, 49_152, 262_144])
def test_draws_with_random_filters_are_the_references(width: int) -> None:
    given = random_draws(48, width)
    on_host = [column.cpu() for column in given]
    wanted = OpTable.reference().draw(*on_host, True)
    assert triton_ops().draw(*given, True).tolist() == wanted.tolist()


@pytest.mark.parametrize("filters", [(ALWAYS, OFF, 0.0), (8, OFF, 0.0), (ALWAYS, 0.8, 0.0), (12, 0.9, 0.05)])
def test_draws_follow_the_distribution(filters: tuple[int, float, float]) -> None:
    """Chi-square over 20,000 seeds in one call."""
    draws, width = 20_000, 20
    top_k, top_p, min_p = filters
    logits = torch.randn(width, generator=torch.Generator().manual_seed(3)) * 1.2
    weights = (logits - logits.max()).double().exp()
    order = torch.sort(logits, descending=True, stable=True).indices
    kept = order[: min(top_k, width)]
    kept = kept[weights[kept] >= min_p]
    before = weights[kept].cumsum(0) - weights[kept]
    kept = kept[before < top_p * weights[kept].sum()]
    expected = torch.zeros(width, dtype=torch.float64)
    expected[kept] = weights[kept] / weights[kept].sum()

    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((draws,), value, dtype=dtype, device="cuda")

    found = triton_ops().draw(
        logits.cuda().repeat(draws, 1),
        column(float(logits.max()), torch.float32),
        column(1.0, torch.float32),
        column(min_p, torch.float32) if min_p else None,
        torch.full((draws,), top_k, dtype=torch.int64, device="cuda"),
        column(top_p, torch.float64),
        torch.arange(draws, device="cuda"),
        torch.full((draws,), 3, dtype=torch.int64, device="cuda"),
        top_k != ALWAYS or top_p != OFF,
    )
    counts = torch.bincount(found.cpu(), minlength=width).double()
    assert counts[expected == 0].sum() == 0
    seen = expected > 0
    chi_square = float(((counts - draws * expected)[seen] ** 2 / (draws * expected)[seen]).sum())
    freedom = int(seen.sum()) - 1
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom) + 6


def test_many_rows_do_not_exceed_a_grid() -> None:
    """More programs than the 65,535 that a grid's second dimension could take."""
    logits = torch.randn((70_000, 37), device="cuda")
    values, ids = triton_ops().argmax(logits)
    assert torch.equal(values, logits.amax(1)) and torch.equal(logits.gather(1, ids[:, None])[:, 0], values)
