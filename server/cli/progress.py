"""Progress of a start: one moving line on a terminal; one line a task on standard error elsewhere, or in the log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

_INTERVAL_SECONDS = 0.1


class ProgressLine:
    """Callable as (what, done, total), from any thread; total 0 means unknown."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        """say: takes each line instead of standard error."""
        self._lock = threading.Lock()
        self._say = say or _to_stderr
        self._moving = say is None and sys.stderr.isatty()
        self._what = ""
        self._shown_at = 0.0
        self._width = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        with self._lock:
            now = time.monotonic()
            new = what != self._what
            if not new and (not self._moving or (now - self._shown_at < _INTERVAL_SECONDS and done < total)):
                return
            if new and self._moving:
                self._clear()
            self._what, self._shown_at = what, now
            if self._moving:
                text = f"{what} {100 * done // total:3d} %" if total else f"{what} ..."
                sys.stderr.write("\r" + text.ljust(self._width))
                self._width = len(text)
                sys.stderr.flush()
            else:
                self._say(what)

    def close(self) -> None:
        """Takes the moving line away."""
        with self._lock:
            if self._moving:
                self._clear()
            self._what = ""

    def _clear(self) -> None:
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
            self._width = 0


def _to_stderr(what: str) -> None:
    sys.stderr.write(f"hotswap: {what}\n")
    sys.stderr.flush()
