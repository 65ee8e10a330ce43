"""Flags out of the pydantic models: a field `max_num_seqs` is the flag `--max-num-seqs`, its description is the help
text.

Only flags that were given end up in the namespace, so that the config file can fill the others.
"""

from __future__ import annotations

import argparse
import json
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hotswap.core.errors import UsageError

from .known_flags import inverse
from .spelling import JSON

SHORT_FLAGS: Final = {
    "quantization": "-q",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
}
FLAG_ALIASES: Final = {"gpu_memory_utilization": "--device-memory-utilization"}  # other words for exactly the same
# vLLM lets these take several values at once: --served-model-name A B.
SEVERAL_VALUES: Final = frozenset({"served_model_name", "api_key"})
_AUTO: Final = {"max_model_len": ("auto", "-1")}  # words for None beside those of every optional number, as in vLLM
_LATER_VALUES: Final = {
    "kv_cache_dtype": "a KV cache of another data type than the model's is not in this version yet; use auto",
    "generation_config": "a folder with sampling defaults is not in this version yet; give single values with "
    "--override-generation-config",
}
_DECIMAL: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY: Final = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


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


def greedy_flag(arguments: argparse.Namespace) -> str | None:
    """The first flag that took several values at once, one of which may have been meant as MODEL."""
    found: str | None = getattr(arguments, "greedy_flag", None)
    return found


def _add_flag(group: Any, name: str, info: FieldInfo) -> None:
    flags = [flag_name(name)]
    flags += [other for other in (SHORT_FLAGS.get(name), FLAG_ALIASES.get(name)) if other]
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": _help(info)}
    kind, choices, _ = _scalar_type(info)
    if kind is bool:
        group.add_argument(*flags, action=_Switch, **common)
    elif kind is list and name in SEVERAL_VALUES:
        group.add_argument(*flags, action=_Several, nargs="+", metavar=_metavar(name), **common)
    elif kind is list:
        group.add_argument(*flags, action="append", metavar=_metavar(name), **common)
    elif kind is dict:
        group.add_argument(*flags, type=json_object, metavar=JSON, **common)
    elif choices:
        group.add_argument(*flags, choices=choices, type=_choice(name, info, choices), **common)
    elif kind in (int, float):
        group.add_argument(*flags, type=_number(kind, auto_words(name, info)), metavar=_metavar(name), **common)
    else:
        group.add_argument(*flags, metavar=_metavar(name), **common)


class _Switch(argparse.BooleanOptionalAction):
    """--enable-x with --no-enable-x and, as vLLM spells it, --disable-x; and the other way round."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, **settings)
        other = inverse(dest)
        self._inverse = [flag_name(other)] if other else []
        self.option_strings = [*self.option_strings, *self._inverse]

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        off = option is not None and (option.startswith("--no-") or option in self._inverse)
        setattr(namespace, self.dest, not off)


class _Several(argparse.Action):
    """--flag A B --flag C is [A, B, C]."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), *values])
        if len(values) > 1 and not hasattr(namespace, "greedy_flag"):
            namespace.greedy_flag = option


def _choice(name: str, info: FieldInfo, choices: Sequence[str]) -> Callable[[str], str]:
    spelled = spellings(info)

    def convert(text: str) -> str:
        refuse_later_value(name, text, [*choices, *spelled])
        return spelled.get(text, text)

    return convert


def spellings(info: FieldInfo) -> dict[str, str]:
    """Other words for choices of a setting, {"half": "float16"}, as its field declares them."""
    extra = info.json_schema_extra
    found = extra.get("spellings", {}) if isinstance(extra, dict) else {}
    return found if isinstance(found, dict) else {}  # type: ignore[return-value]  # declared as strings in core/config.py


def refuse_later_value(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises UsageError for a value that will be a choice one day, and is not yet."""
    if name in _LATER_VALUES and isinstance(value, str) and value not in choices:
        raise UsageError(f"{flag_name(name)} {value}: {_LATER_VALUES[name]}")


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


def auto_words(name: str, info: FieldInfo) -> tuple[str, ...]:
    """What may be given for a number and means what not giving it means."""
    kind, _, optional = _scalar_type(info)
    return _AUTO.get(name, ("auto",)) if optional and kind in (int, float) else ()


def _number(kind: type[int] | type[float], auto: Sequence[str]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        if text in auto:
            return None
        return human_int(text) if kind is int else kind(text)

    convert.__name__ = kind.__name__  # argparse names it in "invalid int value"
    return convert


def number_from_text(name: str, info: FieldInfo, text: str) -> Any:
    """As a flag of this setting would read it; None for "auto". Raises ValueError."""
    return _number(_scalar_type(info)[0], auto_words(name, info))(text)


def human_int(text: str) -> int:
    """8000, 8k (8000), 8K (8192), 25.6k: as vLLM reads them. Raises ValueError."""
    text = text.strip()
    if text[-1:] in _BINARY:
        return int(text[:-1]) * _BINARY[text[-1]]
    if text[-1:] in _DECIMAL:
        number = float(text[:-1]) * _DECIMAL[text[-1]]
        if not number.is_integer():
            raise ValueError(f"{text!r} is not a whole number")
        return int(number)
    return int(text)


def kind_of(info: FieldInfo) -> Any:
    """bool, int, float, str, list or dict: what a value of this setting is; a Literal is str."""
    return _scalar_type(info)[0]


def choices_of(info: FieldInfo) -> tuple[str, ...]:
    """The choices of a Literal; empty for others."""
    return _scalar_type(info)[1]


def json_object(text: str) -> dict[str, Any]:
    """Raises argparse.ArgumentTypeError saying what it is instead."""
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
