"""Conformance of kind `victim`."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from hypothesis import strategies as st

from ...contracts.victim import VictimRule
from ..limits import no_real_time
from ..plain import ByArrival
from ..scheduling_harness import fake_request
from ..scheduling_machine import SchedulingMachine, serve_under_pressure
from ..templates.scheduler import MyScheduler
from ..views import ReadOnlyView
from .base import ConformanceSuite

CANDIDATES = st.lists(
    st.fixed_dictionaries(
        {
            "num_prompt_tokens": st.integers(1, 40),
            "num_output_tokens": st.integers(0, 20),
            "priority": st.integers(-1, 2),
            "num_preemptions": st.integers(0, 3),
            "num_in_flight_steps": st.integers(0, 2),
            "gap": st.sampled_from([0.0, 0.5, 3.0]),
        }
    ),
    min_size=1,
    max_size=8,
)


def running_views(facts: list[dict[str, Any]]) -> list[ReadOnlyView]:
    """Running requests in service order, as a victim rule is offered them."""
    views, now = [], 0.0
    for number, fact in enumerate(sorted(facts, key=lambda fact: fact["priority"])):
        now += fact["gap"]
        request = fake_request(
            number, range(fact["num_prompt_tokens"]), arrival_time=now, priority=fact["priority"], max_tokens=32
        )
        request.max_tokens = 32
        request.output_token_ids = list(range(fact["num_output_tokens"]))
        request.num_computed_tokens = request.num_scheduled_tokens = request.num_known_tokens
        request.block_ids = list(range(1, 2 + request.num_known_tokens // 4))
        request.num_preemptions = fact["num_preemptions"]
        request.num_in_flight_steps = fact["num_in_flight_steps"]
        views.append(ReadOnlyView(request))
    return views


class VictimSuite(ConformanceSuite):
    kind = "victim"

    def test_chooses_one_of_the_candidates(self) -> None:
        """`choose` returns one of the very objects that it was offered, whoever was offered before."""
        rule: VictimRule = self.build()

        def check(facts: list[dict[str, Any]], needed: int) -> None:
            candidates = running_views(facts)
            chosen = rule.choose(candidates, needed)
            assert any(chosen is view for view in candidates), f"choose() gave {chosen!r}, which was not offered"

        self.for_all(40, check, facts=CANDIDATES, needed=st.integers(1, 20))

    def test_takes_the_only_candidate(self) -> None:
        """With one candidate there is one answer."""
        (view,) = running_views(
            [
                {
                    "num_prompt_tokens": 5,
                    "num_output_tokens": 1,
                    "priority": 0,
                    "num_preemptions": 9,
                    "num_in_flight_steps": 1,
                    "gap": 1.0,
                }
            ]
        )
        assert self.build().choose([view], 1) is view

    def test_leaves_the_candidates_alone(self) -> None:
        """The sequence is the core's: a rule neither sorts it in place nor takes from it."""

        def check(facts: list[dict[str, Any]]) -> None:
            candidates = running_views(facts)
            before = list(candidates)
            self.build().choose(candidates, 2)
            assert candidates == before

        self.for_all(10, check, facts=CANDIDATES)

    def test_same_calls_give_the_same_choice(self) -> None:
        """Two rules that are asked the same say the same: the simulator and a replay depend on it. Time is `context.clock`,
        chance is `context.seed`.
        """

        def check(many: list[list[dict[str, Any]]]) -> None:
            answers = []
            for _ in range(2):
                rule = self.build(seed=7)
                with no_real_time():
                    answers.append([rule.choose(running_views(facts), 3).request_id for facts in many])
            assert answers[0] == answers[1]

        self.for_all(10, check, many=st.lists(CANDIDATES, min_size=1, max_size=6))

    def test_keeps_no_views(self) -> None:
        """Between two calls a rule holds no view: the request may be gone."""
        rule: VictimRule = self.build()
        references = []
        for length in range(1, 20):
            fact = {"num_output_tokens": 0, "priority": 0, "num_preemptions": 0, "num_in_flight_steps": 0, "gap": 1.0}
            views = running_views([{**fact, "num_prompt_tokens": length}, {**fact, "num_prompt_tokens": 20 - length}])
            references += [weakref.ref(view) for view in views]
            rule.choose(views, 1)
        del views
        gc.collect()
        kept = [reference() for reference in references if reference() is not None]
        assert not kept, f"{len(kept)} views are still held after the calls"

    def test_serves_through_the_mechanism(self) -> None:
        """Under memory pressure every request still ends with its own tokens, and the first one always gets on."""
        serve_under_pressure(MyScheduler, ByArrival(), self.build())
        pieces = {"schedulers": (MyScheduler,), "policies": (ByArrival,), "victims": (self.build,)}
        self.run_machine(type("VictimUnderTheMechanism", (SchedulingMachine,), pieces), max_examples=15, steps=20)
