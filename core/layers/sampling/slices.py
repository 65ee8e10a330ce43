"""Rows of logits, some at a time: what is made on the way then stays small, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Iterator

COPIED = 2**23  # numbers of a slice that is copied: 32 MiB in float32
SORTED = 2**21  # numbers of a slice that is sorted, which takes some 50 bytes for each
_ALIGNED_ROWS = 4  # float32 rows of any width then begin where 16 bytes can be loaded at once, as the whole does


def slices(count: int, width: int, numbers: int) -> Iterator[slice]:
    """Cuts `count` rows of `width` numbers each into slices of about `numbers`, of 4 rows at least."""
    rows = max(numbers // width // _ALIGNED_ROWS, 1) * _ALIGNED_ROWS
    for start in range(0, count, rows):
        yield slice(start, min(start + rows, count))
