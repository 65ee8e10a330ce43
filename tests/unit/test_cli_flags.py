"""The command line: flags out of the models, one line and status 2 for each refusal, and a quick --help."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.config import EngineConfig, ServerConfig
from hotswap.core.errors import UsageError
from hotswap.core.host import guess_device
from hotswap.server.cli.flags import add_flags, flag_name, flat_fields, human_int
from hotswap.server.cli.known_flags import add_known_flags
from hotswap.server.cli.main import COMMANDS, Parser, main
from hotswap.server.cli.settings import Settings, add_config_flag, read_settings
from hotswap.server.cli.spelling import spelled

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")}


def serve_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="hotswap serve")
    add_config_flag(parser)
    add_flags(parser, EngineConfig)
    add_flags(parser, ServerConfig)
    add_known_flags(parser)
    return parser


def settings(*words: str) -> Settings:
    parser = serve_parser()
    return read_settings(parser.parse_args(spelled(words, parser)), EngineConfig, ServerConfig)


def test_every_field_is_a_flag_with_help() -> None:
    parser = serve_parser()
    options = {option: action for action in parser._actions for option in action.option_strings}
    for config in (EngineConfig, ServerConfig):
        for name, info, _ in flat_fields(config):
            assert info.description, name
            assert flag_name(name) in options
    for short, name in {"-q": "quantization", "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size"}.items():
        assert options[short].dest == name


def test_only_given_flags_are_settings() -> None:
    assert settings().command_line == {}
    assert settings("./model", "--max-num-seqs", "8").command_line == {"model": "./model", "max_num_seqs": 8}
    assert settings().build(EngineConfig) == EngineConfig()
    assert settings().build(ServerConfig) == ServerConfig()


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--max-num-seqs", "8"], "max_num_seqs", 8),
        (["--max-model-len", "auto"], "max_model_len", None),
        (["--gpu-memory-utilization=0.5"], "gpu_memory_utilization", 0.5),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--enforce-eager"], "enforce_eager", True),
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["-q", "none"], "quantization", "none"),
        (["--served-model-name", "a", "--served-model-name", "b"], "served_model_name", ["a", "b"]),
        (["--override-generation-config", '{"temperature": 0}'], "override_generation_config", {"temperature": 0}),
        (["--plugin", "policy=fcfs", "--plugin", "no:x"], "plugin", ["policy=fcfs", "no:x"]),
        (["--port", "0"], "port", 0),
        (["--model", "m"], "model", "m"),
        (["m", "--model", "m"], "model", "m"),
        (["--dtype", "bfloat16"], "dtype", "bfloat16"),
        (["--dtype", "half"], "dtype", "float16"),
        (["--dtype=float"], "dtype", "float32"),
        (["--generation-config", "vllm"], "generation_config", "none"),
        (["--max-model-len", "8k"], "max_model_len", 8000),
        (["--max-model-len", "8K"], "max_model_len", 8192),
        (["--max-model-len", "-1"], "max_model_len", None),
        (["--device-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--disable-prefix-caching"], "enable_prefix_caching", False),
        (["--enable-log-stats"], "disable_log_stats", False),
        (["--no-disable-log-stats"], "disable_log_stats", False),
        (["--disable-log-requests"], "enable_log_requests", False),
        (["m", "--served-model-name", "a", "b", "--port", "0"], "served_model_name", ["a", "b"]),
        (["--served-model-name", "a", "--served-model-name=b"], "served_model_name", ["a", "b"]),
        (["--override-generation-config.temperature", "0.5"], "override_generation_config", {"temperature": 0.5}),
        (
            ["--override-generation-config.top_k=3", "--override_generation_config.stop", "x y"],
            "override_generation_config",
            {"top_k": 3, "stop": "x y"},
        ),
    ],
)
def test_values(words: list[str], name: str, value: Any) -> None:
    assert settings(*words).command_line[name] == value


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Runs a command that must be refused; returns its one line."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hotswap: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["plugin"], "unknown command 'plugin'; did you mean 'plugins'?"),
        (["plugins", "--plugn", "policy=fcfs"], "unknown flag --plugn; the nearest one is --plugin"),
        (["plugins", "--schedule-policy", "lpm"], "unknown flag --schedule-policy: here it is --scheduling-policy"),
        (["plugins", "--strict"], "unknown flag --strict; the nearest one is --strict-plugins"),
        (["plugins", "--log-level", "loud"], "invalid choice: 'loud'"),
        (["plugins", "explain", "polcy"], "did you mean 'policy'?"),
        (["plugins", "--plugin", "policy=nope"], "unknown policy 'nope' (--plugin policy=nope, command line)"),
        (["plugins", "--plugin", "policy=fcfs,x=1"], "policy 'fcfs' of hotswap"),
        (["plugins", "--plugin", "policy=fcfs", "--scheduling-policy", "priority"], "policy: two choices"),
        (["plugins", "--plugin", "./missing.py"], "there is no file ./missing.py"),
        (["plugins", "--plugin", "missing.module"], "No module named 'missing'"),
        (["plugins", "--plugin", "no:missing"], "nothing of that name is installed"),
        (["plugins", "--config", "missing.yaml"], "--config missing.yaml: No such file"),
        (["plugins", "-x"], "unknown flag -x"),
        (["plugins", "-x", "3"], "unknown flag -x"),
        (["serve", "--ctx-size", "4096"], "unknown flag --ctx-size: here it is --max-model-len (a flag of llama.cpp)"),
        (["serve", "--ctx_size=4096"], "unknown flag --ctx-size: here it is --max-model-len"),
        (["serve", "-c", "4096"], "unknown flag -c: here it is --max-model-len"),
        (["serve", "-hf", "org/name:Q4"], "unknown flag -hf: here it is MODEL as the first argument"),
        (["serve", "-ngl=99"], "unknown flag -ngl: a model is on one device whole (a flag of llama.cpp)"),
        (["serve", "-cc.mode=3"], "unknown flag -cc.mode: graphs follow from --max-graph-tokens"),
        (["serve", "--compilation-config.mode", "3"], "graphs follow from --max-graph-tokens"),
        (
            ["serve", "--max-total-tokens", "9"],
            "for SGLang's flag of that name, here it is --kv-cache-memory-bytes or --num-gpu-blocks-override; for "
            "text-generation-launcher's flag of that name, here it is --max-model-len",
        ),
        (["serve", "--hicache-ratio", "2"], "a tier of host memory is not in this version yet"),
        (["serve", "--override-generation-config.a.b"], "a value is missing"),
        (["serve", "--override-generation-config.a=1", "--override-generation-config.a=2"], "given twice"),
        (["serve", "--override-generation-config={}", "--override-generation-config.a=2"], "not both"),
        (["serve", "--plugin.x", "y"], "unknown flag --plugin.x; the nearest one is --plugin"),
        (["serve", "--served-model-name", "tiny", "./model"], "--served-model-name took every value after it"),
        (["serve", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8: a KV cache of another data type"),
        (["serve", "--generation-config", "./folder"], "--override-generation-config"),
        (["serve", "--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["serve", "--max-model-len", "8.5K"], "invalid int value: '8.5K'"),
    ],
)
def test_refusals_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    assert expected in refused(capsys, *words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs: Input should be greater than or equal to 1, got 0"),
        (["--port", "70000"], "--port: "),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization: "),
    ],
)
def test_values_out_of_range_name_the_flag(words: list[str], expected: str) -> None:
    given = settings(*words)
    with pytest.raises(UsageError) as caught:
        given.build(EngineConfig)
        given.build(ServerConfig)
    assert expected in str(caught.value)


def test_values_of_the_wrong_type() -> None:
    with pytest.raises(UsageError, match="--max-num-seqs: invalid int value: 'many'"):
        settings("--max-num-seqs", "many")
    with pytest.raises(UsageError, match="a JSON object is needed, got '3'"):
        settings("--override-generation-config", "3")
    with pytest.raises(UsageError, match="two models: a and --model b"):
        settings("a", "--model", "b")


def test_underscores_are_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown policy 'no_pe'" in refused(capsys, "plugins", "--scheduling_policy", "no_pe")


def test_traceback_only_at_debug(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--plugin", "missing.module", "--log-level", "debug"]) == 2
    error = capsys.readouterr().err
    assert error.endswith("(--plugin missing.module, command line)\n")


def test_debug_shows_the_traceback() -> None:
    words = ["plugins", "--plugin", "missing.module", "--log-level", "debug"]
    code = "import sys; from hotswap.server.cli import main; sys.exit(main())"
    result = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith(
        "hotswap: error: plugin 'module' of missing.module failed to import"
    )


# The config file.


def test_config_file_and_precedence(tmp_path: Path) -> None:
    path = tmp_path / "hotswap.yaml"
    path.write_text(
        "max-num-seqs: 4\nport: 9000\nmax_model_len: 128\nplugin:\n  - policy=priority\nscheduling-policy: priority\n"
    )
    given = settings("--config", str(path), "--max-num-seqs", "8", "--plugin", "policy=fcfs")
    config = given.build(EngineConfig)
    assert (config.scheduler.max_num_seqs, config.model.max_model_len) == (8, 128)
    assert given.build(ServerConfig).port == 9000
    assert [(item.source, getattr(item, "name", "")) for item in given.selections()] == [
        ("command line", "fcfs"),
        ("config file", "priority"),
        ("config file", "priority"),
    ]
    assert [selection.name for selection in given.manager().named("policy")] == ["fcfs"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max-num-seq: 4\n", "unknown setting 'max-num-seq'; did you mean 'max-num-seqs'?"),
        ("- a\n", "a mapping of settings is needed, got list"),
        ("a: [\n", "not YAML"),
        ("plugin:\n  policy: fcfs\n", "plugin: Input should be a valid list"),
        ("plugin: [3]\n", "plugin: Input should be a valid string, got [3]; put it in quotes"),
        ("max-num-seqs: many\n", "max-num-seqs: a whole number is needed, got 'many'"),
        ("max_num_seqs: true\n", "max_num_seqs: a whole number is needed, got True"),
        ("max-num-seqs: [4]\n", "max-num-seqs: Input should be a valid integer, got [4]"),
        ("max-num-seqs: 0\n", "max-num-seqs: Input should be greater than or equal to 1, got 0"),
        ("port: 70000\n", "port: Input should be less than or equal to 65535"),
        ("revision: 12\n", "revision: Input should be a valid string, got 12; put it in quotes"),
        ("enforce-eager: maybe\n", "enforce-eager: Input should be a valid boolean"),
        ("dtype: fp8\n", "dtype: Input should be 'auto', 'float32', 'bfloat16' or 'float16', got 'fp8'"),
        ("kv-cache-dtype: fp8\n", "a KV cache of another data type than the model's is not in this version yet"),
        ("override-generation-config: '[1]'\n", "override-generation-config: a JSON object is needed"),
        ("cache:\n  block-size: 16\n", "unknown setting 'cache': settings are not grouped"),
        ("ctx-size: 4096\n", "unknown setting 'ctx-size': here it is --max-model-len (a flag of llama.cpp)"),
        ("enable-lora: true\n", "enable-lora: serving adapters is not in this version yet"),
        ("disable-lora: false\n", "enable-lora: serving adapters is not in this version yet"),
        (
            "speculative-config: {method: ngram}\n",
            "speculative-config: speculative decoding is not in this version yet",
        ),
        ("enable-log-stats: true\ndisable-log-stats: true\n", "'disable-log-stats' is given twice"),
        ("max-num-seqs: 4\nmax_num_seqs: 5\n", "'max_num_seqs' is given twice"),
        ("!!python/object/apply:os.system ['true']\n", "not YAML"),
    ],
)
def test_config_file_refusals(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        settings("--config", str(path))
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_auto_in_the_config_file_is_what_it_is_as_a_flag(tmp_path: Path) -> None:
    path = tmp_path / "hotswap.yaml"
    path.write_text("max-model-len: auto\nload-format: auto\n")
    config = settings("--config", str(path)).build(EngineConfig)
    assert config.model.max_model_len is None and config.model.load_format == "auto"


def test_api_keys_are_never_shown(tmp_path: Path) -> None:
    config = ServerConfig(api_key=["sesame"])
    assert "sesame" not in f"{config!r} {config} {config.model_dump()} {config.model_dump_json()}"
    path = tmp_path / "hotswap.yaml"
    for text in ("api-key: {k: sesame}\n", "api-key: [[sesame]]\n", "admin-key: [sesame]\n"):
        path.write_text(text)
        with pytest.raises(UsageError, match="-key: ") as caught:
            settings("--config", str(path)).build(ServerConfig)
        assert "sesame" not in str(caught.value)
    path.write_text("api-key: sesame\n")
    (key,) = settings("--config", str(path)).build(ServerConfig).api_key
    assert key.get_secret_value() == "sesame"


def test_a_config_file_of_vllm(tmp_path: Path) -> None:
    """Its keys and forms, with what it accepts without effect."""
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "model: ./model\nhost: 127.0.0.1\nport: 6379\nlog-level: info\n"
        + "served-model-name: chat\ndtype: half\nmax-model-len: 32k\ngpu-memory-utilization: 0.85\n"
        "tensor-parallel-size: 1\nenable-prefix-caching: true\ndisable-log-requests: true\nenable-lora: false\n"
        "kv-cache-dtype: auto\nspeculative-config: null\nquantization: null\ngeneration-config: vllm\n"
        "override-generation-config: '{\"temperature\": 0.2}'\ndisable-uvicorn-access-log: true\n"
    )
    given = settings("--config", str(path))
    config = given.build(EngineConfig)
    assert config.model.served_model_name == ["chat"] and config.model.dtype == "float16"
    assert config.model.max_model_len == 32_000 and config.model.generation_config == "none"
    assert config.model.override_generation_config == {"temperature": 0.2}
    assert config.model.quantization is None and config.cache.gpu_memory_utilization == 0.85
    assert config.enable_log_requests is False and given.build(ServerConfig).port == 6379


@pytest.mark.parametrize("before", [True, False])
def test_a_flag_beats_the_file_in_any_order(tmp_path: Path, before: bool) -> None:
    path = tmp_path / "hotswap.yaml"
    path.write_text("max-model-len: 128\nserved-model-name: [a]\nenforce-eager: true\ndtype: float16\n")
    flags = ["--max-model-len", "auto", "--served-model-name", "b", "--no-enforce-eager", "--port", "1"]
    words = [*flags, "--config", str(path)] if before else ["--config", str(path), *flags]
    config = settings(*words).build(EngineConfig)
    assert config.model.max_model_len is None and config.model.served_model_name == ["b"]
    assert config.enforce_eager is False and config.model.dtype == "float16"


@pytest.mark.parametrize(
    ("text", "number"),
    [("8", 8), ("8k", 8000), ("8K", 8192), ("25.6k", 25_600), ("2M", 2 << 20), ("1.5g", 1_500_000_000)],
)
def test_numbers_as_people_write_them(text: str, number: int) -> None:
    assert human_int(text) == number
    with pytest.raises(ValueError):
        human_int(f"{text}x")


def test_several_values_need_the_model_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--api-key took every value") as caught:
        settings("--api-key", "sesame", "./model")
    assert "sesame" not in str(caught.value)
    path = tmp_path / "hotswap.yaml"
    path.write_text("model: m\n")
    assert settings("--served-model-name", "a", "b", "--config", str(path)).command_line["served_model_name"] == [
        "a",
        "b",
    ]


# The commands.


def test_what_cannot_be_read_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise PermissionError(13, "Permission denied", "model/config.json")

    monkeypatch.setattr("hotswap.server.cli.version_command.run", run)
    assert main(["version"]) == 1
    assert capsys.readouterr().err == "hotswap: error: model/config.json: Permission denied\n"


def test_a_bad_log_level_in_the_config_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logging.root.handlers", [])  # as in a process of its own: basicConfig looks at the level
    path = tmp_path / "hotswap.yaml"
    path.write_text("log-level: loud\n")
    assert "hotswap.yaml: log-level: Input should be" in refused(capsys, "plugins", "--config", str(path))


def test_plugins_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"kind", "name", "distribution", "version", "contract", "state", "reasons"} == set(rows[0])
    states = {(row["kind"], row["name"]): row["state"] for row in rows}
    assert states["policy", "fcfs"] == "active"
    assert states["policy", "priority"] == "available"
    assert states["victim", "newest"] == "active"
    assert "failed" not in states.values(), [row for row in rows if row["state"] == "failed"]


def test_plugins_table_and_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--plugin", "policy=priority"]) == 0
    table = capsys.readouterr().out
    assert any(line.split()[:2] == ["policy", "priority"] and "active" in line for line in table.splitlines())
    assert main(["plugins", "explain", "policy"]) == 0
    assert "-> policy: fcfs (default)" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hotswap ")


def test_commands_point_to_modules_that_exist() -> None:
    import importlib.util

    for name, command in COMMANDS.items():
        for found in command.subcommands.values() or [command]:
            assert importlib.util.find_spec(found.module) is not None, name


def test_host_guess(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2 avx512_bf16\n\nprocessor\t: 1\nflags: none\n"
    )
    device = guess_device(cpuinfo)
    assert (device.kind, device.name, device.features) == ("cpu", "A CPU", frozenset({"fpu", "avx2", "avx512_bf16"}))
    elsewhere = guess_device(tmp_path / "missing")
    assert elsewhere.features == frozenset()
    assert elsewhere.name


def run_and_list_modules(*words: str) -> tuple[float, set[str]]:
    code = (
        "import sys; from hotswap.server.cli import main; status = main(sys.argv[1:]);"
        "print('MODULES', *{name.partition('.')[0] for name in sys.modules}); sys.exit(status)"
    )
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    seconds = time.monotonic() - started
    return seconds, set(result.stdout.rpartition("MODULES")[2].split())


def test_help_is_quick_and_light() -> None:
    seconds, modules = min((run_and_list_modules("--help") for _ in range(3)), key=lambda pair: pair[0])
    assert seconds < 1.0
    assert not modules & {"torch", "transformers", "fastapi", "pydantic", "rich", "numpy"}


def test_plugins_imports_no_engine() -> None:
    _, modules = run_and_list_modules("plugins", "--json")
    assert not modules & {"torch", "transformers", "fastapi"}
