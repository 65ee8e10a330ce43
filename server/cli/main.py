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
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from hotswap.core.errors import HotswapError, UsageError
from hotswap.core.version import __version__

from .spelling import describe_unknown, spelled

PROGRAM: Final = "hotswap"
DESCRIPTION: Final = f"hotswap {__version__} serves open-weight language models; what people argue about is a plugin."


@dataclass(frozen=True, slots=True)
class Command:
    """module: dotted path of the command's module. summary: its line in `hotswap --help`. subcommands: by the second
    word; a command that has them has no module of its own."""

    module: str
    summary: str
    subcommands: Mapping[str, Command] = field(default_factory=dict)


COMMANDS: Final[dict[str, Command]] = {
    "serve": Command("hotswap.server.cli.serve", "serve a model over the OpenAI API"),
    "chat": Command("hotswap.server.cli.chat", "chat with a model in the terminal"),
    "complete": Command("hotswap.server.cli.complete", "continue a text"),
    "bench": Command(
        "",
        "measure a server or an engine, compare results",
        {
            "serve": Command("hotswap.server.cli.bench_serve", "measure a running OpenAI-compatible server"),
            "throughput": Command("hotswap.server.cli.bench_throughput", "measure an engine without HTTP"),
            "compare": Command("hotswap.server.cli.bench_compare", "compare results of the other two"),
        },
    ),
    "compare": Command("hotswap.server.cli.compare", "compare the answers and the latency of two servers"),
    "recommend": Command("hotswap.server.cli.recommend", "settings for the load of a trace, with the arithmetic"),
    "simulate": Command(
        "hotswap.server.cli.simulate", "compare policies on a trace, on a virtual clock, without a model"
    ),
    "pull": Command("hotswap.server.cli.pull", "fetch a model into the cache"),
    "list": Command("hotswap.server.cli.list_models", "list the models that are in the cache"),
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
    _replace_closed_streams()
    try:
        return _dispatch(words)
    except HotswapError as error:
        _trace_if_wanted(words)
        _say_error(words, " ".join(str(error).split()))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone: nothing more can be said
        return 141
    except OSError as error:  # a file that cannot be read or written, wherever: its name is all that the reader needs
        _trace_if_wanted(words)
        what = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        _say_error(words, what)
        return 1


def _say_error(words: Sequence[str], message: str) -> None:
    """One line for people; with --log-format json one for machines, as all that such a server writes there."""
    if not _was_given(words, "--log-format", "json"):
        print(f"{PROGRAM}: error: {message}", file=sys.stderr)
        return
    from hotswap.core import logs

    record = logging.LogRecord(PROGRAM, logging.ERROR, "", 0, message, None, None)
    print(logs.JsonLines().format(record), file=sys.stderr)


def _replace_closed_streams() -> None:
    """Started with a standard stream closed (`>&-`), Python has None in its place, which every user of it would stumble
    over: here and, since the lowest free descriptor is that of the stream, in the engine process, which inherits it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))


def _trace_if_wanted(words: Sequence[str]) -> None:
    if _was_given(words, "--log-level", "debug"):  # whatever was parsed: errors also come before
        logging.basicConfig(level=logging.DEBUG)
        logging.getLogger(PROGRAM).debug("traceback of the error below", exc_info=True)


def configure_logging(level: str) -> None:
    """Log lines on stderr, `hotswap: warning: text`, for commands that are not a server."""
    logging.basicConfig(level=level.upper(), format=f"{PROGRAM}: %(levelname)s: %(message)s", stream=sys.stderr)
    for number, name in ((logging.WARNING, "warning"), (logging.ERROR, "error"), (logging.INFO, "info")):
        logging.addLevelName(number, name)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(PROGRAM, DESCRIPTION, COMMANDS))
        return 0 if words else 2
    name, *rest = words
    if name in ("-V", "--version"):
        name = "version"
    command = _find(name, COMMANDS)
    if command.subcommands:
        if not rest or rest[0] in ("-h", "--help", "help"):
            print(_overview(f"{PROGRAM} {name}", _sentence(command.summary), command.subcommands))
            return 0 if rest else 2
        command = _find(rest[0], command.subcommands, name)
        name, rest = f"{name} {rest[0]}", rest[1:]
    module = importlib.import_module(command.module)
    parser = Parser(prog=f"{PROGRAM} {name}", description=_sentence(command.summary))
    module.configure(parser)
    arguments, unknown = parser.parse_known_args(spelled(rest, parser))
    if unknown:
        raise UsageError(describe_unknown(unknown, parser))
    status: int = module.run(arguments)
    return status


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


def _find(word: str, commands: Mapping[str, Command], above: str = "") -> Command:
    """Raises UsageError with the nearest name."""
    if word in commands:
        return commands[word]
    near = difflib.get_close_matches(word, commands, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    shown = f"{above} {word}".strip()
    raise UsageError(f"unknown command {shown!r}{hint} (commands: {', '.join(commands)})")


def _was_given(words: Sequence[str], flag: str, value: str) -> bool:
    """Whether a flag has this value, as far as can be told before the flags are parsed."""
    spelled = [word.replace("_", "-") for word in words]
    return f"{flag}={value}" in spelled or (flag, value) in itertools.pairwise(spelled)


def _overview(program: str, description: str, commands: Mapping[str, Command]) -> str:
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in commands.items()]
    return "\n".join(
        [f"usage: {program} COMMAND ...", "", description, "", *lines, "", f"{program} COMMAND --help says more."]
    )
