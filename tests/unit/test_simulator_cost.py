"""The cost of simulated steps: numbers worked out by hand, and what was measured on an H200."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.contracts.plan import ScheduledRequest, StepPlan
from hotswap.core.devices import Device, find_device
from hotswap.core.errors import UsageError
from hotswap.core.simulator.model_shape import KNOWN_SHAPES, ModelShape, read_shape, shape_of
from hotswap.core.simulator.step_cost import StepCost, StepWork, derive_cost, read_cost, work_of, write_cost

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
TOLERANCE = 0.25


def test_the_work_of_a_plan() -> None:
    """A decode at 100, a whole prompt of 3, 4 tokens of a prompt of which 10 are done and more come."""
    rows = [
        ScheduledRequest(0, 1, 100, True),
        ScheduledRequest(1, 3, 0, True),
        ScheduledRequest(2, 4, 10, False),
    ]
    pairs = 101 + (1 + 2 + 3) + (11 + 12 + 13 + 14)
    assert work_of(StepPlan(0, [], [], rows, 8)) == StepWork(8, 2, 101 + 3 + 14, pairs)


def test_each_part_is_the_larger_of_its_terms() -> None:
    cost = StepCost(
        weight_seconds=10.0,
        token_seconds=1.0,
        row_seconds=0.5,
        context_seconds=0.25,
        pair_seconds=0.125,
        overhead_seconds=3.0,
    )
    assert cost.seconds(StepWork(tokens=4, rows=4, context_tokens=8, pairs=8)) == 10.0 + 2.0 + 3.0  # weights, KV
    assert cost.seconds(StepWork(tokens=20, rows=2, context_tokens=20, pairs=200)) == 21.0 + 25.0 + 3.0  # arithmetic


def test_a_derived_cost() -> None:
    """2 layers of 4 x 4 x (2 x 2 + 2 x 1) / 2 x 2 + 3 x 4 x 8 parameters on a round device."""
    config: dict[str, Any] = {
        "hidden_size": 4,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 10,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    shape = shape_of("tiny", config)
    assert shape.head_dim == 2
    assert shape.layer_parameters == 2 * (4 * 2 * (4 + 2) + 3 * 4 * 8) == 288
    assert (shape.weight_bytes, shape.read_bytes) == (4 * (288 + 40), 4 * (288 + 40))
    assert shape.kv_bytes_per_token == 2 * 2 * 1 * 2 * 4 == 32
    cost = derive_cost(shape, Device("card", 0, bandwidth=1000 / 0.8, flops=100 / 0.65))
    assert cost.weight_seconds == pytest.approx(4 * 328 / 1000)
    assert cost.token_seconds == pytest.approx(2 * 288 / 100)
    assert cost.row_seconds == pytest.approx(2 * 40 / 100)
    assert cost.context_seconds == pytest.approx(32 / 1000)
    assert cost.pair_seconds == pytest.approx(4 * 2 * 2 * 2 / 100)
    untied = shape_of("tiny", {**config, "tie_word_embeddings": False, "torch_dtype": "bfloat16"})
    assert (untied.weight_bytes, untied.read_bytes) == (2 * (288 + 80), 2 * (288 + 40))


def measured_decode() -> list[tuple[int, int, float]]:
    """(batch, context, ms per step) of docs/benchmarks.md."""
    text = BENCHMARKS.read_text()
    table = text.split("| Llama-3.1-8B shape, decode, batch |")[1].split("\n\n")[0]
    rows = [(int(batch), 576, float(ms)) for batch, ms in re.findall(r"^\| (\d+) \| ([\d.]+) \|", table, re.MULTILINE)]
    contexts = text.split("| contexts around | batch: ms per step |")[1].split("\n\n")[0]
    for context, cell in re.findall(r"^\| ([\d,]+) \| (\d+: .*) \|$", contexts, re.MULTILINE):
        rows += [
            (int(batch), int(context.replace(",", "")), float(ms)) for batch, ms in re.findall(r"(\d+): ([\d.]+)", cell)
        ]
    return rows


def on_h200() -> StepCost:
    return derive_cost(read_shape("llama-3.1-8b"), find_device("h200"))


def test_decode_steps_of_an_h200() -> None:
    rows = measured_decode()
    assert len(rows) >= 15
    off = {}
    for batch, context, ms in rows:
        simulated = 1e3 * on_h200().seconds(StepWork(batch, batch, batch * context, batch * context))
        if abs(simulated / ms - 1) > TOLERANCE:
            off[batch, context] = (simulated, ms)
    assert not off


def test_prefill_of_an_h200() -> None:
    text, cost = BENCHMARKS.read_text(), on_h200()
    found = re.search(r"first token of one 2,048-token prompt \| \**([\d.]+) ms", text)
    assert found is not None
    first_token = cost.seconds(StepWork(2048, 1, 2048, 2048 * 2049 // 2))
    assert 1e3 * first_token == pytest.approx(float(found[1]), rel=TOLERANCE)
    found = re.search(r"prefill 32 x 1,024 \| \**([\d,]+) tok/s", text)
    assert found is not None
    step = cost.seconds(StepWork(8192, 8, 8192, 8 * (1024 * 1025 // 2)))  # 8 prompts fill a step
    assert 8192 / step == pytest.approx(float(found[1].replace(",", "")), rel=TOLERANCE)


def test_a_cost_file(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    cost = StepCost(weight_seconds=0.004, token_seconds=2e-5, overhead_seconds=1e-4, source="measured")
    write_cost(path, cost)
    assert read_cost(path) == cost
    path.write_text('{"weight_seconds": 0.004, "token_seconds": 2e-5}')
    assert read_cost(path).source == f"file {path}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"weight_seconds": 1}', "token_seconds"),
        ('{"weight_seconds": 1, "token_seconds": "x"}', r"\$.token_seconds"),
        ('{"weight_seconds": 1, "token_seconds": 1, "speed": 3}', "speed"),
        ('{"weight_seconds": 1, "token_seconds": -1}', "token_seconds must be"),
        ('{"weight_seconds": 0, "token_seconds": 0}', "no time"),
        ("{", "cost.json"),
    ],
)
def test_a_cost_file_that_cannot_be(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        read_cost(path)
    assert str(path) in str(caught.value)


def test_shapes_are_read_from_a_file_a_folder_and_a_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN_SHAPES["smollm2-135m"]))
    known = read_shape("SmolLM2-135M")
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        shape = read_shape(name)
        assert (shape.weight_bytes, shape.window) == (known.weight_bytes, known.window)
    assert known.layer_parameters + known.head_parameters == pytest.approx(134.5e6, rel=0.001)
    assert read_shape("llama-3.1-8b").weight_bytes == pytest.approx(2 * 8.03e9, rel=0.001)
    assert read_shape("llama-3.1-8b", "float32").weight_bytes == 2 * read_shape("llama-3.1-8b").weight_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_local_experts": 8}, "num_local_experts"),
    ],
)
def test_a_config_that_is_not_enough(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shape_of("x", {**KNOWN_SHAPES["llama-3.1-8b"], **change})


def test_a_device_of_unknown_speed_needs_a_cost() -> None:
    shape: ModelShape = read_shape("llama-3.1-8b")
    with pytest.raises(UsageError, match="--cost"):
        derive_cost(shape, Device("x", 0, None, None))
