"""The contracts keep their word: what changes their public signatures is either harmless or announced."""

from __future__ import annotations

import importlib.util
import json
from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import msgspec
import pytest

from hotswap.core.contracts.kinds import KINDS
from hotswap.core.testing.signatures import (
    MADE_BY_PLUGINS,
    blocked,
    class_changes,
    current_snapshot,
    describe_class,
    kinds_of,
    verdict,
)

SCRIPT = Path(__file__).resolve().parents[1] / "update_contract_signatures.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("update_contract_signatures", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


def test_the_contracts_are_as_committed() -> None:
    sentences = verdict(script.committed_snapshot(), current_snapshot(), script.documented_kinds(), script.COMMAND)
    assert not sentences, "\n".join(sentences)


def test_the_committed_file_is_what_the_script_writes() -> None:
    snapshot = current_snapshot()
    assert json.loads(script.as_text(snapshot)) == json.loads(json.dumps(snapshot))
    assert script.SNAPSHOT.read_text() == script.as_text(script.committed_snapshot())


def test_every_kind_is_in_it() -> None:
    snapshot = current_snapshot()
    assert snapshot["versions"] == {name: kind.current for name, kind in KINDS.items()}
    for kind in KINDS.values():
        module, _, name = kind.abstract.partition(":")
        assert snapshot["modules"][module][name]["members"], kind.name
    assert kinds_of("policy") == ("policy",)
    assert kinds_of("provider") == tuple(KINDS)
    assert kinds_of("plan") == ("executor", "scheduler")


# The rules, on made-up classes.


class Before(ABC):
    limit: int

    def __init__(self, a: int) -> None: ...
    @abstractmethod
    def must(self, a: int, b: str = "") -> int: ...
    def may(self) -> None: ...
    @property
    def fact(self) -> int:
        return 0


class MoreDefaulted(Before):
    def __init__(self, a: int) -> None: ...
    @abstractmethod
    def must(self, a: int, b: str = "") -> int: ...
    def may(self) -> None: ...
    def may_too(self) -> None: ...
    @property
    def fact(self) -> int:
        return 0


class MoreAbstract(Before):
    def __init__(self, a: int) -> None: ...
    @abstractmethod
    def must(self, a: int, b: str = "") -> int: ...
    @abstractmethod
    def must_too(self) -> None: ...
    def may(self) -> None: ...
    @property
    def fact(self) -> int:
        return 0


class OtherParameter(Before):
    def __init__(self, a: int) -> None: ...
    @abstractmethod
    def must(self, a: int, b: str = "", c: int = 0) -> int: ...
    def may(self) -> None: ...
    @property
    def fact(self) -> int:
        return 0


class OtherAnnotation(Before):
    def __init__(self, a: int) -> None: ...
    @abstractmethod
    def must(self, a: int, b: str = "") -> str: ...  # type: ignore[override]
    def may(self) -> None: ...
    @property
    def fact(self) -> int:
        return 0


class Renamed(Before):
    def __init__(self, a: int) -> None: ...
    @abstractmethod
    def must(self, a: int, b: str = "") -> int: ...
    def might(self) -> None: ...
    @property
    def fact(self) -> int:
        return 0


class Empty(Before):
    pass


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (Before, []),
        (MoreDefaulted, [("x.may_too", True)]),
        (MoreAbstract, [("x.must_too", False)]),
        (OtherParameter, [("x.must", False)]),
        (OtherAnnotation, [("x.must", False)]),
        (Renamed, [("x.may", False), ("x.might", True)]),
        (Empty, [(f"x.{name}", False) for name in ("__init__", "fact", "may", "must")]),
    ],
)
def test_methods(after: type[Any], expected: list[tuple[str, bool]]) -> None:
    found = class_changes("x", describe_class(Before), describe_class(after))
    assert [(change.where, change.compatible) for change in found] == expected


@dataclass
class Record:
    a: int
    b: str = ""


@dataclass
class Appended:
    a: int
    b: str = ""
    c: int = 0


@dataclass
class Inserted:
    a: int
    c: int = 0
    b: str = ""


@dataclass(kw_only=True)
class Keywords:
    a: int
    b: str = ""


@dataclass(kw_only=True)
class InsertedKeyword:
    a: int
    c: int = 0
    b: str = ""


@dataclass(kw_only=True)
class NeededKeyword:
    a: int
    b: str = ""
    c: int


@dataclass
class Lost:
    a: int


@dataclass
class Defaulted:
    a: int = 0
    b: str = ""


@dataclass
class Retyped:
    a: float
    b: str = ""


class Message(msgspec.Struct, array_like=True):
    a: int
    b: str = ""


class LongerMessage(msgspec.Struct, array_like=True):
    a: int
    b: str = ""
    c: int = 0


class NeedierMessage(msgspec.Struct, array_like=True):
    a: int
    c: int
    b: str = ""


class View(Protocol):
    @property
    def a(self) -> int: ...


class WiderView(Protocol):
    @property
    def a(self) -> int: ...
    @property
    def b(self) -> int: ...


class Caller(Protocol):
    def call(self, a: int) -> int: ...


class TakesMore(Protocol):
    def call(self, a: int, b: int = 0) -> int: ...


class NeedsMore(Protocol):
    def call(self, a: int, b: int) -> int: ...


class TakesMoreBefore(Protocol):
    def call(self, b: int = 0, a: int = 0) -> int: ...


class GivesAnother(Protocol):
    def call(self, a: int, b: int = 0) -> str: ...


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (Record, Record, []),
        (Record, Appended, [("x.c", True)]),
        (Record, Inserted, [("x", False), ("x.c", True)]),
        (Keywords, InsertedKeyword, [("x.c", True)]),
        (Keywords, NeededKeyword, [("x.c", False)]),
        (Record, Keywords, [("x", False)]),
        (Record, Lost, [("x.b", False)]),
        (Record, Defaulted, [("x.a", True)]),
        (Defaulted, Record, [("x.a", False)]),
        (Record, Retyped, [("x.a", False)]),
        (Message, LongerMessage, [("x.c", True)]),
        (LongerMessage, Message, [("x.c", False)]),
        (Message, NeedierMessage, [("x", False), ("x.c", False)]),
        (View, WiderView, [("x.b", True)]),
        (WiderView, View, [("x.b", False)]),
        (Caller, TakesMore, [("x.call", True)]),
        (TakesMore, Caller, [("x.call", False)]),
        (Caller, NeedsMore, [("x.call", False)]),
        (Caller, TakesMoreBefore, [("x.call", False)]),
        (Caller, GivesAnother, [("x.call", False)]),
    ],
)
def test_fields(before: type[Any], after: type[Any], expected: list[tuple[str, bool]]) -> None:
    found = class_changes("x", describe_class(before), describe_class(after))
    assert [(change.where, change.compatible) for change in found] == expected


def test_what_plugins_make_may_not_grow() -> None:
    """A protocol is the core's to give, but for those that a platform gives back."""
    name = "platform.DeviceEvent"
    assert name in MADE_BY_PLUGINS
    for before, after, member in ((View, WiderView, "b"), (Caller, TakesMore, "call")):
        found = class_changes(name, describe_class(before), describe_class(after))
        assert [(change.where, change.compatible) for change in found] == [(f"{name}.{member}", False)]


def test_every_name_of_what_plugins_make_is_one() -> None:
    modules = current_snapshot()["modules"]
    for name in MADE_BY_PLUGINS:
        module, _, member = name.partition(".")
        assert modules[module][member]["protocol"], name


# What a failing test says.


def changed(edit: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    before = current_snapshot()
    after = deepcopy(before)
    edit(after)
    return before, after


def said(before: dict[str, Any], after: dict[str, Any], documented: dict[str, str] | None = None) -> list[str]:
    return verdict(before, after, documented or {}, "run it")


def test_a_new_defaulted_method_asks_for_the_update() -> None:
    def edit(after: dict[str, Any]) -> None:
        members = after["modules"]["policy"]["Policy"]["members"]
        members["new"] = {**members["shed"], "abstract": False}

    sentences = said(*changed(edit))
    assert sentences == ["policy.Policy.new: added; that breaks no plugin: run it"]
    assert blocked(sentences, "run it") == []


def test_a_removed_method_asks_for_a_version_and_its_entry() -> None:
    def edit(after: dict[str, Any]) -> None:
        del after["modules"]["policy"]["Policy"]["members"]["shed"]

    before, after = changed(edit)
    (sentence,) = said(before, after)
    assert "policy.Policy.shed: removed; that breaks plugins: raise `current` of 'policy'" in sentence
    after["versions"]["policy"] += 1
    (sentence,) = said(before, after)
    assert "does not say what changed in version 2 of 'policy'" in sentence
    assert blocked([sentence], "run it") == [sentence]
    sentences = said(before, after, {"policy": "Version 2: shed is gone."})
    assert sentences == ["policy.Policy.shed: removed, told as version 2 of 'policy': run it"]


def test_a_change_of_what_all_share_concerns_every_kind() -> None:
    def edit(after: dict[str, Any]) -> None:
        del after["modules"]["provider"]["Provider"]

    assert len(said(*changed(edit))) == len(KINDS)


def test_a_new_kind_asks_for_the_update() -> None:
    before, after = changed(lambda after: None)
    del before["versions"]["victim"]
    assert said(before, after) == ["a kind or a version was added: run it"]
    assert said(after, after) == []
