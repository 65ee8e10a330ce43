"""hotswap's pytest plugin, loaded wherever hotswap and pytest are installed together: an option, markers, fixtures.

Importing it imports nothing but pytest: every test run of the environment does so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .scheduling_harness import SchedulingHarness

MARKERS = (
    "hotswap_slow: a conformance check that takes more than a few seconds; leave it out with -m 'not hotswap_slow'",
    "hotswap_device: a conformance check that needs the plugin's device",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hotswap")
    group.addoption(
        "--hotswap-seed",
        dest="hotswap_seed",
        type=int,
        default=None,
        metavar="N",
        help="draw other examples in the conformance suites of hotswap; without it they are the same each time",
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


@pytest.fixture
def hotswap_scheduling_harness() -> Callable[..., SchedulingHarness]:
    """`hotswap_scheduling_harness(scheduler=None, policy=None, victim=None, **limits)`: a whole engine without a model,
    around the pieces under test. What is left out is a plain one: see hotswap.core.testing.templates.

    scheduler: called with (mechanism, policy, victim), such as a Scheduler class. Limits are SchedulingHarness's.
    """

    def make(scheduler: Any = None, policy: Any = None, victim: Any = None, **limits: Any) -> SchedulingHarness:
        from .scheduling_harness import SchedulingHarness
        from .templates.policy import MyPolicy, MyPolicyOptions
        from .templates.scheduler import MyScheduler
        from .templates.victim import MyVictim

        order = MyPolicy(MyPolicyOptions()) if policy is None else policy
        rule = MyVictim() if victim is None else victim
        make_scheduler = MyScheduler if scheduler is None else scheduler
        return SchedulingHarness(lambda mechanism: make_scheduler(mechanism, order, rule), order, **limits)

    return make


@pytest.fixture
def hotswap_tiny_model(tmp_path: Path) -> Callable[..., Path]:
    """`hotswap_tiny_model(name="llama", **config)`: a folder with a checkpoint of a few thousand random weights and a byte
    tokenizer, as a hub has them. Needs transformers. The names are those of hotswap.core.testing.tiny_models.TINY_MODELS.
    """

    def make(name: str = "llama", **config: Any) -> Path:
        from .tiny_models import make_tiny_model

        return make_tiny_model(tmp_path / name, name, **config)

    return make
