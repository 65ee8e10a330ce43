"""The kernels of `triton` pass the conformance suite on a card, in every dtype; and what only a card can show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hotswap.core.contracts.provider import DeviceInfo
from hotswap.core.layers import reference
from hotswap.core.testing.suites import KernelsSuite

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def card() -> DeviceInfo:
    """What torch says of the device; a stand-in where there is none, for collection."""
    kind = "cuda" if torch.version.hip is None else "rocm"
    if not torch.cuda.is_available():
        return DeviceInfo(kind=kind, name="none", capability=(9, 0))
    capability = torch.cuda.get_device_capability() if kind == "cuda" else (0, 0)
    return DeviceInfo(kind=kind, name=torch.cuda.get_device_name(), capability=capability)


class OnCard(KernelsSuite):
    plugin = "hotswap.plugins.kernels.triton"
    torch_device = "cuda"
    device = card()


class TestOnCardLinear(OnCard):
    op = "linear"


class TestOnCardRmsNorm(OnCard):
    op = "rms_norm"


class TestOnCardAddRmsNorm(OnCard):
    op = "add_rms_norm"


class TestOnCardRope(OnCard):
    op = "rope"


class TestOnCardRopeWriteKv(OnCard):
    op = "rope_write_kv"


class TestOnCardSiluMul(OnCard):
    op = "silu_mul"


class TestOnCardGeluTanhMul(OnCard):
    op = "gelu_tanh_mul"


class TestOnCardStepInputs(OnCard):
    op = "step_inputs"


class TestOnCardArgmax(OnCard):
    op = "argmax"


class TestOnCardPenalize(OnCard):
    op = "penalize"


class TestOnCardDraw(OnCard):
    op = "draw"


class TestOnCardGatherLogprobs(OnCard):
    op = "gather_logprobs"


def kernels(op: str) -> Callable[..., Any]:
    """An elementwise op, with dependent launches where the card has them."""
    from hotswap.plugins.kernels.triton import activation, norm, rope

    module = next(module for module in (activation, norm, rope) if hasattr(module, op))
    return partial(getattr(module, op), pdl=card().capability >= (9, 0))


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_a_narrow_cache_gets_rounded_values(cache_dtype: torch.dtype) -> None:
    """Casts round to the nearest, as torch's do; the suite itself uses only numbers that need no rounding."""
    qkv = torch.randn(300, 12, 64, device="cuda", dtype=torch.bfloat16) * 5
    q, k, v = qkv.split_with_sizes((6, 3, 3), 1)
    cache = torch.zeros(2, 20, 16, 3, 64, device="cuda").to(cache_dtype)
    slots, positions = torch.randperm(320, device="cuda")[:300], torch.zeros(300, dtype=torch.int64, device="cuda")
    kernels("rope_write_kv")(q, k, v, positions, None, cache[0], cache[1], slots)
    for side, given in ((cache[0], k), (cache[1], v)):
        written = side.reshape(-1, 3, 64)[slots].float()
        assert torch.equal(written, given.to(cache_dtype).float())


def test_a_cache_beyond_32_bit_offsets() -> None:
    """Slots more than 2^31 elements into a cache."""
    blocks = 2**31 // (16 * 8 * 128) + 100
    if torch.cuda.mem_get_info()[0] < 3 * blocks * 16 * 8 * 128 * 2:
        pytest.skip("needs 13 GB of memory on the card")
    keys = torch.zeros(blocks, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    values = torch.zeros(blocks, 8, 16, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    q, k, v = (torch.randn(2, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8, 8))
    slots, positions = torch.tensor([3, blocks * 16 - 1], device="cuda"), torch.tensor([0, 1], device="cuda")
    kernels("rope_write_kv")(q, k, v, positions, None, keys, values, slots)
    for cache, given in ((keys, k), (values, v)):
        assert torch.equal(cache[0, 3], given[0]) and torch.equal(cache[-1, 15], given[1])
        assert int((cache[-1, :15] != 0).sum()) == 0


@pytest.mark.parametrize("rows", [1, 65_536, 70_000])
def test_more_rows_than_a_grid_has_in_its_second_dimension(rows: int) -> None:
    gate_up = torch.randn(rows, 128, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(kernels("silu_mul")(gate_up), reference.silu_mul(gate_up), rtol=2**-7, atol=1e-6)
    x, weight = gate_up[:, :64], torch.randn(64, device="cuda", dtype=torch.bfloat16)
    found, wanted = kernels("rms_norm")(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found, wanted, rtol=2**-6, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 256, 2048])
def test_a_chain_in_a_graph_gives_the_same_bits(rows: int) -> None:
    """Each kernel of a chain of dependent launches sees all that the one before it wrote, also when replayed many times."""
    x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
    residual, weight = torch.randn_like(x), torch.randn(512, device="cuda", dtype=torch.bfloat16)

    def chain(carried: Tensor, hidden: Tensor) -> Tensor:
        for _ in range(12):
            normed = kernels("add_rms_norm")(hidden, carried, weight, 1e-5)
            hidden = kernels("silu_mul")(torch.cat((normed, carried), 1))
            hidden = kernels("rms_norm")(hidden, weight, 1e-5)
        return hidden

    wanted_residual = residual.clone()
    wanted = chain(wanted_residual, x)
    carried = residual.clone()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        carried.copy_(residual)
        out = chain(carried, x)
    for _ in range(20):
        out.fill_(7.0)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted) and torch.equal(carried, wanted_residual)
