"""Plays the engine's part towards a policy, call by call, and compares it with a plain list of who waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..clock import ManualClock
from ..contracts.policy import Budget, Policy
from ..scheduling.state import MAX_HINTS_PER_STEP
from .scheduling_harness import fake_request
from .views import ReadOnlyView

STEP_TOKENS = 64
STEP_SECONDS = 0.25
SHED_STATUSES = (429, 503)


class PolicyFault(AssertionError):
    """Something that no policy may do."""


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise PolicyFault(message)


class PolicyDriver:
    """waiting, running: views by id, as the engine knows them. Every call is followed by a comparison."""

    def __init__(self, policy: Policy, clock: ManualClock) -> None:
        self.policy = policy
        self.clock = clock
        self.waiting: dict[int, ReadOnlyView] = {}
        self.running: dict[int, ReadOnlyView] = {}
        self.served: list[int] = []
        self._next_id = 0
        self._num_hints = 0

    def new_view(self, num_prompt_tokens: int = 8, **fields: Any) -> ReadOnlyView:
        """A request that arrives now, as the engine has it before it is queued. A policy that does not use priorities
        sees none.
        """
        if not self.policy.uses_priority:
            fields.pop("priority", None)
        max_tokens = fields.pop("max_tokens", 16)
        deadline = fields.pop("deadline", None)
        request = fake_request(
            self._next_id, range(num_prompt_tokens), arrival_time=self.clock.now(), max_tokens=max_tokens, **fields
        )
        request.max_tokens = max_tokens
        request.deadline = deadline
        self._next_id += 1
        return ReadOnlyView(request)

    def push(self, view: ReadOnlyView) -> None:
        self.waiting[view.request_id] = view
        self.policy.push(view)
        self.compare()

    def pop(self) -> ReadOnlyView | None:
        """Takes the next one and schedules its prompt; None when nobody waits."""
        shown = self.policy.peek()
        _check((shown is None) == (not self.waiting), f"peek() gave {shown} while {len(self.waiting)} requests wait")
        if shown is None:
            return None
        _check(self.policy.peek() is shown, "peek() called twice shows two requests")
        self.compare()
        view = self.waiting.get(shown.request_id)
        if view is not shown:
            raise PolicyFault(f"peek() shows {shown}, which does not wait")
        self.share(view)
        taken = self.policy.pop()
        _check(taken is view, f"pop() took {taken}, peek() had shown {shown}")
        del self.waiting[view.request_id]
        self.compare()
        request = view.request
        request.num_scheduled_tokens = request.num_known_tokens
        request.num_in_flight_steps = 1
        self.running[request.request_id] = view
        self.served.append(request.request_id)
        self.policy.on_scheduled(view, request.num_known_tokens)
        return view

    def share(self, view: ReadOnlyView) -> int:
        budget = Budget(num_tokens=STEP_TOKENS, num_requests=4)
        granted = self.policy.share(view, budget)
        _check(isinstance(granted, int) and not isinstance(granted, bool), f"share() gave {granted!r}, not a number")
        _check(granted >= 0, f"share() gave {granted} tokens")
        _check(budget == Budget(STEP_TOKENS, 4), "share() changed the budget: it is the plan builder's")
        return granted

    def progress(self, view: ReadOnlyView) -> None:
        """A step of a running request is confirmed: one token, and the next step is planned."""
        request = view.request
        request.num_computed_tokens = request.num_known_tokens
        request.num_in_flight_steps = 0
        request.output_token_ids.append(len(request.output_token_ids))
        self.policy.on_tokens(view, 1)
        self.share(view)
        self.clock.advance(STEP_SECONDS)
        self.compare()

    def preempt(self, view: ReadOnlyView) -> None:
        """A running request goes back into the queue: its tokens are computed again."""
        del self.running[view.request_id]
        request = view.request
        request.num_computed_tokens = request.num_scheduled_tokens = request.num_in_flight_steps = 0
        request.num_preemptions += 1
        self.push(view)

    def hold(self) -> ReadOnlyView | None:
        """The next one is set aside while another request computes blocks that it shares; None when nobody waits. It comes
        back by `push`, or ends by `end_held`.
        """
        shown = self.policy.peek()
        if shown is None:
            return None
        view = self.waiting.pop(shown.request_id)
        _check(self.policy.pop() is view, f"pop() took another request than peek() had shown, {shown}")
        self.compare()
        return view

    def end_held(self, view: ReadOnlyView) -> None:
        """A request that was set aside is aborted."""
        self.policy.on_finish(view)
        self.compare()

    def remove(self, view: ReadOnlyView) -> None:
        """A waiting request is aborted."""
        del self.waiting[view.request_id]
        self.policy.remove(view.request_id)
        self.compare()
        self.policy.on_finish(view)
        self.compare()

    def finish(self, view: ReadOnlyView) -> None:
        """A running request ends."""
        del self.running[view.request_id]
        self.policy.on_finish(view)
        self.compare()

    def look_up_hints(self) -> None:
        """A step begins: whoever the policy asks about is found to have some other number of tokens in the cache."""
        wanted = list(self.policy.hints_wanted())
        for view in wanted:
            _check(
                self.waiting.get(view.request_id) is view,
                f"hints_wanted() names request {view.request_id}, which does not wait",
            )
        for view in wanted[:MAX_HINTS_PER_STEP]:
            request = self.waiting[view.request_id].request
            if not request.num_preemptions:
                self._num_hints += 1
                request.num_cached_prompt_tokens = self._num_hints * 7 % request.num_prompt_tokens
        self.compare()

    def shed(self) -> None:
        """A step begins; takes the policy at its word: whoever it gives up on is removed."""
        self.look_up_hints()
        given_up = list(self.policy.shed())
        ids = [shed.request_id for shed in given_up]
        _check(len(set(ids)) == len(ids), f"shed() names a request twice: {ids}")
        for shed in given_up:
            _check(shed.request_id in self.waiting, f"shed() names request {shed.request_id}, which does not wait")
            _check(bool(shed.reason.strip()), "shed() gives no reason")
            _check(shed.status in SHED_STATUSES, f"shed() gives status {shed.status}: it must be 429 or 503")
        self.compare()
        for request_id in ids:
            self.remove(self.waiting[request_id])

    def swap(self, policy: Policy) -> None:
        """The operator swaps the policy: those that wait are pushed into the new one by arrival, those that run are
        unknown to it.
        """
        self.policy = policy
        for _, view in sorted(self.waiting.items()):
            policy.push(view)
        self.compare()

    def compare(self) -> None:
        """`len`, `waiting` and `peek` say what is so. Raises PolicyFault."""
        _check(
            len(self.policy) == len(self.waiting),
            f"len() is {len(self.policy)} while {len(self.waiting)} requests wait",
        )
        listed = sorted(view.request_id for view in self.policy.waiting())
        _check(listed == sorted(self.waiting), f"waiting() lists {listed}, but {sorted(self.waiting)} wait")

    def drain(self, max_pops: int = 10_000) -> Sequence[int]:
        """Serves everybody that waits; their ids in order."""
        before = len(self.served)
        for _ in range(max_pops):
            self.shed()
            view = self.pop()
            if view is None:
                break
            self.progress(view)
            self.finish(view)
        return self.served[before:]
