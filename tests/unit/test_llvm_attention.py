"""CPU paged attention against a dense float64 reference; the bits of a row depend on nothing but the row."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from hotswap.core.layers.jit import assembly, generic_target, host_target
from hotswap.core.layers.jit import rope_write_kv as rope
from hotswap.core.layers.jit.paged_cache import PagedCache
from hotswap.plugins.attention.paged_cpu import kernel as module
from hotswap.plugins.attention.paged_cpu.kernel import PagedAttention, paged_attention, plan_attention
from hotswap.plugins.attention.paged_cpu.kernel_code import Shape, build
from hotswap.plugins.kernels.llvm_cpu import elementwise, linear

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    """The dense reference makes many small float64 operations; the kernel's threads are given where they matter."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Case:
    """A step: context lengths, how many of their last tokens are queries, and everything in its place."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor

    def run(self, **options: object) -> torch.Tensor:
        scale = self.q.shape[2] ** -0.5
        return paged_attention(self.q, self.keys, self.values, self.starts, self.lengths, self.table, scale, **options)  # type: ignore[arg-type]

    def dense(self, causal: bool = True, window: int = 0, soft_cap: float = 0.0) -> torch.Tensor:
        tokens, heads, d = self.q.shape
        kv_heads, block_size = self.keys.shape[1], self.keys.shape[3]
        out = torch.zeros(tokens, heads, d, dtype=torch.float64)
        for r, length in enumerate(self.lengths.tolist()):
            start, stop = self.starts[r : r + 2].tolist()
            blocks = self.table[r, : -(-length // block_size)].long()
            k = self.keys[blocks].double().permute(0, 3, 1, 2).reshape(-1, kv_heads, d)[:length]
            v = self.values[blocks].double().permute(0, 2, 1, 3).reshape(-1, kv_heads, d)[:length]
            k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
            scores = torch.einsum("thd,khd->htk", self.q[start:stop].double(), k) * d**-0.5
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            query = torch.arange(length - (stop - start), length)[:, None]
            key = torch.arange(length)[None]
            seen = torch.ones(stop - start, length, dtype=torch.bool)
            if causal:
                seen &= key <= query
            if window:
                seen &= key > query - window
            weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
            out[start:stop] = torch.einsum("htk,khd->thd", weights, v)
        return out


def make_case(
    contexts: list[int],
    queries: list[int],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    d: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = F32,
    cache_dtype: torch.dtype = F32,
    seed: int = 0,
) -> Case:
    """Blocks in random order, queries a view of a fused qkv, unwritten cache slots and the null block full of NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-c // block_size) for c in contexts]
    total = sum(counts) + 1
    order = (torch.randperm(total - 1, generator=generator) + 1).int()
    table = torch.zeros(len(contexts), max(counts) + 1, dtype=torch.int32)
    keys = torch.randn(total, kv_heads, d, block_size, generator=generator).to(cache_dtype)
    values = torch.randn(total, kv_heads, block_size, d, generator=generator).to(cache_dtype)
    keys[0] = values[0] = math.nan
    at = 0
    for r, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        table[r, :count] = order[at : at + count]
        at += count
        if context % block_size:
            keys[int(table[r, count - 1]), :, :, context % block_size :] = math.nan
            values[int(table[r, count - 1]), :, context % block_size :] = math.nan
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    qkv = torch.randn(int(starts[-1]), (heads + 2 * kv_heads) * d, generator=generator).to(dtype)
    q = qkv[:, : heads * d].view(-1, heads, d)
    return Case(q, keys, values, starts, torch.tensor(contexts).int(), table)


def assert_close(actual: torch.Tensor, exact: torch.Tensor) -> None:
    tolerance = 2e-6 if actual.dtype == F32 else 2**-8
    torch.testing.assert_close(actual.double(), exact, rtol=tolerance, atol=3e-6 if actual.dtype == F32 else 2**-9)


OPTIONS: list[dict[str, object]] = [
    {},
    {"causal": False},
    {"window": 7},
    {"window": 150},
    {"soft_cap": 2.0},
    {"window": 1},
]


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(F32, F32), (BF16, BF16), (F32, BF16)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "block_size"),
    [(9, 3, 64, 16), (4, 4, 24, 16), (8, 1, 80, 4), (7, 1, 96, 8), (4, 2, 20, 32), (2, 1, 128, 16), (2, 2, 5, 12)],
)
def test_against_float64(
    dtype: torch.dtype, cache_dtype: torch.dtype, heads: int, kv_heads: int, d: int, block_size: int
) -> None:
    rng = random.Random(d)
    contexts = [1, 16, 17, 128, 129, 300, rng.randint(1, 400)]
    queries = [1, 16, 1, 128, 40, 1, rng.randint(1, contexts[-1])]
    shape = {"heads": heads, "kv_heads": kv_heads, "d": d, "block_size": block_size}
    case = make_case(contexts, queries, dtype=dtype, cache_dtype=cache_dtype, seed=d, **shape)
    for options in OPTIONS:
        assert_close(case.run(threads=2, **options), case.dense(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("context", [1, 2, 15, 16, 33, 127, 128, 129, 256, 257])
def test_one_sequence(context: int) -> None:
    for queries in {1, context, max(1, context // 2)}:
        case = make_case([context], [queries], seed=context)
        assert_close(case.run(), case.dense())


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(F32, F32), (BF16, BF16)])
@pytest.mark.parametrize("block_size", [16, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (5, 1), (3, 3)])
@pytest.mark.parametrize("options", [{}, {"window": 37}, {"soft_cap": 3.0}])
def test_bits_do_not_depend_on_batch_or_chunks(
    dtype: torch.dtype, cache_dtype: torch.dtype, block_size: int, heads: int, kv_heads: int, options: dict[str, object]
) -> None:
    """A prompt at once, in chunks, token by token, and beside others: the same bits at each position."""
    whole = make_case(
        [300], [300], heads=heads, kv_heads=kv_heads, block_size=block_size, dtype=dtype, cache_dtype=cache_dtype
    )
    expected = whole.run(**options)
    other = make_case(
        [77, 500],
        [1, 30],
        heads=heads,
        kv_heads=kv_heads,
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        seed=1,
    )
    for sizes in ([1, 99, 128, 72], [13] * 23 + [1], [150, 150], [299, 1]):
        end = 0
        for size in sizes:
            end += size
            part = dataclasses.replace(
                whole,
                q=whole.q[end - size : end],
                starts=torch.tensor([0, size]).int(),
                lengths=torch.tensor([end]).int(),
            )
            assert torch.equal(part.run(**options), expected[end - size : end]), (sizes, end)
    # The last 40 tokens as the middle sequence of a batch of three.
    offset = len(whole.keys)
    wide = max(whole.table.shape[1], other.table.shape[1])
    table = torch.zeros(3, wide, dtype=torch.int32)
    table[1, : whole.table.shape[1]] = whole.table[0]
    table[[0, 2], : other.table.shape[1]] = other.table + offset
    batch = Case(
        q=torch.cat([other.q[:1], whole.q[260:], other.q[1:]]),
        keys=torch.cat([whole.keys, other.keys]),
        values=torch.cat([whole.values, other.values]),
        starts=torch.tensor([0, 1, 41, 71]).int(),
        lengths=torch.tensor([77, 300, 500]).int(),
        table=table,
    )
    result, alone = batch.run(**options), other.run(**options)
    assert torch.equal(result[1:41], expected[260:])
    assert torch.equal(result[:1], alone[:1]) and torch.equal(result[41:], alone[1:])


def test_bits_do_not_depend_on_where_blocks_are() -> None:
    case = make_case([200, 90], [10, 90])
    expected = case.run()
    order = torch.randperm(len(case.keys), generator=torch.Generator().manual_seed(5))
    moved = dataclasses.replace(
        case, keys=case.keys[order], values=case.values[order], table=order.argsort()[case.table.long()].int()
    )
    assert torch.equal(moved.run(), expected)


def test_sequences_may_share_blocks() -> None:
    case = make_case([100, 100], [1, 1])
    case.table[1, :6] = case.table[0, :6]
    assert_close(case.run(), case.dense())


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    rng = random.Random(0)
    contexts = [2000, *(rng.randint(1, 60) for _ in range(20))]
    case = make_case(contexts, [1] * 10 + [min(c, 9) for c in contexts[10:]], cache_dtype=BF16)
    alone = case.run(threads=1)
    assert_close(alone, case.dense())
    for threads in (2, 3):
        for _ in range(5):
            assert torch.equal(case.run(threads=threads), alone)


@pytest.mark.parametrize(("width", "registers"), [(4, 16), (16, 32)])
@pytest.mark.parametrize("block_size", [16, 4])
def test_other_vector_shapes(monkeypatch: pytest.MonkeyPatch, width: int, registers: int, block_size: int) -> None:
    target = dataclasses.replace(host_target(), width=width, registers=registers)
    monkeypatch.setattr(module, "host_target", lambda: target)
    for dtype in (F32, BF16):
        case = make_case([150, 20], [33, 1], d=40, block_size=block_size, dtype=dtype, cache_dtype=dtype)
        assert_close(case.run(window=70), case.dense(window=70))


def test_large_scores_neither_overflow_nor_vanish() -> None:
    case = make_case([200], [200])
    case = dataclasses.replace(case, q=case.q * 300)
    torch.testing.assert_close(case.run().double(), case.dense(), rtol=1e-4, atol=1e-4)


def test_a_layer_called_with_the_fused_qkv_and_padding() -> None:
    case = make_case([30, 5], [3, 1])
    layer = PagedAttention(6, PagedCache.of(case.keys, case.values), 32**-0.5, F32)
    plan = plan_attention(case.starts, case.lengths, case.table, 3)
    assert plan.tokens == 4
    qkv = torch.randn(6, 10 * 32)
    qkv[:4, : 6 * 32] = case.q.reshape(4, -1)
    out = torch.full((6, 6 * 32), 7.0)
    assert layer(qkv, plan, out) is out
    assert torch.equal(out[:4], case.run().view(4, -1))
    assert (out[4:] == 7).all()


def test_a_sequence_without_queries_has_no_work() -> None:
    case = make_case([30, 50, 20], [2, 0, 3])
    assert_close(case.run(), case.dense())
    assert plan_attention(case.starts, case.lengths, case.table, 3).items[:, 0].tolist() == [0, 2]


def test_the_longest_work_comes_first() -> None:
    starts, lengths = torch.tensor([0, 1, 2, 102]).int(), torch.tensor([10, 4000, 100]).int()
    plan = plan_attention(starts, lengths, torch.zeros(3, 250, dtype=torch.int32), 3)
    assert plan.items[0, 0] == 1 and plan.items[-1].tolist() == [0, 0]
    assert sorted(plan.items[plan.items[:, 0] == 2, 1].tolist()) == list(range(0, 300, 48))


def test_wrong_arguments_are_named() -> None:
    case = make_case([30], [3])
    with pytest.raises(ValueError, match="no multiple"):
        dataclasses.replace(case, q=torch.randn(3, 5, 32)).run()
    with pytest.raises(ValueError, match="heads of 16"):
        dataclasses.replace(case, q=torch.randn(3, 6, 16)).run()
    with pytest.raises(ValueError, match="seq_lens must be int32"):
        dataclasses.replace(case, lengths=case.lengths.long()).run()
    with pytest.raises(ValueError, match="KV cache is"):
        dataclasses.replace(case, values=case.keys).run()
    with pytest.raises(TypeError, match="float16"):
        dataclasses.replace(case, q=case.q.half()).run()
    with pytest.raises(ValueError, match=r"\[R \+ 1\]"):
        dataclasses.replace(case, starts=case.starts[:1]).run()


@pytest.mark.parametrize(
    ("triple", "instruction"), [("x86_64-unknown-linux-gnu", "mulps"), ("aarch64-unknown-linux-gnu", "fmla")]
)
def test_code_for_the_baseline_cpu_of_other_machines(triple: str, instruction: str) -> None:
    """Compiled only: no such machine is here to run it."""
    target = generic_target(triple, 4, has_fma=triple.startswith("aarch64"))
    modules = [
        build(target, Shape(64, 16, 3, "f32", "bf16")),
        build(target, Shape(20, 4, 1, "bf16", "bf16")),
        linear.build(target, "bf16", "bf16"),
        elementwise.build_norm(target, "bf16", "f32", add=True, wide=False),
        elementwise.build_gate(target, "silu_mul", "bf16"),
        rope.build(target, "bf16", "f32"),
    ]
    for code in modules:
        text = assembly(code)
        assert instruction in text
        assert "fmaf" not in text  # no call of the C library for each lane
