"""An error at work is laid at the door of the plugin whose code raised it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotswap.core.config import EngineConfig
from hotswap.core.contracts import KeyedPolicy
from hotswap.core.engine.process import tell_fault
from hotswap.core.errors import PlanError
from hotswap.core.plugin_manager import PluginManager
from hotswap.core.testing.scheduling_harness import fake_request
from hotswap.plugins import BUILTIN_PLUGINS

FAULTY = """
from hotswap.core.contracts import KeyedPolicy, PolicyProvider, hookimpl

class Faulty(KeyedPolicy):
    def key(self, view):
        return 1 / view.num_output_tokens

@hookimpl
def hotswap_policy():
    yield PolicyProvider(name="faulty", build=lambda context: Faulty())
"""


@pytest.fixture
def faulty(tmp_path: Path) -> tuple[PluginManager, Any, Path]:
    path = tmp_path / "faulty.py"
    path.write_text(FAULTY)
    manager = PluginManager(builtins=BUILTIN_PLUGINS, selections=[("command line", str(path))])
    manager.load()
    (found,) = [found for found in manager.providers("policy") if found.name == "faulty"]
    return manager, found.provider.build(None), path


def test_the_plugin_whose_code_raised_is_named(faulty: tuple[PluginManager, KeyedPolicy, Path]) -> None:
    manager, policy, path = faulty
    with pytest.raises(ZeroDivisionError) as caught:
        policy.push(fake_request(1, prompt=range(3)))  # through the core's KeyedPolicy into the plugin's key()
    owner = manager.owner_of(caught.value)
    assert owner is not None and owner.how == "file"
    message = tell_fault(caught.value, owner, EngineConfig())
    assert message == f"plugin file {path.name} failed: ZeroDivisionError: division by zero"


def test_the_cores_own_faults_are_nobodys(faulty: tuple[PluginManager, KeyedPolicy, Path]) -> None:
    manager, _, _ = faulty
    try:
        raise PlanError("the pool is short of a block")
    except PlanError as error:
        assert manager.owner_of(error) is None
        assert tell_fault(error, None, EngineConfig()) == "PlanError: the pool is short of a block"
