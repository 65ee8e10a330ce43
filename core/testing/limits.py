"""What a conformance check may not do: read the real clock, or go on for ever."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

CLOCKS: Final = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")
_MAY_READ_IT: Final = ("logging", "threading", "queue", "hotswap.core.clock")  # the last: the test's own clock
_AGAIN_AFTER: Final = 5.0


@contextmanager
def no_real_time() -> Iterator[None]:
    """Within it the clocks of `time` raise AssertionError: a simulation has a clock of its own."""
    with ExitStack() as patches:
        for name in CLOCKS:
            patches.enter_context(mock.patch.object(time, name, _refusing(name)))
        yield


def _refusing(name: str) -> Callable[[], Any]:
    real = getattr(time, name)

    def read() -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith(_MAY_READ_IT):
            return real()
        raise AssertionError(f"time.{name}() was called: the time is context.clock.now(), which a simulation replaces")

    return read


class TookTooLong(BaseException):
    """No Exception, so that neither the plugin nor hypothesis takes it for one of the plugin's own and goes on."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TookTooLong in what runs within it after so many seconds, and every few seconds from then on: what cleans up
    may hang as well. Without effect outside the main thread, where Python takes no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        code = frame.f_code
        where = f"{code.co_filename}:{frame.f_lineno}, in {code.co_name}"
        raise TookTooLong(f"not done after {seconds:g} s; it was at {where}")

    handler = signal.signal(signal.SIGALRM, stop)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_AFTER)
    started = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:  # an outer limit, such as that of pytest-timeout, goes on where it was
            signal.setitimer(signal.ITIMER_REAL, max(0.001, remaining - (time.monotonic() - started)), interval)
