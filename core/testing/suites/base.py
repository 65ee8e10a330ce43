"""What every conformance suite shares: how a plugin is named, how its objects are built, and the checks of descriptors.

    from hotswap.core.testing.suites import PolicySuite

    class TestMyPolicy(PolicySuite):
        plugin = "hotswap_my_policy"

A suite is a plain pytest class; its tests need no model and no network. Each test's docstring is the rule that it checks.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from hypothesis.strategies import SearchStrategy
from pydantic import BaseModel

from ...clock import ManualClock
from ...config import EngineConfig
from ...contracts.kinds import KINDS, Kind
from ...contracts.provider import BuildContext, DeviceInfo, Provider
from ...host import guess_device
from ...plugin_choice import Choice
from ...plugin_inventory import context_for
from ...plugin_manager import PluginManager
from ...plugin_options import validated_options
from ...plugin_selection import nearest
from ..finding import find_provider

if TYPE_CHECKING:
    from ...plugin_registry import Registered

MAX_SUMMARY_CHARS = 100
HEAVY_MODULES = ("torch", "transformers", "jax", "triton", "vllm")
_NAME = re.compile(r"[a-z][a-z0-9_]*")

# Run in a process of its own: this one may have imported torch for other reasons.
_LAZINESS_SCRIPT = """
import sys
from hotswap.core.testing.finding import offered_by
offered_by(sys.argv[1])
print("HEAVY:" + ",".join(name for name in sys.argv[2].split(",") if name in sys.modules))
"""


class ConformanceSuite:
    """Subclassed by the suite of each kind, which sets `kind` and adds its own tests; an author sets the rest.

    plugin: the module path of the plugin, a file (ends in .py), an entry point's value, or a Provider object.
    name, op: which of its providers, when it offers several of the kind.
    options: the plugin's options, as after `--plugin KIND=NAME,`.
    shrink: whether a failing example is made as small as can be; False is faster.
    torch_device: where the suites of kernels and attention put their tensors.
    device: what the context says of the device; None: this machine's processors.
    """

    kind: ClassVar[str]
    plugin: ClassVar[str | Provider[Any]]
    name: ClassVar[str] = ""
    op: ClassVar[str | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
    shrink: ClassVar[bool] = True
    torch_device: ClassVar[str] = "cpu"
    device: ClassVar[DeviceInfo | None] = None

    seed: int | None = None  # of --hotswap-seed; None: the same examples every time

    # What a suite uses.

    @classmethod
    def row(cls) -> Kind:
        return KINDS[cls.kind]

    @classmethod
    def registered(cls) -> Registered:
        """The provider under test and its origin. Raises PluginError when the manager would refuse it."""
        if not hasattr(cls, "plugin"):
            pytest.fail(f"{cls.__name__}: set `plugin` to the module of your plugin, or to a Provider", pytrace=False)
        return find_provider(cls.kind, cls.plugin, cls.name, cls.op)

    def context_fields(self) -> dict[str, Any]:
        """The fields that this kind's context has beyond the common ones, and common ones that its build needs."""
        return {}

    def context(self, **fields: Any) -> Any:
        """The kind's context: the common fields with plain values, `context_fields()`, and what is given on top."""
        common: dict[str, Any] = {
            "options": self.validated_options(),
            "config": EngineConfig(),
            "device": self.device or guess_device(),
            "clock": ManualClock(),
            "logger": logging.getLogger("hotswap.conformance"),
        }
        return self.row().context_class()(**{**common, **self.context_fields(), **fields})

    def validated_options(self) -> BaseModel | None:
        """`options` through the plugin's own model. Raises PluginError."""
        return validated_options(self.registered(), self.options, "the suite's options")

    def build(self, **context_fields: Any) -> Any:
        """A new product, through the plugin manager's own checks. Skips the test, with the plugin's reasons, when it
        cannot run on this machine. Raises PluginError.
        """
        found, context = self.registered(), self.context(**context_fields)
        reasons = PluginManager().reasons_against(found, context)
        if reasons:
            pytest.skip(f"cannot run here: {'; '.join(reasons)}")
        choice = Choice(
            kind=found.kind, provider=found.provider, origin=found.origin, options=context.options, why="under test"
        )
        return PluginManager().build_choice(choice, context)

    def drawn(self, max_examples: int, **changes: Any) -> settings:
        """Hypothesis settings for this suite: a fixed set of examples without a time limit for one."""
        phases = (Phase.explicit, Phase.generate, *((Phase.shrink,) if self.shrink else ()))
        return settings(
            max_examples=max_examples,
            deadline=None,
            database=None,
            derandomize=self.seed is None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            **changes,
        )

    def for_all(self, max_examples: int, check: Callable[..., None], **strategies: SearchStrategy[Any]) -> None:
        """Calls `check` with drawn keyword arguments; it fails by raising."""
        test = given(**strategies)(check)
        if self.seed is not None:
            test = hypothesis_seed(self.seed)(test)
        self.drawn(max_examples)(test)()

    def check_callbacks(self, product: object) -> None:
        """Fails when the product has an `on_...` that the kind's class does not know: nobody would ever call it."""
        known = [name for name in dir(self.row().product_class(self.op)) if name.startswith("on_")]
        for name in dir(type(product)):
            if name.startswith("on_") and name not in known:
                pytest.fail(f"nobody calls {name}(){nearest(name, known)} (callbacks: {', '.join(known)})")

    def run_machine(self, machine: type[RuleBasedStateMachine], max_examples: int, steps: int) -> None:
        """Runs a state machine. Its class may keep the suite as an attribute, to build products."""
        if self.seed is not None:
            machine = hypothesis_seed(self.seed)(machine)
        run_state_machine_as_test(machine, settings=self.drawn(max_examples, stateful_step_count=steps))

    # Fixtures.

    @pytest.fixture(autouse=True)
    def _take_seed(self, request: pytest.FixtureRequest) -> None:
        self.seed = request.config.getoption("hotswap_seed", None)

    @pytest.fixture
    def provider(self) -> Provider[Any]:
        return self.registered().provider

    @pytest.fixture
    def options_model(self) -> BaseModel | None:
        """The validated options; None when the provider declares none."""
        return self.validated_options()

    @pytest.fixture
    def product(self) -> Any:
        return self.build()

    # The checks that every kind inherits.

    def test_descriptor_is_one_that_the_plugin_manager_takes(self, provider: Provider[Any]) -> None:
        """The hook yields the kind's own Provider class, with a build and an unavailable that can be called."""
        assert isinstance(provider, self.row().provider_class())
        assert callable(provider.build)
        assert callable(provider.unavailable)

    def test_name_is_lower_case(self, provider: Provider[Any]) -> None:
        """A name is lower case letters, digits and `_`, and begins with a letter: it is typed on a command line."""
        assert _NAME.fullmatch(provider.name), f"name {provider.name!r}"

    def test_summary_is_one_line(self, provider: Provider[Any]) -> None:
        """`summary` is one line that says what this one does: it is all that `hotswap plugins` can show."""
        assert provider.summary.strip(), f"{provider.name} has no summary"
        assert "\n" not in provider.summary, f"the summary of {provider.name} has several lines"
        assert len(provider.summary) <= MAX_SUMMARY_CHARS, f"the summary has {len(provider.summary)} characters"

    def test_contract_version_is_supported(self, provider: Provider[Any]) -> None:
        """`contract` is a version of the kind's contract that this hotswap supports."""
        kind = self.row()
        assert kind.oldest_supported <= provider.contract <= kind.current, f"contract {provider.contract}"

    def test_options_are_documented_and_valid(self, provider: Provider[Any]) -> None:
        """Each option has a description, and without any the defaults validate (unless one is required)."""
        if provider.options is None:
            pytest.skip("it takes no options")
        for option, info in provider.options.model_fields.items():
            assert info.description, f"option {option!r} has no description"
        if not any(info.is_required() for info in provider.options.model_fields.values()):
            provider.options.model_validate({})
        assert isinstance(self.validated_options(), provider.options)

    def test_hook_is_cheap(self) -> None:
        """Neither importing the plugin nor calling its hooks imports torch: every process does both at start."""
        if not isinstance(self.plugin, str):
            pytest.skip("a Provider object is under test, not a plugin's module")
        heavy = _imported_by_hooks(self.plugin)
        assert not heavy, f"importing {self.plugin} and calling its hooks imports {', '.join(heavy)}"

    def test_hook_yields_equal_descriptors_each_time(self, provider: Provider[Any]) -> None:
        """Every process calls the hook for itself and must get the same answer."""
        if not isinstance(self.plugin, str):
            pytest.skip("a Provider object is under test, not a plugin's module")
        again = find_provider(self.kind, self.plugin, self.name, self.op, fresh=True).provider
        assert _facts(again) == _facts(provider)

    def test_unavailable_gives_every_reason_without_a_model(self, provider: Provider[Any]) -> None:
        """`unavailable` works before there is a model, and returns a sequence of sentences, the same each time."""
        common = {field.name: getattr(self.context(), field.name) for field in dataclasses.fields(BuildContext)}
        bare = context_for(self.row(), BuildContext(**{**common, "options": None, "model": None}), self.op)
        reasons = provider.unavailable(bare)
        assert not isinstance(reasons, str), "unavailable() gave a string, not a sequence of reasons"
        for reason in reasons:
            assert isinstance(reason, str) and reason.strip(), f"unavailable() gave {reason!r} as a reason"
            assert "\n" not in reason, f"a reason is one line: {reason!r}"
        assert list(provider.unavailable(bare)) == list(reasons)

    def test_build_gives_the_kinds_class(self, product: Any) -> None:
        """`build` returns an instance of the kind's abstract class, with every abstract method there."""
        assert isinstance(product, self.row().product_class(self.op or getattr(self.registered(), "op", None)))


_HEAVY_BY_PLUGIN: dict[str, list[str]] = {}


def _imported_by_hooks(plugin: str) -> list[str]:
    """The heavy modules that a fresh process has after loading the plugin; asked once per plugin."""
    if plugin not in _HEAVY_BY_PLUGIN:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", _LAZINESS_SCRIPT, plugin, ",".join(HEAVY_MODULES)]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if result.returncode:
            pytest.fail(f"it cannot be imported in a fresh process:\n{result.stderr[-2000:]}", pytrace=False)
        _HEAVY_BY_PLUGIN[plugin] = [name for name in result.stdout.split("HEAVY:")[-1].strip().split(",") if name]
    return _HEAVY_BY_PLUGIN[plugin]


def _facts(provider: Provider[Any]) -> dict[str, Any]:
    """Every field but functions, which a hook may make anew."""
    facts = {field.name: getattr(provider, field.name) for field in dataclasses.fields(provider)}
    return {name: value for name, value in facts.items() if isinstance(value, type) or not callable(value)}
