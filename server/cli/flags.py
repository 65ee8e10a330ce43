"""Flags out of the pydantic models: a field `max_num_seqs` is the flag `--max-num-seqs`, its description is the help
text.

Only flags that were given end up in the namespace, so that the config file can fill the others.
"""

from __future__ import annotations

import argparse
import difflib
import json
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hotswap.core.errors import UsageError

SHORT_FLAGS: Final = {
    "quantization": "-q",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
}
# What other engines call it. Refused with our name: a flag that is quietly taken for another one surprises somebody.
FOREIGN_FLAGS: Final = {
    "--model-path": "MODEL as the first argument",
    "--context-length": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--max-running-requests": "--max-num-seqs",
    "--max-queued-requests": "--max-num-queued-reqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--schedule-policy": "--scheduling-policy",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--disable-cuda-graph": "--enforce-eager",
    "--tp-size": "--tensor-parallel-size",
    "--max-total-tokens": "--kv-cache-memory-bytes or --num-gpu-blocks-override",
    "--disable-log-requests": "nothing: requests are logged only with --enable-log-requests",
}


def flag_name(field: str) -> str:
    """max_num_seqs -> --max-num-seqs"""
    return "--" + field.replace("_", "-")


def flat_fields(config: type[BaseModel]) -> Iterator[tuple[str, FieldInfo, type[BaseModel]]]:
    """(field name, field, section) of a config and its sections."""
    for name, info in config.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from flat_fields(info.annotation)
        else:
            yield name, info, config


def add_flags(
    parser: argparse.ArgumentParser, config: type[BaseModel], *, only: Callable[[str], bool] = lambda name: True
) -> None:
    """A flag for each field, grouped by section. `model` is the positional MODEL (and --model)."""
    groups: dict[type[BaseModel], Any] = {}
    for name, info, section in flat_fields(config):
        if not only(name):
            continue
        if section not in groups:
            title = (section.__doc__ or section.__name__).strip().splitlines()[0].rstrip(".")
            groups[section] = parser.add_argument_group(title)
        if name == "model":
            groups[section].add_argument(
                "model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=_help(info)
            )
            groups[section].add_argument(
                "--model", dest="model_flag", default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )
        else:
            _add_flag(groups[section], name, info)


def given_settings(arguments: argparse.Namespace, config: type[BaseModel]) -> dict[str, Any]:
    """The settings that the command line gave, by field name. Raises UsageError when MODEL and --model differ."""
    given = vars(arguments)
    settings = {name: given[name] for name, _, _ in flat_fields(config) if name in given}
    by_flag = given.get("model_flag")
    if by_flag is not None:
        if settings.get("model", by_flag) != by_flag:
            raise UsageError(f"two models: {settings['model']} and --model {by_flag}; keep one")
        settings["model"] = by_flag
    return settings


def describe_unknown(words: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """What to say about words that no flag of ours explains."""
    word = next((word for word in words if word.startswith("-") and word != "-"), words[0])
    if not word.startswith("-"):
        return f"unexpected argument {word!r}; a flag that takes several values is repeated: --flag A --flag B"
    flag = word.partition("=")[0]
    ours = [option for action in parser._actions for option in action.option_strings]
    if flag in FOREIGN_FLAGS:
        return f"unknown flag {flag}: here it is {FOREIGN_FLAGS[flag]}"
    near = difflib.get_close_matches(flag, ours, n=1, cutoff=0.5)
    hint = f"; the nearest one is {near[0]}" if near else ""
    return f"unknown flag {flag}{hint} (all flags: {parser.prog} --help)"


def _add_flag(group: Any, name: str, info: FieldInfo) -> None:
    flags = [flag_name(name), *([SHORT_FLAGS[name]] if name in SHORT_FLAGS else [])]
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": _help(info)}
    kind, choices, optional = _scalar_type(info)
    if kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
    elif kind is list:
        group.add_argument(*flags, action="append", metavar=_metavar(name), **common)
    elif kind is dict:
        group.add_argument(*flags, type=_json_object, metavar="JSON", **common)
    elif choices:
        group.add_argument(*flags, choices=choices, **common)
    elif kind in (int, float):
        group.add_argument(*flags, type=_number(kind, optional), metavar=_metavar(name), **common)
    else:
        group.add_argument(*flags, metavar=_metavar(name), **common)


def _scalar_type(info: FieldInfo) -> tuple[Any, tuple[str, ...], bool]:
    """(type, choices of a Literal, whether None is allowed) of a field such as `Annotated[int, ...] | None`."""
    annotation: Any = info.annotation
    optional = False
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        optional = len(members) < len(typing.get_args(annotation))
        if len(members) != 1:
            raise TypeError(f"a setting needs one type, not {annotation}")
        annotation = members[0]
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) is Literal:
        return str, typing.get_args(annotation), optional
    return typing.get_origin(annotation) or annotation, (), optional


def takes_auto(info: FieldInfo) -> bool:
    """Whether "auto" may be given for a number, and means what not giving it means."""
    kind, _, optional = _scalar_type(info)
    return optional and kind in (int, float)


def _number(kind: type[int] | type[float], optional: bool) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        if optional and text == "auto":
            return None
        return kind(text)

    convert.__name__ = kind.__name__  # argparse names it in "invalid int value"
    return convert


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error}): {text!r:.60}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is needed, got {text!r:.60}")
    return value


def _metavar(name: str) -> str:
    return name.rpartition("_")[2].upper()


def _help(info: FieldInfo) -> str:
    text = info.description or ""
    default = info.get_default(call_default_factory=True)
    shown = f" (default: {default})" if default not in (None, [], {}, False, "") else ""
    return (text + shown).replace("%", "%%")
