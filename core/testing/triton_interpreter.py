"""Triton's interpreter, for tests of kernels on a machine without a GPU."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def repair_loops() -> None:
    """Lets interpreted kernels loop up to a number that they have loaded. Triton keeps scalars in arrays of one element,
    and since numpy 2.4 `int` takes none of those. Where kernels are compiled this changes nothing."""
    from triton.runtime import interpreter  # here: a heavy import

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch
