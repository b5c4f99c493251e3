"""Gradients of torch parameters, reduced over all ranks while a backward pass computes them.

Two hooks on each parameter watch the accumulation of its gradient. The parameters are divided into
buckets. The reduction of a bucket starts once all its gradients are there, and those of the buckets
before it have been started, so that all ranks start them in the same order. What is left is started
at the end of the backward pass, which waits for all. So `.grad` is reduced when `backward()` returns.
"""

from __future__ import annotations

import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, Final

import numpy as np
import torch
from torch._C import _current_graph_task_id
from torch.amp.grad_scaler import GradScaler
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

import arraycomm as ac
from arraycomm.adapters._torch_slots import Slot, slot_of, writes_to

_FIRST_BUCKET: Final = 1 << 20


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
    tasks : set of int
        Autograd's numbers of the passes.
    outermost : int or None
        The number of the one in which the others run, once that is known.
    order : dict of int
        The parameters whose gradients were accumulated, in this order.
    repeated : bool
        Whether a gradient may be accumulated more than once, so that none is complete before the end.
    late : bool
        Whether a gradient was accumulated after its reduction had started.
    waiting : list of int
        How many gradients of each bucket are still to come.
    aside : list of int
        The parameters whose reduced gradients have been set aside.
    requests : list of Request
        The reductions that have been started.
    """

    def __init__(self, place: Any, local: bool, joined: bool, buckets: Sequence[Any]) -> None:
        self.place, self.local, self.joined = place, local, joined
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
        """Tell whether the next bucket, if it is not the last, can be started."""
        following = len(self.requests)
        if self.local or self.joined or self.repeated or following >= len(self.waiting) - 1:
            return False
        return not self.waiting[following]


class Reducer:
    """Reduces the gradients of one optimizer's parameters.

    Parameters
    ----------
    gradients : object
        How they are reduced; see `arraycomm._training.gradients`.
    """

    def __init__(self, gradients: Any) -> None:
        self._gradients = gradients
        self._lock = threading.RLock()
        self._at_end = gradients.entry(without_owner(self._end))
        self.syncing = True
        # Whether gradients have been reduced for this step inside `join`.
        self._has_joined = False
        self._backward: Backward | None = None
        # The parameters with gradients of backward passes for this step.
        self._touched: list[int] = []
        self.parameters: list[torch.Tensor] = []
        self._slots: list[Slot] = []
        self._buckets: list[Any] = []
        self._bucket_of: list[int] = []
        self._ordered = False

    # Parameters and buckets

    def adopt(self, groups: Sequence[dict[str, Any]]) -> None:
        """Reduce the gradients of all parameters of these groups from now on."""
        parameters = list({id(p): p for each in groups for p in each["params"]}.values())
        if list(map(id, parameters)) == list(map(id, self.parameters)):
            self._take_over(self._slots, only_free=True)
            return
        self.parameters, self._slots = parameters, list(map(slot_of, parameters))
        self._take_over(self._slots)
        self._touched = []
        everything = list(range(len(parameters)))
        division = self._gradients.division or []
        # If parameters have come, the ranks have to agree anew.
        self._ordered = sorted(number for bucket in division for number in bucket) == everything
        self._divide(division if self._ordered else [everything])

    def _take_over(self, slots: list[Slot], *, only_free: bool = False) -> None:
        """Have the hooks of parameters report to this reducer."""
        for number, slot in enumerate(slots):
            if not only_free or slot.reducer() is None:
                slot.reducer, slot.number = weakref.ref(self), number

    def _divide(self, buckets: list[list[int]]) -> None:
        """Divide the parameters into these buckets."""
        self._buckets = [self._gradients.bucket(n, each) for n, each in enumerate(buckets)]
        self._bucket_of = [0] * len(self.parameters)
        for bucket in self._buckets:
            for number in bucket.numbers:
                self._bucket_of[number] = bucket.index

    def _agree_on_order(self, backward: Backward | None) -> None:
        """Divide the parameters into buckets in the order in which one rank's gradients came.

        Collective, after the first round: of the ranks with the most gradients, the first decides.
        """
        count = len(self.parameters)
        row = np.zeros((2, count + 1), np.int64)
        if backward is not None:
            row[:, 0] = len(backward.order), backward.repeated
            order = [*backward.order, *(n for n in range(count) if n not in backward.order)]
            row[0, 1:], row[1, 1:] = order, self._cuts(order, len(backward.order))
        rows = self._gradients.comm.allgather(row).reshape(-1, 2, count + 1)
        self._ordered = True
        if not rows[:, 1, 0].any():
            order, indices = rows[int(rows[:, 0, 0].argmax()), :, 1:]
            self._divide([order[indices == n].tolist() for n in range(indices.max() + 1)])
        self._gradients.division = [bucket.numbers for bucket in self._buckets]

    def _cuts(self, order: Sequence[int], used: int) -> list[int]:
        """Return the bucket of each parameter in order; those that are not used come with the last."""
        limit = self._gradients.options["bucket_bytes"]
        index, nbytes, room, cuts = 0, 0, min(limit, _FIRST_BUCKET), []
        for number in order[:used]:
            if nbytes >= room:
                index, nbytes, room = index + 1, 0, limit
            nbytes += self.parameters[number].nbytes
            cuts.append(index)
        return cuts + [index] * (len(order) - used)

    # Backward passes

    def before_accumulation(self, slot: Slot) -> None:
        """Called before autograd adds to a gradient, or returns it without accumulating it."""
        with self._lock:
            task, backward = _current_graph_task_id(), self._backward
            if backward is None or task not in backward.tasks:
                backward = self._enter(task)
            if slot.set_aside(self.parameters[slot.number]):
                backward.late = True
            if slot.base is not None:
                backward.aside.append(slot.number)

    def after_accumulation(self, slot: Slot, parameter: torch.Tensor) -> None:
        """Called after autograd has added to a gradient."""
        with self._lock:
            backward = self._backward
            if backward is None:
                return
            slot.accumulated(parameter.grad)
            backward.note(slot.number, self._bucket_of[slot.number])
            while backward.has_ready_bucket():
                bucket = self._buckets[len(backward.requests)]
                backward.requests.append(self._start(bucket, backward.place))

    def _enter(self, task: int) -> Backward:
        """Return the backward pass that a pass of autograd belongs to; ask for a call at its end."""
        enclosing = _enclosing_node()
        if enclosing is None and self._backward and self._backward.outermost is not None:
            # An exception ended it.
            self._abandon()
        backward = self._backward = self._backward or self._begin()
        backward.tasks.add(task)
        if enclosing is None:
            backward.outermost = task
            Variable._execution_engine.queue_callback(self._at_end)
        else:
            backward.repeated = True
            self._follow(enclosing, backward)
        return backward

    def _follow(self, node: Any, backward: Backward) -> None:
        """Enter the pass in which a node has run this one, once the node is finished."""

        def finished(*_: Any) -> None:
            handle.remove()
            with self._lock:
                task = _current_graph_task_id()
                if self._backward is backward and task not in backward.tasks:
                    self._enter(task)

        handle = node.register_hook(finished)

    def _begin(self) -> Backward:
        """Begin a backward pass, and a new step if the last one was skipped."""
        gradients = self._gradients
        self._note_skipped()
        if self._has_joined and self._are_zeroed(range(len(self.parameters))):
            self._has_joined = False
        if gradients.rounds is None:
            return Backward(None, True, False, self._buckets)
        local = not self.syncing or gradients.keeps
        return Backward(gradients.rounds.place, local, gradients.joined, self._buckets)

    def _note_skipped(self) -> None:
        """Go on to the next step if the gradients of this one have been zeroed without it."""
        if self._touched and self._are_zeroed(self._touched):
            self._finish_step(skipped=True)

    def _are_zeroed(self, numbers: Iterable[int]) -> bool:
        """Tell whether the gradients of these parameters are None or zeros by now."""
        return all(self._slots[n].was_zeroed(self.parameters[n].grad) for n in numbers)

    def _end(self) -> None:
        """Called at the end of a backward pass."""
        with self._lock:
            backward = self._backward
            if backward is None:
                return
            for number in backward.aside:
                self._slots[number].put_back(self.parameters[number])
            if not backward.local and backward.order:
                finish = self._finish_in_join if backward.joined else self._finish_backward
                finish(backward)
                return
            self._backward = None
            if self.syncing and not backward.joined:
                self._touched = list({*self._touched, *backward.order})

    def _finish_backward(self, backward: Backward) -> None:
        try:
            self._run_round(backward.place, backward.requests, backward)
            while backward.late:
                backward.late = False
                self._run_round(self._gradients.rounds.place, [])
        finally:
            self._backward = None
            self._forget_sent()

    def _finish_in_join(self, _: Backward) -> None:
        try:
            self._reduce_in_join()
        finally:
            self._backward = None

    def _leave_backward(self) -> None:
        """Forget a backward pass that an exception ended; raise inside one that goes on."""
        if self._backward is None:
            return
        if _current_graph_task_id() != -1:
            self._gradients.fail(
                RuntimeError(
                    "DistributedOptimizer: step() was called inside backward(), before all gradients "
                    "are reduced; call it after backward()"
                )
            )
        self._abandon()

    def _abandon(self) -> None:
        """Wait for what an unfinished backward pass has started, and keep its gradients local."""
        backward, self._backward = self._backward, None
        self._forget_sent()
        if backward is not None:
            ac.waitall(backward.requests)

    def _forget_sent(self) -> None:
        for slot in self._slots:
            slot.sent = None

    # Rounds

    def _run_round(self, place: Any, requests: list[Any], backward: Backward | None = None) -> Any:
        """Reduce all buckets of which `requests` are under way; return where the ranks were."""
        requests += [self._start(bucket, place) for bucket in self._buckets[len(requests) : -1]]
        reduce = self._start if requests else self._reduce
        last = reduce(self._buckets[-1], place)
        results = ac.waitall([*requests, last]) if requests else [last]
        for reduced in results:
            self._settle(reduced.leaves)
        self._finish_round(place, backward)
        return results[0].places

    def _finish_round(self, place: Any, backward: Backward | None) -> None:
        gradients = self._gradients
        gradients.rounds.finish_round(place)
        gradients.forget_sums()
        if not self._ordered:
            self._agree_on_order(backward)

    def _start(self, bucket: Any, place: Any) -> Any:
        return self._gradients.rounds.start(bucket, partial(self._leaves, bucket), place)

    def _reduce(self, bucket: Any, place: Any) -> Any:
        return self._gradients.rounds.reduce(bucket, partial(self._leaves, bucket), place)

    def _leaves(self, bucket: Any) -> dict[int, Any]:
        """Return what this rank adds to the reduction of a bucket."""
        leaves = {number: self._unreduced(number) for number in bucket.numbers}
        means: dict[int, Any] = self._gradients.mean_of(leaves)
        return means

    def _unreduced(self, number: int, *, stale: bool = False) -> torch.Tensor | None:
        """Return a gradient that has to be reduced, and note that this has begun.

        `stale` says that one which was reduced in a step before is no exception.
        """
        slot, grad = self._slots[number], self.parameters[number].grad
        settled = grad is None or (slot.reduced if stale else slot.is_settled(grad))
        if slot.sent is None and grad is not None and not settled:
            _check_gradient(grad, number)
            backward = self._backward
            if backward and number in backward.order and writes_to(grad) != slot.version:
                raise _changed_inside(number)
            slot.send(grad)
        return slot.sent

    def _settle(self, leaves: dict[int, Any]) -> None:
        with torch.no_grad():
            for number, reduced in leaves.items():
                parameter, slot = self.parameters[number], self._slots[number]
                if slot.was_written():
                    self._gradients.fail(_changed_inside(number))
                slot.settle(parameter, _like(parameter, reduced))
        if self._is_counted:
            self._touched += [number for number, reduced in leaves.items() if reduced is not None]

    # Steps

    def reduce_for_step(self) -> bool:
        """Reduce what no backward pass has reduced; tell whether the step can be taken.

        Collective, but for steps whose gradients are only accumulated.
        """
        gradients = self._gradients
        self._leave_backward()
        if gradients.rounds is None:
            return self._reduce_at_once()
        self._check_owners()
        if gradients.joined:
            return self._step_in_join()
        self._check_join()
        self._note_skipped()
        if gradients.keeps:
            self._check_unchanged(f"with accumulate={gradients.accumulate}")
            gradients.keep(self._all_unreduced())
            self._forget_sent()
            self._finish_step()
            return False
        self._reduce_with_others()
        self._finish_step()
        return True

    def reduce_evaluation(self) -> None:
        """Reduce what a closure's backward pass has not; see `reduce_for_step`."""
        gradients = self._gradients
        self._leave_backward()
        if gradients.rounds is None:
            self._reduce_at_once()
            return
        self._check_owners()
        if gradients.joined:
            self._step_in_join()
            return
        self._reduce_with_others()
        self._forget_reduced()
        gradients.rounds.next_evaluation()

    def begin_evaluations(self) -> None:
        """Begin a step with a closure."""
        if self._is_counted:
            self._gradients.rounds.next_evaluation()

    def end_evaluations(self) -> None:
        """End a step with a closure."""
        if self._is_counted:
            self._finish_step()

    @property
    def _is_counted(self) -> bool:
        """Whether ranks compare in which step they are."""
        return self._gradients.rounds is not None and not self._gradients.joined

    def take_over(self, reduced: Sequence[Any]) -> None:
        """Replace the gradients of all parameters by those of ranks with data."""
        for parameter in self.parameters:
            parameter.grad = None
        self._settle_all(reduced)
        self._forget_reduced()

    def _settle_all(self, reduced: Sequence[Any]) -> None:
        self._settle(dict(enumerate(reduced)))

    def _reduce_with_others(self) -> None:
        """Take part in the others' backward passes until all ranks are in their step."""
        try:
            while not self._reduce_in_step():
                pass
            self._gradients.forget_sums()
        finally:
            self._forget_sent()

    def _reduce_in_step(self) -> bool:
        """Take part in one round, and tell whether all ranks are in their step."""
        place = replace(
            self._gradients.rounds.place,
            stepping=True,
            pending=self._is_pending(),
            replaced=self._any(Slot.is_replaced),
            changed=self._any(Slot.is_changed),
            stale=self._any(Slot.is_stale),
        )
        first = self._reduce(self._buckets[0], place)
        self._settle(first.leaves)
        together = all(other.stepping for other in first.places)
        if not together or any(other.pending for other in first.places):
            self._run_rest(place)
        if not together:
            self._finish_round(place, None)
            return False
        worked = [rank for rank, other in enumerate(first.places) if other.worked]
        if worked and len(worked) < len(first.places):
            self._hand_over(worked[0])
        elif _need_comparison(first.places):
            self._compare()
        if any(other.stale for other in first.places):
            return self._judge_stale()
        return True

    def _run_rest(self, place: Any) -> None:
        for reduced in ac.waitall([self._start(bucket, place) for bucket in self._buckets[1:]]):
            self._settle(reduced.leaves)

    def _hand_over(self, root: int) -> None:
        """Give the gradients of a rank to all: it may have clipped them, others had none to clip."""
        grads = [parameter.grad for parameter in self.parameters]
        mine = grads if self._gradients.comm.rank == root else [None] * len(grads)
        given = ac.allreduce_gradients(mine, "sum", comm=self._gradients.comm)
        for parameter, slot, grad in zip(self.parameters, self._slots, given, strict=True):
            parameter.grad = _like(parameter, grad)
            slot.note_reduced(parameter.grad)

    def _reduce_at_once(self) -> bool:
        """Reduce all gradients now, because other ranks' frameworks cannot do so before the step."""
        self._check_unchanged("and other ranks' frameworks have no gradients before that")
        try:
            complete, reduced = self._gradients.add(self._all_unreduced())
            if complete:
                self._settle_all(reduced)
        finally:
            self._forget_sent()
        self._forget_reduced()
        return bool(complete)

    def _reduce_in_join(self) -> None:
        """Reduce all gradients by weight."""
        try:
            reduced = self._gradients.reduce_in_join(self._all_unreduced())
            self._settle_all(reduced)
            self._has_joined = True
        finally:
            self._forget_sent()

    def _step_in_join(self) -> bool:
        """Give the gradients of a step to ranks without data; tell whether the step can be taken."""
        if not self._has_joined:
            self._reduce_in_join()
        grads = [parameter.grad for parameter in self.parameters]
        replaced = (
            zlib.crc32(repr(list(map(_checksum, grads))).encode())
            if self._any(Slot.is_replaced)
            else None
        )
        complete = self._gradients.hand_over(grads, replaced)
        self._has_joined = False
        self._forget_reduced()
        return bool(complete)

    def _all_unreduced(self) -> list[Any]:
        """Return what this step's gradients are if no rank can say which are stale."""
        return [self._unreduced(number, stale=True) for number in range(len(self.parameters))]

    def _is_pending(self) -> bool:
        """Tell whether this rank has gradients that are not reduced."""
        pairs = zip(self._slots, self.parameters, strict=True)
        return self._gradients.has_sums or any(
            p.grad is not None and not slot.is_settled(p.grad) for slot, p in pairs
        )

    def _any(self, question: Callable[[Slot, torch.Tensor | None], bool]) -> bool:
        """Ask a question about each gradient; tell whether it is true of any."""
        pairs = zip(self._slots, self.parameters, strict=True)
        return any(question(slot, parameter.grad) for slot, parameter in pairs)

    def _finish_step(self, *, skipped: bool = False) -> None:
        self._forget_reduced()
        self._gradients.finish_step(skipped=skipped)

    def _forget_reduced(self) -> None:
        """Take gradients that are assigned from now on for this rank's own."""
        self._touched = []
        for slot, parameter in zip(self._slots, self.parameters, strict=True):
            slot.forget_reduced(parameter.grad)

    # Checks

    def _check_unchanged(self, why: str) -> None:
        """Raise if gradients were changed before they are reduced: they are this rank's alone."""
        # Torch does not count what a scaler writes.
        changed = _is_in_scaler()
        for number in self._touched:
            grad = self.parameters[number].grad
            changed = changed or grad is None or writes_to(grad) != self._slots[number].version
        if changed:
            self._gradients.fail(
                RuntimeError(
                    "DistributedOptimizer: gradients were changed between backward() and step(), but "
                    f"they are reduced later here, in step() ({why}); with accumulate, clip and "
                    "unscale only before the last of the steps, or accumulate in no_sync(optimizer) "
                    "instead"
                )
            )

    def _check_owners(self) -> None:
        """Raise if an optimizer made later reduces some of the gradients in another way."""
        for slot in self._slots:
            other = slot.reducer()
            if other is self:
                continue
            if other is not None and other._gradients.settings != self._gradients.settings:
                raise ValueError(
                    "DistributedOptimizer: a parameter of this optimizer is also in a distributed "
                    "optimizer that was made later with another op, accumulate or compression, which "
                    "reduces its gradient; pass the same arguments to both"
                )

    def _check_join(self) -> None:
        """Raise if a `join` block has ended between a backward pass and its step."""
        if self._has_joined:
            self._has_joined = False
            self._gradients.fail(
                RuntimeError(
                    "DistributedOptimizer: step() was called after a join block with gradients of a "
                    "backward() inside, which ranks without data do not have; call both inside, or both "
                    "after the block"
                )
            )

    def _judge_stale(self) -> bool:
        """Find out which gradients are those of a step before, the same on all ranks; tell whether all are."""
        grads = [parameter.grad for parameter in self.parameters]
        pairs = list(zip(self._slots, grads, strict=True))
        rows = self._checksums([grad if slot.is_stale(grad) else None for slot, grad in pairs])
        same = (rows == rows[0]).all(axis=0)
        for number, (slot, grad) in enumerate(pairs):
            if slot.is_stale(grad):
                slot.judge_stale(same=bool(same[number]))
        return bool(same.all())

    def _checksums(self, grads: Sequence[torch.Tensor | None]) -> Any:
        """Return the checksums of all ranks' gradients, a row for each rank."""
        mine = np.array(list(map(_checksum, grads)), np.int64)
        return self._gradients.comm.allgather(mine).reshape(-1, len(mine))

    def _compare(self) -> None:
        """Raise unless all ranks have the same gradients."""
        rows = self._checksums([parameter.grad for parameter in self.parameters])
        differing = (rows != rows[0]).any(axis=0)
        if differing.any():
            number = int(differing.argmax())
            ranks = [rank for rank, row in enumerate(rows) if row[number] != rows[0, number]]
            raise ac.MismatchError(
                "DistributedOptimizer: .grad was changed after backward() had reduced it, and is not the "
                f"same on all ranks: that of parameter {number}, of shape "
                f"{tuple(self.parameters[number].shape)}, on rank {ranks[0]} is not that on rank 0; compute "
                "it from .grad and from values that are the same on all ranks"
            )


def _need_comparison(places: Sequence[Any]) -> bool:
    """Tell whether gradients may differ between ranks since they have been reduced."""
    return any(p.replaced for p in places) or len({p.changed for p in places}) > 1


def _check_gradient(grad: torch.Tensor, number: int) -> None:
    """Raise for a gradient that cannot be reduced."""
    if grad.requires_grad:
        raise TypeError(
            f"the gradient of parameter {number} has a history (backward(create_graph=True)), which a "
            "reduction over ranks would lose; use torch.autograd.grad(..., create_graph=True), which "
            "leaves .grad alone, or no_sync(optimizer)"
        )
    if grad.layout is not torch.strided:
        raise TypeError(
            f"the gradient of parameter {number} is of layout {grad.layout}, and only dense gradients "
            "are reduced; make the layer with sparse=False"
        )


def _changed_inside(number: int) -> RuntimeError:
    return RuntimeError(
        f"DistributedOptimizer: the gradient of parameter {number} was changed inside backward(), before it "
        "was reduced, as by a hook after its accumulation; change .grad after backward()"
    )


def _like(parameter: torch.Tensor, reduced: Any) -> torch.Tensor | None:
    """Return a reduced gradient as a tensor where the parameter is."""
    if reduced is None:
        return None
    if not isinstance(reduced, torch.Tensor):
        # This rank had no gradient at all, so the result is NumPy's.
        reduced = ac.exchange(reduced, "torch")
    tensor: torch.Tensor = reduced.to(parameter.device)
    return tensor


def _checksum(grad: torch.Tensor | None) -> int:
    if grad is None:
        return -1
    array = np.ascontiguousarray(ac.exchange(grad.detach(), "numpy"))
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


def _is_in_scaler() -> bool:
    """Tell whether a `GradScaler` takes this step."""
    scaler = _running(GradScaler.step)
    return scaler is not None and bool(scaler.is_enabled())


def _enclosing_node() -> Any:
    """Return the node of autograd inside which this backward pass runs, or None.

    A re-entrant checkpoint calls `backward()` while its own node is run.
    """
    return _running(BackwardCFunction.apply)


def _running(method: Any) -> Any:
    """Return the object whose method is running in this thread, the innermost one, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is method.__code__:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def without_owner(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method as a function that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments)

    return call
