"""Makes tensors in threads, a bounded number ahead of their consumer."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_THREADS = 8


def ahead(
    items: Iterable[Item], work: Callable[[Item], Result], *, threads: int | None = None
) -> Generator[tuple[Item, Result], None, None]:
    """Yields (item, work(item)) in the order of `items`, `work` running in threads, at most one result a thread ahead.

    threads: one a core, at most eight, when None. What `work` raises is raised at its item. Leaving early cancels what has
    not begun and waits for what has.
    """
    threads = threads or min(MAX_THREADS, os.cpu_count() or 1)
    source = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="loader") as pool:
        pending: deque[tuple[Item, Future[Result]]] = deque()
        try:
            pending.extend((item, pool.submit(work, item)) for item in islice(source, threads))
            while pending:
                item, future = pending.popleft()
                result = future.result()
                pending.extend((following, pool.submit(work, following)) for following in islice(source, 1))
                yield item, result
        finally:
            for _, future in pending:
                future.cancel()
