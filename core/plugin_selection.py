"""The one selection rule, first half: what the operator wrote, parsed, with where it was written. The second half, what
to choose from it, is in plugin_manager.py.

    KIND=NAME[,OPTION=VALUE...]   choose          KIND.OP=NAME   choose for one op (kinds with one active per op)
    NAME[,OPTION=VALUE...]        choose, when only one kind has that name
    ./file.py  some.module        load it first and activate what it provides
    no:NAME  no:DISTRIBUTION  no:KIND=NAME   block
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from .contracts.kinds import KINDS
from .errors import PluginError

COMMAND_LINE: Final = "command line"
PYTHON: Final = "Python"
CONFIG_FILE: Final = "config file"
# The sources of explicit choices, strongest first; what the checkpoint implies and what is automatic come after them.
PRECEDENCE: Final = (COMMAND_LINE, PYTHON, CONFIG_FILE)

AUTO: Final = "auto"  # as a name: leave it to the implied or automatic choice, whatever weaker sources say
BLOCK_PREFIX: Final = "no:"

# Settings that mean `--plugin KIND=VALUE`.
ALIASES: Final[Mapping[str, str]] = {
    "attention_backend": "attention",
    "scheduling_policy": "policy",
    "distributed_executor_backend": "executor",
    "load_format": "loader",
    "quantization": "quantization",
    "tool_call_parser": "tool_parser",
}


class Selection(msgspec.Struct, frozen=True):
    """An explicit choice. kind None: not known before the plugins are loaded. spelled: as the operator wrote it."""

    source: str
    spelled: str
    name: str
    kind: str | None = None
    op: str | None = None
    options: dict[str, Any] = {}

    @property
    def where(self) -> str:
        """For messages: '--plugin policy=fair, config file'."""
        return f"{self.spelled}, {self.source}"


class LoadRequest(msgspec.Struct, frozen=True):
    """A file or module to load first; what it provides is then chosen."""

    source: str
    spelled: str
    target: str
    is_file: bool
    options: dict[str, Any] = {}


class Block(msgspec.Struct, frozen=True):
    """Keeps a plugin, a distribution or a provider out. name: a provider's, an entry point's or a distribution's."""

    source: str
    spelled: str
    name: str
    kind: str | None = None


Parsed = Selection | LoadRequest | Block


def parse(raw: str, source: str, *, spelled: str | None = None) -> Parsed:
    """One value of --plugin. Raises PluginError saying what is wrong with it."""
    if source not in PRECEDENCE:
        raise ValueError(f"unknown source of selections {source!r}; one of {', '.join(PRECEDENCE)}")
    spelled = spelled or f"--plugin {raw}"
    text = raw.strip()
    if text.startswith(BLOCK_PREFIX):
        return _parse_block(text.removeprefix(BLOCK_PREFIX), source, spelled)
    head, comma, rest = text.partition(",")
    options = _parse_options(rest, spelled) if comma else {}
    if head.endswith(".py") and "=" not in head:
        return LoadRequest(source, spelled, head, True, options)
    kind_part, equals, name = head.partition("=")
    if not equals:
        if not head:
            raise PluginError(f"{spelled}: empty; write KIND=NAME, NAME, ./file.py, some.module or no:NAME")
        if "." in head:
            return LoadRequest(source, spelled, head, False, options)
        return Selection(source, spelled, head, options=options)
    kind, op = _parse_kind(kind_part, spelled)
    if not name:
        raise PluginError(f"{spelled}: the name after {kind_part}= is empty")
    if name.endswith(".py"):
        raise PluginError(f"{spelled}: a file is loaded by itself, without a kind: --plugin {name}")
    if name == AUTO and options:
        raise PluginError(f"{spelled}: options need a named plugin, not {AUTO!r}")
    return Selection(source, spelled, name, kind, op, options)


def parse_all(selections: Iterable[tuple[str, str] | Parsed]) -> list[Parsed]:
    """Pairs of (source, value of --plugin), or what `selections_from_settings` made of aliases."""
    return [parse(item[1], item[0]) if isinstance(item, tuple) else item for item in selections]


def selections_from_settings(settings: Mapping[str, Any], source: str) -> list[Parsed]:
    """The explicit choices in flat settings of one source: `plugin` (a list) and the familiar aliases. Unset ones are
    None."""
    plugin = settings.get("plugin") or []
    found = [parse(raw, source) for raw in ([plugin] if isinstance(plugin, str) else plugin)]
    for setting, kind in ALIASES.items():
        value = settings.get(setting)
        if value is None:
            continue
        flag = f"--{setting.replace('_', '-')} {value}"
        # A familiar flag was never anything but a name: vLLM writes some of them in capitals.
        found.append(Selection(source, flag, str(value).strip().lower().replace("-", "_"), kind))
    return found


def strongest(selections: Sequence[Selection]) -> list[Selection]:
    """Those of the source that takes precedence."""
    for source in PRECEDENCE:
        found = [selection for selection in selections if selection.source == source]
        if found:
            return found
    return []


def agree(selections: Sequence[Selection], label: str) -> Selection | None:
    """The one choice that equally strong selections make. Raises PluginError when there are two."""
    if not selections:
        return None
    named = [selection for selection in selections if selection.name != AUTO] or selections
    chosen = max(named, key=lambda selection: len(selection.options))
    for other in named:
        if other.name != chosen.name or (other.options and other.options != chosen.options):
            raise PluginError(f"{label}: two choices, {other.spelled} and {chosen.spelled} ({chosen.source}); keep one")
    return chosen


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean 'x'?' or nothing."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower().replace("-", "_"), by_lower, n=3, cutoff=0.6)
    if not near:
        return ""
    return "; did you mean " + " or ".join(repr(by_lower[key]) for key in near) + "?"


def _parse_block(text: str, source: str, spelled: str) -> Block:
    kind_part, equals, name = text.partition("=")
    if not equals:
        kind_part, name = "", text
    if not name:
        raise PluginError(f"{spelled}: write no:NAME, no:DISTRIBUTION or no:KIND=NAME")
    if "," in name:
        raise PluginError(f"{spelled}: a block takes no options; repeat --plugin for each name")
    return Block(source, spelled, name, _parse_kind(kind_part, spelled)[0] if equals else None)


def _parse_kind(text: str, spelled: str) -> tuple[str, str | None]:
    name, _, op = text.strip().partition(".")
    if name not in KINDS:
        raise PluginError(f"{spelled}: unknown plugin kind {name!r}{nearest(name, KINDS)} (kinds: {', '.join(KINDS)})")
    if op and KINDS[name].active != "one per op":
        raise PluginError(f"{spelled}: {name} is not chosen per op; write {name}=NAME")
    if op and op not in KINDS[name].ops():
        raise PluginError(
            f"{spelled}: unknown op {op!r}{nearest(op, KINDS[name].ops())} (ops: {', '.join(KINDS[name].ops())})"
        )
    return name, op or None


def _parse_options(text: str, spelled: str) -> dict[str, Any]:
    """OPTION=VALUE,...: a VALUE that parses as JSON is JSON, and its commas do not split; any other is a string."""
    options: dict[str, Any] = {}
    position = 0
    while position <= len(text):
        equals = text.find("=", position)
        comma = text.find(",", position)
        if equals < 0 or (0 <= comma < equals):
            piece = text[position : comma if comma >= 0 else len(text)]
            raise PluginError(f"{spelled}: {piece!r} is not OPTION=VALUE")
        name = text[position:equals].strip()
        if not name:
            raise PluginError(f"{spelled}: an option without a name before '='")
        if name in options:
            raise PluginError(f"{spelled}: option {name!r} is given twice")
        options[name], position = _parse_value(text, equals + 1)
    return options


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _parse_value(text: str, start: int) -> tuple[Any, int]:
    """The value that begins at `start`, and where the next option begins (past the end when there is none)."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        if end == len(text) or text[end] == ",":
            return value, end + 1
    except ValueError:
        pass  # not JSON: a plain string up to the next comma
    comma = text.find(",", start)
    end = comma if comma >= 0 else len(text)
    return text[start:end], end + 1
