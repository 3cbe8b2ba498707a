"""A batch's ids in host memory, copied there without holding up the trainer when they lie on a GPU (section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .forms import Ints, count_up


class HostIds:
    """The ids of one batch.

    Host tensors are not copied: they must not change before the batch's forward. Tensors of a GPU are copied when
    somebody is going to read them; a forward whose batch was prefetched only looks at sizes.

    Args:
        ids: One tensor a slot, of any shape, int64 or int32, on the CPU or a GPU.

    Attributes:
        sizes: Number of ids of each.
        tensors: The tensors as given, flat.
        fingerprints: Of each list, once the id plane has read it for tables on a GPU.
    """

    def __init__(self, ids: Sequence[Tensor]) -> None:
        self.tensors = [each if each.dim() == 1 else each.reshape(-1) for each in ids]
        self.sizes = [each.shape[0] for each in self.tensors]
        self._host: list[Tensor] | None = None
        self._event: torch.cuda.Event | None = None
        self.fingerprints: list[int] = []

    def begin(self) -> None:
        """Begin to copy, behind what the current stream does; on the trainer's thread."""
        if self._host is None:
            self._host = [_to_host(each) for each in self.tensors]
            if any(each.is_cuda for each in self.tensors):
                self._event = torch.cuda.Event(blocking=True)
                self._event.record()

    def wait(self) -> None:
        """Wait for copies from a GPU; for the thread that reads the ids."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def arrays(self) -> list[Ints]:
        """One array a slot, int64, once `wait` is back."""
        assert self._host is not None, "begun before it is read"
        return [np.asarray(each.numpy(), dtype=np.int64) for each in self._host]

    def find_difference(self, other: HostIds) -> int | None:
        """The first slot in which both have other ids, of those whose ids came in host memory. Sizes are equal."""
        for slot, (one, another) in enumerate(zip(self.tensors, other.tensors, strict=True)):
            if not (one.is_cuda or another.is_cuda or same_ids(one, another)):
                return slot
        return None

    def equal(self, other: HostIds) -> bool:
        """Whether both hold the same ids. Synchronises when they came from a GPU."""
        for each in (self, other):
            each.begin()
            each.wait()
        return self.sizes == other.sizes and all(map(np.array_equal, self.arrays, other.arrays))


def _to_host(ids: Tensor) -> Tensor:
    if not ids.is_cuda:
        return ids
    return torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True).copy_(ids, non_blocking=True)


def fingerprint(ids: Ints) -> int:
    """The sum of ids, each times its place from 1, modulo 2⁶⁴ as a signed number.

    Example:
        >>> fingerprint(np.array([5, 7]))
        19
    """
    return int(np.dot(ids, count_up(len(ids) + 1)[1:]))


def same_ids(one: Tensor, another: Tensor) -> bool:
    """Whether two lists in host memory, int64 or int32, are equal; one that is compared with itself is not read.

    Example:
        >>> same_ids(torch.tensor([5, 7]), torch.tensor([5, 7], dtype=torch.int32))
        True
    """
    if one.dtype != another.dtype:
        one, another = one.long(), another.long()
    return torch.equal(one, another)
