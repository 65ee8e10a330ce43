"""Discovery, refusals, building and freezing, with plugins that are installed distributions (metadata on sys.path)."""

from __future__ import annotations

import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hotswap.core.clock import ManualClock
from hotswap.core.config import EngineConfig
from hotswap.core.contracts.kernels import KernelContext
from hotswap.core.contracts.policy import PolicyContext
from hotswap.core.contracts.provider import BuildContext, DeviceInfo
from hotswap.core.errors import ModelLoadError, PluginError
from hotswap.core.plugin_inventory import InventoryRow, explain
from hotswap.core.plugin_manager import FrozenPlugins, PluginManager, Suits

COMMON: dict[str, Any] = {
    "options": None,
    "config": EngineConfig(),
    "device": DeviceInfo("cpu", "test"),
    "clock": ManualClock(),
}
CONTEXT = BuildContext(**COMMON)
POLICY_CONTEXT = PolicyContext(**COMMON)

PREAMBLE = """
from pydantic import BaseModel, Field
from hotswap.core.contracts import *
from hotswap.core.contracts import hookimpl

class Keyed(KeyedPolicy):
    def __init__(self, options=None):
        super().__init__()
        self.options = options
    def key(self, view):
        return view.arrival_time

class Yield(VictimRule):
    def choose(self, candidates, num_blocks_needed):
        return candidates[-1]
"""


def policy(name: str, more: str = "") -> str:
    return f"""
@hookimpl
def hotswap_policy():
    yield PolicyProvider(name={name!r}, build=lambda context: Keyed(context.options){", " + more if more else ""})
"""


VICTIM = """
@hookimpl
def hotswap_victim():
    yield Provider(name={name!r}, build=lambda context: Yield())
"""

Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution with one entry point; returns the module's name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def make(distribution: str, code: str, *, version: str = "1.0", entry: str | None = "") -> str:
        module = distribution.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(PREAMBLE + textwrap.dedent(code))
        info = tmp_path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "top_level.txt").write_text(f"{module}\n")
        (info / "RECORD").write_text(f"{module}.py,,\n")
        if entry is not None:
            (info / "entry_points.txt").write_text(f"[hotswap]\n{entry or module} = {module}\n")
        return module

    yield make
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def builtins(tmp_path: Path, install: Install) -> tuple[str, ...]:
    """Stand-ins for the built-in plugins, as modules that no distribution announces."""
    names = ("builtin_fcfs", "builtin_priority", "builtin_newest")
    code = (policy("fcfs"), policy("priority", 'default_victim="lowest"'), VICTIM.format(name="newest"))
    for name, text in zip(names, code, strict=True):
        (tmp_path / f"{name}.py").write_text(PREAMBLE + text)
    return names


def loaded(builtins: tuple[str, ...], *values: str, strict: bool = False) -> PluginManager:
    manager = PluginManager(builtins=builtins, selections=[("command line", value) for value in values], strict=strict)
    manager.load()
    return manager


def refusal(builtins: tuple[str, ...], *values: str) -> str:
    with pytest.raises(PluginError) as caught:
        loaded(builtins, *values)
    message = str(caught.value)
    assert "\n" not in message
    return message


def rows(manager: PluginManager) -> dict[str, InventoryRow]:
    return {row.name: row for row in manager.inventory(CONTEXT)}


# Choosing.


def test_defaults_and_building(builtins: tuple[str, ...]) -> None:
    manager = loaded(builtins)
    assert manager.choose("policy", POLICY_CONTEXT).name == "fcfs"
    assert manager.choose("victim", CONTEXT).name == "newest"
    assert type(manager.build("policy", POLICY_CONTEXT)).__name__ == "Keyed"


def test_victim_follows_the_policy(builtins: tuple[str, ...], install: Install) -> None:
    install("hotswap-low", VICTIM.format(name="lowest"))
    manager = loaded(builtins, "policy=priority")
    choice = manager.choose("victim", CONTEXT)
    assert (choice.name, choice.distribution) == ("lowest", "hotswap-low")
    assert "policy 'priority'" in choice.why


def test_default_victim_that_is_not_installed_is_refused(builtins: tuple[str, ...]) -> None:
    manager = loaded(builtins, "policy=priority")
    with pytest.raises(PluginError, match=r"unknown victim 'lowest' \(default_victim of policy 'priority' of hotswap"):
        manager.choose("victim", CONTEXT)


def test_third_party_policy_must_be_named(builtins: tuple[str, ...], install: Install) -> None:
    install("hotswap-eager", policy("eager", "priority=1000"))
    assert loaded(builtins).choose("policy", CONTEXT).name == "fcfs"
    assert loaded(builtins, "policy=eager").choose("policy", CONTEXT).distribution == "hotswap-eager"
    assert loaded(builtins, "eager").choose("policy", CONTEXT).version == "1.0"


def test_options_reach_build_typed(builtins: tuple[str, ...], install: Install) -> None:
    install(
        "hotswap-opt",
        "class O(BaseModel):\n    half_life: float = 1.0\n    tags: list[str] = []\n" + policy("opt", "options=O"),
    )
    manager = loaded(builtins, 'policy=opt,half_life=5,tags=["a,b","c"]')
    built = manager.build("policy", POLICY_CONTEXT)
    assert (built.options.half_life, built.options.tags) == (5.0, ["a,b", "c"])
    plain = loaded(builtins, "policy=opt").build("policy", POLICY_CONTEXT)
    assert plain.options.half_life == 1.0


EXECUTORS = """
@hookimpl
def hotswap_executor():
    yield Provider(name="slow", build=lambda context: None, priority=1)
    yield Provider(name="fast", build=lambda context: None, priority=5, unavailable=lambda context: {reasons!r})
"""


def test_automatic_takes_the_highest_priority_that_can_run(tmp_path: Path, builtins: tuple[str, ...]) -> None:
    (tmp_path / "builtin_ex.py").write_text(PREAMBLE + EXECUTORS.format(reasons=[]))
    assert loaded((*builtins, "builtin_ex")).choose("executor", CONTEXT).name == "fast"
    (tmp_path / "builtin_ey.py").write_text(PREAMBLE + EXECUTORS.format(reasons=["needs two GPUs", "needs NVLink"]))
    manager = loaded((*builtins, "builtin_ey"))
    assert manager.choose("executor", CONTEXT).name == "slow"
    row = rows(manager)["fast"]
    assert (row.state, row.reasons) == ("rejected", ["needs two GPUs", "needs NVLink"])


def test_named_choice_never_falls_back_and_gives_all_reasons(tmp_path: Path, builtins: tuple[str, ...]) -> None:
    (tmp_path / "builtin_ez.py").write_text(PREAMBLE + EXECUTORS.format(reasons=["needs two GPUs", "needs NVLink"]))
    manager = loaded((*builtins, "builtin_ez"), "executor=fast")
    with pytest.raises(PluginError, match="cannot run here: needs two GPUs; needs NVLink"):
        manager.choose("executor", CONTEXT)


MODEL = """
@hookimpl
def hotswap_model():
    yield ModelProvider(name={name!r}, build=lambda context: None, architectures=({arch!r},), priority={priority})
"""


def test_equal_priorities_are_refused_naming_both(builtins: tuple[str, ...], install: Install) -> None:
    install("hotswap-m-one", MODEL.format(name="one", arch="A", priority=3))
    install("hotswap-m-two", MODEL.format(name="two", arch="A", priority=3))
    suits = Suits("architecture 'A'", lambda provider: "A" in provider.architectures)
    with pytest.raises(PluginError) as caught:
        loaded(builtins).choose("model", CONTEXT, suits=suits)
    message = str(caught.value)
    assert "'one' of hotswap-m-one 1.0 and model 'two' of hotswap-m-two 1.0 have the same priority 3" in message
    assert "--plugin model=one or --plugin model=two" in message
    named = loaded(builtins, "model=two").choose("model", CONTEXT, suits=suits)
    assert named.name == "two"


def test_nothing_suits(builtins: tuple[str, ...], install: Install) -> None:
    install("hotswap-m-one", MODEL.format(name="one", arch="A", priority=3))
    suits = Suits("architecture 'B'", lambda provider: "B" in provider.architectures)
    with pytest.raises(
        PluginError, match=r"no model plugin can serve for architecture 'B': one .not for architecture 'B'"
    ):
        loaded(builtins).choose("model", CONTEXT, suits=suits)


def test_implied_by_the_checkpoint_yields_to_the_operator(builtins: tuple[str, ...], install: Install) -> None:
    install(
        "hotswap-q",
        "@hookimpl\ndef hotswap_quantization():\n    for n in ('gptq', 'none'):\n"
        "        yield QuantizationProvider(name=n, build=lambda c: None)\n",
    )
    assert loaded(builtins).choose("quantization", CONTEXT, implied="gptq").why == "implied by the model"
    assert loaded(builtins, "quantization=none").choose("quantization", CONTEXT, implied="gptq").name == "none"
    assert loaded(builtins, "quantization=auto").choose("quantization", CONTEXT, implied="gptq").name == "gptq"
    with pytest.raises(PluginError, match=r"unknown quantization 'awq' \(implied by the model\)"):
        loaded(builtins).choose("quantization", CONTEXT, implied="awq")


KERNELS = """
@hookimpl
def hotswap_kernels():
    for op in ("rope", "rms_norm"):
        yield KernelProvider(name={name!r}, op=op, build=lambda context: (lambda *a: {name!r}), priority={priority})
"""


def kernel_context(op: str) -> KernelContext:
    return KernelContext(**COMMON, op=op)


def test_kernels_are_chosen_per_op(tmp_path: Path, builtins: tuple[str, ...], install: Install) -> None:
    (tmp_path / "builtin_k.py").write_text(PREAMBLE + KERNELS.format(name="native", priority=1))
    install("hotswap-k", KERNELS.format(name="custom", priority=50))
    everything = (*builtins, "builtin_k")

    def chosen(op: str, *values: str) -> str | None:
        choice = loaded(everything, *values).choose_or_none("kernels", kernel_context(op), op=op)
        return choice.name if choice else None

    assert chosen("rope") == "native"
    assert chosen("linear") is None  # the core's reference
    assert chosen("rope", "kernels=custom") == "custom"
    assert chosen("linear", "kernels=custom") is None
    assert chosen("rope", "kernels=reference") is None
    assert chosen("rope", "kernels=custom", "kernels.rope=native") == "native"
    assert chosen("rms_norm", "kernels=custom", "kernels.rope=native") == "custom"
    row = rows(loaded(everything, "kernels.rope=custom"))
    assert row["custom"].state == row["native"].state == "active"
    assert row["custom"].reasons == ["serves rope"]


# Refusals at load.


def test_unknown_name_gives_nearest_and_list(builtins: tuple[str, ...]) -> None:
    message = refusal(builtins, "policy=prority")
    assert message.startswith(
        "unknown policy 'prority' (--plugin policy=prority, command line); did you mean 'priority'?"
    )
    assert message.endswith("(installed: fcfs, priority)")


def test_unknown_bare_name(builtins: tuple[str, ...], install: Install) -> None:
    assert "no plugin of any kind is called 'newst'; did you mean 'newest'?" in refusal(builtins, "newst")
    install("hotswap-eager", policy("eager"), entry="start")
    assert "what it provides: --plugin policy=eager" in refusal(builtins, "hotswap-eager")
    assert "what it provides: --plugin policy=eager" in refusal(builtins, "start")


def test_bare_name_of_two_kinds(builtins: tuple[str, ...], install: Install) -> None:
    install("hotswap-both", policy("lazy") + VICTIM.format(name="lazy"))
    assert "'lazy' is the name of 2 kinds; write --plugin policy=lazy or --plugin victim=lazy" in refusal(
        builtins, "lazy"
    )


def test_two_distributions_with_one_name(builtins: tuple[str, ...], install: Install) -> None:
    install("hotswap-a", policy("fair"), version="1.2")
    install("hotswap-b", policy("fair"), version="0.3")
    message = refusal(builtins)
    assert "policy 'fair' is offered by hotswap-a 1.2 and hotswap-b 0.3" in message
    assert "--plugin no:hotswap-a or --plugin no:hotswap-b" in message
    assert loaded(builtins, "no:hotswap-a", "policy=fair").choose("policy", CONTEXT).distribution == "hotswap-b"
    tolerant = PluginManager(builtins=builtins)
    tolerant.load(tolerate_conflicts=True)
    assert [row.state for row in tolerant.inventory(CONTEXT) if row.name == "fair"] == ["failed", "failed"]


def test_a_built_in_name_cannot_be_taken_over(builtins: tuple[str, ...], install: Install) -> None:
    install("hotswap-evil", policy("fcfs"))
    message = refusal(builtins)
    assert "offered by hotswap " in message
    assert message.endswith("keep one with --plugin no:hotswap-evil")


def test_contract_version(builtins: tuple[str, ...], install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("hotswap-old", policy("old", "contract=99"))
    message = refusal(builtins, "policy=old")
    assert "written for version 99 of the policy contract, this hotswap supports 1" in message
    assert "docs/plugins/contracts.md#policy" in message
    assert "hotswap-old 1.0" in message
    manager = loaded(builtins)
    assert rows(manager)["old"].state == "failed"
    assert [record.levelno for record in caplog.records].count(logging.WARNING) >= 1


OPTIONS = "class O(BaseModel):\n    half_life: float = Field(1.0, gt=0)\n    mode: str = 'a'\n"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("policy=opt,half_life=-1", "option 'half_life': should be greater than 0, got -1"),
        (
            "policy=opt,half_life=soon",
            "option 'half_life': should be a valid number, unable to parse string as a number, got 'soon'",
        ),
        ("policy=opt,half_lif=1", "has no option 'half_lif'; did you mean 'half_life'? (options: half_life, mode;"),
        ("policy=fcfs,x=1", "policy 'fcfs' of hotswap"),
        ("policy=fcfs,x=1", "takes no options, got x"),
    ],
)
def test_options_that_do_not_validate(builtins: tuple[str, ...], install: Install, value: str, expected: str) -> None:
    install("hotswap-opt", OPTIONS + policy("opt", "options=O"))
    assert expected in refusal(builtins, value)


def test_required_option(builtins: tuple[str, ...], install: Install) -> None:
    install(
        "hotswap-opt",
        "class O(BaseModel):\n    target: str = Field(description='where to')\n" + policy("opt", "options=O"),
    )
    assert "option 'target' is required (where to)" in refusal(builtins, "policy=opt")


def test_failed_import(builtins: tuple[str, ...], install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install(
        "hotswap-broken",
        "try:\n    import not_there_at_all\n"
        "except ImportError as error:\n    raise RuntimeError('wrapped') from error\n",
        entry="fancy",
    )
    manager = loaded(builtins)
    expected = (
        "plugin 'fancy' of hotswap-broken 1.0 failed to import: ModuleNotFoundError: No module named 'not_there_at_all'"
    )
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [expected]
    row = rows(manager)["fancy"]
    assert (row.kind, row.state, row.distribution, row.reasons) == ("", "failed", "hotswap-broken", [expected])
    for value in ("policy=fancy", "fancy", "hotswap-broken"):
        assert expected in refusal(builtins, value)
    with pytest.raises(PluginError, match=r"not_there_at_all.*--strict-plugins"):
        loaded(builtins, strict=True)
    caplog.clear()
    assert rows(loaded(builtins, "no:hotswap-broken"))["fancy"].state == "blocked"
    assert not caplog.records


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "@hookimpl\ndef hotswap_policy():\n    raise KeyError('x')\n    yield\n",
            "hotswap_policy() failed: KeyError: 'x'",
        ),
        ("@hookimpl\ndef hotswap_policy():\n    return None\n", "it returned NoneType; yield Provider objects"),
        ("@hookimpl\ndef hotswap_policy():\n    yield 'fair'\n", "yielded str; the kind policy wants PolicyProvider"),
        ("@hookimpl\ndef hotswap_policy():\n    yield Provider(name='x', build=print)\n", "wants PolicyProvider"),
        (
            "@hookimpl\ndef hotswap_polices():\n    return []\n",
            "unknown hook 'hotswap_polices'; did you mean 'hotswap_policy'",
        ),
        ("@hookimpl\ndef hotswap_policy(config):\n    return []\n", "invalid hook"),
        ("@hookimpl(wrapper=True)\ndef hotswap_policy():\n    return (yield)\n", "cannot be wrapped"),
        ("x = 1\n", "implements no hook"),
        ("import sys\nsys.exit(3)\n", "failed to import: SystemExit: 3"),
        (policy("Not Valid"), "yielded the name 'Not Valid'"),
        (policy("auto"), "and not 'auto'"),
        (policy("x", "options=dict"), "options that are no pydantic model class"),
        (
            "@hookimpl\ndef hotswap_kernels():\n    yield KernelProvider(name='x', op='rms', build=print)\n",
            "unknown op 'rms'",
        ),
    ],
)
def test_faulty_hook_is_named(builtins: tuple[str, ...], install: Install, code: str, expected: str) -> None:
    install("hotswap-faulty", code)
    row = rows(loaded(builtins))["hotswap_faulty"]
    assert row.state == "failed"
    assert expected in row.reasons[0]
    assert "hotswap-faulty 1.0" in row.reasons[0]


def test_class_instead_of_instance(builtins: tuple[str, ...], install: Install, tmp_path: Path) -> None:
    install("hotswap-cls", "class Plugin:\n    @hookimpl\n    def hotswap_policy(self):\n        return []\n")
    points = tmp_path / "hotswap_cls-1.0.dist-info" / "entry_points.txt"
    points.write_text("[hotswap]\ncls = hotswap_cls:Plugin\n")
    assert "is the class Plugin, not an instance" in rows(loaded(builtins))["cls"].reasons[0]


def test_a_plugin_is_taken_whole_or_not_at_all(builtins: tuple[str, ...], install: Install) -> None:
    install("hotswap-half", policy("half") + "@hookimpl\ndef hotswap_victim():\n    raise OSError('disk')\n")
    manager = loaded(builtins)
    assert [found.name for found in manager.providers("policy")] == ["fcfs", "priority"]
    assert "hotswap_victim() failed: OSError: disk" in rows(manager)["hotswap_half"].reasons[0]


def test_entry_points_load_in_name_order(builtins: tuple[str, ...], install: Install) -> None:
    for name in ("zeta", "alpha", "midway"):
        install(f"hotswap-{name}", policy(name), entry=name)
    outside = [found.name for found in loaded(builtins).providers("policy") if not found.builtin]
    assert outside == ["alpha", "midway", "zeta"]


# Blocks.


def test_blocks(builtins: tuple[str, ...], install: Install) -> None:
    module = install("hotswap-fair", policy("fair") + VICTIM.format(name="fair"))
    assert [
        f.kind
        for k in ("policy", "victim")
        for f in loaded(builtins, "no:policy=fair").providers(k)
        if f.name == "fair"
    ] == ["victim"]
    blocked = loaded(builtins, "no:Hotswap_Fair")
    assert rows(blocked)[module].state == "blocked"
    message = refusal(builtins, "no:fair", "policy=fair")
    assert "policy 'fair' (--plugin policy=fair, command line) is blocked by --plugin no:fair (command line)" in message
    assert "nothing of that name is installed; did you mean 'priority'" in refusal(builtins, "no:priorty")


def test_blocked_distribution_is_not_imported(builtins: tuple[str, ...], install: Install) -> None:
    module = install("hotswap-noisy", "raise RuntimeError('imported')\n")
    loaded(builtins, "no:hotswap-noisy")
    assert module not in sys.modules


def test_essential_built_in_blocked(builtins: tuple[str, ...]) -> None:
    manager = loaded(builtins, "no:fcfs")
    with pytest.raises(
        PluginError, match=r"policy 'fcfs' \(default\) is blocked by --plugin no:fcfs .*installed: priority"
    ):
        manager.choose("policy", CONTEXT)
    nothing = loaded(builtins, "no:hotswap")
    with pytest.raises(PluginError, match="blocked by --plugin no:hotswap"):
        nothing.choose("policy", CONTEXT)


# Files and modules.


def test_file_is_loaded_and_chosen(builtins: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "my_sched.py"
    path.write_text(PREAMBLE + OPTIONS + policy("mine", "options=O"))
    manager = loaded(builtins, f"{path},half_life=3")
    choice = manager.choose("policy", CONTEXT)
    assert (choice.name, choice.distribution, choice.module) == ("mine", "my_sched.py", str(path))
    assert choice.options is not None
    assert choice.options.half_life == 3  # type: ignore[attr-defined]
    assert f"there is no file {path}x.py" in refusal(builtins, f"{path}x.py")
    assert "policy: two choices" in refusal(builtins, str(path), "policy=fcfs")
    assert loaded(builtins, str(path), "policy=mine,half_life=9").choose("policy", CONTEXT).options.half_life == 9  # type: ignore[union-attr]


def test_file_with_several_of_a_kind(builtins: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    path.write_text(
        PREAMBLE
        + policy("first")
        + policy("second")
        .replace("def hotswap_policy", "def _b")
        .replace("@hookimpl", "@hookimpl(specname='hotswap_policy')")
    )
    assert "it provides policy 'first' and 'second', of which one can be active" in refusal(builtins, str(path))
    assert loaded(builtins, str(path), "policy=second").choose("policy", CONTEXT).name == "second"
    assert "whose options are these?" in refusal(builtins, f"{path},x=1")


def test_file_that_fails(builtins: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("def broken(:\n")
    assert "plugin file bad.py failed to import: SyntaxError" in refusal(builtins, str(path))


def test_module_is_loaded_and_chosen(builtins: tuple[str, ...], tmp_path: Path) -> None:
    package = tmp_path / "ourpack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sched.py").write_text(PREAMBLE + policy("ours"))
    assert loaded(builtins, "ourpack.sched").choose("policy", CONTEXT).name == "ours"
    assert "No module named 'ourpack.shed'" in refusal(builtins, "ourpack.shed")


def test_installed_module_named_again_is_not_a_conflict(
    builtins: tuple[str, ...], install: Install, tmp_path: Path
) -> None:
    install("hotswap-twice", policy("twice"))
    points = tmp_path / "hotswap_twice-1.0.dist-info" / "entry_points.txt"
    points.write_text("[hotswap]\ntwice = twicepack.sched\n")
    (tmp_path / "twicepack").mkdir()
    (tmp_path / "twicepack" / "__init__.py").write_text("")
    (tmp_path / "twicepack" / "sched.py").write_text(PREAMBLE + policy("twice"))
    assert loaded(builtins, "twicepack.sched").choose("policy", CONTEXT).distribution == "hotswap-twice"


# Faults while building or answering.


def test_build_that_fails_names_the_plugin(builtins: tuple[str, ...], install: Install) -> None:
    install(
        "hotswap-fault",
        "def bad(context):\n    raise OSError('no such cable')\n"
        "def gone(context):\n    raise ModelLoadError('shard 2 is missing')\n"
        "@hookimpl\ndef hotswap_policy():\n"
        "    yield PolicyProvider(name='bad', build=bad)\n"
        "    yield PolicyProvider(name='odd', build=lambda context: 7)\n"
        "    yield PolicyProvider(name='gone', build=gone)\n",
    )
    with pytest.raises(PluginError, match=r"policy 'bad' of hotswap-fault 1.0 failed to build: OSError: no such cable"):
        loaded(builtins, "policy=bad").build("policy", POLICY_CONTEXT)
    with pytest.raises(PluginError, match=r"policy 'odd' of hotswap-fault 1.0 built a int, which is no Policy"):
        loaded(builtins, "policy=odd").build("policy", POLICY_CONTEXT)
    with pytest.raises(ModelLoadError, match=r"^shard 2 is missing$"):
        loaded(builtins, "policy=gone").build("policy", POLICY_CONTEXT)


def test_abstract_policy_is_named(builtins: tuple[str, ...], install: Install) -> None:
    install(
        "hotswap-abs",
        "@hookimpl\ndef hotswap_policy():\n    yield PolicyProvider(name='abs', build=lambda c: Policy())\n",
    )
    with pytest.raises(
        PluginError, match=r"policy 'abs' of hotswap-abs 1.0 failed to build: TypeError: Can't instantiate"
    ):
        loaded(builtins, "policy=abs").build("policy", POLICY_CONTEXT)


PLATFORMS = """
def worse(context):
    raise ValueError('driver 3 is too old')
@hookimpl
def hotswap_platform():
    yield PlatformProvider(name={name!r}, build=lambda c: None, unavailable={unavailable}, priority={priority})
"""


def test_unavailable_that_raises(
    tmp_path: Path, builtins: tuple[str, ...], install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "builtin_cpu.py").write_text(
        PREAMBLE + PLATFORMS.format(name="cpu", unavailable="always_available", priority=0)
    )
    everything = (*builtins, "builtin_cpu")
    install("hotswap-npu", PLATFORMS.format(name="npu", unavailable="worse", priority=9))
    manager = loaded(everything)
    assert manager.choose("platform", CONTEXT).name == "cpu"
    assert "platform 'npu' of hotswap-npu 1.0: unavailable() failed: ValueError: driver 3 is too old" in caplog.text
    assert rows(manager)["npu"].state == "failed"
    with pytest.raises(PluginError, match="driver 3 is too old"):
        loaded(everything, "platform=npu").choose("platform", CONTEXT)
    with pytest.raises(PluginError, match="driver 3 is too old"):
        loaded(everything, strict=True).choose("platform", CONTEXT)


def test_unavailable_that_gives_text(builtins: tuple[str, ...], install: Install) -> None:
    install("hotswap-txt", policy("txt", "unavailable=lambda context: 'no GPU'"))
    with pytest.raises(PluginError, match=r"unavailable\(\) gave str, not a list of reasons"):
        loaded(builtins, "policy=txt").choose("policy", CONTEXT)


def test_third_party_platform_takes_part_in_automatic_choice(
    tmp_path: Path, builtins: tuple[str, ...], install: Install
) -> None:
    (tmp_path / "builtin_cpu.py").write_text(
        PREAMBLE + PLATFORMS.format(name="cpu", unavailable="always_available", priority=0)
    )
    install("hotswap-npu", PLATFORMS.format(name="npu", unavailable="always_available", priority=9))
    assert loaded((*builtins, "builtin_cpu")).choose("platform", CONTEXT).name == "npu"


def test_build_named_and_named(builtins: tuple[str, ...]) -> None:
    manager = loaded(builtins, "policy=priority")
    assert type(manager.build_named("policy", "fcfs", POLICY_CONTEXT)).__name__ == "Keyed"
    assert [selection.name for selection in manager.named("policy")] == ["priority"]
    with pytest.raises(PluginError, match=r"unknown policy 'nope' \(asked for as policy 'nope'\)"):
        manager.build_named("policy", "nope", POLICY_CONTEXT)
    with pytest.raises(PluginError, match="unknown plugin kind 'polcy'; did you mean 'policy'"):
        manager.providers("polcy")


# Freezing and the inventory.


def thaw(manager: PluginManager) -> PluginManager:
    message = msgspec.msgpack.encode(manager.frozen())
    return PluginManager.from_frozen(msgspec.msgpack.decode(message, type=FrozenPlugins))


def test_the_same_plugins_in_another_process(builtins: tuple[str, ...], install: Install, tmp_path: Path) -> None:
    install("hotswap-opt", OPTIONS + policy("opt", "options=O"))
    install("hotswap-broken", "import nope_nope\n")
    path = tmp_path / "rule.py"
    path.write_text(PREAMBLE + VICTIM.format(name="mine"))
    other = thaw(loaded(builtins, "policy=opt,half_life=7", str(path), "no:priority"))
    assert other.choose("policy", CONTEXT).options.half_life == 7  # type: ignore[union-attr]
    assert other.choose("victim", CONTEXT).name == "mine"
    table = rows(other)
    assert (table["hotswap_broken"].state, table["priority"].state) == ("failed", "blocked")


def test_another_process_that_lacks_a_plugin_says_so(
    builtins: tuple[str, ...], install: Install, tmp_path: Path
) -> None:
    module = install("hotswap-opt", policy("opt"))
    frozen = loaded(builtins, "policy=opt").frozen()
    (tmp_path / f"{module}.py").unlink()
    del sys.modules[module]
    with pytest.raises(PluginError, match=r"plugin 'hotswap_opt' of hotswap-opt 1.0 failed to import.*in this process"):
        PluginManager.from_frozen(frozen)
    metadata = tmp_path / "hotswap_opt-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("1.0", "2.0"))
    with pytest.raises(PluginError, match=r"in this process hotswap-opt is 2.0"):
        PluginManager.from_frozen(frozen)


def test_inventory_states_and_explain(builtins: tuple[str, ...], install: Install) -> None:
    install("hotswap-eager", policy("eager"))
    manager = loaded(builtins)
    table = rows(manager)
    assert {name: table[name].state for name in ("fcfs", "priority", "eager", "newest")} == {
        "fcfs": "active",
        "priority": "available",
        "eager": "available",
        "newest": "active",
    }
    assert manager.chosen == {}, "looking must not choose"
    text = "\n".join(explain(manager, "executor", CONTEXT) + explain(manager, "policy", CONTEXT))
    assert "policy plugins from outside are used only when named" in text
    assert "-> policy: fcfs (default)" in text
    assert "no executor plugin can serve: none is installed" in text


def test_inventory_keys_are_the_documented_ones(builtins: tuple[str, ...]) -> None:
    row = msgspec.to_builtins(loaded(builtins).inventory(CONTEXT)[0])
    assert list(row) == ["kind", "name", "distribution", "version", "contract", "state", "reasons"]
