"""The benchmarks of loading and of start-up run from end to end, without a GPU and on toy shapes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
SMALL = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 20, "dtype": "float32"}
TOY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


def script(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> ModuleType:
    """The script as a module, ready for `main()` with these arguments."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    return module


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "model", tmp_path / "rows.jsonl"
    settings = json.dumps({key: value for key, value in SMALL.items() if key != "dtype"})
    common = [str(folder), "--toy", "--device", "cpu", "--reps", "1", "--out", str(out)]
    module = script("load", monkeypatch, *common, "--readers", "1,3", "--buffer-mib", "1", "--llm", settings)
    module.main()
    assert len(list(folder.glob("model-*-of-00004.safetensors"))) == 4
    assert "4 tensors are bit for bit as written" in capsys.readouterr().out
    measured = [str(row["what"]) for row in rows(out)]
    assert [what.split(",")[0] for what in measured] == [
        "written",
        "first load of the process",
        *["reading into host memory"] * 2,
        *["staged"] * 2,
        "without staging",
        "the engine: read",
    ]
    assert all(isinstance(row["gb_per_s"], float) and row["device"] == "cpu" for row in rows(out))

    shard = folder / "model-00001-of-00004.safetensors"  # begins with the embedding, which is compared
    content = bytearray(shard.read_bytes())
    content[-1 - 2 * 64] ^= 1 if shard.stat().st_size else 0
    begin = 8 + int.from_bytes(content[:8], "little")
    content[begin + 100] ^= 1
    shard.write_bytes(content)
    module = script("load", monkeypatch, *common, "--skip-engine")
    with pytest.raises(SystemExit, match="did not arrive as it was written"):
        module.main()


@pytest.mark.full
def test_start_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ["--modes", "offline,served", "--device", "cpu", "--runs", "0", "--out", str(out)]
    arguments += ["--config", json.dumps(TOY), "--llm", json.dumps(SMALL)]
    module = script("startup", monkeypatch, *arguments)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    module.main()
    offline, served = (row["seconds"] for row in rows(out))
    assert isinstance(offline, dict) and isinstance(served, dict)
    assert sum(seconds for part, seconds in offline.items() if part != "total") == pytest.approx(
        offline["total"], abs=0.05
    ), "the parts do not add up"
    assert {"import torch and the engine", "device", "model", "weights", "first token"} <= offline.keys()
    assert {"engine: imports", "engine: weights", "engine: engine"} <= served.keys()
    assert served["total"] == pytest.approx(served["ready"] + served["first token"], abs=0.01)
    table = capsys.readouterr().out
    assert "first start" in table and "import torch and the engine" in table


def test_the_line_in_the_log_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("startup", monkeypatch)
    line = '{"message": "start-up in seconds: device 0.004, KV cache 1.250, engine 12.000"}'
    found = module.LINE.search(f"noise\n{line}\n")
    assert module.pairs(found[1]) == [("device", 0.004), ("KV cache", 1.25), ("engine", 12.0)]
    assert module.flags_of({"max_model_len": 5, "enforce_eager": True, "async_scheduling": False}) == [
        "--max-model-len",
        "5",
        "--enforce-eager",
    ]
