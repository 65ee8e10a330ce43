"""What commands write where: streams that are closed, as a script may start them, and lines for machines."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hotswap.server.cli.main import main
from hotswap.server.cli.progress import ProgressLine

RUN = "import sys; from hotswap.server.cli.main import main; sys.exit(main())"
CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; sys.stderr.isatty()'], check=True)"


@pytest.mark.parametrize("closing", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_fault(closing: str) -> None:
    line = f'exec "$0" -c "$1" list {closing}'
    found = subprocess.run(["sh", "-c", line, sys.executable, RUN], check=False, capture_output=True, text=True)
    assert (found.returncode, found.stderr.count("Traceback")) == (0, 0)


def test_child_processes_have_the_stream_too() -> None:
    code = f"from hotswap.server.cli.main import main; main(['--help']); {CHILD}"
    found = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code], check=False)
    assert found.returncode == 0


@pytest.mark.parametrize("flag", [["--log-format", "json"], ["--log-format=json"]])
def test_with_json_logs_the_last_word_is_json_too(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *flag, "--prot", "1"]) == 2
    line = json.loads(capsys.readouterr().err)
    assert line["level"] == "error" and line["message"].startswith("unknown flag --prot")


def test_progress_goes_where_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    progress = ProgressLine(said.append)
    for done in range(3):
        progress("weights", done, 3)
    progress("cache", 0, 0)
    progress.close()
    assert said == ["weights", "cache"] and capsys.readouterr().err == ""
    ProgressLine()("weights", 0, 0)
    assert capsys.readouterr().err == "hotswap: weights\n"


def test_json_is_of_the_list_of_plugins_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "explain", "policy", "--json"]) == 2
    assert "--json is of the list of plugins" in capsys.readouterr().err
