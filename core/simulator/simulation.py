"""A workload through one replica: who arrives when, and what became of it."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ..contracts.observer import FinishedRequest
from ..engine.quiet_gc import collected_rarely
from .replica import EngineTotals, Replica, prompt_of
from .requests import OWN_TOKENS, Run, SimulatedRequest

REPORT_EVERY: Final = 64  # turns

Report = Callable[[int], None]  # requests that have ended


@dataclass(frozen=True, slots=True)
class Outcome:
    """finished: every request that was queued, in the order in which they ended; ids are places in the workload; shed
    ones ended with "error". refused: reason -> how many were turned away at the door."""

    finished: list[FinishedRequest]
    refused: dict[str, int]
    totals: EngineTotals


class Simulation:
    """Used once."""

    def __init__(self, requests: Sequence[SimulatedRequest]) -> None:
        """requests: in order of arrival."""
        self._requests = requests
        self._finished: list[FinishedRequest] = []
        self._refused: Counter[str] = Counter()
        self._arrivals: list[tuple[float, int]] = []  # a heap of (moment, number)
        self._later: dict[str, deque[int]] = defaultdict(deque)  # session -> its requests whose turn has not come
        self._history: dict[str, list[Run]] = {}  # session -> prompt and answer of its last answered turn
        self._prompts: dict[int, list[Run]] = {}  # of conversations' requests that are under way
        for number, request in enumerate(requests):
            if request.session and request.session in self._later:
                self._later[request.session].append(number)
                continue
            if request.session:
                self._later[request.session] = deque()
            self._arrivals.append((request.arrival, number))
        heapq.heapify(self._arrivals)

    @property
    def num_ended(self) -> int:
        return len(self._finished) + self._refused.total()

    def ended(self, request: FinishedRequest) -> None:
        """What the replica tells of every end."""
        self._finished.append(request)
        session = self._requests[request.request_id].session
        if session:
            prompt = self._prompts.pop(request.request_id)
            if request.num_output_tokens:
                self._history[session] = [*prompt, (OWN_TOKENS + request.request_id, request.num_output_tokens)]
            self._next_turn(session, request.finish_time)

    def run(self, replica: Replica, report: Report | None = None) -> Outcome:
        """Until every request has ended. Raises what the scheduler, the policy and the victim rule raise."""
        clock, arrivals, turns = replica.clock, self._arrivals, 0
        with collected_rarely():
            while True:
                while arrivals and arrivals[0][0] <= clock.now():
                    self._submit(replica, *heapq.heappop(arrivals))
                if replica.has_work:
                    replica.turn()
                elif arrivals:
                    clock.advance_to(arrivals[0][0])
                else:
                    break
                turns += 1
                if report is not None and turns % REPORT_EVERY == 0:
                    report(self.num_ended)
        replica.close()
        if self.num_ended != len(self._requests):  # what is told to observers may get lost there when they raise
            raise RuntimeError(
                f"{self.num_ended} of {len(self._requests)} requests have ended, and nothing is left to do"
            )
        return Outcome(self._finished, dict(self._refused.most_common()), replica.totals())

    def _submit(self, replica: Replica, moment: float, number: int) -> None:
        request = self._requests[number]
        history: Sequence[Run] = ()
        if request.session:
            history = self._history.get(request.session, ())
            self._prompts[number] = prompt_of(request, number, history)
        refusal = replica.submit(number, request, moment, history)
        if refusal is not None:
            self._refused[refusal] += 1
            if request.session:
                del self._prompts[number]
                self._next_turn(request.session, moment)

    def _next_turn(self, session: str, moment: float) -> None:
        """The conversation goes on: no earlier than its next request's own arrival."""
        later = self._later[session]
        if later:
            number = later.popleft()
            heapq.heappush(self._arrivals, (max(moment, self._requests[number].arrival), number))
