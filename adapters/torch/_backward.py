"""Backward passes of torch: what one of them has done so far, and in which node one is run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch._C import _current_graph_task_id
from torch.amp.grad_scaler import GradScaler
from torch.autograd.function import BackwardCFunction


@dataclass(eq=False)
class Backward:
    """One backward pass, and those that run inside it, as re-entrant checkpoints do."""

    # Where in the training it is; see `arraycomm._training.rounds`.
    place: Any
    # The parameters, the bucket of each, and how many gradients of each bucket are still to come.
    tensors: list[torch.Tensor]
    buckets: list[int]
    waiting: list[int]
    # Whether gradients are only accumulated, whether it is inside `join`, and whether reductions
    # start before its end.
    local: bool = True
    joined: bool = False
    overlaps: bool = False
    # Whether torch has compiled it. Its callbacks at the end are then dropped.
    compiled: bool = False
    # Autograd's numbers of the passes, and that of the one in which the others run, once it is
    # known.
    tasks: set[int] = field(default_factory=set)
    outermost: int | None = None
    # The parameters whose gradients were accumulated, in this order.
    order: dict[int, None] = field(default_factory=dict)
    # Whether a gradient may be accumulated more than once: none is complete before the end.
    repeated: bool = False
    # Whether a gradient was accumulated after its reduction had started.
    late: bool = False
    # The parameters to whose gradients autograd is about to add, and has begun to add,
    # and the handles of the hooks that tell so.
    awaited: set[int] = field(default_factory=set)
    adding: list[int] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    # The reductions that have been started.
    requests: list[Any] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)

    def expects(self, number: int) -> bool:
        """Return whether a gradient may be accumulated, and there is nothing to be done before."""
        return (
            self.tensors[number].grad is None
            and _current_graph_task_id() in self.tasks
            and not (self.overlaps and self.has_ready_bucket())
        )

    def note(self, number: int) -> None:
        """Note that the gradient of a parameter has been accumulated."""
        if number in self.order:
            self.repeated = True
            return
        self.order[number] = None
        if self.overlaps:
            # Autograd calls hooks in a thread for each device.
            with self.lock:
                self.waiting[self.buckets[number]] -= 1

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
    return next((call.f_locals["self"] for call in calls_under_way(method.__code__)), None)


def scaler_of_step() -> Any:
    """Return the `GradScaler` that takes the step of this thread, or None."""
    scaler = running(GradScaler.step)
    return scaler if scaler is not None and scaler.is_enabled() else None


def calls_under_way(code: CodeType) -> Iterator[FrameType]:
    """Yield the frames of this thread that run some code, the innermost one first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is code:
            yield frame
        frame = frame.f_back
