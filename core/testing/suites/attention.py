"""What every attention backend must hold: dense attention in float64 is the truth, whatever the pages look like.

    from hotswap.core.testing.suites import AttentionSuite

    class TestMyAttention(AttentionSuite):
        plugin = "hotswap_my_attention"

The head sizes, block sizes and dtypes that are tried are those that the backend claims. It may refuse (`unavailable`)
any cache that it does not serve; it must serve one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ...contracts.attention import AttentionBackend, AttentionLayer, CacheSpec, Capabilities
from ..paged_steps import PagedStep, make_paged_step
from .base import ConformanceSuite

# Requests of a step: (new tokens, context length after them).
BATCHES: dict[str, tuple[tuple[int, int], ...]] = {
    "prefill": ((5, 5), (33, 33), (1, 1)),
    "decode": ((1, 1), (1, 16), (1, 17), (1, 61)),
    "chunked prefill": ((7, 16), (20, 53), (3, 4)),
    "mixed": ((1, 20), (33, 33), (9, 48), (1, 40), (2, 18)),
}
_DIMENSIONS = ("block", "token", "head", "dim")
_HEADS = ((4, 2), (3, 3), (6, 1), (9, 3))
_HEAD_SIZES = (64, 16, 40, 128)  # tried where a backend claims any
_BLOCK_SIZES = (16, 4, 32)
_DTYPES = ("float32", "bfloat16", "float16")
_PROBED_HEAD_SIZES = (64, 128, 16, 32, 80, 96, 256)
_PROBED_BLOCK_SIZES = (*_BLOCK_SIZES, 64, 128, 256)

# Against float64: relative to the value, and absolute on outputs of size one: matrix units multiply weights that are rounded
# to the dtype, so that the absolute error of a small output is that of the values it is made of.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-7, 2**-7), torch.float16: (2**-10, 2**-10)}


@dataclass(frozen=True)
class AttentionCase:
    """One combination that the backend serves."""

    heads: tuple[int, int]
    head_size: int
    block_size: int
    dtype: str

    def layer(self, **changes: Any) -> AttentionLayer:
        heads, kv_heads = self.heads
        return AttentionLayer(0, heads, kv_heads, self.head_size, self.head_size, self.head_size**-0.5, **changes)

    def spec(self, layer: AttentionLayer) -> CacheSpec:
        sizes = layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v
        return CacheSpec("full" if layer.window is None else "window", *sizes, self.dtype, layer.window)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class AttentionSuite(ConformanceSuite):
    kind: ClassVar[str] = "attention"
    random_steps: ClassVar[int] = 12
    max_cases: ClassVar[int] = 4  # combinations of heads, head size, block size and dtype; a large number means all

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        """The dense reference makes many small operations, which threads only slow down."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    # What it serves.

    def reasons(self, layer: AttentionLayer, spec: CacheSpec, block_size: int) -> Sequence[str]:
        """Why it does not serve a layer; empty when it does."""
        provider = self.registered().provider
        return provider.unavailable(self.context(spec=spec, block_size=block_size, layers=(layer,)))

    def backend(self, case: AttentionCase, layer: AttentionLayer | None = None) -> AttentionBackend:
        layer = layer or case.layer()
        made: AttentionBackend = self.build(spec=case.spec(layer), block_size=case.block_size, layers=(layer,))
        return made

    def serves(self, case: AttentionCase, layer: AttentionLayer | None = None) -> bool:
        layer = layer or case.layer()
        return not self.reasons(layer, case.spec(layer), case.block_size)

    def capabilities(self) -> Capabilities:
        """As claimed by a backend for the first cache that it serves."""
        return self._first()[1].capabilities

    def _first(self) -> tuple[AttentionCase, AttentionBackend]:
        refused: set[str] = set()
        for dtype, size, block in itertools.product(_DTYPES, _PROBED_HEAD_SIZES, _PROBED_BLOCK_SIZES):
            case = AttentionCase((4, 2), size, block, dtype)
            layer = case.layer()
            reasons = self.reasons(layer, case.spec(layer), block)
            if not reasons:
                return case, self.backend(case)
            refused.update(reasons)
        bare = self.registered().provider.unavailable(self.context())
        if bare:
            pytest.skip(f"cannot run here: {'; '.join(bare)}")
        pytest.fail(f"it serves none of the ordinary caches: {'; '.join(sorted(refused))}", pytrace=False)

    def all_cases(self) -> list[AttentionCase]:
        """Every combination of what the backend claims and does not refuse."""
        _, backend = self._first()
        claimed, layout = backend.capabilities, backend.layout
        sizes = claimed.head_sizes or _HEAD_SIZES
        blocks = [size for size in _BLOCK_SIZES if not layout.block_sizes or size in layout.block_sizes]
        blocks = blocks or sorted({layout.block_sizes[0], layout.block_sizes[-1]})
        product = itertools.product(_HEADS, sizes, blocks, claimed.dtypes)
        return [case for case in itertools.starmap(AttentionCase, product) if self.serves(case)]

    def cases(self) -> list[AttentionCase]:
        """A few that hold every value of each axis at least once."""
        left = self.all_cases()
        random.Random(0).shuffle(left)
        chosen: list[AttentionCase] = []
        seen: set[tuple[str, Any]] = set()
        while left:
            best = max(left, key=lambda case: len(_values(case) - seen))
            if not _values(best) - seen and len(chosen) >= self.max_cases:
                break
            left.remove(best)
            chosen.append(best)
            seen |= _values(best)
        return chosen

    def step(self, case: AttentionCase, batch: str, layer: AttentionLayer | None = None, **changes: Any) -> PagedStep:
        backend = self.backend(case, layer)
        options = {
            "block_size": case.block_size,
            "dtype": case.torch_dtype,
            "device": self.torch_device,
            **changes,
        }
        return make_paged_step(backend.layout, layer or case.layer(), BATCHES[batch], **options)

    def check(self, case: AttentionCase, step: PagedStep, layer: AttentionLayer | None = None) -> None:
        layer = layer or case.layer()
        found = step.run(self.backend(case, layer), layer)[: step.geometry.num_tokens]
        compare(found, step.expected(layer), case)

    # The tests.

    def test_it_serves_something(self) -> None:
        """It serves at least one of the ordinary caches, and its capabilities agree with what it serves."""
        case, backend = self._first()
        assert case.dtype in backend.capabilities.dtypes, f"it serves {case.dtype} but does not claim it"
        assert not backend.capabilities.head_sizes or case.head_size in backend.capabilities.head_sizes
        assert sorted(backend.layout.key_shape) == sorted(backend.layout.value_shape) == sorted(_DIMENSIONS)

    @pytest.mark.parametrize("batch", BATCHES)
    def test_equals_dense_attention(self, batch: str) -> None:
        """Prompts, chunks of prompts, single tokens and all of them in one step equal dense attention in float64."""
        for seed, case in enumerate(self.cases()):
            self.check(case, self.step(case, batch, seed=seed))

    def test_random_batches(self) -> None:
        """Any mix of context lengths and new tokens."""
        case, backend = self._first()
        for seed in range(self.random_steps):
            rng = random.Random(seed if self.seed is None else self.seed + seed)
            lengths = [rng.choice((1, 2, case.block_size, 3 * case.block_size, rng.randint(1, 150))) for _ in range(6)]
            contexts = [(rng.choice((1, length, rng.randint(1, length))), length) for length in lengths]
            step = make_paged_step(
                backend.layout,
                case.layer(),
                contexts,
                block_size=case.block_size,
                dtype=case.torch_dtype,
                seed=seed,
                device=self.torch_device,
            )
            self.check(case, step)

    def test_requests_share_a_cached_prefix(self) -> None:
        """Two requests whose tables begin with the same blocks read the same keys."""
        for case in self.cases()[:4]:
            block = case.block_size
            contexts = ((3, 3 * block + 2), (block, 3 * block + 1), (1, 5))
            layout = self.backend(case).layout
            step = make_paged_step(
                layout,
                case.layer(),
                contexts,
                block_size=block,
                dtype=case.torch_dtype,
                shared_blocks=2,
                device=self.torch_device,
            )
            self.check(case, step)

    @pytest.mark.parametrize("window", [1, 6, 20, 1000])
    def test_windows(self, window: int) -> None:
        """With a window of w, a token sees itself and the w - 1 before it; what has left the window may be anything."""
        self._need(self.capabilities().window, "windows")
        for case in self.cases()[:4]:
            layer = case.layer(window=window)
            windowed = case.spec(layer)
            for spec in (windowed, replace(windowed, kind="full", window=None)):  # a model may keep the whole context
                if self.reasons(layer, spec, case.block_size):
                    continue
                step = self.step(case, "mixed", layer)
                expected = step.expected(layer)
                forget_what_left_the_window(step, window)
                backend = self.build(spec=spec, block_size=case.block_size, layers=(layer,))
                compare(step.run(backend, layer), expected, case)

    def test_values_of_another_size(self) -> None:
        """Values narrower than keys, as in multi-head latent attention, are right or refused."""
        case = self._first()[0]
        layer = replace(case.layer(), head_dim_v=case.head_size // 2)
        if not self.serves(case, layer):
            pytest.skip("it refuses values of another size than keys")
        self.check(case, self.step(case, "mixed", layer), layer)

    def test_soft_caps(self) -> None:
        """Scores become cap * tanh(score / cap), before the mask."""
        self._need(self.capabilities().soft_cap, "soft caps")
        for case in self.cases()[:4]:
            layer = case.layer(soft_cap=1.5)
            if self.serves(case, layer):
                self.check(case, self.step(case, "mixed", layer), layer)

    def test_sinks(self) -> None:
        """A head's sink is one more score in the softmax, with no value."""
        self._need(self.capabilities().sinks, "attention sinks")
        for case in self.cases()[:3]:
            layer = case.layer(sinks=self.by_head(case).to(case.torch_dtype))
            if self.serves(case, layer):
                for batch in ("mixed", "decode"):
                    self.check(case, self.step(case, batch, layer), layer)

    def test_alibi(self) -> None:
        """A head's slope times (key position - query position) is added to its scores."""
        self._need(self.capabilities().alibi, "ALiBi")
        for case in self.cases()[:3]:
            layer = case.layer(alibi_slopes=2.0 ** -self.by_head(case))
            if self.serves(case, layer):
                self.check(case, self.step(case, "mixed", layer), layer)

    def test_fp8_caches(self) -> None:
        """A cache of 8-bit floats holds rounded keys and values; the queries are in another dtype."""
        self._need(self.capabilities().fp8_cache, "8-bit caches")
        for case in self.cases()[:2]:
            for name in ("float8_e4m3fn", "float8_e5m2"):
                layer = case.layer()
                spec = replace(case.spec(layer), dtype=name)
                if self.reasons(layer, spec, case.block_size):
                    continue
                backend = self.build(spec=spec, block_size=case.block_size, layers=(layer,))
                step = self.step(case, "mixed", layer, cache_dtype=getattr(torch, name))
                compare(step.run(backend, layer), step.expected(layer), case)

    def by_head(self, case: AttentionCase) -> Tensor:
        """float32 [H]: 1, 2, 3, ..."""
        return torch.arange(1.0, 1 + case.heads[0], device=self.torch_device)

    def test_bidirectional(self) -> None:
        """With `causal` False a token sees the whole context."""
        self._need(self.capabilities().non_causal, "attention that is not causal")
        for case in self.cases()[:3]:
            self.check(case, self.step(case, "mixed", causal=False))

    @pytest.mark.parametrize("feature", ["window", "soft_cap", "sinks", "alibi"])
    def test_what_it_does_not_claim_it_refuses(self, feature: str) -> None:
        """A layer with a window, a soft cap, sinks or slopes that it does not claim is refused by `unavailable`, not
        computed wrongly."""
        if getattr(self.capabilities(), feature):
            pytest.skip(f"it claims {feature}")
        case = self._first()[0]
        by_head = self.by_head(case)
        fields: dict[str, Any] = {
            "window": {"window": 4},
            "soft_cap": {"soft_cap": 4.0},
            "sinks": {"sinks": by_head},
            "alibi": {"alibi_slopes": by_head},
        }
        layer = case.layer(**fields[feature])
        full = replace(case.spec(layer), kind="full", window=None)
        assert self.reasons(layer, full, case.block_size), f"it does not claim {feature}, yet takes a layer with one"

    def test_rows_do_not_depend_on_batch_mates(self) -> None:
        """A request alone gives the same bits as in a batch: what one user sees cannot depend on the others."""
        for case in self.cases()[:4]:
            step = self.step(case, "mixed")
            together = step.run(self.backend(case), case.layer())
            for request in range(len(step.contexts)):
                alone = step.alone(request).run(self.backend(case), case.layer())
                assert torch.equal(alone, together[step.rows_of(request)]), f"{case}: request {request}"

    def test_result_does_not_depend_on_where_blocks_lie(self) -> None:
        """The same contexts in other blocks give the same bits."""
        case, backend = self._first()
        layer = case.layer()
        one = self.step(case, "mixed")
        other = self.step(case, "mixed")
        order = torch.cat([torch.tensor([0]), torch.randperm(len(one.layout.views(one.cache)[0]) - 1) + 1])
        order = order.to(self.torch_device)
        for stored in other.layout.views(other.cache):
            stored.copy_(stored[order.argsort()].clone())
        other.geometry.block_table.copy_(order[other.geometry.block_table.long()])
        blocks = other.geometry.slot_mapping // case.block_size
        other.geometry.slot_mapping.copy_(
            order[blocks] * case.block_size + other.geometry.slot_mapping % case.block_size
        )
        assert torch.equal(one.run(backend, layer), other.run(self.backend(case), layer))

    def test_writes_exactly_the_slots(self) -> None:
        """`write_kv` stores each token at its slot, bit for bit, and changes nothing else; slot -1 writes nothing."""
        for case in self.cases()[:4]:
            step = self.step(case, "mixed", padding=3)
            backend = self.backend(case)
            before = [stored.clone() for stored in step.layout.views(step.cache)]
            new = step.key.clone(), step.value.clone()
            backend.prepare(step.geometry)
            backend.write_kv(step.key, step.value, step.cache)
            assert torch.equal(step.key, new[0]) and torch.equal(step.value, new[1]), "it changed its inputs"
            for stored, old, written in zip(step.layout.views(step.cache), before, new, strict=True):
                wanted = old
                for token, slot in enumerate(step.geometry.slot_mapping.tolist()):
                    if slot >= 0:
                        wanted[slot // case.block_size, slot % case.block_size] = written[token]
                assert torch.equal(stored.nan_to_num(7.0), wanted.nan_to_num(7.0)), f"{case}"

    def test_padding_rows_change_nothing(self) -> None:
        """Rows after the last token (of a step padded to a size) leave the others' results as they are."""
        for case in self.cases()[:3]:
            self.check(case, self.step(case, "mixed", padding=5))

    def test_output_is_new_contiguous_and_in_the_querys_dtype(self) -> None:
        """`forward` returns [T, H, head_dim_v], contiguous, in the dtype of `query`, and leaves query and cache as they
        were."""
        for case in self.cases():
            step, layer, backend = self.step(case, "mixed"), case.layer(), self.backend(case)
            fused = torch.cat((step.query, step.query), dim=1)
            query = fused[:, : layer.num_heads]  # a view of a wider product
            backend.prepare(step.geometry)
            backend.write_kv(step.key, step.value, step.cache)
            cache = [x.clone() for x in step.cache]
            out = backend.forward(query, step.cache, layer)
            assert out.shape == (len(step.query), layer.num_heads, layer.head_dim_v)
            assert out.is_contiguous() and out.dtype == query.dtype
            assert torch.equal(query, step.query), "it changed the query"
            for stored, old in zip(step.cache, cache, strict=True):
                assert torch.equal(stored.nan_to_num(7.0), old.nan_to_num(7.0)), "forward changed the cache"
            compare(out, step.expected(layer), case)

    def test_steps_follow_each_other(self) -> None:
        """`prepare` forgets the step before: a short batch after a long one, several layers and caches in turn."""
        case, backend = self._first()
        first, second = self.step(case, "mixed"), self.step(case, "decode", seed=5)
        layers = [case.layer(), replace(case.layer(), index=1, scale=0.5)]
        for step in (first, second, first):
            for layer in layers:
                compare(step.run(backend, layer), step.expected(layer), case)

    def test_large_scores(self) -> None:
        """Scores far apart neither overflow nor vanish."""
        case, backend = self._first()
        step = self.step(case, "mixed")
        step.query *= 300
        torch.testing.assert_close(
            step.run(backend, case.layer()).double().cpu(), step.expected(case.layer()), rtol=1e-2, atol=1e-2
        )

    def _need(self, claimed: bool, what: str) -> None:
        if not claimed:
            pytest.skip(f"it does not claim {what}")


def _values(case: AttentionCase) -> set[tuple[str, Any]]:
    return {("heads", case.heads), ("size", case.head_size), ("block", case.block_size), ("dtype", case.dtype)}


def compare(found: Tensor, expected: Tensor, case: AttentionCase) -> None:
    relative, absolute = TOLERANCES[found.dtype]
    torch.testing.assert_close(
        found.double().cpu(), expected, rtol=relative, atol=absolute, msg=lambda text: f"{case}: {text}"
    )


def forget_what_left_the_window(step: PagedStep, window: int) -> None:
    """Points the table at the null block, which is NaN, where a whole block is behind every query's window."""
    block = step.geometry.block_size
    for request, (new, length) in enumerate(step.contexts):
        for index in range(max(0, length - new - window + 1) // block):
            step.geometry.block_table[request, index] = 0
