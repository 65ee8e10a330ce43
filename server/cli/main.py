"""`hotswap COMMAND ...`: finds the command, prints errors in one line, knows nothing else.

A command is a module with `configure(parser)` and `run(arguments) -> exit status`. Only the one asked for is imported,
so that `hotswap --help` needs no pydantic, no torch and no FastAPI.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import itertools
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from hotswap.core.errors import HotswapError, UsageError
from hotswap.core.version import __version__

PROGRAM: Final = "hotswap"


@dataclass(frozen=True, slots=True)
class Command:
    """module: dotted path of the command's module. summary: its line in `hotswap --help`."""

    module: str
    summary: str


COMMANDS: Final[dict[str, Command]] = {
    "serve": Command("hotswap.server.cli.serve", "serve a model over the OpenAI API"),
    "chat": Command("hotswap.server.cli.chat", "chat with a model in the terminal"),
    "plugins": Command("hotswap.server.cli.plugins_command", "show what is installed, active, rejected, and why"),
    "version": Command("hotswap.server.cli.version_command", "print the version"),
}


class Parser(argparse.ArgumentParser):
    """argparse, with errors as UsageError: one line, exit status 2."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status; errors meant for the reader are printed in one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except HotswapError as error:
        _trace_if_wanted(words)
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone: nothing more can be said
        return 141
    except OSError as error:  # a file that cannot be read or written, wherever: its name is all that the reader needs
        _trace_if_wanted(words)
        what = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        print(f"{PROGRAM}: error: {what}", file=sys.stderr)
        return 1


def _trace_if_wanted(words: Sequence[str]) -> None:
    if _debug_wanted(words):
        logging.basicConfig(level=logging.DEBUG)
        logging.getLogger(PROGRAM).debug("traceback of the error below", exc_info=True)


def configure_logging(level: str) -> None:
    """Log lines on stderr, `hotswap: warning: text`, for commands that are not a server."""
    logging.basicConfig(level=level.upper(), format=f"{PROGRAM}: %(levelname)s: %(message)s", stream=sys.stderr)
    for number, name in ((logging.WARNING, "warning"), (logging.ERROR, "error"), (logging.INFO, "info")):
        logging.addLevelName(number, name)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else 2
    name, *rest = words
    if name in ("-V", "--version"):
        name = "version"
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"unknown command {name!r}{hint} (commands: {', '.join(COMMANDS)})")
    module = importlib.import_module(command.module)
    parser = Parser(prog=f"{PROGRAM} {name}", description=command.summary.capitalize() + ".")
    module.configure(parser)
    rest = _dashes(rest)
    # Flags first: argparse would take the value of an unknown flag for MODEL and complain about that instead.
    known = {option for action in parser._actions for option in action.option_strings}
    unknown = [word for word in rest if word.startswith("--") and word != "--" and word.partition("=")[0] not in known]
    if not unknown:
        arguments, unknown = parser.parse_known_args(rest)
    if unknown:
        from .flags import describe_unknown

        raise UsageError(describe_unknown(unknown, parser))
    status: int = module.run(arguments)
    return status


def _dashes(words: Sequence[str]) -> list[str]:
    """`--max_num_seqs` means `--max-num-seqs`. Values are left alone."""
    spelled = []
    for word in words:
        flag, equals, value = word.partition("=")
        spelled.append(flag.replace("_", "-") + equals + value if flag.startswith("--") else word)
    return spelled


def _debug_wanted(words: Sequence[str]) -> bool:
    """Whether --log-level debug was given: needed also for errors that occur before the flags are parsed."""
    spelled = [word.replace("_", "-") for word in words]
    return "--log-level=debug" in spelled or ("--log-level", "debug") in itertools.pairwise(spelled)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND ...",
            "",
            f"hotswap {__version__} serves open-weight language models; what people argue about is a plugin.",
            "",
            *lines,
            "",
            f"{PROGRAM} COMMAND --help says more.",
        ]
    )
