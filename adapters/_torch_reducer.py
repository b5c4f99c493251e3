"""Gradients of torch parameters, reduced over all ranks while a backward pass computes them.

Two hooks on each parameter watch the accumulation of its gradient. The parameters are divided into
buckets. The reduction of a bucket starts once all its gradients are there, and those of the buckets
before it have been started, so that all ranks start them in the same order. What is left is started
at the end of the backward pass, which waits for all. So `.grad` is reduced when `backward()` returns.

Before autograd adds to a gradient that has been reduced already, this is set aside as the *base*.
Autograd then accumulates this rank's part alone, which is reduced and added to the base.
"""

from __future__ import annotations

import sys
import threading
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, Final

import numpy as np
import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

import arraycomm as ac

_FIRST_BUCKET: Final = 1 << 20


class Slot:
    """The gradient of one parameter, between autograd and its reduction.

    Attributes
    ----------
    reducer : weak reference to Reducer
        That of the optimizer made last for this parameter, which reduces its gradient.
    number : int
        Of the parameter in that reducer.
    base : Tensor or None
        What was reduced before. `.grad` is then what this rank has accumulated since.
    sent : Tensor or None
        The `.grad` that is being reduced.
    reduced : bool
        Whether `.grad` has been reduced in this step.
    version : int
        How often `.grad` had been written to when this slot last saw it.
    """

    __slots__ = ("_result", "base", "number", "reduced", "reducer", "sent", "version")

    def __init__(self) -> None:
        self.reducer: Any = lambda: None
        self.number = 0
        self.base: torch.Tensor | None = None
        self.sent: torch.Tensor | None = None
        self.reduced = False
        self.version = 0
        self._result: Any = lambda: None

    def is_reduced(self, grad: torch.Tensor) -> bool:
        """Tell whether a gradient has been reduced, and maybe changed since."""
        return self.reduced or self._result() is grad

    def is_settled(self, grad: torch.Tensor) -> bool:
        """Tell whether a gradient has been reduced, in this step or without a change since."""
        return self.reduced or (self._result() is grad and grad._version == self.version)

    def is_replaced(self, grad: torch.Tensor | None) -> bool:
        """Tell whether something else has been assigned to `.grad` after it was reduced in this step."""
        return self.reduced and (grad is None or self._result() is not grad)

    def was_zeroed(self, grad: torch.Tensor | None) -> bool:
        """Tell whether a gradient has been set to None or zeros since this slot last saw it."""
        if grad is None:
            return True
        result = self._result()
        if grad._version == self.version and (result is None or result is grad):
            return False
        return not grad.any()

    def base_of(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Return what was reduced before this gradient was accumulated, if anything."""
        if self.base is not None and self.was_zeroed(grad):
            self.base = None
        return self.base

    def set_aside(self, parameter: torch.Tensor) -> bool:
        """Make autograd accumulate into a new `.grad`; tell whether the old one is being reduced."""
        grad = parameter.grad
        if grad is not None and grad is self.sent:
            parameter.grad = None
            return True
        if grad is None:
            self.base, self.reduced = None, False
        elif self.base_of(grad) is None and self.is_reduced(grad):
            self.base, parameter.grad = grad, None
        return False

    def put_back(self, parameter: torch.Tensor) -> None:
        """Undo `set_aside` if nothing has been accumulated."""
        if parameter.grad is None and self.base is not None:
            parameter.grad, self.base = self.base, None

    def accumulated(self, grad: torch.Tensor | None) -> None:
        """Note that autograd has accumulated this rank's part."""
        self.reduced, self._result = False, lambda: None
        self.version = 0 if grad is None else grad._version

    def settle(self, parameter: torch.Tensor, reduced: torch.Tensor | None) -> None:
        """Take over a reduced gradient, unless no rank had one."""
        sent, self.sent = self.sent, None
        if reduced is None:
            return
        grad = parameter.grad
        late = sent is not None and grad is not sent
        total = self._total(parameter, sent, reduced)
        self.base = None
        if late and grad is not None:
            self.base = total
            return
        if grad is not total:
            parameter.grad = total
        self.reduced, self.version, self._result = True, total._version, TensorWeakRef(total)

    def _total(
        self, parameter: torch.Tensor, sent: torch.Tensor | None, reduced: torch.Tensor
    ) -> torch.Tensor:
        """Return the whole reduced gradient, in the memory where the program has seen it."""
        base = self.base_of(sent) if sent is not None else parameter.grad
        with torch.no_grad():
            if base is not None:
                return base.add_(reduced)
            return reduced if sent is None else sent.copy_(reduced)


_slots: Any = WeakTensorKeyDictionary()


def slot_of(parameter: torch.Tensor) -> Slot:
    """Return the slot of a parameter; the first call hooks it to the parameter."""
    slot: Slot | None = _slots.get(parameter)
    if slot is None:
        slot = _slots[parameter] = Slot()
        if _may_have_gradient(parameter):
            # Torch allows hooks only while gradients are required. They stay if a parameter is frozen.
            frozen = not parameter.requires_grad
            if frozen:
                parameter.requires_grad_(True)
            _hook(parameter, slot)
            if frozen:
                parameter.requires_grad_(False)
    return slot


def _hook(parameter: Any, slot: Slot) -> None:
    before: Any = partial(_before_accumulation, slot)
    before.__torch_unserializable__ = True  # so that torch does not warn when it saves the tensor
    parameter.register_hook(before)
    parameter.register_post_accumulate_grad_hook(partial(_after_accumulation, slot))


def _may_have_gradient(parameter: torch.Tensor) -> bool:
    numeric = parameter.is_floating_point() or parameter.is_complex()
    return numeric and parameter.is_leaf and not parameter.is_inference()


def _before_accumulation(slot: Slot, _: torch.Tensor) -> None:
    reducer: Reducer | None = slot.reducer()
    if reducer is not None:
        reducer.before_accumulation(slot)


def _after_accumulation(slot: Slot, parameter: torch.Tensor) -> None:
    reducer: Reducer | None = slot.reducer()
    if reducer is not None:
        reducer.after_accumulation(slot, parameter)


class Backward:
    """One backward pass, and those that run inside it, as re-entrant checkpoints do.

    Attributes
    ----------
    place : object
        Where in the training it is; see `arraycomm._training.rounds`.
    local : bool
        Whether gradients are only accumulated.
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

    def __init__(self, place: Any, local: bool, buckets: Sequence[Any]) -> None:
        self.place, self.local = place, local
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
        if self.local or self.repeated or following >= len(self.waiting) - 1:
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
        self.syncing = True
        self._backward: Backward | None = None
        # Whether a backward pass has computed gradients for this step.
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
        self._touched, self._ordered = [], False
        self._divide([list(range(len(parameters)))])

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
            task, backward = torch._C._current_graph_task_id(), self._backward
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
            Variable._execution_engine.queue_callback(self._end)
        else:
            backward.repeated = True
            self._follow(enclosing, backward)
        return backward

    def _follow(self, node: Any, backward: Backward) -> None:
        """Enter the pass in which a node has run this one, once the node is finished."""

        def finished(*_: Any) -> None:
            handle.remove()
            with self._lock:
                task = torch._C._current_graph_task_id()
                if self._backward is backward and task not in backward.tasks:
                    self._enter(task)

        handle = node.register_hook(finished)

    def _begin(self) -> Backward:
        """Begin a backward pass, and a new step if the last one was skipped."""
        gradients = self._gradients
        if self._touched and self._are_zeroed():
            self._finish_step(skipped=True)
        if gradients.rounds is None:
            return Backward(None, True, self._buckets)
        local = not self.syncing or gradients.joined or gradients.keeps
        return Backward(gradients.rounds.place, local, self._buckets)

    def _are_zeroed(self) -> bool:
        return all(self._slots[n].was_zeroed(self.parameters[n].grad) for n in self._touched)

    def _end(self) -> None:
        """Called at the end of a backward pass."""
        with self._lock:
            backward = self._backward
            if backward is None:
                return
            for number in backward.aside:
                self._slots[number].put_back(self.parameters[number])
            if not backward.local and backward.order:
                self._finish_backward(backward)
                return
            self._backward = None
            if self.syncing and self._is_counted:
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

    def _leave_backward(self) -> None:
        """Forget a backward pass that an exception ended; raise inside one that goes on."""
        if self._backward is None:
            return
        if torch._C._current_graph_task_id() != -1:
            self._gradients.rounds.fail(
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

    def _unreduced(self, number: int) -> torch.Tensor | None:
        """Return a gradient that has to be reduced, and note that this has begun."""
        slot, grad = self._slots[number], self.parameters[number].grad
        if slot.sent is None and grad is not None and not slot.is_settled(grad):
            _check_gradient(grad, number)
            slot.sent = grad
        return slot.sent

    def _settle(self, leaves: dict[int, Any]) -> None:
        for number, reduced in leaves.items():
            parameter = self.parameters[number]
            self._slots[number].settle(parameter, _like(parameter, reduced))
            if reduced is not None:
                self._touched.append(number)

    # Steps

    def reduce_for_step(self) -> bool:
        """Reduce what no backward pass has reduced; tell whether the step can be taken.

        Collective, but for steps whose gradients are only accumulated.
        """
        gradients = self._gradients
        self._leave_backward()
        if not self._is_counted:
            return self._reduce_at_once()
        self._check_owners()
        if gradients.keeps:
            self._check_unchanged()
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
        if not self._is_counted:
            self._reduce_at_once()
            return
        self._check_owners()
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

    def settle_all(self, reduced: Sequence[Any]) -> None:
        """Take over reduced gradients of all parameters."""
        self._settle(dict(enumerate(reduced)))

    def _reduce_with_others(self) -> None:
        """Take part in the others' backward passes until all ranks are in their step."""
        try:
            while not self._reduce_in_step():
                pass
        finally:
            self._forget_sent()

    def _reduce_in_step(self) -> bool:
        """Take part in one round, and tell whether all ranks are in their step."""
        pending, replaced = self._is_pending(), self._is_replaced()
        rounds = self._gradients.rounds
        place = replace(rounds.place, stepping=True, pending=pending, replaced=replaced)
        first = self._reduce(self._buckets[0], place)
        self._settle(first.leaves)
        together = all(other.stepping for other in first.places)
        if not together or any(other.pending for other in first.places):
            self._run_rest(place)
        if not together:
            self._finish_round(place, None)
        elif any(other.replaced for other in first.places):
            self._compare()
        return together

    def _run_rest(self, place: Any) -> None:
        for reduced in ac.waitall([self._start(bucket, place) for bucket in self._buckets[1:]]):
            self._settle(reduced.leaves)
        self._gradients.forget_sums()

    def _reduce_at_once(self) -> bool:
        """Reduce all gradients now: inside `join`, or if frameworks differ between ranks."""
        try:
            complete, reduced = self._gradients.add(self._all_unreduced())
            if complete:
                self.settle_all([reduced[number] for number in range(len(self.parameters))])
        finally:
            self._forget_sent()
        self._forget_reduced()
        return bool(complete)

    def _all_unreduced(self) -> list[Any]:
        return [self._unreduced(number) for number in range(len(self.parameters))]

    def _is_pending(self) -> bool:
        """Tell whether this rank has gradients that are not reduced."""
        pairs = zip(self._slots, self.parameters, strict=True)
        return self._gradients.has_sums or any(
            p.grad is not None and not slot.is_settled(p.grad) for slot, p in pairs
        )

    def _is_replaced(self) -> bool:
        pairs = zip(self._slots, self.parameters, strict=True)
        return any(slot.is_replaced(parameter.grad) for slot, parameter in pairs)

    def _finish_step(self, *, skipped: bool = False) -> None:
        self._forget_reduced()
        self._gradients.finish_step(skipped=skipped)

    def _forget_reduced(self) -> None:
        """Take gradients that are assigned from now on for this rank's own."""
        self._touched = []
        for slot in self._slots:
            slot.reduced = False

    # Checks

    def _check_unchanged(self) -> None:
        """Raise if gradients were changed that are only accumulated: they are this rank's alone."""
        for number in self._touched:
            grad = self.parameters[number].grad
            if grad is None or grad._version != self._slots[number].version:
                raise RuntimeError(
                    "DistributedOptimizer: gradients were changed between backward() and a step() that "
                    f"only adds them up (accumulate={self._gradients.accumulate}), before they are reduced; "
                    "clip and unscale only before the last of these steps, or accumulate in "
                    "no_sync(optimizer) instead"
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

    def _compare(self) -> None:
        """Raise unless all ranks have the same gradients."""
        mine = np.array([_checksum(parameter.grad) for parameter in self.parameters], np.int64)
        rows = self._gradients.comm.allgather(mine).reshape(-1, len(mine))
        differing = (rows != rows[0]).any(axis=0)
        if differing.any():
            number = int(differing.argmax())
            ranks = [rank for rank, row in enumerate(rows) if row[number] != rows[0, number]]
            raise ac.MismatchError(
                "DistributedOptimizer: .grad was replaced after backward() had reduced it, and is not the "
                f"same on all ranks: that of parameter {number}, of shape "
                f"{tuple(self.parameters[number].shape)}, on rank {ranks[0]} is not that on rank 0; compute "
                "it from .grad and from values that are the same on all ranks"
            )


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


def _enclosing_node() -> Any:
    """Return the node of autograd inside which this backward pass runs, or None.

    A re-entrant checkpoint calls `backward()` while its own node is run.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
