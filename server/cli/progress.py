"""Progress of a start on standard error: one moving line on a terminal, one line a task elsewhere."""

from __future__ import annotations

import sys
import threading
import time

_INTERVAL_SECONDS = 0.1


class ProgressLine:
    """Callable as (what, done, total), from any thread; total 0 means unknown."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moving = sys.stderr.isatty()
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
            else:
                sys.stderr.write(f"hotswap: {what}\n")
            sys.stderr.flush()

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
