"""Routing checkpoint tensors to the layers that want them.
 A layer registers a `WeightTarget` for every tensor of the checkpoint that it takes. `WeightMap.load` then walks over
the tensors in whatever order the file has, checks each shape, and calls a layer's `finish` as soon as its last tensor
is in, so that only one layer's plain weights live beside its packed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..contracts.model import LoadReport, WeightSpec
from ..errors import ModelLoadError

_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # tables that old checkpoints stored; ours come from the config
_SHOWN = 8  # names in an error message


@dataclass(slots=True)
class WeightTarget:
    """One tensor that a layer takes. `load` must copy what it keeps: the tensor may be a view of a mapped file."""

    spec: WeightSpec
    load: Callable[[Tensor], None]


@dataclass(slots=True)
class _Group:
    """The tensors of one layer. pending: the required ones that have not come yet."""

    finish: Callable[[], None] | None
    pending: set[str] = field(default_factory=set)


class WeightMap:
    """Every tensor that a model takes, by its checkpoint name."""

    def __init__(self) -> None:
        self._targets: dict[str, tuple[WeightTarget, _Group]] = {}
        self._groups: list[_Group] = []

    def add(self, targets: Iterable[WeightTarget], finish: Callable[[], None] | None = None) -> None:
        """Registers one layer. `finish` is called once, when all its tensors that are not optional are in."""
        group = _Group(finish)
        self._groups.append(group)
        for target in targets:
            name = target.spec.name
            if name in self._targets:
                raise ModelLoadError(f"two layers of the model want the tensor {name}")
            self._targets[name] = (target, group)
            if not target.spec.optional:
                group.pending.add(name)

    def specs(self) -> Iterator[WeightSpec]:
        return (target.spec for target, _ in self._targets.values())

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> LoadReport:
        """Takes all tensors. Raises ModelLoadError on a wrong shape, a tensor that comes twice, or required ones that
        are missing."""
        report = LoadReport()
        seen: set[str] = set()
        for name, tensor in weights:
            if name in seen:
                raise ModelLoadError(f"the checkpoint holds the tensor {name} twice")
            seen.add(name)
            if name in self._targets:
                self._take(name, tensor)
            elif not name.endswith(_IGNORED_SUFFIXES):
                report.unexpected.append(name)
        report.missing = [
            name for name, (target, _) in self._targets.items() if name not in seen and not target.spec.optional
        ]
        if report.missing:
            raise ModelLoadError(_missing_message(report))
        return report

    def _take(self, name: str, tensor: Tensor) -> None:
        target, group = self._targets[name]
        if tuple(tensor.shape) != target.spec.shape:
            raise ModelLoadError(
                f"tensor {name} has the shape {list(tensor.shape)}; the config asks for {list(target.spec.shape)}"
            )
        target.load(tensor)
        group.pending.discard(name)
        if not group.pending and group.finish is not None and not target.spec.optional:
            group.finish()
            group.finish = None


def _missing_message(report: LoadReport) -> str:
    shown = ", ".join(report.missing[:_SHOWN])
    more = f" and {len(report.missing) - _SHOWN} more" if len(report.missing) > _SHOWN else ""
    hint = f" It holds others that nothing uses, such as {report.unexpected[0]}." if report.unexpected else ""
    return f"the checkpoint lacks {len(report.missing)} tensor(s) that the config asks for: {shown}{more}.{hint}"


def check_float(name: str, tensor: Tensor) -> None:
    """Raises ModelLoadError unless the tensor holds plain floating-point numbers."""
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ModelLoadError(
            f"tensor {name} holds {str(tensor.dtype).removeprefix('torch.')}, not plain floating-point weights; "
            "the checkpoint seems to be quantized: name its method with --quantization"
        )


class Parameter:
    """A small plain tensor (a norm's weight, a bias) made of one or more checkpoint tensors one below the other.

    `tensor` is allocated at once, so layers may hold it; loading fills it in place.
    """

    __slots__ = ("_names", "_parts", "tensor")

    def __init__(
        self, names: tuple[str, ...], parts: tuple[int, ...], dtype: torch.dtype, device: str | torch.device
    ) -> None:
        self.tensor = torch.empty(sum(parts), dtype=dtype, device=device)
        self._names = names
        self._parts = parts

    def targets(self) -> Iterator[WeightTarget]:
        for name, rows, slot in zip(self._names, self._parts, self.tensor.split_with_sizes(self._parts), strict=True):
            yield WeightTarget(WeightSpec(name, (rows,)), _copy_into(name, slot))


def _copy_into(name: str, slot: Tensor) -> Callable[[Tensor], None]:
    def load(tensor: Tensor) -> None:
        check_float(name, tensor)
        slot.copy_(tensor)

    return load
