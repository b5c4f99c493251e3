"""Whether gradients of torch parameters are what the ranks take them for, and the errors if not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import arraycomm as ac
from arraycomm._training.comparison.digests import digest_of
from arraycomm.adapters.torch._backward import scaler_of_step
from arraycomm.adapters.torch._parameters import UNSEEN, Parameters
from arraycomm.adapters.torch._slots import UNREDUCED, State, writes_to


def check_unchanged(parameters: Parameters, why: str) -> None:
    """Raise if gradients were changed before they are reduced: they are this rank's alone."""
    # Torch does not count what a scaler writes.
    changed = scaler_of_step() is not None
    for number in parameters.touched:
        grad = parameters.tensors[number].grad
        changed = changed or grad is None or writes_to(grad) != parameters.slots[number].version
    if changed:
        parameters.gradients.fail(
            RuntimeError(
                "DistributedOptimizer: gradients were changed between backward() and step(), but "
                f"they are reduced later here, in step() ({why}); with accumulate, clip and "
                "unscale only before the last of the steps, or accumulate in no_sync(optimizer) "
                "instead"
            )
        )


def check_left(parameters: Parameters) -> None:
    """Raise if a gradient was changed that is reduced in the step: it is this rank's alone."""
    for tensor, slot in zip(parameters.tensors, parameters.slots, strict=True):
        if slot.whole is not None:
            slot.take_apart(tensor)
    gradients = parameters.gradients
    virtual, size = gradients.virtual, gradients.comm.size
    of_others = (size if virtual is None else virtual.count) > 1
    for number, why in parameters.left.items() if of_others else ():
        slot, grad = parameters.slots[number], parameters.tensors[number].grad
        if grad is None or slot.state(grad) not in UNREDUCED:
            continue
        # Torch does not count what a scaler writes, nor all of its own writes.
        written = why == UNSEEN or writes_to(grad) != slot.version
        if (written or scaler_of_step() is not None) and not slot.was_zeroed(grad):
            gradients.fail(
                RuntimeError(
                    f"DistributedOptimizer: the gradient of parameter {number} was not reduced by "
                    f"backward(), and may have been clipped or scaled as this rank's alone: {why}"
                )
            )


def check_owners(parameters: Parameters) -> None:
    """Raise if an optimizer made later reduces some of the gradients in another way."""
    for other in parameters.others():
        if other.gradients.settings != parameters.gradients.settings:
            raise ValueError(
                "DistributedOptimizer: a parameter of this optimizer is also in a distributed "
                "optimizer that was made later with another op, accumulate or compression, which "
                "reduces its gradient; pass the same arguments to both"
            )


def judge_stale(parameters: Parameters) -> bool:
    """Find the gradients of an earlier step that all ranks still have; return whether all are."""
    pairs = list(zip(parameters.slots, parameters.grads, strict=True))
    stale = [slot.state(grad) is State.STALE for slot, grad in pairs]
    mine = [grad if each else None for each, (_, grad) in zip(stale, pairs, strict=True)]
    rows = _checksums(parameters, mine)
    same = (rows == rows[0]).all(axis=0)
    for number, (slot, _) in enumerate(pairs):
        if stale[number]:
            slot.reduced = bool(same[number])
            # Else it has been written by hand.
            slot.result = slot.result if slot.reduced else None
    return bool(same.all())


def compare(parameters: Parameters) -> None:
    """Raise unless all ranks have the same gradients."""
    rows = _checksums(parameters, parameters.grads)
    differing = (rows != rows[0]).any(axis=0)
    if differing.any():
        number = int(differing.argmax())
        ranks = [rank for rank, row in enumerate(rows) if row[number] != rows[0, number]]
        why = parameters.left.get(number)
        raise ac.MismatchError(
            "DistributedOptimizer: .grad was changed after backward() had reduced it, and is not "
            f"the same on all ranks: that of parameter {number}, of shape "
            f"{tuple(parameters.tensors[number].shape)}, on rank {ranks[0]} is not that on rank 0; "
            f"{why or 'compute it from .grad and from values that are the same on all ranks'}"
        )


def digest(grads: Sequence[torch.Tensor | None]) -> int:
    """Return one number for gradients."""
    return digest_of(_own_checksums(grads))


def _checksums(parameters: Parameters, grads: Sequence[torch.Tensor | None]) -> Any:
    """Return the checksums of all ranks' gradients, a row for each rank."""
    mine = _own_checksums(grads)
    return parameters.gradients.comm.allgather(mine).reshape(-1, len(mine))


def _own_checksums(grads: Sequence[torch.Tensor | None]) -> Any:
    return np.array([-1 if grad is None else digest_of(grad) for grad in grads], np.int64)
