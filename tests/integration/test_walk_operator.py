"""The operator's walk: every command of docs/operators/from_vllm.md, in order, in one shell, against a tiny model; and its
table of flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from walks import ROOT, walk_with_a_tiny_model

PAGE = ROOT / "docs" / "operators" / "from_vllm.md"


@pytest.mark.timeout(150)
def test_an_operator_moves_from_a_vllm_command_line(tmp_path: Path) -> None:
    assert walk_with_a_tiny_model(PAGE, tmp_path) > 15


# The table of flags.


def names_in(row: str) -> list[str]:
    (cell,) = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return re.findall(r"`(--[^`]+)`", cell)


def test_the_flags_table_is_true() -> None:
    from hotswap.core.compatibility import refuse_incompatible
    from hotswap.core.config import EngineConfig, ServerConfig
    from hotswap.server.cli import serve
    from hotswap.server.cli.flags import flag_name, flat_fields
    from hotswap.server.cli.foreign_flags import VLLM, find_foreign
    from hotswap.server.cli.known_flags import known_flag
    from hotswap.server.cli.main import Parser
    from hotswap.server.cli.settings import read_settings

    settings = {flag_name(name) for config in (EngineConfig, ServerConfig) for name, _, _ in flat_fields(config)}
    assert set(names_in("same name, same meaning")) <= settings | {"--config"}
    for words in names_in("accepted only with the value that changes nothing"):
        parser = Parser(prog="hotswap serve")
        serve.configure(parser)
        given = read_settings(parser.parse_args(["m", *words.split()]), EngineConfig, ServerConfig)
        refuse_incompatible(given.build(EngineConfig))
    for flag in names_in("not in this version yet"):
        known = known_flag(flag.removeprefix("--").replace("-", "_"))
        assert known is not None and known.later
    for row, renamed in (("another name here", True), ("meaningless here", False)):
        for flag in names_in(row):
            assert [entry.renamed for entry in find_foreign(flag) if entry.engine == VLLM] == [renamed], flag


def test_every_flag_of_the_table_of_names_is_known() -> None:
    """The flags that users bring are the settings, the known ones, or this command's own."""
    from hotswap.server.cli import serve
    from hotswap.server.cli.main import Parser
    from hotswap.server.cli.spelling import options_of

    parser = Parser(prog="hotswap serve")
    serve.configure(parser)
    options = options_of(parser)
    brought = (
        "host port api-key served-model-name tokenizer chat-template dtype max-model-len trust-remote-code revision seed "
        "load-format download-dir quantization kv-cache-dtype block-size gpu-memory-utilization kv-cache-memory-bytes "
        "num-gpu-blocks-override swap-space enable-prefix-caching enable-chunked-prefill max-num-batched-tokens "
        "max-num-seqs max-num-queued-reqs scheduling-policy preemption-mode async-scheduling enforce-eager "
        "speculative-config speculative-model num-speculative-tokens attention-backend tensor-parallel-size "
        "pipeline-parallel-size data-parallel-size enable-expert-parallel distributed-executor-backend kv-transfer-config "
        "enable-lora lora-modules max-loras max-lora-rank limit-mm-per-prompt enable-auto-tool-choice tool-call-parser "
        "reasoning-parser generation-config override-generation-config enable-log-requests disable-log-stats "
        "otlp-traces-endpoint config max-logprobs max-request-bytes shutdown-timeout metrics-namespace metrics-public "
        "strict-auth strict-plugins plugin"
    )
    missing = [name for name in brought.split() if f"--{name}" not in options]
    assert not missing
    assert {"-q", "-tp", "-pp", "-dp"} <= options.keys()
