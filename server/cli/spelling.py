"""What a command line's words say before argparse reads them: other spellings made ours, and words that are no flag of
ours refused with the nearest one.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Sequence
from typing import Any

from hotswap.core.errors import UsageError

JSON = "JSON"  # the metavar of flags that take a JSON object
_FLAG = re.compile(r"--?[A-Za-z]")


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The flags that a parser knows."""
    return {option: action for action in parser._actions for option in action.option_strings}


def spelled(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """`--max_num_seqs` as `--max-num-seqs`, and `--setting.key VALUE` as one `--setting JSON`. Values are left alone.
    Raises UsageError for a flag that is not known."""
    known = options_of(parser)
    end = words.index("--") if "--" in words else len(words)
    out: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    position = 0
    while position < end:
        word = words[position]
        position += 1
        flag, equals, value = word.partition("=")
        if not _FLAG.match(word) or " " in flag:  # a text with spaces is a value, whatever it begins with
            out.append(word)
            continue
        root, dot, path = flag.partition(".")
        if root.startswith("--"):
            root = root.replace("_", "-")
        flag = root + dot + path
        if dot and root in known and known[root].metavar == JSON:
            if not equals:
                if position >= end:
                    raise UsageError(f"{flag}: a value is missing")
                value = words[position]
                position += 1
            _set(nested.setdefault(root, {}), flag, path.split("."), _json_or_text(value))
            continue
        _refuse_unknown(flag, known, parser)
        out.append(flag + equals + value)
    for flag, content in nested.items():
        if any(word.partition("=")[0] == flag for word in out):
            raise UsageError(f"{flag}: give it as JSON or as {flag}.KEY VALUE, not both")
        out += [flag, json.dumps(content)]
    return [*out, *words[end:]]


def _set(content: dict[str, Any], flag: str, path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        inner = content.setdefault(key, {})
        if not isinstance(inner, dict):
            raise UsageError(f"{flag}: {key} has a value of its own already")
        content = inner
    if not path[-1] or path[-1] in content:
        raise UsageError(f"{flag}: {'given twice' if path[-1] else 'a key is missing after the dot'}")
    content[path[-1]] = value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _refuse_unknown(flag: str, known: dict[str, argparse.Action], parser: argparse.ArgumentParser) -> None:
    """Before argparse, which would take the value of an unknown flag for MODEL and complain about that instead."""
    from .foreign_flags import describe_foreign

    if flag in known:
        return
    joined = not flag.startswith("--") and flag[:2] in known  # -qNAME is -q NAME
    if joined and describe_foreign(flag) is None and known[flag[:2]].nargs != 0:
        return
    raise UsageError(describe_unknown([flag], parser))


def describe_unknown(words: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """What to say about words that no flag of ours explains."""
    from .foreign_flags import describe_foreign

    word = next((word for word in words if word.startswith("-") and word != "-"), words[0])
    if not word.startswith("-"):
        return f"unexpected argument {word!r}; a flag that takes several values is repeated: --flag A --flag B"
    flag = word.partition("=")[0]
    foreign = describe_foreign(flag) or describe_foreign(flag.partition(".")[0])
    if foreign is not None:
        return f"unknown flag {flag}: {foreign}"
    near = difflib.get_close_matches(flag, options_of(parser), n=1, cutoff=0.5)
    hint = f"; the nearest one is {near[0]}" if near else ""
    return f"unknown flag {flag}{hint} (all flags: {parser.prog} --help)"
