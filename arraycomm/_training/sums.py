"""Sums of an optimizer's gradients over the steps that it accumulates before it reduces them."""

from __future__ import annotations

from copy import copy
from typing import Any, Self

from arraycomm._errors import naming
from arraycomm._training.arithmetic import Operand, added, divided, operand_of, restored, widened
from arraycomm._training.rounds import Leaves
from arraycomm._trees.leaves import check_leaf
from arraycomm._trees.pytrees import flatten
from arraycomm._trees.reduce import AllreduceGradients


class Sums:
    """The sums of one optimizer's gradients over the steps so far, one for each leaf."""

    def __init__(self, accumulate: int) -> None:
        self._accumulate, self._steps = accumulate, 0
        self._sums: list[Sum | None] = []
        # Whether the last of the accumulated steps has reduced them already.
        self.has_reduced = False

    @property
    def keeps(self) -> bool:
        """Whether the gradients of this step are only added to those of the steps before."""
        return not self.has_reduced and self._steps + 1 < self._accumulate

    def __bool__(self) -> bool:
        """Return whether gradients of the steps before wait for their reduction."""
        return any(total is not None for total in self._sums)

    def keep(self, tree: Any) -> None:
        """Add the gradients of a step to those of the steps before."""
        with naming(AllreduceGradients.name):
            self._sums = self._added(tree)
        self._steps += 1

    def mean_of(self, leaves: Leaves) -> Leaves:
        """Return the mean of the steps' gradients, of the parameters of these numbers."""
        if self._accumulate == 1:
            return leaves
        return {number: self._mean(number, leaf) for number, leaf in leaves.items()}

    def _mean(self, number: int, leaf: Any) -> Any:
        total = self._sums[number] if self._sums else None
        if leaf is not None:
            total = _plus(total, leaf, f"[{number}]")
        return None if total is None else total.mean(self._accumulate)

    def mean_with(self, tree: Any) -> Any:
        """Return the mean of the steps' gradients, those of a last step among them."""
        if self._accumulate == 1:
            return tree
        sums = self._added(tree)
        return flatten(tree).rebuild(
            [None if total is None else total.mean(self._accumulate) for total in sums]
        )

    def _added(self, tree: Any) -> list[Sum | None]:
        """Return this rank's sums with another step's gradients; the old sums stay as they are."""
        flat = flatten(tree)
        sums = self._sums or [None] * len(flat.leaves)
        if len(sums) != len(flat.leaves):
            raise ValueError(
                "gradients that are accumulated must have the same structure in every "
                f"step; got {len(flat.leaves)} leaves after {len(sums)}"
            )
        return [
            total if leaf is None else _plus(total, leaf, path)
            for total, leaf, path in zip(sums, flat.leaves, flat.paths, strict=True)
        ]

    def forget(self) -> None:
        """Note that they have been reduced."""
        self._sums, self.has_reduced = [], True

    def finish_step(self) -> None:
        """Go on to the next step."""
        if self.has_reduced:
            self._steps, self.has_reduced = 0, False

    def renumber(self, numbers: dict[int, int], count: int) -> None:
        """Give the sums their parameters' new numbers; drop the others'."""
        if self._sums:
            before, self._sums = self._sums, [None] * count
            for old, new in numbers.items():
                self._sums[new] = before[old]

    def copy(self) -> Self:
        """Return those of a copy of the optimizer."""
        made = copy(self)
        made._sums = list(self._sums)
        return made


class Sum:
    """The sum of one leaf's gradients, in the precision in which gradients are reduced."""

    def __init__(self, array: Any, last: Operand) -> None:
        self.array = array
        # Without the gradients themselves, so that their memory can be freed.
        self.last = last._replace(array=None)

    def mean(self, steps: int) -> Any:
        """Return the mean over this many steps, as an array like the gradients."""
        return restored(divided(self.array, self.last, steps), self.last)


def _plus(total: Sum | None, leaf: Any, path: str) -> Sum:
    gradient = operand_of(leaf, path)
    check_leaf(gradient.dtype, "mean", path)
    if total is None:
        # A copy, since the caller may use the same memory in the next step.
        return Sum(widened(gradient), gradient)
    got, before = tuple(gradient.array.shape), tuple(total.array.shape)
    if (got, gradient.dtype) != (before, total.last.dtype):
        raise ValueError(
            f"{path} must have the same shape and dtype in every step that is accumulated; "
            f"got {gradient.dtype} {got} after {total.last.dtype} {before}"
        )
    return Sum(added(total.array, gradient), gradient)
