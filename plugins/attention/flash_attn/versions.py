"""The three FlashAttentions: which are installed, what each serves, and which one a cache gets. Imports none of them.

Facts are those of the sources of flash-attn 2.8.4, of version 3 (hopper/) beside it, and of flash-attn-4 4.0.0b36.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from hotswap.core.contracts.attention import AttentionContext
from hotswap.core.contracts.provider import DeviceInfo

from ..half_precision import common_reasons, dotted

_MAX_HEAD_SIZE = 256
_OLDEST_2 = (2, 6)  # soft caps, and block tables in calls of variable length


@dataclass(frozen=True, slots=True)
class Version:
    """One of them.

    missing: why it cannot be imported, as far as files tell; None when it can.
    oldest, too_new: compute capabilities whose paged caches it serves: from the first, and below the second (None: all).
    block_sizes, graph_capture: see `KVLayout` and `Capabilities`.
    against_head_size: why a head size is not served on a device; None when it is.
    """

    number: int
    module: str
    missing: Callable[[], str | None]
    oldest: tuple[int, int]
    too_new: tuple[int, int] | None
    block_sizes: tuple[int, ...]
    graph_capture: Literal["uniform_decode", "any"]
    against_head_size: Callable[[int, DeviceInfo], str | None]

    @property
    def name(self) -> str:
        return f"FlashAttention {self.number}"

    def reasons(self, context: AttentionContext) -> Iterator[str]:
        """Why it cannot serve, beyond `common_reasons`."""
        missing = self.missing()
        if missing is not None:
            yield missing
        device = context.device
        if device.kind == "cuda" and not self._runs_on(device.capability):
            upper = "" if self.too_new is None else f" and below {dotted(self.too_new)}"
            yield (
                f"{self.name} needs compute capability {dotted(self.oldest)} or newer{upper}, "
                f"{device.name} has {dotted(device.capability)}"
            )
        if context.spec is not None:
            if context.block_size not in self.block_sizes:
                yield f"{self.name} takes blocks of {self._blocks()} tokens, not {context.block_size} (--block-size)"
            against = self.against_head_size(context.spec.head_dim_k, device)
            if against is not None:
                yield f"{self.name}: {against}"

    def _runs_on(self, capability: tuple[int, int]) -> bool:
        return self.oldest <= capability and (self.too_new is None or capability < self.too_new)

    def _blocks(self) -> str:
        first, last = self.block_sizes[0], self.block_sizes[-1]
        return str(first) if first == last else f"{first} to {last}"


def _missing_2() -> str | None:
    if not _package_has("flash_attn_interface.py"):
        return "FlashAttention 2 is not installed: pip install 'hotswap[flash-attn]'"
    if find_spec("flash_attn_2_cuda") is None:
        return "FlashAttention 2 is installed without its CUDA extension, the module flash_attn_2_cuda"
    try:
        found = version("flash-attn")
    except PackageNotFoundError:
        return None  # a source tree on the path; its age is not known
    if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) < _OLDEST_2:
        return f"FlashAttention {found} is installed, {dotted(_OLDEST_2)} or newer is needed"
    return None


def _missing_3() -> str | None:
    if find_spec("flash_attn_interface") is None:
        return "FlashAttention 3 is not installed (the module flash_attn_interface)"
    return None


def _missing_4() -> str | None:
    if not _package_has("cute/__init__.py"):
        return "FlashAttention 4 is not installed: pip install 'hotswap[flash-attn-4]'"
    if find_spec("cutlass") is None:
        return "FlashAttention 4 needs the package nvidia-cutlass-dsl, which is not installed"
    return None


def _package_has(file: str) -> bool:
    """Whether the package flash_attn, which versions 2 and 4 share, has a file: to ask for a submodule would import it."""
    spec = find_spec("flash_attn")
    folders = None if spec is None else spec.submodule_search_locations
    return any((Path(folder) / file).is_file() for folder in folders or ())


def _multiples_of_8(size: int, device: DeviceInfo) -> str | None:
    if size % 8 or size > _MAX_HEAD_SIZE:
        return f"its head sizes are the multiples of 8 up to {_MAX_HEAD_SIZE}, not {size}"
    return None


def _multiples_of_16(size: int, device: DeviceInfo) -> str | None:
    largest = _MAX_HEAD_SIZE if device.capability < (10, 0) else 128
    if size % 16 or size > largest:
        return f"its head sizes over paged caches are the multiples of 16 up to {largest} on {device.name}, not {size}"
    return None


# Versions 3 and 4 take blocks of any size, but load a block as a whole, with slots that nobody has written, when it fills one
# of their tiles. The smallest tile has 64 tokens.
_BELOW_A_TILE = tuple(range(1, 64))

# Mixed steps of versions 2 and 3 are not known to work in a graph; those of version 4 were replayed on an H200.
VERSION_2 = Version(2, "flash_attn", _missing_2, (8, 0), None, (256,), "uniform_decode", _multiples_of_8)
VERSION_3 = Version(
    3, "flash_attn_interface", _missing_3, (8, 0), (10, 0), _BELOW_A_TILE, "uniform_decode", _multiples_of_8
)
VERSION_4 = Version(4, "flash_attn.cute", _missing_4, (9, 0), (12, 0), _BELOW_A_TILE, "any", _multiples_of_16)


def choose(candidates: Sequence[Version], context: AttentionContext) -> Version | None:
    """The first that can serve; None when none can."""
    return next((candidate for candidate in candidates if not list(candidate.reasons(context))), None)


def reasons_against(candidates: Sequence[Version], context: AttentionContext) -> list[str]:
    """Every reason why none of them can serve; empty when one can."""
    reasons = list(common_reasons(context))
    if choose(candidates, context) is None:
        reasons.extend(reason for candidate in candidates for reason in candidate.reasons(context))
    return reasons
