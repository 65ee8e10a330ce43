"""The sampler against a slow oracle, row by row, and the faults of bug bank group B by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from hotswap.core.contracts.plan import PositionLogprobs
from hotswap.core.layers.ops import OpTable
from hotswap.core.layers.sampling.blockwise import inverse_cdf, row_max, row_sum
from hotswap.core.layers.sampling.logprobs import FLOOR, gather_logprobs
from hotswap.core.layers.sampling.noise import uniform
from hotswap.core.runner.edits import History
from hotswap.core.runner.logprobs import position_logprobs
from hotswap.core.runner.penalties import Penalties, PenaltyPool, penalties_of
from hotswap.core.runner.processed import processed_logits
from hotswap.core.runner.sampler import Drawn, sample
from hotswap.core.runner.sampling_rows import build_batch, resolve_row
from hotswap.core.runner.transfer import Transfers
from hotswap.core.sampling_params import SamplingParams

OPS, TRANSFERS = OpTable.reference(), Transfers()


def described(logits: torch.Tensor, chosen: torch.Tensor, counts: Sequence[int]) -> list[PositionLogprobs]:
    """Log-probabilities as messages, one a row."""
    return position_logprobs(*gather_logprobs(logits, chosen, max(counts)), counts)


@dataclass
class Row:
    """One request as the sampler meets it."""

    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    outputs: list[int] = field(default_factory=list)


def run(logits: torch.Tensor, rows: Sequence[Row], masks: dict[int, torch.Tensor] | None = None) -> Drawn:
    """Samples a step of these rows."""
    width = logits.shape[1]
    pool = PenaltyPool(width, TRANSFERS)
    tokens = torch.zeros((len(rows) + 1, 64), dtype=torch.int32)
    resolved = []
    for slot, row in enumerate(rows, start=1):
        known = torch.tensor(row.prompt + row.outputs)
        tokens[slot, : len(known)] = known
        pool_row = None
        penalties = penalties_of(row.params)
        if penalties is not None:
            pool_row = pool.add(penalties, known[: len(row.prompt)], known[len(row.prompt) :])
        resolved.append(resolve_row(row.params, 1000 + slot, width, TRANSFERS, pool_row))
    history = History(
        tokens,
        torch.arange(1, len(rows) + 1),
        torch.tensor([len(row.prompt) + len(row.outputs) for row in rows]),
        torch.tensor([len(row.prompt) for row in rows]),
    )
    return sample(logits, build_batch(resolved, masks or {}, width, TRANSFERS), history, pool, OPS)


def drawn_ids(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    result = run(logits, rows)
    assert result.faults.tolist() == [0] * len(rows)
    ids: list[int] = result.token_ids.tolist()
    return ids


def edited_logits(logits: np.ndarray, row: Row) -> np.ndarray:
    """The documented order, one token after the other."""
    params, x = row.params, logits.astype(np.float32).copy()
    if params.allowed_token_ids is not None:
        for token in range(len(x)):
            if token not in params.allowed_token_ids:
                x[token] = -np.inf
    for word in params.bad_words_token_ids:
        head = word[:-1]
        if not head or row.outputs[-len(head) :] == head:
            x[word[-1]] = -np.inf
    if len(row.outputs) < params.min_tokens:
        x[params.eos_token_ids + params.stop_token_ids] = -np.inf
    if params.ignore_eos:
        x[[token for token in params.eos_token_ids if token not in params.stop_token_ids]] = -np.inf
    for token, bias in params.logit_bias.items():
        x[token] = -np.inf if bias == -100 else x[token] + np.float32(bias)
    forced = [token for token, bias in params.logit_bias.items() if bias == 100 and x[token] > -np.inf]
    if forced:
        kept = x[forced]
        x[:] = -np.inf
        x[forced] = kept
    for token in set(row.prompt) | set(row.outputs):
        factor = np.float32(params.repetition_penalty)
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(row.outputs):
        x[token] -= np.float32(params.frequency_penalty) * np.float32(row.outputs.count(token))
        x[token] -= np.float32(params.presence_penalty)
    return x


def kept_probabilities(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities after temperature, min_p, top_k and top_p; float64."""
    weights = np.exp((x.astype(np.float64) - float(x.max())) / params.temperature)
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    kept = [token for token in order if weights[token] >= params.min_p and weights[token] > 0]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.top_p < 1.0:
        total, reached, nucleus = sum(weights[kept]), 0.0, []
        for token in kept:
            if reached >= params.top_p * total:
                break
            nucleus.append(token)
            reached += weights[token]
        kept = nucleus
    result = np.zeros(len(x))
    result[kept] = weights[kept]
    probabilities: np.ndarray = result / result.sum()
    return probabilities


def oracle(logits: np.ndarray, row: Row) -> int:
    x = edited_logits(logits, row)
    if row.params.temperature < 1e-5 or row.params.top_k == 1:
        return int(np.argmax(x))
    position = len(row.prompt) + len(row.outputs)
    noise = float(uniform(torch.tensor([row.params.seed]), torch.tensor([position])))
    cumulative = 0.0
    probabilities = kept_probabilities(x, row.params)
    for token, probability in enumerate(probabilities):
        cumulative += probability
        if cumulative > noise:
            return token
    return int(np.nonzero(probabilities)[0][-1])


def random_row(rng: np.random.Generator, width: int) -> Row:
    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    def ids(count: int) -> list[int]:
        return [int(i) for i in rng.integers(0, width, count)]

    prompt, outputs = ids(int(rng.integers(1, 12))), ids(int(rng.integers(0, 10)))
    words = [ids(1), ids(3)]
    if outputs:
        words.append(outputs[-2:] + ids(1))
        words.append(outputs[-2:-1] + ids(1))  # matches only when the output has one token
    eos = ids(2)
    params = SamplingParams(
        temperature=pick(0.0, 0.0, 0.3, 1.0, 1.7),
        top_k=pick(0, 0, 1, 5, 40, 300, width + 9),
        top_p=pick(1.0, 1.0, 0.9, 0.5, 0.05),
        min_p=pick(0.0, 0.0, 0.02, 0.5),
        presence_penalty=pick(0.0, 0.0, 1.5, -1.0),
        frequency_penalty=pick(0.0, 0.0, 0.7, -0.4),
        repetition_penalty=pick(1.0, 1.0, 1.3, 0.8),
        seed=int(rng.integers(-(2**62), 2**62)),
        min_tokens=pick(0, 0, 5),
        ignore_eos=pick(False, False, True),
        stop_token_ids=pick([], [], ids(2), eos[:1]),
        logit_bias=pick({}, {}, {ids(1)[0]: 5.5, ids(1)[0]: -100.0}, {ids(1)[0]: 100.0, ids(1)[0]: 100.0}),
        allowed_token_ids=pick(None, None, None, ids(30)),
        logprobs=pick(None, 0, 3),
        eos_token_ids=eos,
        bad_words_token_ids=pick([], [], words),
    )
    return Row(params, prompt, outputs)


@pytest.mark.parametrize(("width", "spread"), [(50, 2.0), (515, 3.0), (700, 0.2), (5000, 0.5)])
def test_every_row_of_mixed_batches_equals_the_oracle(width: int, spread: float) -> None:
    rng = np.random.default_rng(width)
    for _ in range(12 if width < 1000 else 3):
        rows = [random_row(rng, width) for _ in range(int(rng.integers(1, 24)))]
        logits = torch.from_numpy(rng.normal(0, spread, (len(rows), width)).astype(np.float32))
        result = run(logits, rows)
        for place, row in enumerate(rows):
            x = logits[place].numpy()
            if not np.isfinite(edited_logits(x, row).max()):
                assert result.faults[place] == 2
            else:
                assert (int(result.token_ids[place]), int(result.faults[place])) == (oracle(x, row), 0), row


@pytest.mark.parametrize("width", [50, 515])
def test_ties_are_cut_by_id_exactly_as_the_oracle_does(width: int) -> None:
    rng = np.random.default_rng(width)
    for _ in range(8):
        rows = [random_row(rng, width) for _ in range(16)]
        logits = torch.from_numpy(rng.integers(-2, 3, (16, width)).astype(np.float32))
        result = run(logits, rows)
        for place, row in enumerate(rows):
            if result.faults[place] == 0:
                assert int(result.token_ids[place]) == oracle(logits[place].numpy(), row), row


def test_a_row_does_not_depend_on_its_batch() -> None:
    width = 9_001
    rng = np.random.default_rng(3)
    rows = [random_row(rng, width) for _ in range(16)]
    logits = torch.from_numpy(rng.normal(0, 2, (16, width)).astype(np.float32))
    together = run(logits, rows)
    entries = described(logits, together.token_ids, [4] * 16)
    for place, row in enumerate(rows):
        alone = run(logits[place : place + 1].clone(), [row])
        assert alone.token_ids[0] == together.token_ids[place]
        assert described(logits[place : place + 1].clone(), alone.token_ids, [4])[0] == entries[place]


# Bug bank, group B.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_B03_top_k_1_equals_greedy_on_ties_and_takes_the_lowest_id(dtype: torch.dtype) -> None:
    logits = torch.randn((4, 1000), generator=torch.Generator().manual_seed(0)).to(dtype).float()
    logits[:, [901, 77, 500]] = 9.0
    greedy, top_1 = Row(SamplingParams(temperature=0.0)), Row(SamplingParams(temperature=1.3, top_k=1, seed=5))
    free = Row(SamplingParams(temperature=1.0, seed=8))
    assert drawn_ids(logits[:1], [greedy]) == drawn_ids(logits[:1], [top_1]) == [77]
    mixed = drawn_ids(logits, [free, greedy, free, top_1])
    assert (mixed[1], mixed[3]) == (77, 77)
    assert mixed[0] == drawn_ids(logits[:1], [free])[0]


def test_B03_top_k_and_top_p_keep_exact_sets_of_ties() -> None:
    logits = torch.zeros((1, 512))
    for params in (SamplingParams(top_k=3, seed=0), SamplingParams(top_p=3 / 512, seed=0)):
        seen = {drawn_ids(logits, [Row(params.clone(seed=seed))])[0] for seed in range(60)}
        assert seen == {0, 1, 2}


def test_B04_logprobs_do_not_depend_on_sampling_settings() -> None:
    logits = torch.randn((3, 600), generator=torch.Generator().manual_seed(1)) * 3
    reference = torch.log_softmax(logits.double(), 1)
    for entry, row, chosen in zip(
        described(logits, torch.tensor([5, 6, 7]), [5] * 3), reference, (5, 6, 7), strict=True
    ):
        assert entry.token_ids == [chosen, *row.topk(5).indices.tolist()]
        assert entry.logprobs == pytest.approx(row[entry.token_ids].tolist(), abs=1e-6)
        assert entry.ranks == [1 + int((row > row[chosen]).sum()), 1, 2, 3, 4, 5]


def test_B04_logits_are_not_modified_by_sampling() -> None:
    rng = np.random.default_rng(0)
    rows = [random_row(rng, 300) for _ in range(16)]
    logits = torch.randn((16, 300), generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    run(logits, rows)
    assert torch.equal(logits, before)


def test_B05_minus_infinity_has_a_finite_floor() -> None:
    logits = torch.full((1, 80), -math.inf)
    logits[0, 3] = 0.0
    entry = described(logits, torch.tensor([7]), [5])[0]
    assert entry.logprobs == [FLOOR, 0.0, FLOOR, FLOOR, FLOOR, FLOOR]
    assert entry.token_ids == [7, 3, 0, 1, 2, 4]
    assert entry.ranks == [2, 1, 2, 2, 2, 2]
    assert FLOOR == -9999.0


def test_B07_logit_bias_bans_and_forces() -> None:
    logits = torch.zeros((1, 200))
    logits[0, 9] = 60_000.0
    assert drawn_ids(logits, [Row(SamplingParams(temperature=0.0, logit_bias={9: -100.0}))]) == [0]
    assert drawn_ids(logits, [Row(SamplingParams(temperature=0.0, logit_bias={150: 100.0}))]) == [150]
    seeds = range(50)
    both = {drawn_ids(logits, [Row(SamplingParams(logit_bias={4: 100.0, 5: 100.0}, seed=s))])[0] for s in seeds}
    assert both == {4, 5}


def test_B08_penalties_follow_their_definitions() -> None:
    # Token 7 came three times in the output, 8 once, 5 in the prompt only.
    logits = torch.zeros((1, 64))
    logits[0, [5, 7, 8, 9]] = torch.tensor([2.0, 4.0, 3.0, 0.5])

    def logit_order(**penalties: Any) -> np.ndarray:
        row = Row(SamplingParams(temperature=0.0, **penalties), [5], [7, 8, 7, 7])
        return edited_logits(logits[0].numpy(), row)

    x = logit_order(frequency_penalty=1.0, presence_penalty=0.5)
    assert x[[5, 7, 8, 9]].tolist() == [2.0, 4.0 - 3 - 0.5, 3.0 - 1 - 0.5, 0.5]
    row = Row(SamplingParams(temperature=0.0, frequency_penalty=1.0, presence_penalty=0.5), [5], [7, 8, 7, 7])
    assert drawn_ids(logits, [row]) == [5]
    x = logit_order(repetition_penalty=4.0)
    assert x[[5, 7, 8, 9]].tolist() == [0.5, 1.0, 0.75, 0.5]
    assert drawn_ids(logits, [Row(SamplingParams(temperature=0.0, repetition_penalty=4.0), [5], [7, 8, 7, 7])]) == [7]
    negative = -logits - 1
    negative[0, 9] = -30.0
    row = Row(SamplingParams(temperature=0.0, repetition_penalty=2.0), list(range(64)), [])
    assert drawn_ids(negative, [row]) == [0]  # all negative and multiplied alike


def test_B08_counts_grow_token_by_token() -> None:
    width = 32
    pool = PenaltyPool(width, TRANSFERS)
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    prompt = torch.tensor([3])
    row = resolve_row(params, 1, width, TRANSFERS, pool.add(Penalties(1.0, 0.0, 1.0), prompt, prompt[:0]))
    batch = build_batch([row], {}, width, TRANSFERS)
    logits = torch.zeros((1, width))
    logits[0, [10, 11]] = torch.tensor([2.5, 1.0])
    history = History(torch.zeros((1, 64), dtype=torch.int32), torch.tensor([0]), torch.tensor([1]), torch.tensor([1]))
    drawn = [int(sample(logits, batch, history, pool, OPS).token_ids) for _ in range(6)]
    # 10 at 2.5, 1.5, then 11 at 1.0 beats 0.5, then 10 at 0.5, then 0 before 11 (both 0), then 1.
    assert drawn == [10, 10, 11, 10, 0, 1]


def test_B09_rows_with_and_without_filters_do_not_mix() -> None:
    width = 2000
    logits = torch.randn((5, width), generator=torch.Generator().manual_seed(4))
    rows = [
        Row(SamplingParams(top_k=1, seed=1)),
        Row(SamplingParams(seed=2)),
        Row(SamplingParams(min_p=0.5, seed=3)),
        Row(SamplingParams(presence_penalty=2.0, seed=4), outputs=[1, 1, 5]),
        Row(SamplingParams(top_k=width + 1, top_p=1.0, seed=5)),
    ]
    together = drawn_ids(logits, rows)
    assert together == [drawn_ids(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == [oracle(logits[i].numpy(), row) for i, row in enumerate(rows)]


@pytest.mark.parametrize("top_k", [0, -1, 2001])
def test_B09_top_k_off_draws_from_everything(top_k: int) -> None:
    logits = torch.zeros((64, 2000))
    rows = [Row(SamplingParams(top_k=top_k, seed=seed)) for seed in range(64)]
    assert drawn_ids(logits, rows) == drawn_ids(logits, [Row(SamplingParams(seed=seed)) for seed in range(64)])


@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 0.01, 1e6])
def test_B10_extreme_logits_and_temperatures_never_give_nan(temperature: float) -> None:
    logits = torch.full((1, 300), -60_000.0, dtype=torch.bfloat16).float()
    logits[0, 200] = 60_000.0
    for extra in ({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        result = run(logits, [Row(SamplingParams(temperature=temperature, seed=3, **extra))])
        assert result.faults.tolist() == [0]
        if temperature < 1:
            assert result.token_ids.tolist() == [200]


def test_B11_all_eos_tokens_are_masked_while_ignored_or_below_min_tokens() -> None:
    logits = torch.zeros((1, 128))
    logits[0, [2, 7, 9, 40]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    eos: dict[str, Any] = {"temperature": 0.0, "eos_token_ids": [2, 7, 9]}
    assert drawn_ids(logits, [Row(SamplingParams(**eos))]) == [2]
    assert drawn_ids(logits, [Row(SamplingParams(**eos, ignore_eos=True))]) == [40]
    assert drawn_ids(logits, [Row(SamplingParams(**eos, min_tokens=2), outputs=[5])]) == [40]
    assert drawn_ids(logits, [Row(SamplingParams(**eos, min_tokens=2), outputs=[5, 5])]) == [2]
    assert drawn_ids(logits, [Row(SamplingParams(**eos, min_tokens=2, stop_token_ids=[40]), outputs=[5])]) == [0]
    # A stop token id that is also an end of sequence was asked for: ignore_eos does not take it away.
    assert drawn_ids(logits, [Row(SamplingParams(**eos, ignore_eos=True, stop_token_ids=[7]))]) == [7]


def test_bad_words_look_at_the_output_only() -> None:
    logits = torch.zeros((1, 32))
    logits[0, 9] = 5.0
    params = SamplingParams(temperature=0.0, bad_words_token_ids=[[8, 9], [5, 8, 9]])
    assert drawn_ids(logits, [Row(params, prompt=[5, 8])]) == [9]
    assert drawn_ids(logits, [Row(params, prompt=[5], outputs=[8])]) == [0]
    assert drawn_ids(logits, [Row(params, prompt=[5], outputs=[7])]) == [9]
    longer = params.clone(bad_words_token_ids=[[5, 8, 9]])
    assert drawn_ids(logits, [Row(longer, prompt=[5], outputs=[8])]) == [9]
    assert drawn_ids(logits, [Row(longer, prompt=[5], outputs=[5, 8])]) == [0]


def test_penalty_rows_are_reused_and_start_afresh() -> None:
    pool = PenaltyPool(16, TRANSFERS)
    settings, nothing = Penalties(2.0, 1.0, 1.0), torch.zeros(0, dtype=torch.int64)
    rows = [pool.add(settings, torch.tensor([3]), torch.tensor([4, 4])) for _ in range(20)]
    assert sorted(rows) == list(range(20)) and len(pool) == 20
    for row in rows:
        pool.remove(row)
    assert len(pool) == 0
    again = pool.add(settings, nothing, nothing)
    logits = torch.full((1, 16), 6.0)
    pool.apply(logits, torch.tensor([0]), torch.tensor([again]), OPS)
    assert torch.equal(logits, torch.full((1, 16), 6.0))


def test_F01_logprobs_of_mixed_rows_go_to_the_rows_that_asked() -> None:
    width = 100
    rows = [
        resolve_row(SamplingParams(logprobs=count), i, width, TRANSFERS, None)
        for i, count in enumerate([None, 2, None, 0])
    ]
    batch = build_batch(rows, {}, width, TRANSFERS)
    assert (batch.logprob_rows, batch.num_logprobs) == ((1, 3), (2, 0))
    logits = torch.randn((2, width), generator=torch.Generator().manual_seed(6))
    entries = described(logits, torch.tensor([4, 5]), batch.num_logprobs)
    assert [len(entry.token_ids) for entry in entries] == [3, 1]
    assert entries[0] == described(logits[:1], torch.tensor([4]), [2])[0]
    assert entries[1] == described(logits[1:], torch.tensor([5]), [0])[0]


# Faults of one row.


def test_a_faulty_row_is_reported_and_harms_no_other() -> None:
    width = 1000
    rng = np.random.default_rng(11)
    rows = [random_row(rng, width) for _ in range(12)]
    for row in rows:
        row.params = row.params.clone(allowed_token_ids=None)
    logits = torch.from_numpy(rng.normal(0, 2, (12, width)).astype(np.float32))
    clean = run(logits, rows)
    for bad in (math.nan, math.inf):
        for place in range(12):
            dirty = logits.clone()
            dirty[place, 123] = bad
            result = run(dirty, rows)
            others = [i for i in range(12) if i != place]
            assert result.faults[place] == 1
            assert torch.equal(result.token_ids[others], clean.token_ids[others])
            assert torch.equal(result.faults[others], clean.faults[others])
            assert 0 <= int(result.token_ids[place]) < width


def test_a_row_whose_tokens_are_all_excluded_is_reported() -> None:
    logits = torch.zeros((2, 64))
    row = Row(SamplingParams(temperature=0.0, allowed_token_ids=[4], eos_token_ids=[4], ignore_eos=True))
    result = run(logits, [row, Row(SamplingParams(temperature=0.0))])
    assert result.faults.tolist() == [2, 0]


def test_grammar_masks_limit_their_row_only() -> None:
    logits = torch.zeros((3, 64))
    logits[:, 9] = 5.0
    mask = torch.zeros(64, dtype=torch.bool)
    mask[[20, 21]] = True
    rows = [Row(SamplingParams(temperature=0.0)) for _ in range(2)]
    rows.append(Row(SamplingParams(temperature=0.0, allowed_token_ids=[21, 9])))
    assert run(logits, rows, {1: mask, 2: mask}).token_ids.tolist() == [9, 20, 21]


# Distributions.

CASES = [
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 8, "top_p": 0.8, "min_p": 0.05},
    {"logit_bias": {3: 2.0, 5: -100.0}, "temperature": 0.9},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_the_distribution(case: dict[str, Any]) -> None:
    check_distribution(case, 20)


def test_draws_over_two_levels_follow_the_distribution() -> None:
    """300 tokens: more than one block of the search."""
    check_distribution({"min_p": 0.02, "temperature": 1.3}, 300)
    check_distribution({"top_k": 40, "top_p": 0.9}, 300)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_over_two_levels_follow_each_distribution(case: dict[str, Any]) -> None:
    check_distribution(case, 300)


def check_distribution(case: dict[str, Any], width: int) -> None:
    draws, batch_rows = 20_000, 500
    logits = torch.randn((1, width), generator=torch.Generator().manual_seed(12)) * 1.5
    row = Row(SamplingParams(seed=0, **case))
    expected = kept_probabilities(edited_logits(logits[0].numpy(), row), row.params)
    batch = build_batch([resolve_row(row.params, 1, width, TRANSFERS, None)] * batch_rows, {}, width, TRANSFERS)
    places = torch.full((batch_rows,), 3)
    history = History(torch.zeros((1, 64), dtype=torch.int32), places * 0, places, places)
    counts = np.zeros(width)
    for start in range(0, draws, batch_rows):
        groups = tuple(replace(group, seeds=start + torch.arange(batch_rows)) for group in batch.groups)
        drawn = sample(
            logits.repeat(batch_rows, 1), replace(batch, groups=groups), history, PenaltyPool(width, TRANSFERS), OPS
        )
        counts += np.bincount(drawn.token_ids.numpy(), minlength=width)
    assert counts[expected == 0].sum() == 0
    common = expected * draws >= 5
    rest = draws - counts[common].sum()
    expected_rest = draws * (1 - expected[common].sum())
    chi_square = ((counts[common] - draws * expected[common]) ** 2 / (draws * expected[common])).sum()
    if expected_rest >= 5:
        chi_square += (rest - expected_rest) ** 2 / expected_rest
    freedom = int(common.sum())
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom) + 6


# The two-level search.


@pytest.mark.parametrize("width", [1, 5, 63, 64, 65, 127, 128, 129, 515, 4096, 4097])
def test_blockwise_equals_the_plain_operations(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    rows = torch.randint(-3, 3, (40, width), generator=generator).float()
    values, ids = row_max(rows)
    assert torch.equal(ids, torch.from_numpy(rows.numpy().argmax(1)))
    assert torch.equal(values, rows.amax(1))
    weights = torch.rand((40, width), generator=generator)
    weights[weights < 0.6] = 0.0
    weights[:, -1] += 1e-3
    assert torch.allclose(row_sum(weights), weights.double().sum(1))
    cumulative = weights.double().cumsum(1)
    for noise in (0.0, 0.31, 0.999, 1 - 2**-53):
        found = inverse_cdf(weights, torch.full((40,), noise, dtype=torch.float64))
        assert bool((weights.gather(1, found.unsqueeze(1)) > 0).all())
        plain = torch.searchsorted(cumulative, noise * cumulative[:, -1:], right=True).squeeze(1).clamp(max=width - 1)
        assert torch.equal(found, plain) or noise > 0.99


def test_inverse_cdf_never_draws_a_weight_of_zero_at_the_ends() -> None:
    weights = torch.zeros((1, 1000))
    weights[0, 400] = 1e-30
    for noise in (0.0, 0.5, 1 - 2**-53):
        assert int(inverse_cdf(weights, torch.tensor([noise], dtype=torch.float64))) == 400


def test_a_batch_that_is_uploaded_in_one_copy_is_the_same() -> None:
    """The way of a device that is not the host: every list of a batch travels in one buffer."""
    width = 100
    settings: list[dict[str, Any]] = [
        {"temperature": 0.7, "top_p": 0.5, "min_p": 0.25, "seed": -3},
        {"logit_bias": {3: 1.5, 9: 100.0}, "min_tokens": 4, "eos_token_ids": [5], "top_k": 7},
        {"bad_words_token_ids": [[1, 2], [3, 4, 5], [8]], "temperature": 0.0, "allowed_token_ids": [1, 2]},
    ]
    params = [SamplingParams(**fields) for fields in settings]
    copies = []

    class OneCopy(Transfers):
        def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
            copies.append(tensor)
            return super().to_device(tensor)

    built = []
    for transfers in (TRANSFERS, OneCopy("cpu:0")):
        rows = [resolve_row(p, i, width, transfers, i if i == 1 else None) for i, p in enumerate(params)]
        copies.clear()
        built.append(build_batch(rows, {}, width, transfers))
    assert len(copies) == 1

    def tensors(found: Any) -> list[Any]:
        if isinstance(found, torch.Tensor):
            return [found.dtype, found.tolist()]
        parts = (
            found if isinstance(found, tuple) else [getattr(found, name) for name in getattr(found, "__slots__", ())]
        )
        return [tensors(part) for part in parts] or [found]

    assert tensors(built[0]) == tensors(built[1])
    assert built[0].edits is not None and built[0].edits.words is not None


def test_forced_tokens_that_are_all_impossible_leave_the_row_as_it_was() -> None:
    """Of two rows, one may draw none of its forced tokens: it is drawn from what is left, as if nothing were forced."""
    logits = torch.zeros((2, 50))
    logits[:, 7] = 9.0
    params = SamplingParams(temperature=0.0, logit_bias={3: 100.0, 4: 100.0}, bad_words_token_ids=[[3], [4]])
    free = SamplingParams(temperature=0.0, logit_bias={3: 100.0, 4: 100.0}, bad_words_token_ids=[[3]])
    found = run(logits, [Row(params), Row(free)])
    assert found.token_ids.tolist() == [7, 4] and found.faults.tolist() == [0, 0]
    assert found.edited is not None
    assert torch.isfinite(found.edited[0]).sum() == 48 and torch.isfinite(found.edited[1]).sum() == 1


def test_edits_and_processed_logits_do_not_depend_on_how_rows_are_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn((11, 300), generator=torch.Generator().manual_seed(5))
    rows = [
        Row(SamplingParams(seed=at, top_p=0.5, min_p=0.01, allowed_token_ids=list(range(at, 300, at + 1))))
        for at in range(10)
    ]
    rows.append(Row(SamplingParams(seed=3, top_k=40, temperature=0.3)))
    resolved = [resolve_row(row.params, 0, 300, TRANSFERS, None) for row in rows]
    batch = build_batch(resolved, {}, 300, TRANSFERS)
    found = []
    for _ in range(2):
        drawn = run(logits, rows)
        found.append((drawn.token_ids, drawn.edited, processed_logits(logits.clone(), drawn.edited, batch)))
        monkeypatch.setattr("hotswap.core.runner.edits.COPIED", 1)
        monkeypatch.setattr("hotswap.core.runner.processed.SORTED", 1)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert int(torch.isfinite(found[0][2][10]).sum()) <= 40


def test_a_pool_with_room_for_all_never_grows() -> None:
    pool = PenaltyPool(16, TRANSFERS, 5)
    tokens = torch.tensor([1, 2])
    kept = pool._divisors
    taken = [pool.add(Penalties(1.5, 0.0, 0.0), tokens, tokens[:0]) for _ in range(5)]
    assert sorted(taken) == list(range(5)) and len(pool) == 5 and pool._divisors is kept
    pool.remove(taken[0])
    assert pool.add(Penalties(1.5, 0.0, 0.0), tokens, tokens[:0]) == taken[0] and pool._divisors is kept
    assert pool.add(Penalties(2.0, 0.0, 0.0), tokens, tokens[:0]) == 5, "more than there was room for"
    assert pool._divisors[taken[1]].tolist() == [1.0, 1.5, 1.5] + [1.0] * 13
