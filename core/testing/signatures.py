"""The public signatures of the contracts as plain data, and what changed between two states of them.

A plugin is written against what is here. A new method or field with a default breaks nobody, nor does a new parameter with a
default of what plugins only call; anything else asks for a new version of the contract.
`tests/unit/test_contract_signatures.py` compares with the committed state, and `tests/update_contract_signatures.py`
replaces it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import msgspec

from .. import contracts
from ..contracts.kinds import KINDS

NOT_A_CONTRACT = frozenset({"kinds"})  # the core's own table
SHARED: Mapping[str, tuple[str, ...]] = {"plan": ("executor", "scheduler")}  # modules of several kinds; others: of all
# Protocols whose objects plugins make. Those of all others, and functions, are the core's: plugins call them.
MADE_BY_PLUGINS = frozenset({"platform.DeviceEvent", "platform.DeviceGraph"})
Snapshot = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """where: "module.Class.member". compatible: whether plugins written before go on working."""

    where: str
    what: str
    compatible: bool

    @property
    def module(self) -> str:
        return self.where.split(".")[0]


def current_snapshot() -> Snapshot:
    """{"versions": {kind: current}, "modules": {module: {class or function: description}}}"""
    modules: dict[str, Any] = {}
    for found in pkgutil.iter_modules(contracts.__path__):
        if found.name not in NOT_A_CONTRACT:
            module = importlib.import_module(f"{contracts.__name__}.{found.name}")
            modules[found.name] = dict(sorted(_public(module)))
    return {"versions": {name: kind.current for name, kind in KINDS.items()}, "modules": modules}


def kinds_of(module: str) -> tuple[str, ...]:
    """The kinds whose contract a module is part of."""
    own = tuple(name for name, kind in KINDS.items() if kind.abstract.partition(":")[0] == module)
    return own or SHARED.get(module, tuple(KINDS))


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(value):
            yield name, describe_class(value)
        elif isinstance(value, FunctionType):
            yield name, {"function": _signature(value)}


def describe_class(cls: type[Any]) -> dict[str, Any]:
    """{"fields": [[name, annotation, has a default], ...], "keywords_only", "protocol", "members": {name: ...}}"""
    members: dict[str, Any] = {}
    for name, value in vars(cls).items():
        if name.startswith("_") and name not in ("__init__", "__len__"):
            continue
        described = _member(value)
        generated = dataclasses.is_dataclass(cls) or issubclass(cls, msgspec.Struct)
        if described is not None and not (name == "__init__" and generated):
            members[name] = described
    return {
        "fields": _fields(cls),
        "keywords_only": _keywords_only(cls),
        "protocol": bool(getattr(cls, "_is_protocol", False)),
        "members": dict(sorted(members.items())),
    }


def _member(value: Any) -> dict[str, Any] | None:
    if isinstance(value, property):
        return {"property": _signature(value.fget)["returns"], "abstract": _is_abstract(value)}
    if isinstance(value, (staticmethod, classmethod)):
        return {**_signature(value.__func__), "abstract": _is_abstract(value)}
    if isinstance(value, FunctionType):
        return {**_signature(value), "abstract": _is_abstract(value)}
    return None


def _is_abstract(value: Any) -> bool:
    return bool(getattr(value, "__isabstractmethod__", False))


def _signature(function: Any) -> dict[str, Any]:
    signature = inspect.signature(function)
    parameters = [
        [p.name, p.kind.name, _text(p.annotation), p.default is not inspect.Parameter.empty]
        for p in signature.parameters.values()
    ]
    return {"parameters": parameters, "returns": _text(signature.return_annotation)}


def _text(annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _fields(cls: type[Any]) -> list[list[Any]]:
    """Own and inherited, in the order in which a constructor takes them; for other classes the annotated attributes."""
    if dataclasses.is_dataclass(cls):
        missing = dataclasses.MISSING
        return [
            [f.name, _text(f.type), f.default is not missing or f.default_factory is not missing]
            for f in dataclasses.fields(cls)
        ]
    annotations: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        annotations.update(vars(base).get("__annotations__", {}))
    if issubclass(cls, msgspec.Struct):
        names = cls.__struct_fields__
        defaults = (msgspec.NODEFAULT,) * (len(names) - len(cls.__struct_defaults__)) + cls.__struct_defaults__
        return [
            [name, _text(annotations[name]), default is not msgspec.NODEFAULT]
            for name, default in zip(names, defaults, strict=True)
        ]
    return [[name, _text(kind), hasattr(cls, name)] for name, kind in annotations.items() if not name.startswith("_")]


def _keywords_only(cls: type[Any]) -> bool:
    if dataclasses.is_dataclass(cls):
        return all(f.kw_only for f in dataclasses.fields(cls))
    return not issubclass(cls, msgspec.Struct) or not cls.__match_args__


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Between two values of `current_snapshot()["modules"]`: empty when nothing changed."""
    found: list[Change] = []
    for module in sorted({*before, *after}):
        if module not in before or module not in after:
            found.append(Change(module, "added" if module in after else "removed", module in after))
            continue
        old, new = before[module], after[module]
        for name in sorted({*old, *new}):
            where = f"{module}.{name}"
            if name not in old or name not in new:
                found.append(Change(where, "added" if name in new else "removed", name in new))
            elif "function" in old[name] or "function" in new[name]:
                if old[name] != new[name]:
                    was, now = old[name].get("function", {}), new[name].get("function", {})
                    found.append(Change(where, "changed", _only_takes_more(was, now)))
            else:
                found += class_changes(where, old[name], new[name])
    return found


def class_changes(where: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Between two descriptions of one class."""
    found: list[Change] = []
    from_core = bool(new["protocol"]) and where not in MADE_BY_PLUGINS
    if (old["protocol"], old["keywords_only"]) != (new["protocol"], new["keywords_only"]):
        found.append(Change(where, "another kind of class, or fields that are taken otherwise", False))
    found += _field_changes(where, old, new, from_core)
    for name in sorted({*old["members"], *new["members"]}):
        place = f"{where}.{name}"
        was, now = old["members"].get(name), new["members"].get(name)
        if was is None and now is not None:
            # What the core gives may grow; an abstract method, or one of a protocol, is what every plugin would have to have.
            needed = now.get("abstract") or (new["protocol"] and not from_core)
            added = "added, and abstract" if now.get("abstract") else "added"
            found.append(Change(place, added, from_core or not needed))
        elif now is None:
            found.append(Change(place, "removed", False))
        elif was != now:
            found.append(Change(place, "changed", from_core and _only_takes_more(was, now)))
    return found


def _only_takes_more(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether every call that was right before still is: the parameters as they were, then others with a default."""
    was, now = old.get("parameters"), new.get("parameters")
    if was is None or now is None or {**old, "parameters": now} != new:
        return False
    return now[: len(was)] == was and all(default for _, _, _, default in now[len(was) :])


def _field_changes(where: str, old: Mapping[str, Any], new: Mapping[str, Any], from_core: bool) -> list[Change]:
    found: list[Change] = []
    was = {name: (kind, default) for name, kind, default in old["fields"]}
    now = {name: (kind, default) for name, kind, default in new["fields"]}
    for name, (kind, default) in was.items():
        if name not in now:
            found.append(Change(f"{where}.{name}", "removed", False))
        elif now[name] != (kind, default):
            given_a_default = now[name] == (kind, True)
            found.append(Change(f"{where}.{name}", "changed", given_a_default))
    kept = [name for name in now if name in was]
    moved = kept != [name for name in was if name in now] or list(now)[: len(kept)] != kept
    if moved and not new["keywords_only"]:
        found.append(Change(where, "fields in another order", False))
    for name, (_, default) in now.items():
        if name not in was:
            what = "added" if default else "added, and without a default"
            found.append(Change(f"{where}.{name}", what, bool(default) or from_core))
    return found


def verdict(before: Snapshot, after: Snapshot, documented: Mapping[str, str], command: str) -> list[str]:
    """What must be done before `after` may replace `before`, one sentence each; empty when nothing changed.

    documented: the section of each kind in docs/plugins/contracts.md. command: what updates the committed state.
    """
    found = changes(before["modules"], after["modules"])
    sentences: list[str] = []
    for change in found:
        if change.compatible:
            sentences.append(f"{change.where}: {change.what}; that breaks no plugin: {command}")
            continue
        for kind in kinds_of(change.module):
            version = after["versions"][kind]
            if version <= before["versions"].get(kind, 0):
                sentences.append(
                    f"{change.where}: {change.what}; that breaks plugins: raise `current` of {kind!r} in core/contracts/"
                    f"kinds.py and say in docs/plugins/contracts.md what changed"
                )
            elif f"Version {version}: " not in documented.get(kind, ""):
                sentences.append(
                    f"{change.where}: {change.what}; docs/plugins/contracts.md does not say what changed in version "
                    f"{version} of {kind!r}"
                )
            else:
                sentences.append(f"{change.where}: {change.what}, told as version {version} of {kind!r}: {command}")
    if before["versions"] != after["versions"] and not found:
        sentences.append(f"a kind or a version was added: {command}")
    return sentences


def blocked(sentences: list[str], command: str) -> list[str]:
    """Those of `verdict` that the update does not settle."""
    return [sentence for sentence in sentences if not sentence.endswith(command)]
