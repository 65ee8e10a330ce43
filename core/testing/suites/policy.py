"""Conformance of kind `policy`."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from ...clock import ManualClock
from ...contracts.policy import Policy
from ..limits import no_real_time
from ..policy_driver import PolicyDriver, PolicyFault
from ..scheduling_machine import Machine, SchedulingMachine, serve_under_pressure
from ..templates.scheduler import MyScheduler
from ..templates.victim import MyVictim
from ..views import ReadOnlyView
from .base import ConformanceSuite

REQUESTS = st.fixed_dictionaries(
    {
        "num_prompt_tokens": st.integers(1, 40),
        "priority": st.integers(-1, 2),
        "user": st.sampled_from(["", "alice", "bob"]),
        "max_tokens": st.integers(1, 20),
        "deadline": st.none() | st.floats(0.0, 20.0),
    }
)


class PolicySuite(ConformanceSuite):
    """max_passed: how many newer requests of the same shape, class and user may be served before an older one."""

    kind = "policy"
    max_passed: ClassVar[int] = 200

    def driver(self, **context_fields: Any) -> PolicyDriver:
        clock = ManualClock()
        return PolicyDriver(self.build(clock=clock, **context_fields), clock)

    def test_its_callbacks_are_the_contracts(self) -> None:
        """A method called `on_...` is one that the engine calls: `on_scheduled`, `on_tokens` or `on_finish`."""
        self.check_callbacks(self.build())

    def test_starts_empty(self) -> None:
        """A new policy has nobody waiting: `len` 0, `peek` None, and `pop` raises IndexError."""
        policy: Policy = self.build()
        assert len(policy) == 0
        assert list(policy.waiting()) == []
        assert policy.peek() is None
        with pytest.raises(IndexError):
            policy.pop()

    def test_serves_each_request_once(self) -> None:
        """Whoever is pushed comes out once, as the very object that was pushed; then the policy is empty."""

        def check(requests: list[dict[str, Any]]) -> None:
            driver = self.driver()
            for fields in requests:
                driver.push(driver.new_view(**fields))
                driver.clock.advance(0.5)
            waiting = set(driver.waiting)
            served = driver.drain()
            assert len(set(served)) == len(served)
            assert set(served) <= waiting
            assert not driver.waiting
            assert driver.policy.peek() is None

        self.for_all(12, check, requests=st.lists(REQUESTS, max_size=12))

    def test_peek_changes_nothing(self) -> None:
        """`peek` shows what the next `pop` takes, however often it is asked."""
        driver = self.driver()
        for length in (9, 3, 7, 5, 1):
            driver.push(driver.new_view(length))
            driver.clock.advance(1.0)
        while driver.waiting:
            shown = {driver.policy.peek() for _ in range(5)}
            assert len(shown) == 1, f"peek() showed {shown} with nothing in between"
            driver.compare()
            assert driver.policy.pop() is shown.pop()
            del driver.waiting[next(iter(set(driver.waiting) - {view.request_id for view in driver.policy.waiting()}))]

    def test_removed_request_is_gone(self) -> None:
        """`remove` takes exactly one request out; for one that does not wait here it raises KeyError."""

        def check(requests: list[dict[str, Any]], data: st.DataObject) -> None:
            driver = self.driver()
            for fields in requests:
                driver.push(driver.new_view(**fields))
            gone = data.draw(st.lists(st.sampled_from(sorted(driver.waiting)), unique=True))
            for request_id in gone:
                driver.remove(driver.waiting[request_id])
                with pytest.raises(KeyError):
                    driver.policy.remove(request_id)
            assert not set(driver.drain()) & set(gone)
            with pytest.raises(KeyError):
                driver.policy.remove(10_000)

        self.for_all(12, check, requests=st.lists(REQUESTS, min_size=1, max_size=8), data=st.data())

    def test_agrees_with_the_engine_over_any_calls(self) -> None:
        """`len`, `waiting`, `peek` and `pop` agree after any order of arrivals, steps, preemptions, aborts and ends;
        callbacks may be about requests that were never pushed here, after a swap.
        """
        self.run_machine(_machine(self, with_swaps=True), max_examples=20, steps=25)

    def test_hears_of_requests_that_it_never_saw(self) -> None:
        """After a swap `on_scheduled`, `on_tokens` and `on_finish` come for requests that another policy had, and one of
        them may be pushed here after a preemption.
        """
        driver = self.driver()
        for number in range(6):
            driver.push(driver.new_view(user=f"user {number % 2}"))
            driver.clock.advance(0.5)
        first, second = driver.pop(), driver.pop()
        assert first is not None
        assert second is not None
        driver.swap(self.build(clock=driver.clock))
        driver.policy.on_scheduled(first, 1)
        driver.progress(first)
        driver.progress(second)
        driver.preempt(first)
        driver.finish(second)
        driver.drain()
        assert not driver.waiting

    def test_takes_preempted_requests_back(self) -> None:
        """A request that was preempted is pushed again, with `num_preemptions` above 0, and is served again."""
        driver = self.driver()
        for _ in range(3):
            driver.push(driver.new_view())
            driver.clock.advance(1.0)
        view = driver.pop()
        assert view is not None
        for _ in range(3):
            driver.progress(view)
            driver.preempt(view)
            assert view.request_id in driver.drain()
            driver.running[view.request_id] = view
        driver.finish(view)

    def test_share_is_a_number_of_tokens(self) -> None:
        """`share` gives a whole number, 0 or more, leaves the budget alone, and gives a lone request something."""
        driver = self.driver()
        driver.push(driver.new_view(30))
        for _ in range(self.max_passed):
            assert driver.share(driver.waiting[0]) >= 0
            if driver.share(driver.waiting[0]) > 0:
                return
            driver.clock.advance(1.0)
        pytest.fail("share() never gives the only request anything: it would wait for ever")

    def test_shed_names_waiting_requests(self) -> None:
        """`shed` names only requests that wait, each once, with a reason and the status 429 or 503."""
        driver = self.driver()
        for number in range(12):
            driver.push(driver.new_view(1 + 9 * number, deadline=2.0 * number, user=f"user {number % 2}"))
            driver.clock.advance(0.5)
            driver.shed()
        while driver.waiting:
            driver.clock.advance(5.0)
            driver.shed()
            view = driver.pop()
            if view is not None:
                driver.progress(view)
                driver.finish(view)
            driver.shed()

    def test_asks_hints_of_waiting_requests(self) -> None:
        """`hints_wanted` names only requests that wait, as the objects that were pushed; what they then say changes nothing
        but the order.
        """
        driver = self.driver()
        for number in range(12):
            driver.push(driver.new_view(9 + number, user=f"user {number % 2}"))
            driver.clock.advance(0.5)
        for number in range(24):
            driver.look_up_hints()
            if number % 3 == 0:
                driver.remove(next(iter(driver.waiting.values())))
            elif driver.running and number % 3 == 1:
                driver.preempt(next(iter(driver.running.values())))
            else:
                driver.pop()
            if not driver.waiting:
                break
        driver.drain()
        assert not driver.waiting

    def test_nobody_waits_for_ever(self) -> None:
        """A request is served although newer ones of the same shape, class and user keep arriving."""
        driver = self.driver()
        driver.push(driver.new_view())
        for _ in range(self.max_passed):
            driver.clock.advance(1.0)
            driver.push(driver.new_view())
            view = driver.pop()
            assert view is not None
            driver.progress(view)
            driver.finish(view)
            if 0 not in driver.waiting:
                return
        pytest.fail(f"{self.max_passed} newer requests were served and the first one still waits")

    def test_same_calls_give_the_same_order(self) -> None:
        """Two policies that hear the same say the same: the simulator and a replay depend on it. Time is `context.clock`,
        chance is `context.seed`.
        """
        orders = []
        for _ in range(2):
            driver = self.driver(seed=7)
            with no_real_time():
                for number in range(40):
                    driver.push(driver.new_view(1 + number * 7 % 11, priority=number % 3, user=f"user {number % 4}"))
                    driver.clock.advance(0.1)
                orders.append(list(driver.drain()))
        assert orders[0] == orders[1]

    def test_forgets_requests_that_ended(self) -> None:
        """After `on_finish` a policy holds no view of the request: one that does grows as long as the engine runs."""
        driver = self.driver()
        views: list[weakref.ref[ReadOnlyView]] = []
        for number in range(100):
            view = driver.new_view(user=f"user {number}")
            views.append(weakref.ref(view))
            driver.push(view)
            driver.clock.advance(0.1)
        for view in list(driver.waiting.values())[::3]:
            driver.remove(view)
        driver.drain()
        del view
        gc.collect()
        kept = [reference() for reference in views if reference() is not None]
        assert len(kept) <= 3, f"{len(kept)} of 100 requests that ended are still held"

    def test_serves_through_the_mechanism(self) -> None:
        """Under the core's real mechanism every request ends with its own tokens, under pressure and through swaps."""
        serve_under_pressure(MyScheduler, self.build(), MyVictim())
        machine = type(
            "PolicyUnderTheMechanism",
            (SchedulingMachine,),
            {
                "schedulers": (MyScheduler,),
                "policies": (self.build,),
                "victims": (MyVictim,),
            },
        )
        self.run_machine(machine, max_examples=15, steps=20)


def _machine(suite: PolicySuite, *, with_swaps: bool) -> type[RuleBasedStateMachine]:
    """The engine's calls in any order, as a hypothesis state machine over a PolicyDriver."""

    class PolicyMachine(Machine):
        def __init__(self) -> None:
            super().__init__()
            self.driver = suite.driver()
            self.held: list[ReadOnlyView] = []

        @rule(fields=REQUESTS)
        def arrives(self, fields: dict[str, Any]) -> None:
            self.driver.push(self.driver.new_view(**fields))

        @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 30.0]))
        def time_passes(self, seconds: float) -> None:
            self.driver.clock.advance(seconds)

        @rule()
        def next_is_served(self) -> None:
            self.driver.pop()

        @rule()
        def sheds(self) -> None:
            self.driver.shed()

        @precondition(lambda self: self.driver.waiting)
        @rule(data=st.data())
        def waiting_one_is_aborted(self, data: st.DataObject) -> None:
            self.driver.remove(self.driver.waiting[data.draw(st.sampled_from(sorted(self.driver.waiting)))])

        @rule()
        def next_is_held_back(self) -> None:
            view = self.driver.hold()
            if view is not None:
                self.held.append(view)

        @precondition(lambda self: self.held)
        @rule(ends=st.booleans())
        def held_one_comes_back(self, ends: bool) -> None:
            view = self.held.pop(0)
            (self.driver.end_held if ends else self.driver.push)(view)

        @precondition(lambda self: self.driver.running)
        @rule(data=st.data(), what=st.sampled_from(["progress", "preempt", "finish"]))
        def running_one(self, data: st.DataObject, what: str) -> None:
            view = self.driver.running[data.draw(st.sampled_from(sorted(self.driver.running)))]
            getattr(self.driver, what)(view)

        @precondition(lambda self: with_swaps)
        @rule()
        def is_swapped(self) -> None:
            self.driver.swap(suite.build(clock=self.driver.clock))

        def teardown(self) -> None:
            if self.has_failed:
                return
            for view in list(self.driver.running.values()):
                self.driver.finish(view)
            for view in self.held:
                self.driver.push(view)
            self.driver.drain()
            if self.driver.waiting:
                raise PolicyFault(f"{len(self.driver.waiting)} requests are never served")

    return PolicyMachine
