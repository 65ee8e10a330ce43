"""The reference ops against independent definitions, and the layers' loading rules."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hotswap.core.contracts.attention import AttentionLayer
from hotswap.core.contracts.kernels import OPS
from hotswap.core.contracts.model import WeightSpec
from hotswap.core.contracts.quantization import LayerSpec, ParamSpec
from hotswap.core.errors import ModelLoadError
from hotswap.core.layers import reference
from hotswap.core.layers.activation import gated_activation
from hotswap.core.layers.embedding import Embedding, OutputHead
from hotswap.core.layers.linear import Linear, part_shape
from hotswap.core.layers.norm import RMSNorm
from hotswap.core.layers.ops import OpTable
from hotswap.core.layers.weights import Parameter, WeightMap, WeightTarget
from hotswap.core.testing.forward_harness import quantization_context
from hotswap.plugins.quantization.none.method import PlainQuantization

OPS_TABLE = OpTable.reference()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(dtype: torch.dtype = torch.float32) -> PlainQuantization:
    return PlainQuantization(quantization_context(dtype=dtype))


# Reference ops


def test_the_table_has_every_op() -> None:
    assert all(getattr(OPS_TABLE, op) is not None for op in OPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_bit_for_bit_that_of_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, weight = normal(5, 48, dtype=dtype), normal(48, seed=1, dtype=dtype)
    theirs = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    theirs.weight.data.copy_(weight)
    assert torch.equal(reference.rms_norm(x, weight, 1e-5), theirs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_wide_norm_is_bit_for_bit_that_of_gemma(dtype: torch.dtype) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    x, weight = normal(5, 48, dtype=dtype), normal(48, seed=1, dtype=dtype)
    theirs = GemmaRMSNorm(48, eps=1e-5).to(dtype)
    theirs.weight.data.copy_(weight)
    ours = RMSNorm(OPS_TABLE, "n", 48, 1e-5, wide=True, one_plus=True, dtype=dtype)
    weights = WeightMap()
    ours.register(weights)
    weights.load([("n.weight", weight)])
    assert torch.equal(ours(x), theirs(x))
    residual = normal(5, 48, seed=2, dtype=dtype)
    total = residual + x
    assert torch.equal(ours.add(x, residual), theirs(total))
    assert torch.equal(residual, total)


def test_add_rms_norm_adds_in_place() -> None:
    x, residual, weight = normal(3, 16), normal(3, 16, seed=1), normal(16, seed=2)
    total = x + residual
    normed = reference.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert torch.equal(normed, reference.rms_norm(total, weight, 1e-6))


def test_rope_rotates_strided_views_in_place_and_leaves_the_rest_alone() -> None:
    tokens, heads, kv_heads, dim, rotary = 4, 3, 2, 8, 6
    fused = normal(tokens, (heads + 2 * kv_heads) * dim)
    before = fused.clone()
    q, k, v = fused.view(tokens, -1, dim).split_with_sizes((heads, kv_heads, kv_heads), 1)
    positions = torch.tensor([0, 7, 3, 3])
    angles = torch.arange(8, dtype=torch.float32)[:, None] * torch.tensor([1.0, 0.3, 0.01])
    reference.rope(q, k, positions, torch.cat((angles.cos(), angles.sin()), 1))
    assert torch.equal(v, before.view(tokens, -1, dim)[:, heads + kv_heads :])
    for token, position in enumerate(positions.tolist()):
        for head in range(heads + kv_heads):
            old, new = before.view(tokens, -1, dim)[token, head], fused.view(tokens, -1, dim)[token, head]
            for pair in range(rotary // 2):
                turn = torch.complex(angles[position, pair].cos(), angles[position, pair].sin())
                rotated = torch.complex(old[pair], old[pair + rotary // 2]) * turn
                assert new[pair] == pytest.approx(float(rotated.real), abs=1e-6)
                assert new[pair + rotary // 2] == pytest.approx(float(rotated.imag), abs=1e-6)
            assert torch.equal(new[rotary:], old[rotary:])


@pytest.mark.parametrize(
    ("op", "function"),
    [
        (reference.silu_mul, lambda gate: gate * torch.sigmoid(gate)),
        (
            reference.gelu_tanh_mul,
            lambda gate: 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))),
        ),
    ],
)
def test_gated_activations(op: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor]) -> None:
    gate_up = normal(5, 24)
    torch.testing.assert_close(op(gate_up), function(gate_up[:, :12]) * gate_up[:, 12:], rtol=1e-5, atol=1e-6)


def test_an_unknown_activation_is_named() -> None:
    assert gated_activation(OPS_TABLE, "silu").apply is OPS_TABLE.silu_mul
    with pytest.raises(ModelLoadError, match="hidden_act='relu2'"):
        gated_activation(OPS_TABLE, "relu2")


def test_reference_linear_widens_its_operands_for_float32_logits() -> None:
    kernel = reference.ReferenceLinear()
    weight, x, bias = (normal(*shape, dtype=torch.bfloat16) for shape in ((7, 32), (3, 32), (7,)))
    packed = kernel.pack(weight)
    assert (packed.out_features, packed.in_features) == (7, 32)
    assert torch.equal(packed.unpack(), weight)
    logits = kernel.apply(x, packed, bias, torch.float32)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T + bias.float())
    assert kernel.apply(x, packed, None).dtype == torch.bfloat16


def test_reference_attention_against_loops_in_float64() -> None:
    layer = AttentionLayer(0, 4, 2, head_dim_k=6, head_dim_v=5, scale=0.3, window=3, soft_cap=2.0)
    query, keys, values = normal(4, 4, 6), normal(9, 2, 6, seed=1), normal(9, 2, 5, seed=2)
    out = reference.attention(query, keys, values, layer)
    for row in range(4):
        at = 5 + row
        for head in range(4):
            seen = range(max(0, at - 2), at + 1)
            scores = torch.stack([query[row, head].double() @ keys[j, head // 2].double() for j in seen]) * 0.3
            weights = (torch.tanh(scores / 2.0) * 2.0).softmax(0)
            expected = sum(w * values[j, head // 2].double() for w, j in zip(weights, seen, strict=True))
            torch.testing.assert_close(out[row, head].double(), expected, rtol=1e-5, atol=1e-6)


# Loading


def test_a_fused_linear_is_its_parts() -> None:
    q, k, bias_q, bias_k = normal(4, 6), normal(2, 6, seed=1), normal(4, seed=2), normal(2, seed=3)
    layer = Linear(plain(), "a.qk", in_features=6, sources=("a.q", "a.k"), parts=(4, 2), bias=True, dtype=torch.float32)
    weights = WeightMap()
    layer.register(weights)
    assert {spec.name: spec.shape for spec in weights.specs()} == {
        "a.q.weight": (4, 6),
        "a.k.weight": (2, 6),
        "a.q.bias": (4,),
        "a.k.bias": (2,),
    }
    report = weights.load([("a.k.bias", bias_k), ("a.k.weight", k), ("a.q.bias", bias_q), ("a.q.weight", q)])
    assert (report.missing, report.unexpected) == ([], [])
    x = normal(3, 6, seed=4)
    torch.testing.assert_close(layer(x), torch.cat((x @ q.T + bias_q, x @ k.T + bias_k), 1))
    assert torch.equal(layer.method.dequantize(), torch.cat((q, k)))


def test_plain_weights_are_copied_and_packed_when_complete() -> None:
    packed: list[Tensor] = []

    class Recording(reference.ReferenceLinear):
        def pack(self, weight: Tensor) -> reference.PlainWeight:
            packed.append(weight)
            return super().pack(weight)

    ops = OpTable(**{op: getattr(OPS_TABLE, op) for op in OPS if op != "linear"}, linear=Recording())
    method = PlainQuantization(quantization_context(ops=ops)).create(LayerSpec("linear", "p", 3, 4, (2, 2)))
    first = torch.ones(2, 3)
    method.load("weight", 0, first)
    first.zero_()  # the checkpoint's memory goes away
    with pytest.raises(ModelLoadError, match=r"part\(s\) \[1\] never came"):
        method.finish_loading()
    method.load("weight", 1, torch.full((2, 3), 2.0))
    method.finish_loading()
    assert torch.equal(packed[0], torch.tensor([[1.0] * 3] * 2 + [[2.0] * 3] * 2))


@pytest.mark.parametrize(
    ("name", "part", "tensor", "message"),
    [
        ("weight", 0, torch.zeros(3, 3), r"part 0, has the shape \[3, 3\]; \[2, 3\] is needed"),
        ("weight", 2, torch.zeros(2, 3), "has no 'weight' of part 2"),
        ("scales", 0, torch.zeros(2, 3), "has no 'scales'"),
        ("weight", 0, torch.zeros(2, 3, dtype=torch.int8), "int8, not plain floating-point"),
        ("weight", 0, torch.zeros(2, 3).to(torch.float8_e4m3fn), "float8_e4m3fn, not plain floating-point"),
    ],
)
def test_plain_weights_refuse_what_does_not_fit(name: str, part: int, tensor: Tensor, message: str) -> None:
    method = plain().create(LayerSpec("linear", "model.x", 3, 4, (2, 2)))
    with pytest.raises(ModelLoadError, match=message) as error:
        method.load(name, part, tensor)
    assert "model.x" in str(error.value)


def test_plain_weights_convert_and_refuse_other_kinds() -> None:
    method = plain(torch.bfloat16).create(LayerSpec("linear", "x", 3, 2, (2,)))
    method.load("weight", 0, torch.ones(2, 3))
    method.finish_loading()
    assert method.dequantize().dtype == torch.bfloat16
    assert method.params() == (ParamSpec("weight", (2, 3), "bfloat16"),)
    with pytest.raises(ModelLoadError, match="experts"):
        plain().create(LayerSpec("experts", "x", 3, 2, (2,)))


def test_part_shapes_of_packed_parameters() -> None:
    assert part_shape(ParamSpec("qweight", (8, 48), "int32", part_dim=1), 16) == (8, 16)
    assert part_shape(ParamSpec("qweight", (64, 6), "int32", part_dim=1, pack_factor=8), 16) == (64, 2)
    assert part_shape(ParamSpec("scale", (), "float32"), 16) == ()


def test_weight_map_names_what_is_wrong() -> None:
    def fresh() -> WeightMap:
        weights = WeightMap()
        weights.add(Parameter(("a.weight",), (3,), torch.float32, "cpu").targets())
        weights.add([WeightTarget(WeightSpec("b.weight", (2,), optional=True), lambda tensor: None)])
        return weights

    with pytest.raises(ModelLoadError, match=r"a\.weight has the shape \[4\]; the config asks for \[3\]"):
        fresh().load([("a.weight", torch.zeros(4))])
    with pytest.raises(ModelLoadError, match=r"a\.weight twice"):
        fresh().load([("a.weight", torch.zeros(3)), ("a.weight", torch.zeros(3))])
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensor.*a\.weight.*such as model\.a\.weight"):
        fresh().load([("model.a.weight", torch.zeros(3))])
    others = [("c", torch.zeros(1)), ("l.rotary_emb.inv_freq", torch.zeros(1))]
    report = fresh().load([("a.weight", torch.zeros(3)), *others])
    assert report.unexpected == ["c"]


def test_a_layer_is_finished_as_soon_as_its_last_tensor_is_in() -> None:
    order: list[str] = []
    weights = WeightMap()
    for layer in ("a", "b"):
        names = [f"{layer}.{part}" for part in ("x", "y")]
        targets = [WeightTarget(WeightSpec(name, (1,)), lambda tensor, name=name: order.append(name)) for name in names]  # type: ignore[misc]
        weights.add(targets, lambda layer=layer: order.append(f"{layer} done"))  # type: ignore[misc]
    weights.load((name, torch.zeros(1)) for name in ("a.x", "b.y", "b.x", "a.y"))
    assert order == ["a.x", "b.y", "b.x", "b done", "a.y", "a done"]


def head_of(tied: bool, weights: dict[str, Tensor], caplog: pytest.LogCaptureFixture) -> tuple[Embedding, OutputHead]:
    embedding = Embedding("embed", 5, 4, dtype=torch.float32)
    head = OutputHead(embedding, plain(), OPS_TABLE.linear, "head", tied=tied, logger=logging.getLogger("test"))
    table = WeightMap()
    head.register(table)
    with caplog.at_level(logging.WARNING):
        table.load(weights.items())
        head.finish()
    return embedding, head


TABLE, OTHER = normal(5, 4), normal(5, 4, seed=9)


@pytest.mark.parametrize(
    ("tied", "weights", "matrix"),
    [
        (True, {"embed.weight": TABLE}, TABLE),
        (True, {"embed.weight": TABLE, "head.weight": TABLE.clone()}, TABLE),
        (True, {"head.weight": OTHER, "embed.weight": TABLE}, OTHER),
        (True, {"head.weight": OTHER}, OTHER),
        (False, {"embed.weight": TABLE, "head.weight": OTHER}, OTHER),
    ],
)
def test_output_heads(tied: bool, weights: dict[str, Tensor], matrix: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    """J02: an equal head beside a tied embedding is fine, a different one is kept, and said so."""
    embedding, head = head_of(tied, weights, caplog)
    hidden = normal(2, 4, seed=5)
    torch.testing.assert_close(head(hidden), hidden @ matrix.T)
    assert torch.equal(embedding(torch.tensor([1, 4])), (weights.get("embed.weight", OTHER))[[1, 4]])
    assert bool(caplog.records) == (tied and len(weights) == 2 and matrix is OTHER)


@pytest.mark.parametrize(
    ("tied", "weights", "name"), [(True, {}, "embed.weight"), (False, {"embed.weight": TABLE}, "head.weight")]
)
def test_a_missing_head_is_named(
    tied: bool, weights: dict[str, Tensor], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ModelLoadError, match=name):
        head_of(tied, weights, caplog)


def test_the_reference_head_shares_the_embedding_s_memory(caplog: pytest.LogCaptureFixture) -> None:
    kept: list[Tensor] = []

    class Recording(reference.ReferenceLinear):
        def pack(self, weight: Tensor) -> reference.PlainWeight:
            kept.append(weight)
            return super().pack(weight)

    embedding = Embedding("embed", 5, 4, dtype=torch.float32)
    head = OutputHead(embedding, plain(), Recording(), "head", tied=True, logger=logging.getLogger("test"))
    table = WeightMap()
    head.register(table)
    table.load([("embed.weight", TABLE)])
    head.finish()
    assert kept[0].data_ptr() == embedding.table.data_ptr()
