"""Backward passes of torch: what one of them has done so far, and in which node one is run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch.autograd.function import BackwardCFunction


class Backward:
    """One backward pass, and those that run inside it, as re-entrant checkpoints do.

    Attributes
    ----------
    place : object
        Where in the training it is; see `arraycomm._training.rounds`.
    local : bool
        Whether gradients are only accumulated.
    joined : bool
        Whether it is inside `join`.
    overlaps : bool
        Whether reductions start before its end.
    tasks : set of int
        Autograd's numbers of the passes.
    outermost : int or None
        The number of the one in which the others run, once that is known.
    order : dict of int
        The parameters whose gradients were accumulated, in this order.
    repeated : bool
        Whether a gradient may be accumulated more than once: none is complete before the end.
    late : bool
        Whether a gradient was accumulated after its reduction had started.
    waiting : list of int
        How many gradients of each bucket are still to come.
    aside : list of int
        The parameters whose reduced gradients have been set aside.
    requests : list of Request
        The reductions that have been started.
    """

    def __init__(
        self,
        place: Any,
        buckets: Sequence[Any],
        *,
        local: bool = True,
        joined: bool = False,
        overlaps: bool = False,
    ) -> None:
        self.place, self.local, self.joined, self.overlaps = place, local, joined, overlaps
        self.tasks: set[int] = set()
        self.outermost: int | None = None
        self.order: dict[int, None] = {}
        self.repeated = self.late = False
        self.waiting = [len(bucket.numbers) for bucket in buckets]
        self.aside: list[int] = []
        self.requests: list[Any] = []

    def note(self, number: int, bucket: int) -> None:
        """Note that the gradient of a parameter has been accumulated."""
        if number in self.order:
            self.repeated = True
        else:
            self.order[number] = None
            self.waiting[bucket] -= 1

    def has_ready_bucket(self) -> bool:
        """Return whether the next bucket, if it is not the last, can be started."""
        following = len(self.requests)
        if self.local or self.joined or self.repeated or not self.overlaps:
            return False
        if following >= len(self.waiting) - 1:
            return False
        return not self.waiting[following]


def enclosing_node() -> Any:
    """Return the node of autograd inside which this backward pass runs, or None.

    A re-entrant checkpoint calls `backward()` while its own node is run.
    """
    return running(BackwardCFunction.apply)


def running(method: Any) -> Any:
    """Return the object whose method is running in this thread, the innermost one, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is method.__code__:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
