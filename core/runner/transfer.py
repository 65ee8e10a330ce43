"""Host lists to device tensors and back, without making the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ..contracts.platform import DeviceEvent, Platform


class Transfers:
    """What goes between host and device. On a device that works asynchronously, uploads pass through pinned memory (torch's
    allocator keeps it until the copy is done) and downloads are there after an event."""

    def __init__(self, device: str = "cpu", platform: Platform | None = None) -> None:
        """platform: None: the host itself."""
        self.device = device
        self._platform = platform
        self._is_asynchronous = platform is not None and platform.is_asynchronous

    def upload(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """A new device tensor of a (nested) list of numbers."""
        tensor = torch.tensor(values, dtype=dtype)
        return self.to_device(tensor)

    def array(self, values: NDArray[Any]) -> Tensor:
        """A new device tensor of a host array."""
        return self.to_device(torch.from_numpy(values))

    def to_device(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device. On the host itself it is the same tensor."""
        if not self._is_asynchronous:
            return tensor if self.device == "cpu" else tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def copy_into(self, target: Tensor, values: Sequence[Any]) -> None:
        """Overwrites a device tensor with a list of numbers, in the order of the device's queue."""
        tensor = torch.tensor(values, dtype=target.dtype)
        target.copy_(tensor.pin_memory() if self._is_asynchronous else tensor, non_blocking=self._is_asynchronous)

    def download(self, *tensors: Tensor) -> Download:
        """Begins to bring tensors to the host. They may be overwritten on the device by whatever is queued later."""
        if self._platform is None or not self._is_asynchronous:
            return Download(tensors, None)
        copies = []
        for tensor in tensors:
            copy = self._platform.pinned(tuple(tensor.shape), tensor.dtype)
            copy.copy_(tensor, non_blocking=True)
            copies.append(copy)
        event = self._platform.event()
        event.record()
        return Download(tuple(copies), event)


class Download:
    """Tensors on their way to the host."""

    __slots__ = ("_event", "_tensors")

    def __init__(self, tensors: tuple[Tensor, ...], event: DeviceEvent | None) -> None:
        self._tensors = tensors
        self._event = event

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors on the host, once they are there."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._tensors
