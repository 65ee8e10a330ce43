"""`hotswap recommend`: numbers worked out by hand, and what may never go down when something goes up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap.core.devices import DEVICES, GIB, Device, available_memory, find_device
from hotswap.core.errors import UsageError
from hotswap.core.trace import TraceRow, write_trace
from hotswap.server.cli.main import main
from hotswap.server.recommend.derivation import (
    Assumed,
    Derivation,
    busiest_rate,
    computed_prompt_tokens,
    derive,
    percentile,
    round_up,
)
from hotswap.server.recommend.model_facts import ModelFacts, StoredModel, facts_of, from_index

# 2 x 4 layers x 2 KV heads x 8 x 2 bytes = 256 bytes a token, 4096 a block of 16. 1,000,000 parameters in 2,000,000 bytes.
MODEL = ModelFacts("model", 4, 2, 8, "bfloat16", 2_000_000, 4096, "2,000,000 bytes")
# 10,096,000 x 0.5 - 2,000,000 - 0 = 3,048,000 bytes: 744 blocks, 743 without the null block.
DEVICE = Device("test", 10_096_000, 100e6, 10e9, utilization=0.5)
PLAIN = Assumed(workspace_bytes=0)


def trace(count: int = 100, gap: float = 1.0, prompt: int = 100, output: int = 50) -> list[TraceRow]:
    return [TraceRow(arrival=number * gap, prompt_tokens=prompt, output_tokens=output) for number in range(count)]


def lines(found: Derivation, heading: str) -> str:
    return "\n".join(line for group, line in found.lines if group == heading)


def test_percentiles_and_rounding() -> None:
    values = list(range(1, 101))
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert percentile([7], 0.99) == 7
    assert [round_up(value, 16) for value in (1, 16, 17)] == [16, 16, 32]


def test_the_window() -> None:
    """100 requests: 98 of 150 tokens, one of 333, one of 1000. p99 is 333, so 336 tokens in blocks of 16."""
    rows = [*trace(98), TraceRow(200.0, 300, 33), TraceRow(201.0, 990, 10)]
    found = derive(rows, MODEL, DEVICE, PLAIN)
    assert found.max_model_len == 336
    assert (found.refused, found.cut_short) == (1, 0)  # 990 prompt tokens do not fit 336
    assert "p99 333 rounded up to blocks of 16: 336" in lines(found, "--max-model-len")
    rows[-1] = TraceRow(201.0, 335, 700)
    found = derive(rows, MODEL, DEVICE, PLAIN)
    assert (found.max_model_len, found.refused, found.cut_short) == (336, 0, 1)


def test_the_window_is_not_wider_than_model_and_memory() -> None:
    rows = trace(prompt=5000)
    found = derive(rows, MODEL, DEVICE, PLAIN)
    assert found.max_model_len == 4096 and found.refused == 100
    small = Device("small", 4_100_000, 100e6, 10e9, utilization=0.5)  # 50,000 bytes: 12 blocks, 11 usable
    found = derive(rows, MODEL, small, PLAIN)
    assert found.max_model_len == 11 * 16 and found.max_num_seqs == 1
    assert len(found.warnings) >= 2


def test_memory() -> None:
    found = derive(trace(), MODEL, DEVICE, PLAIN)
    text = lines(found, "Memory for the KV cache")
    assert "2 (K and V) x 4 layers x 2 KV heads x 8 x 2 bytes = 256 bytes" in text
    assert "(16 tokens x 256 bytes) = 744, one is the null block" in text
    with pytest.raises(UsageError, match="does not fit small"):
        derive(trace(), MODEL, Device("small", 4_000_000, 1e9, 1e9, utilization=0.5), PLAIN)


def test_seats_by_littles_law_with_measured_speeds() -> None:
    """1 request a second; 100 prompt tokens at 1000/s are 0.1 s, 50 tokens at 0.078 s are 3.9 s: 4 at once on average,
    4 + 3 x 2 = 10 seats. 150 tokens are 10 blocks: 743 // 10 = 74 fit."""
    found = derive(trace(101), MODEL, DEVICE, Assumed(workspace_bytes=0, tpot=0.078, prefill_rate=1000))
    assert busiest_rate(trace(101)) == (1.0, 60.0)
    assert found.max_num_seqs == 10
    text = lines(found, "--max-num-seqs")
    assert "1/s x 4 s = 4 requests at once" in text and "4 + 3 x sqrt(4) = 10" in text
    assert "743 blocks / 10 (p95 length 150 tokens, in blocks) = 74 requests at once" in text
    # A step: 10 decode tokens + min(100, 0.2 s x 1000/s = 200) = 110, rounded up to 112.
    assert found.max_num_batched_tokens == 112
    # 10 x 160 tokens and a block, 256 bytes each.
    assert found.kv_cache_bytes == (10 * 160 + 16) * 256


def test_seats_by_the_devices_speed() -> None:
    """prefill: 100 x 2 x 1e6 / (0.4 x 10e9) = 0.05 s: 5 % of the device. decode: 100e6 x 0.6 x 0.95 = 57e6 bytes a second;
    KV read of a request: 125 x 256 = 32,000. N = (0.05 + 50 x 2e6 / 57e6) / (1 - 50 x 32,000 / 57e6) = 1.856."""
    found = derive(trace(101), MODEL, DEVICE, PLAIN)
    average = (0.05 + 50 * 2e6 / 57e6) / (1 - 50 * 32_000 / 57e6)
    assert found.max_num_seqs == math.ceil(average + 3 * math.sqrt(average)) == 6
    assert f"{average:.3g} requests at once" in lines(found, "--max-num-seqs")


def test_memory_bounds_the_seats() -> None:
    found = derive(trace(500, gap=0.01), MODEL, DEVICE, Assumed(workspace_bytes=0, tpot=0.1, prefill_rate=100_000))
    assert found.max_num_seqs == 74
    assert "memory holds 74 requests at once" in found.warnings[0]


def test_a_device_that_cannot_keep_up_is_told() -> None:
    found = derive(trace(500, gap=0.001), MODEL, DEVICE, PLAIN)
    assert any("cannot keep up" in warning for warning in found.warnings)
    assert found.max_num_seqs == 74


def test_all_at_once_and_one_alone() -> None:
    found = derive([TraceRow(5.0, 100, 50)] * 7, MODEL, DEVICE, PLAIN)
    assert found.max_num_seqs == 7
    assert derive(trace(1), MODEL, DEVICE, PLAIN).max_num_seqs == 1


def test_shared_prefixes_are_computed_once() -> None:
    rows = [TraceRow(float(number), 100, 1, prefix="faq", prefix_tokens=80) for number in range(10)]
    assert computed_prompt_tokens(rows, True) == 100 + 9 * 20
    assert computed_prompt_tokens(rows, False) == 1000


def test_long_prompts_are_cut_into_steps_that_do_not_stall() -> None:
    rows = trace(101, prompt=2000)
    found = derive(rows, MODEL, DEVICE, Assumed(workspace_bytes=0, tpot=0.001, prefill_rate=4000, stall_seconds=0.1))
    assert found.max_num_batched_tokens == round_up(found.max_num_seqs + 400, 16)


def test_unknown_speed_is_asked_for() -> None:
    nameless = Device("of 1 GiB", GIB, None, None)
    with pytest.raises(UsageError, match="--prefill-rate"):
        derive(trace(), MODEL, nameless, PLAIN)
    with pytest.raises(UsageError, match="--tpot"):
        derive(trace(), MODEL, nameless, Assumed(workspace_bytes=0, prefill_rate=1000))
    assert derive(trace(), MODEL, nameless, Assumed(workspace_bytes=0, prefill_rate=1000, tpot=0.1)).max_num_seqs > 1


rows_of_any_kind = st.lists(
    st.builds(
        TraceRow,
        arrival=st.floats(0, 300, allow_nan=False),
        prompt_tokens=st.integers(1, 3000),
        output_tokens=st.integers(0, 1000),
    ),
    min_size=1,
    max_size=40,
)


@given(rows_of_any_kind, st.integers(1, 500))
def test_longer_requests_never_lower_the_window(rows: list[TraceRow], more: int) -> None:
    longer = [TraceRow(row.arrival, row.prompt_tokens + more, row.output_tokens) for row in rows]
    before, after = derive(rows, MODEL, DEVICE, PLAIN), derive(longer, MODEL, DEVICE, PLAIN)
    assert after.max_model_len >= before.max_model_len


@given(rows_of_any_kind, st.integers(1, 10**7))
def test_more_memory_never_lowers_anything(rows: list[TraceRow], more: int) -> None:
    larger = Device("larger", DEVICE.memory_bytes + more, DEVICE.bandwidth, DEVICE.flops, DEVICE.utilization)
    before, after = derive(rows, MODEL, DEVICE, PLAIN), derive(rows, MODEL, larger, PLAIN)
    assert after.max_num_seqs >= before.max_num_seqs and after.max_model_len >= before.max_model_len


@given(rows_of_any_kind, st.floats(1.0, 10.0))
def test_a_slower_token_never_lowers_the_seats(rows: list[TraceRow], slower: float) -> None:
    fast = Assumed(workspace_bytes=0, tpot=0.01, prefill_rate=10_000)
    slow = Assumed(workspace_bytes=0, tpot=0.01 * slower, prefill_rate=10_000)
    assert derive(rows, MODEL, DEVICE, slow).max_num_seqs >= derive(rows, MODEL, DEVICE, fast).max_num_seqs


@given(rows_of_any_kind)
def test_what_is_recommended_fits(rows: list[TraceRow]) -> None:
    """The window's longest request fits the cache, every seat's share is in the budget, a step has room for all seats."""
    found = derive(rows, MODEL, DEVICE, PLAIN)
    budget = int(DEVICE.memory_bytes * DEVICE.utilization) - MODEL.weight_bytes
    assert found.max_model_len * MODEL.kv_bytes_per_token <= found.kv_cache_bytes <= budget
    assert found.max_num_batched_tokens > found.max_num_seqs >= 1
    assert found.max_model_len % 16 == 0 and found.max_num_batched_tokens % 16 == 0


# Devices and models.


def test_devices() -> None:
    assert find_device("H200").memory_bytes == 140 * GIB
    assert find_device("A100_80g") is DEVICES["a100-80g"]
    with pytest.raises(UsageError, match="did you mean 'h100'"):
        find_device("h1000")
    cpu = find_device("cpu", lambda: 8 * GIB)
    assert cpu.memory_bytes == 8 * GIB and cpu.guessed


def test_available_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 2048 kB\nMemAvailable:    1024 kB\n")
    assert available_memory(meminfo) == 1 << 20
    assert available_memory(tmp_path / "missing") > 0


CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 100,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "torch_dtype": "float16",
}


def test_model_facts() -> None:
    facts = facts_of("m", StoredModel(CONFIG, 4000), "safetensors", on_cpu=False)
    assert (facts.dtype, facts.weight_bytes, facts.kv_bytes_per_token) == ("float16", 4000, 2 * 2 * 2 * 16 * 2)
    assert facts_of("m", StoredModel(CONFIG, 4000), "safetensors", on_cpu=True).weight_bytes == 8000  # as float32
    forced = facts_of("m", StoredModel(CONFIG, 4000), "safetensors", dtype="bfloat16", on_cpu=True)
    assert (forced.weight_bytes, forced.parameters, forced.window) == (4000, 2000, 512)
    # 2 x 1000 x 64 + 2 x (64 x 16 x (2 x 4 + 2 x 2) + 3 x 64 x 100) = 191,  as bfloat16 twice the bytes
    gguf = facts_of("m", StoredModel(CONFIG, 1), "gguf", on_cpu=True)
    assert gguf.parameters == 2 * 1000 * 64 + 2 * (64 * 16 * 12 + 3 * 64 * 100)
    nested = {"text_config": CONFIG, "model_type": "vlm"}
    assert facts_of("m", StoredModel(nested, 4000), "safetensors", on_cpu=False).layers == 2
    with pytest.raises(UsageError, match="no num_hidden_layers"):
        facts_of("m", StoredModel({**CONFIG, "num_hidden_layers": None}, 1), "safetensors", on_cpu=False)


# The command.


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """A folder of a large model without its weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    index = {"metadata": {"total_size": 400_000}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_the_command(indexed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    write_trace(file, trace())
    words = ["recommend", str(indexed), "--trace", str(file), "--device", "l4", "--block-size", "32"]
    assert main(words) == 0
    text = capsys.readouterr().out
    for heading in ("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "Assumed", "Not known"):
        assert f"\n{heading}\n" in text
    command = text.splitlines()[-1]
    assert command.startswith(f"hotswap serve {indexed} --max-model-len 160 --max-num-seqs ")
    assert command.endswith("--gpu-memory-utilization 0.9 --block-size 32")
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["command"] == command and answer["max_model_len"] == 160
    assert answer["weight_bytes"] == 400_000 and answer["derivation"] and answer["assumed"] and answer["not_known"]


def test_the_command_for_this_machine_says_the_bytes(
    indexed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    write_trace(file, trace(20))
    assert main(["recommend", str(indexed), "--trace", str(file), "--device", "cpu", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert f"--kv-cache-memory-bytes {answer['kv_cache_bytes']}" in answer["command"]
    assert any("guess" in line for line in answer["assumed"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "--trace FILE is needed"),
        (["--trace", "missing.jsonl"], "trace missing.jsonl: No such file"),
        (["--trace", "TRACE"], "--device NAME or --device-memory GIB is needed"),
        (["--trace", "TRACE", "--device", "h10"], "did you mean 'h100'"),
        (["--trace", "TRACE", "--device-memory", "8"], "--prefill-rate"),
        (["--trace", "TRACE", "--device", "l4", "--tpot", "0"], "--tpot must be above 0"),
        (["--trace", "TRACE", "--device", "l4", "--device-memory", "0.5"], "does not fit l4"),
    ],
)
def test_the_command_refuses_in_one_line(
    indexed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    file = tmp_path / "trace.jsonl"
    write_trace(file, trace())
    assert main(["recommend", str(indexed), *(str(file) if word == "TRACE" else word for word in words)]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_an_index_that_is_none(tmp_path: Path) -> None:
    assert from_index(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert from_index(tmp_path) is None
