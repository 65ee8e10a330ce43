"""The documentation says what the code does: links, settings, endpoints, metrics, commands, examples."""

from __future__ import annotations

import importlib.util
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hotswap.core.clock import ManualClock
from hotswap.core.config import EngineConfig, ServerConfig
from hotswap.core.contracts import DeviceInfo, KeyedPolicy, PolicyContext
from hotswap.core.contracts.kinds import KINDS
from hotswap.core.errors import PluginError
from hotswap.core.plugin_manager import PluginManager
from hotswap.core.testing.scheduling_harness import fake_request
from hotswap.plugins import BUILTIN_PLUGINS
from hotswap.plugins.models.dense_decoder.traits import TRAITS
from hotswap.server.cli.main import COMMANDS, Parser

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
FIRST_PLUGIN = DOCS / "plugins" / "first_plugin.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
IDS = [path.relative_to(ROOT).as_posix() for path in PAGES]

every_page = pytest.mark.parametrize("page", PAGES, ids=IDS)

_FENCE = re.compile(r"^[ ]*```(\w*)\n(.*?)^[ ]*```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language ("" for those without)."""
    return [body for found, body in _FENCE.findall(page.read_text()) if found == language]


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives to a page's headings."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def section(page: Path, heading: str) -> str:
    return page.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


# Links.


@every_page
def test_links_resolve(page: Path) -> None:
    for target in _LINK.findall(prose(page)):
        if "://" in target:
            continue
        name, _, fragment = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        assert path.is_relative_to(ROOT), f"{page.name}: {target} leads out of the repository"
        if fragment and path.suffix == ".md":
            assert fragment in anchors(path), f"{page.name}: {target}: no such heading"


def test_every_page_is_reached_from_the_index() -> None:
    reached, todo = set[Path](), [DOCS / "index.md"]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        todo += [(page.parent / target.partition("#")[0]).resolve() for target in _LINK.findall(prose(page))]
    assert set(DOCS.rglob("*.md")) <= reached


def test_readme_leads_to_the_index_and_stays_short() -> None:
    text = README.read_text()
    assert "(docs/index.md)" in text
    assert len(text.splitlines()) <= 200


def test_picture_is_well_formed_and_names_every_kind() -> None:
    path = DOCS / "images" / "architecture.svg"
    ElementTree.fromstring(path.read_text())
    words = set(re.findall(r"\w+", " ".join(re.findall(r'class="k"[^>]*>([^<]*)<', path.read_text()))))
    assert words == set(KINDS)


# Pages that are made from, or must agree with, the code.


@pytest.fixture(scope="module")
def generator() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("generate_settings", DOCS / "generate_settings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_settings_page_equals_the_models(generator: types.ModuleType) -> None:
    assert generator.PAGE == DOCS / "operators" / "settings.md"
    assert generator.PAGE.read_text() == generator.page(), "run: python docs/generate_settings.py"


def test_settings_page_has_every_setting(generator: types.ModuleType) -> None:
    from hotswap.server.cli.flags import flag_name, flat_fields

    text = generator.page()
    for config in (EngineConfig, ServerConfig):
        for name, info, _ in flat_fields(config):
            assert info.description, f"{name} has no description"
            assert name == "model" or f"| `{flag_name(name)}`" in text, name


def test_endpoints(api: Any) -> None:
    documented = set(re.findall(r"`(/[\w/{}.]+)`", section(DOCS / "operators" / "serving.md", "Endpoints")))
    served = {re.sub(r":\w+}", "}", route.path) for route in api.app.routes}
    assert documented == served


def test_request_fields() -> None:
    from hotswap.server.openai.fields import NOT_SERVED, REMOVED, WITHOUT_EFFECT
    from hotswap.server.openai.protocol import ChatRequest, CompletionRequest

    text = section(DOCS / "operators" / "serving.md", "Request fields")
    honoured, rest = text.split("**Honoured**")[1].split("**Accepted, without effect**")
    accepted, refused = rest.split("**Refused**")

    def names(part: str) -> set[str]:
        return set(re.findall(r"`([a-z_]+)`", part))

    fields = CompletionRequest.model_fields.keys() | ChatRequest.model_fields.keys()
    assert names(honoured) - {"text", "none"} == fields
    assert names(accepted) == WITHOUT_EFFECT
    listed = refused.split("and every unknown name")[0]
    assert names(listed) <= NOT_SERVED.keys() | REMOVED.keys()


def test_metrics(api: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    text = (DOCS / "operators" / "metrics.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \|", text, re.MULTILINE))
    families = list(text_string_to_metric_families(api.get("/metrics").text))
    exposed = {family.name.removeprefix("hotswap:"): family.type for family in families}
    assert {name: kind for name, kind in documented.items() if name != "plugin_info"} == {
        name: kind for name, kind in exposed.items() if name != "plugin_info"
    }
    assert documented["plugin_info"] == "gauge"


def test_kinds_and_built_in_names() -> None:
    text = section(DOCS / "plugins" / "index.md", "The kinds")
    rows = {
        cells[1].split("`")[1]: cells[3]
        for cells in (line.split("|") for line in text.splitlines() if line.startswith("| [`"))
    }
    assert list(rows) == list(KINDS)
    assert all(f"[`{kind}`]({kind}.md)" in text for kind in KINDS)
    manager = PluginManager(builtins=BUILTIN_PLUGINS)
    manager.load()
    for kind, cell in rows.items():
        builtin = {found.name for found in manager.providers(kind) if found.distribution == "hotswap"}
        assert set(re.findall(r"`(\w+)`", cell)) - {KINDS[kind].fallback} == builtin, kind
    assert set(manager.ops("kernels")) <= set(re.findall(r"`(\w+)`", text))


def test_native_architectures() -> None:
    text = section(DOCS / "operators" / "models.md", "Architectures")
    assert set(re.findall(r"`(\w+ForCausalLM)`", text)) == set(TRAITS)


# Commands.


def command_lines(page: Path) -> Iterator[list[str]]:
    """Words of every `hotswap ...` line in blocks of a page, and of every `hotswap ...` in its prose."""
    lines = [line for _, body in _FENCE.findall(page.read_text()) for line in body.splitlines()]
    for text in [*lines, *re.findall(r"`([^`\n]+)`", prose(page))]:
        words = re.split(r" #| \| |; ", text.strip().removeprefix("$ "))[0].split()  # the first command of the line
        if words[:1] == ["hotswap"] and len(words) > 1:
            yield words[1:]


@every_page
def test_commands_and_flags_exist(page: Path) -> None:
    for name, *rest in command_lines(page):
        if name == "COMMAND" or name == "serves":  # a placeholder; the server's own first word
            continue
        assert name in COMMANDS, f"{page.name}: hotswap {name}"
        command = COMMANDS[name]
        if command.subcommands:
            if not rest:
                continue
            assert rest[0] in command.subcommands, f"{page.name}: hotswap {name} {rest[0]}"
            command = command.subcommands[rest[0]]
        module = importlib.import_module(command.module)
        parser = Parser(prog=name)
        module.configure(parser)
        known = {option for action in parser._actions for option in action.option_strings}
        for word in rest:
            if word.startswith("-"):
                assert word.partition("=")[0] in known, f"{page.name}: hotswap {name} {word}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"


# One page per kind, with an example that is a plugin.

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_example_on_a_kinds_page_is_its_template(kind: str) -> None:
    template = (ROOT / "core" / "testing" / "templates" / f"{kind}.py").read_text()
    page = DOCS / "plugins" / f"{kind}.md"
    assert template in blocks(page, "python"), f"copy core/testing/templates/{kind}.py into {page.name}"


@every_kind
def test_a_kinds_page_leads_on(kind: str) -> None:
    text = (DOCS / "plugins" / f"{kind}.md").read_text()
    for wanted in (
        f"(contracts.md#{kind})",
        "(testing.md)",
        f"hotswap plugins check {kind}=",
        f"hotswap plugins new {kind} ",
    ):
        assert wanted in text, f"{kind}.md does not say {wanted!r}"


@every_kind
def test_a_kinds_page_names_the_checks_of_its_broken_samples(kind: str) -> None:
    from hotswap.core.testing.broken import broken_samples

    text = (DOCS / "plugins" / f"{kind}.md").read_text()
    missing = {sample.caught_by for sample in broken_samples(kind) if f"`{sample.caught_by}`" not in text}
    assert not missing, f"{kind}.md: Common mistakes"


# Examples.


@every_page
def test_python_blocks_compile(page: Path) -> None:
    for number, source in enumerate(blocks(page, "python")):
        compile(source, f"{page.name}, block {number}", "exec")


def policy_from(selections: list[str], name: str) -> KeyedPolicy:
    """The policy that `--plugin ...` builds, through the manager."""
    manager = PluginManager(builtins=BUILTIN_PLUGINS, selections=[("command line", value) for value in selections])
    manager.load()
    context = PolicyContext(options=None, config=EngineConfig(), device=DeviceInfo("cpu", "test"), clock=ManualClock())
    assert manager.choose("policy", context).name == name
    policy = manager.build("policy", context)
    assert isinstance(policy, KeyedPolicy)
    return policy


def order_of(policy: KeyedPolicy) -> list[int]:
    return [policy.pop().request_id for _ in range(len(policy))]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Path, str], Path]:
    """Writes a page's only python block that has `marker` to a file of its own."""

    def write_block(page: Path, marker: str) -> Path:
        (source,) = [block for block in blocks(page, "python") if marker in block]
        file = tmp_path / "plugin_of_the_page.py"
        file.write_text(source)
        return file

    return write_block


def test_readme_plugin(write: Callable[[Path, str], Path]) -> None:
    file = write(README, "hotswap_policy")
    code = [line for line in file.read_text().splitlines() if line.strip()]
    assert len(code) <= 20, "the README promises 20 lines"
    policy = policy_from([f"{file},patience=50"], "short_prompts_first")
    for request_id, (length, arrival) in enumerate([(100, 0.0), (10, 1.0), (10, 3.0)]):
        policy.push(fake_request(request_id, prompt=range(length), arrival_time=arrival))
    assert order_of(policy) == [1, 0, 2]
    with pytest.raises(PluginError, match="should be greater than 0, got -1"):
        policy_from([f"{file},patience=-1"], "short_prompts_first")


@pytest.mark.parametrize(("marker", "options"), [("a second in the queue", ""), ("class Options", ",seconds=1")])
def test_first_plugin(write: Callable[[Path, str], Path], marker: str, options: str) -> None:
    policy = policy_from([f"{write(FIRST_PLUGIN, marker)}{options}"], "take_turns")
    requests = [
        fake_request(number, user=user, arrival_time=0.1 * number)
        for number, user in enumerate(["alice", "alice", "alice", "bob"])
    ]
    for request in requests:
        policy.push(request)
    assert order_of(policy) == [0, 3, 1, 2]
    for request in requests:
        policy.on_finish(request)
    late = fake_request(9, user="alice", arrival_time=9.0)
    assert policy.key(late) == 9.0  # nothing of her is open any more


def test_first_plugin_package_is_one() -> None:
    import tomllib

    (source,) = blocks(FIRST_PLUGIN, "toml")
    project = tomllib.loads(source)
    assert project["project"]["entry-points"]["hotswap"] == {"take_turns": "hotswap_take_turns"}
    assert project["tool"]["setuptools"]["py-modules"] == ["hotswap_take_turns"]


def test_first_plugin_test_passes(
    write: Callable[[Path, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's own test, run against the page's own package."""
    import sys

    write(FIRST_PLUGIN, "class Options").rename(tmp_path / "hotswap_take_turns.py")
    (source,) = [block for block in blocks(FIRST_PLUGIN, "python") if "SchedulingHarness" in block]
    monkeypatch.syspath_prepend(tmp_path)
    space: dict[str, Any] = {}
    try:
        exec(compile(source, "test_take_turns.py", "exec"), space)  # noqa: S102 - a page of this repository
        tests = [value for name, value in space.items() if name.startswith("test_")]
        assert len(tests) == 2
        for test in tests:
            test()
    finally:
        sys.modules.pop("hotswap_take_turns", None)


def test_readme_lists_the_plugins_that_there_are() -> None:
    """The inventory that the README shows is complete."""
    manager = PluginManager(builtins=BUILTIN_PLUGINS)
    manager.load()
    (shown_run,) = [body for body in blocks(README, "") if "hotswap plugins" in body]
    shown = set(re.findall(r"^(\w+)\s+(\w+)\s+hotswap\s", shown_run, re.MULTILINE))
    assert shown == {(kind, found.name) for kind in KINDS for found in manager.providers(kind)}
