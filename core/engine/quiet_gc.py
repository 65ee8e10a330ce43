"""Python's garbage collector kept out of the step loop's way.

A full collection looks at every container of the process. With torch, transformers and our plugins loaded those are some
380,000 before the first request; while it looks no step is planned, and the device idles once it has finished those in flight.
Our own objects need no collector: what a step makes is in no cycle and goes with its last reference.

Measured on a CPU with the instant model (testing/scripted_model.py), torch and transformers imported: collections in one
`LLM.generate` of 500 tokens a request (gc.callbacks, CPU time), how many and milliseconds in all, and the longest one.

                                                   young       middle     full        longest
    256 requests, Python's settings                468, 53     43, 39     1, 232      232
    256 requests, collected_rarely                 1, 1        none       none        1
    64 requests with logprobs=2, Python's          231, 273    21, 65     1, 294      294
    64 requests with logprobs=2, collected_rarely  2, 53       none       none        27
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

Thresholds = tuple[int, int, int]  # as gc.get_threshold gives them

# Net allocations to a young collection, young ones to a middle one, middle ones to a full one. What a step makes and drops does
# not add up; 50,000 are what is kept, or garbage.
PROCESS: Thresholds = (50_000, 20, 50)
# Of a call: what it keeps are its results (with log-probabilities, several containers a token), and middle collections would go
# through all of them again and again. Young ones still find what was dropped in cycles soon after it was made.
CALL: Thresholds = (50_000, 1_000, 1_000)


def settle_process() -> None:
    """For a process that is the engine's own, once everything is loaded: what is there now stays and is never looked at again,
    and new garbage is looked for rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*PROCESS)


@contextmanager
def collected_rarely() -> Iterator[None]:
    """For a loop in a process that is somebody else's: thresholds are raised while anybody is inside, and put back at the end
    however that comes about. Any number of threads may be inside at once, and one within the other.

    Nothing is frozen: gc.unfreeze would also let go of what the user has frozen. A collector that is off stays off, a threshold
    that is higher already stays, and what the user sets meanwhile stays too.
    """
    who = object()
    try:
        _raised.enter(who)  # may be interrupted half-way
        yield
    finally:
        _raised.leave(who)


class _Raised:
    """The process's thresholds, raised from the first `enter` to the last `leave`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: set[object] = set()
        self._before: Thresholds | None = None  # the user's; None when they were left alone
        self._ours: Thresholds = CALL

    def enter(self, who: object) -> None:
        with self._lock:
            self._inside.add(who)
            young, middle, full = gc.get_threshold()
            if len(self._inside) > 1 or not gc.isenabled() or young == 0:  # 0: off as well
                return
            self._before = young, middle, full
            gc.set_threshold(max(young, CALL[0]), max(middle, CALL[1]), max(full, CALL[2]))
            self._ours = gc.get_threshold()  # an interpreter may not keep all three

    def leave(self, who: object) -> None:
        """Whoever came only half-way in may leave too."""
        with self._lock:
            self._inside.discard(who)
            if self._inside or self._before is None:
                return
            if gc.get_threshold() == self._ours:
                gc.set_threshold(*self._before)
            self._before = None


_raised = _Raised()
