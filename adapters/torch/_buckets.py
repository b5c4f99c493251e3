"""Buckets: which torch parameters' gradients are reduced together, and in which order.

The order is that in which one rank's first backward pass computed the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from arraycomm._training.rounds import Bucket

_FIRST_BUCKET: Final = 1 << 20


def _fit(slots: Sequence[torch.Tensor], gradients: Sequence[Any]) -> bool:
    """Return whether gradients are plain tensors in host memory, each like its slot."""
    return all(
        type(grad) is torch.Tensor
        and grad.is_cpu
        and grad.dtype is slot.dtype
        and grad.layout is torch.strided
        and grad.shape == slot.shape
        and grad.is_contiguous()
        # One that was made smaller has no memory behind its elements.
        and grad.untyped_storage().nbytes()
        >= slot.nbytes + (grad.storage_offset() and grad.storage_offset() * grad.itemsize)
        for slot, grad in zip(slots, gradients, strict=True)
    )


_fill: Final[Callable[[Any, Any], None]] = torch.no_grad()(torch._foreach_copy_)


class Buckets:
    """The buckets of one optimizer's parameters, in the order of their reduction."""

    def __init__(self, gradients: Any) -> None:
        self._gradients = gradients
        self._nbytes: list[int] = []
        self.all: list[Bucket] = []
        # The number of each parameter's bucket.
        self.of: list[int] = []
        self._ordered = False

    def adopt(self, tensors: list[torch.Tensor]) -> None:
        """Divide these parameters from now on."""
        self._nbytes = [tensor.nbytes for tensor in tensors]
        everything = list(range(len(tensors)))
        division = self._gradients.division or []
        # If parameters have come, the ranks have to agree anew.
        self._ordered = sorted(number for bucket in division for number in bucket) == everything
        self._divide(division if self._ordered else [everything])

    def _divide(self, numbers: list[list[int]]) -> None:
        """Divide the parameters into buckets of these numbers."""
        self.all = [Bucket(n, each, _fit, _fill) for n, each in enumerate(numbers)]
        self.of = [0] * len(self._nbytes)
        for bucket in self.all:
            for number in bucket.numbers:
                self.of[number] = bucket.index

    def agree(self, came: Sequence[int], *, repeated: bool) -> None:
        """Divide the parameters in the order of one rank's gradients, unless that is done.

        Collective, after the first round: of the ranks with the most gradients, the first decides.
        If any rank's came more than once, there is one bucket.
        """
        if self._ordered:
            return
        count = len(self._nbytes)
        row = np.zeros((2, count + 1), np.int64)
        row[:, 0] = len(came), repeated
        order = [*came, *(n for n in range(count) if n not in came)]
        row[0, 1:], row[1, 1:] = order, self._cuts(order, len(came))
        rows = self._gradients.comm.allgather(row).reshape(-1, 2, count + 1)
        self._ordered = True
        if not rows[:, 1, 0].any():
            order, indices = rows[int(rows[:, 0, 0].argmax()), :, 1:]
            self._divide([order[indices == n].tolist() for n in range(indices.max() + 1)])
        self._gradients.division = [bucket.numbers for bucket in self.all]

    def _cuts(self, order: Sequence[int], used: int) -> list[int]:
        """Return the bucket of each parameter in order; unused ones come with the last bucket."""
        limit = self._gradients.options["bucket_bytes"]
        index, nbytes, room, cuts = 0, 0, min(limit, _FIRST_BUCKET), []
        for number in order[:used]:
            if nbytes >= room:
                index, nbytes, room = index + 1, 0, limit
            nbytes += self._nbytes[number]
            cuts.append(index)
        return cuts + [index] * (len(order) - used)
