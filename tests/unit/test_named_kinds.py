"""Kinds of which any number is active, each named by the operator; and a kind whose fallback is to have none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hotswap.core.clock import SystemClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.provider import BuildContext, DeviceInfo
from hotswap.core.errors import PluginError
from hotswap.core.plugin_inventory import explain
from hotswap.core.plugin_manager import PluginManager, Suits
from hotswap.core.plugin_selection import COMMAND_LINE, CONFIG_FILE
from hotswap.plugins import BUILTIN_PLUGINS

CONTEXT = BuildContext(options=None, config=EngineConfig(), device=DeviceInfo("cpu", "a cpu"), clock=SystemClock())
PLUGIN = """
from pydantic import BaseModel
from hotswap.core.contracts import LogitsProcessor, LogitsProcessorProvider, Observer, Provider, hookimpl

class Options(BaseModel):
    level: int = 0

class Quiet(Observer):
    def __init__(self, level):
        self.level = level

@hookimpl
def hotswap_observer():
    yield Provider(name="quiet", build=lambda c: Quiet(c.options.level), options=Options)
    yield Provider(name="silent", build=lambda c: Quiet(-1))
    yield Provider(name="useless", build=lambda c: Quiet(-1), unavailable=lambda c: ["it is night"])
    yield Provider(name="wrong", build=lambda c: 7)
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("named")
    (folder / "named_kinds_plugin.py").write_text(PLUGIN)
    return str(folder)


@pytest.fixture
def manage(module: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PluginManager]:
    monkeypatch.syspath_prepend(module)

    def make(*command_line: str, config_file: tuple[str, ...] = ()) -> PluginManager:
        selections = [(COMMAND_LINE, raw) for raw in command_line] + [(CONFIG_FILE, raw) for raw in config_file]
        manager = PluginManager(builtins=(*BUILTIN_PLUGINS, "named_kinds_plugin"), selections=selections)
        manager.load()
        return manager

    return make


def active(manager: PluginManager, kind: str) -> list[str]:
    return [row.name for row in manager.inventory(CONTEXT) if row.kind == kind and row.state == "active"]


def test_none_unless_named(manage: Callable[..., PluginManager]) -> None:
    manager = manage()
    assert manager.build_all("observer", CONTEXT) == [] and active(manager, "observer") == []
    assert explain(manager, "observer", CONTEXT)[-1].startswith("  -> observer: none: --plugin observer=NAME activates")


def test_all_that_are_named_in_their_order(manage: Callable[..., PluginManager]) -> None:
    manager = manage("observer=silent", "observer=quiet,level=3", "observer=silent")
    assert active(manager, "observer") == ["quiet", "silent"], "known before anything is built"
    built = manager.build_all("observer", CONTEXT)
    assert [(choice.name, product.level) for choice, product in built] == [("silent", -1), ("quiet", 3)]
    assert active(manager, "observer") == ["quiet", "silent"]
    assert explain(manager, "observer", CONTEXT)[-2:] == [
        "  -> observer: 1. silent (--plugin observer=silent, command line)",
        "  -> observer: 2. quiet (--plugin observer=quiet,level=3, command line)",
    ]
    assert [found.name for found in PluginManager.from_frozen(manager.frozen()).named("observer")] == [
        "silent",
        "quiet",
    ]


def test_the_stronger_source_takes_all(manage: Callable[..., PluginManager]) -> None:
    file = ("observer=silent", "observer=quiet")
    assert [found.name for found in manage(config_file=file).named("observer")] == ["silent", "quiet"]
    assert [found.name for found in manage("observer=quiet", config_file=file).named("observer")] == ["quiet"]
    assert manage("observer=auto", config_file=file).named("observer") == []


def test_one_name_with_two_sets_of_options_is_refused(manage: Callable[..., PluginManager]) -> None:
    with pytest.raises(PluginError, match="observer 'quiet': two choices"):
        manage("observer=quiet,level=1", "observer=quiet,level=2")
    manager = manage("observer=quiet", "observer=quiet,level=2")
    assert [product.level for _, product in manager.build_all("observer", CONTEXT)] == [2]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("observer=quit",), "unknown observer 'quit' (--plugin observer=quit, command line); did you mean 'quiet'?"),
        (("observer=quiet,levl=1",), "has no option 'levl'; did you mean 'level'"),
        (("observer=quiet", "no:quiet"), "observer 'quiet' (--plugin observer=quiet, command line) is blocked by"),
        (("observer=quiet", "no:observer=quiet"), "is blocked by --plugin no:observer=quiet"),
    ],
)
def test_refusals_at_load(manage: Callable[..., PluginManager], given: tuple[str, ...], expected: str) -> None:
    with pytest.raises(PluginError) as caught:
        manage(*given)
    assert expected in str(caught.value)


def test_refusals_at_build_and_a_row_that_says_so(manage: Callable[..., PluginManager]) -> None:
    manager = manage("observer=useless", "observer=silent")
    with pytest.raises(PluginError, match="cannot run here: it is night"):
        manager.build_all("observer", CONTEXT)
    assert explain(manager, "observer", CONTEXT)[-2].startswith("  -> observer: 1. refused: observer 'useless'")
    assert "observer 'useless' of hotswap 0.1.0, priority 0: it is night" in "\n".join(
        explain(manager, "observer", CONTEXT)
    )
    with pytest.raises(PluginError, match="built a int, which is no Observer"):
        manage("observer=wrong").build_all("observer", CONTEXT)


def test_a_block_of_one_that_nobody_named(manage: Callable[..., PluginManager]) -> None:
    manager = manage("no:quiet", "observer=silent")
    states = {row.name: row.state for row in manager.inventory(CONTEXT) if row.kind == "observer"}
    assert states["quiet"] == "blocked" and states["silent"] == "active"


def test_a_named_file_activates_all_of_a_kind(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from hotswap.core.contracts import Observer, Provider, hookimpl\n"
        "@hookimpl\ndef hotswap_observer():\n"
        "    yield Provider(name='one', build=lambda c: Observer())\n"
        "    yield Provider(name='two', build=lambda c: Observer())\n"
    )
    manager = PluginManager(builtins=BUILTIN_PLUGINS, selections=[(COMMAND_LINE, str(path))])
    manager.load()
    assert [choice.name for choice, _ in manager.build_all("observer", CONTEXT)] == ["one", "two"]


# tool_parser: one, or none.


def test_a_tool_parser_by_its_template_by_name_or_none(manage: Callable[..., PluginManager]) -> None:
    def recognises(text: str) -> Suits:
        return Suits("this chat template", lambda provider: provider.detect(text))

    automatic = manage()
    assert automatic.choose_or_none("tool_parser", CONTEXT, suits=recognises("nothing of the kind")) is None
    with pytest.raises(PluginError, match="tool_parser: no plugin was chosen; no tool_parser is active"):
        automatic.choose("tool_parser", CONTEXT, suits=recognises("nothing of the kind"))
    assert active(automatic, "tool_parser") == []
    assert explain(automatic, "tool_parser", CONTEXT)[-1] == "  -> tool_parser: decided by the checkpoint at start"
    named = manage("tool_parser=hermes")
    choice = named.choose_or_none("tool_parser", CONTEXT, suits=recognises("nothing of the kind"))
    assert choice is not None and choice.name == "hermes" and active(named, "tool_parser") == ["hermes"]
    none = manage("tool_parser=none")
    assert none.choose_or_none("tool_parser", CONTEXT, suits=recognises("<tool_call>")) is None
    assert explain(none, "tool_parser", CONTEXT)[-1] == "  -> tool_parser: no tool_parser is active"


def test_a_fallback_that_serves_reads_otherwise(manage: Callable[..., PluginManager]) -> None:
    lines = explain(manage("kernels=reference"), "kernels", CONTEXT)
    assert "  -> linear: the core's own 'reference' serves" in lines
