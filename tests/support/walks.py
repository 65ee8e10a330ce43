"""Pages of the docs that a reader walks through: their commands, run in order in one shell, and what they must print.

In ```console blocks `$ ` begins a command, `> ` goes on with it, other lines are its output, where `...` stands for anything
within its line and a line of `...` alone for any number of lines. Lines such as MODEL= are the reader's: a test gives its own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hotswap.core.testing.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
MARK = "--- the command above has ended ---"


@dataclass
class Step:
    """A command of the page and what it shows below it."""

    command: str
    shown: list[str] = field(default_factory=list)


def steps_of(page: Path) -> list[Step]:
    steps: list[Step] = []
    for block in re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                steps.append(Step(line[2:]))
            elif line.startswith("> ") or line == ">":
                steps[-1].command += "\n" + line[2:]
            else:
                steps[-1].shown.append(line)
    return steps


def as_pattern(shown: list[str]) -> re.Pattern[str]:
    lines = [r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n" for line in shown]
    return re.compile("".join(lines))


class Shell:
    """bash, fed one command at a time, with `hotswap`, `python` and `pip` of this environment. `pip install` puts what it
    installs into a folder of the walk, which this shell's Python sees."""

    def __init__(self, folder: Path, **variables: str) -> None:
        programs, packages, work = (folder / name for name in ("bin", "packages", "work"))
        for path in (programs, packages, work):
            path.mkdir()
        self._program(programs / "hotswap", "from hotswap.server.cli import main\nsys.exit(main(sys.argv[1:]))")
        install = [
            "install",
            "--no-deps",
            "--no-build-isolation",
            "--disable-pip-version-check",
            "--target",
            str(packages),
        ]
        wheel = ["wheel", "--no-build-isolation", "--disable-pip-version-check"]
        self._program(
            programs / "pip",
            "from pip._internal.cli.main import main\n"
            f"sys.exit(main({{'install': {install}, 'wheel': {wheel}}}[sys.argv[1]] + sys.argv[2:]))",
        )
        python = programs / "python"  # not a link: by its place Python finds its environment
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        # Copies: building a package leaves files beside its source.
        shutil.copytree(
            ROOT / "examples", folder / "hotswap" / "examples", ignore=shutil.ignore_patterns("*.egg-info", "build")
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.process = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=work,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
                "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join([*(path for path in sys.path if path), str(packages)]),
                "HOTSWAP": str(folder / "hotswap"),
                "PORT": str(port),
                "LC_ALL": "C",
                "COLUMNS": "200",
                **variables,
            },
            start_new_session=True,
        )

    @staticmethod
    def _program(path: Path, code: str) -> None:
        path.write_text(f"#!{sys.executable}\nimport sys\n{code}\n")
        path.chmod(0o755)

    def run(self, command: str) -> str:
        """What the command printed, errors included; bash's own notes about jobs left out."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{command}\necho '{MARK}'\n")
        self.process.stdin.flush()
        output = ""
        for line in self.process.stdout:
            if line.rstrip("\n").endswith(MARK):
                unended = line.rstrip("\n").removesuffix(MARK)
                output += unended + "\n" if unended else ""
                kept = (line.rstrip() for line in output.splitlines() if not re.match(r"\[\d+\]", line))
                return "".join(line + "\n" for line in kept)
            output += line
        raise AssertionError(f"the shell ended in {command!r}: {output}")

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def walk_with_a_tiny_model(page: Path, folder: Path) -> int:
    """`walk` in a shell of its own, whose MODEL is a tiny one."""
    shell = Shell(folder, MODEL=str(make_tiny_model(folder / "model", max_position_embeddings=4096)))
    try:
        return walk(page, shell)
    finally:
        shell.close()


def walk(page: Path, shell: Shell, readers: tuple[str, ...] = ("MODEL", "PORT")) -> int:
    """Runs the page. Returns how many commands that was. Raises AssertionError naming the command that says something else.

    readers: variables that the page sets and the shell has from the test instead.
    """
    steps = steps_of(page)
    theirs = [step for step in steps if re.match(rf"({'|'.join(readers)})=", step.command)]
    assert len(theirs) == len(readers), f"{page.name} must set each of {readers} once"
    for step in steps:
        if step in theirs:
            continue
        output = shell.run(step.command)
        shown = "\n".join(step.shown)
        assert as_pattern(step.shown).fullmatch(output), f"$ {step.command}\n{output}\nthe page shows:\n{shown}"
    return len(steps)
