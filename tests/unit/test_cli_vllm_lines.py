"""Command lines that run elsewhere, given to `hotswap serve`: what exists starts unchanged, the rest says why not.

Nothing is started here: a line starts when its settings build and no combination of them is refused.
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from hotswap.core.compatibility import refuse_incompatible
from hotswap.core.config import EngineConfig, ServerConfig
from hotswap.core.errors import UsageError
from hotswap.server.cli import serve
from hotswap.server.cli.flags import choices_of, flag_name, flat_fields
from hotswap.server.cli.foreign_flags import LLAMA_CPP, LMDEPLOY, SGLANG, TGI, VLLM, find_foreign, foreign_flags
from hotswap.server.cli.known_flags import KNOWN_FLAGS, KnownFlag, known_flag
from hotswap.server.cli.main import COMMANDS, Parser, main
from hotswap.server.cli.settings import file_settings, read_settings
from hotswap.server.cli.spelling import options_of, spelled

# Flags of shared notes and runbooks; the model's name is not looked up.
PRODUCTION_LINES = [
    "meta-llama/Llama-3.1-8B-Instruct --host 0.0.0.0 --port 8000 --dtype auto --max-model-len 8192",
    "Qwen/Qwen2.5-7B-Instruct --served-model-name qwen chat --api-key sesame --gpu-memory-utilization 0.92 "
    "--max-num-seqs 256 --disable-log-requests",
    "mistralai/Mistral-7B-Instruct-v0.3 --dtype half --max-model-len 32k --enable-prefix-caching "
    "--enable-chunked-prefill --max-num-batched-tokens 8192 --seed 42",
    "--model HuggingFaceTB/SmolLM2-135M-Instruct --tensor-parallel-size 1 --pipeline-parallel-size=1 "
    "--trust-remote-code --download-dir /models --revision main",
    "org/name -tp 1 -pp 1 -dp 1 --swap-space 0 --kv-cache-dtype auto --no-enable-lora --enforce-eager "
    "--disable-log-stats --block-size 16",
    'org/name --generation-config vllm --override-generation-config \'{"temperature": 0.7, "top_p": 0.9}\' '
    "--max-logprobs 5 --scheduling-policy priority",
    "org/name --tokenizer org/name --tokenizer-mode auto --chat-template ./chat.jinja --response-role assistant "
    "--disable-uvicorn-access-log --disable-fastapi-docs --enable-request-id-headers",
    "org/name --load-format safetensors --max_model_len 4096 --max_num_seqs 64 --gpu_memory_utilization=0.8 "
    "--no-enable-prefix-caching",
    "org/name --runner generate --convert none --limit-mm-per-prompt '{\"image\": 0}' --cpu-offload-gb 0 --nnodes 1 "
    "--api-server-count 1 --data-parallel-size 1 --enable-prompt-tokens-details",
    "org/name --async-scheduling --kv-cache-memory-bytes 4G --num-gpu-blocks-override 1000 --max-num-queued-reqs 100 "
    "--shutdown-timeout 60 --disable-hybrid-kv-cache-manager --stream-interval 1",
    "org/name --override-generation-config.temperature 0.2 --override-generation-config.max_new_tokens 512 "
    "--served-model-name prod --enable-log-requests --max-log-len 100",
]

NOT_YET_LINES = [
    ("org/name -tp 2", "--tensor-parallel-size above 1", "is not in this version yet; use 1"),
    ("org/name --tensor-parallel-size 8 --pipeline-parallel-size 2", "--pipeline-parallel-size above 1", "not in this"),
    ("org/name -dp 4", "--data-parallel-size above 1", "start several engines"),
    ("org/name --swap-space 4", "--swap-space", "leave it out, preempted requests are recomputed"),
    ("org/name --kv-cache-dtype fp8", "--kv-cache-dtype fp8", "use auto"),
    ('org/name --speculative-config \'{"method": "ngram"}\'', "--speculative-config", "leave it out"),
    ("org/name --speculative-config.method ngram", "--speculative-config", "leave it out"),
    ("org/name --speculative-model org/draft --num-speculative-tokens 5", "--speculative-model", "leave it out"),
    (
        "org/name --enable-lora --lora-modules sql=/adapters/sql --max-lora-rank 32",
        "--enable-lora",
        "merge the adapter",
    ),
    ("org/name --lora-modules a=b c=d", "--lora-modules", "merge the adapter"),
    ("org/name --max-loras 4", "--max-loras", "merge the adapter"),
    ("org/name --max-lora-rank 64", "--max-lora-rank", "merge the adapter"),
    ("org/name --enable-expert-parallel", "--enable-expert-parallel", "leave it out"),
    ("org/name -ep", "--enable-expert-parallel", "leave it out"),
    ('org/name --kv-transfer-config \'{"kv_role": "kv_both"}\'', "--kv-transfer-config", "leave it out"),
    ("org/name --limit-mm-per-prompt image=2", "--limit-mm-per-prompt", "only text is served"),
    ("org/name --reasoning-parser deepseek_r1", "--reasoning-parser", "split it in the client"),
    ("org/name --otlp-traces-endpoint http://collector:4317", "--otlp-traces-endpoint", "scrape /metrics"),
    ("org/name --task embed", "--task", "use auto or generate"),
]


def build(line: str) -> tuple[EngineConfig, ServerConfig]:
    parser = Parser(prog="hotswap serve")
    serve.configure(parser)
    arguments = parser.parse_args(spelled(shlex.split(line), parser))
    settings = read_settings(arguments, EngineConfig, ServerConfig)
    config = settings.build(EngineConfig)
    refuse_incompatible(config)
    settings.selections()
    return config, settings.build(ServerConfig)


@pytest.mark.parametrize("line", PRODUCTION_LINES)
def test_lines_of_vllm_start_unchanged(line: str) -> None:
    config, _ = build(line)
    assert config.model.model == shlex.split(line.removeprefix("--model "))[0]


def test_what_a_line_says_is_what_is_built() -> None:
    config, server = build(PRODUCTION_LINES[1])
    assert config.model.served_model_name == ["qwen", "chat"] and config.scheduler.max_num_seqs == 256
    assert server.api_key[0].get_secret_value() == "sesame"
    config, _ = build(PRODUCTION_LINES[2])
    assert (config.model.dtype, config.model.max_model_len, config.model.seed) == ("float16", 32_000, 42)
    config, _ = build(PRODUCTION_LINES[9])
    assert config.cache.kv_cache_memory_bytes == 4 * 2**30
    config, _ = build(PRODUCTION_LINES[10])
    assert config.model.override_generation_config == {"temperature": 0.2, "max_new_tokens": 512}


@pytest.mark.parametrize(("line", "flag", "instead"), NOT_YET_LINES, ids=[line for line, _, _ in NOT_YET_LINES])
def test_what_is_not_in_this_version_says_so(line: str, flag: str, instead: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(line)
    message = str(caught.value)
    assert flag in message and instead in message and "\n" not in message
    assert "not in this version yet" in message


def test_refusals_reach_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for line, flag, _ in NOT_YET_LINES[5:]:
        assert main(["serve", *shlex.split(line)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"hotswap: error: {flag}: ") and error.count("\n") == 1


@pytest.mark.parametrize("known", KNOWN_FLAGS, ids=[known.name for known in KNOWN_FLAGS])
def test_known_flags(known: KnownFlag) -> None:
    """Each is accepted with what it says it accepts, and refused in one line otherwise."""
    assert known_flag(known.name) is known
    if known.switch:
        off = f"--no-{known.flag[2:]}"
        fine, bad = (off, known.flag) if known.neutral == ("false",) else (known.flag, off)
        build(f"org/name {fine}")
        with pytest.raises(UsageError, match=known.flag):
            build(f"org/name {bad}")
        return
    for value in known.neutral:
        build(f"org/name {known.flag} {shlex.quote(value)}")
        build(f"org/name {known.flag}={shlex.quote(value)}")
    if "*" not in known.neutral:
        with pytest.raises(UsageError, match=known.flag):
            build(f"org/name {known.flag} 77")


# The table of other engines' flags.


def serve_options() -> dict[str, argparse.Action]:
    parser = Parser(prog="hotswap serve")
    serve.configure(parser)
    return options_of(parser)


def test_no_foreign_flag_is_one_of_ours() -> None:
    ours = serve_options()
    shadowed = [entry for entry in foreign_flags() if entry.flag in ours]
    assert not shadowed
    for option in ours:
        exact = [entry.flag for entry in find_foreign(option) if not entry.flag.endswith("*")]
        assert not exact, f"{option} is ours"


def test_our_names_in_the_table_exist() -> None:
    ours = set(serve_options())
    for entry in foreign_flags():
        for word in entry.here.replace(",", " ").replace(";", " ").replace("=", " ").split():
            if word.startswith("--") and word != "--otlp-traces-endpoint":
                assert word.rstrip(":") in ours, f"{entry.engine} {entry.flag}: {word}"
        for name in {"pull", "list", "version", "plugins"} & set(entry.here.replace("`", " ").split()):
            assert name in COMMANDS


def test_one_entry_for_each_flag_of_an_engine() -> None:
    entries = [(entry.engine, entry.flag) for entry in foreign_flags()]
    assert not {entry for entry in entries if entries.count(entry) > 1}


@pytest.mark.parametrize(
    ("engine", "flag", "here"),
    [
        (VLLM, "--logits-processors", "--plugin logits_processor=NAME"),
        (VLLM, "--max-seq-len-to-capture", "graphs follow from --max-graph-tokens"),
        (VLLM, "--max-cudagraph-capture-size", "--max-graph-tokens"),
        (SGLANG, "--mem-fraction-static", "--gpu-memory-utilization"),
        (SGLANG, "--chunked-prefill-size", "--max-num-batched-tokens"),
        (SGLANG, "--enable-deterministic-inference", "--deterministic"),
        (SGLANG, "--disaggregation-mode", "splitting prefill from decode"),
        (TGI, "--num-shard", "--tensor-parallel-size"),
        (TGI, "--max-batch-prefill-tokens", "--max-num-batched-tokens"),
        (LLAMA_CPP, "-np", "--max-num-seqs"),
        (LLAMA_CPP, "--n-gpu-layers", "on one device"),
        (LMDEPLOY, "--cache-max-entry-count", "--gpu-memory-utilization"),
        (LMDEPLOY, "--session-len", "--max-model-len"),
    ],
)
def test_engines_are_named(capsys: pytest.CaptureFixture[str], engine: str, flag: str, here: str) -> None:
    for words in ([flag, "1"], [f"{flag}=1"]):
        assert main(["serve", "org/name", *words]) == 2
        message = capsys.readouterr().err
        assert flag in message and here in message and engine in message and message.count("\n") == 1


# Flags, the file and the page are one thing.


def test_flags_and_file_keys_are_the_fields() -> None:
    """The page is compared in test_docs.py; here the other two, and both with the models."""
    options, keys = serve_options(), file_settings()
    for config in (EngineConfig, ServerConfig):
        for name, info, section in flat_fields(config):
            action = options["--model"] if name == "model" else options[flag_name(name)]
            assert keys[name].info is info and keys[name].section is section
            if name == "model":
                continue
            assert action.dest == name and action.help is not None
            assert action.help.replace("%%", "%").startswith(info.description or "?")
            default = info.get_default(call_default_factory=True)
            assert action.default is argparse.SUPPRESS
            if default not in (None, [], {}, False, ""):
                assert f"(default: {default})" in action.help
    fields = {name for config in (EngineConfig, ServerConfig) for name, _, _ in flat_fields(config)}
    assert {setting.name for setting in keys.values()} == fields
    beyond = {action.dest for action in options.values()} - fields - {"help", "config", "model_flag", argparse.SUPPRESS}
    assert not beyond


def page_rows() -> dict[str, list[str]]:
    """Flag -> [what may be given, default, description] of the reference page's tables of settings."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "operators" / "settings.md").read_text()
    tables = text.split("\n## Not in this version yet")[0]
    rows = [line.split("|")[1:-1] for line in tables.splitlines() if re.match(r"\| `(--|MODEL)", line)]
    return {cells[0].strip().split("`")[1]: [cell.strip() for cell in cells[1:]] for cells in rows if len(cells) == 4}


def test_the_page_says_what_flags_and_file_take() -> None:
    """Every field in each of the three, with one description, one default, the same choices."""
    options, keys, rows = serve_options(), file_settings(), page_rows()
    seen = set()
    for config in (EngineConfig, ServerConfig):
        for name, info, _ in flat_fields(config):
            row = "MODEL" if name == "model" else flag_name(name)
            seen.add(row)
            value, default, description = rows[row]
            assert description == info.description == keys[name].info.description
            expected = info.get_default(call_default_factory=True)
            said = {"on": True, "off": False, "": None}.get(default, default.strip("`"))
            assert (expected in (None, [], {})) if said is None else str(said) == str(expected), name
            if name == "model":
                continue
            choices = options[flag_name(name)].choices
            assert (choices is None) == (choices_of(info) == ())
            for choice in choices or ():
                assert f"`{choice}`" in value
    assert seen == set(rows)
    assert "`--config FILE`" in (Path(__file__).resolve().parents[2] / "docs" / "operators" / "settings.md").read_text()
