"""Virtual ranks: fewer ranks train as more would, in rounds, with the same bits.

Rank r of p plays the virtual ranks r, r + p, r + 2p, … one after another. Round t adds the
gradients of virtual ranks tp to tp + p - 1, in rank order, to the total of the rounds before. So
the total is ((g0 + g1) + g2) + … for every p. It stays in the dtype of sums, and is divided by the
number of virtual ranks, and rounded, once, after the last round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Self

import numpy as np

from arraycomm._arrays.buffer import Array, allocate
from arraycomm._errors import MismatchError
from arraycomm._folds import fold_on
from arraycomm._trees.leaves import Onto, Total, identity
from arraycomm._trees.pytrees import Flat


class VirtualRanks:
    """The virtual ranks of one optimizer, the round that it is in, and the totals of gradients."""

    def __init__(self, count: int, op: str, rank: int, size: int) -> None:
        self.count, self.rounds = count, -(-count // size)
        self._op, self._rank, self._size = op, rank, size
        # The round under way, and whether its gradients are in the totals.
        self.round, self.is_complete = 0, False
        # Whether any has had a backward pass in the step.
        self._worked = False
        # Of the rounds before, and of this one with them, by the numbers of the leaves.
        self._totals: dict[int, Total] = {}
        self._new: dict[int, Total] = {}
        # How the tree of the first round says what its containers and paths are.
        self._tree: Any = None

    @property
    def is_last(self) -> bool:
        """Whether the optimizer takes its step in the round under way."""
        return self.round == self.rounds - 1

    def plays(self, number: int) -> bool:
        """Return whether this rank plays a virtual rank in a round."""
        return self._rank + number * self._size < self.count

    def onto(self, numbers: Sequence[int]) -> Onto:
        """Return what the leaves of these numbers are added to in the round under way."""
        totals = [self._totals.get(number) for number in numbers] if self.round else None
        return Onto(totals, counts=self.plays(self.round))

    def check_tree(self, tree: Flat) -> None:
        """Raise unless a tree is as that of the first round, as ranks would compare theirs."""
        found = tree.structure, tuple(tree.paths)
        if not self.round:
            self._tree = found
        if found != self._tree:
            raise MismatchError(
                "DistributedOptimizer: the gradients of all virtual ranks must be trees of one "
                f"structure; got {', '.join(found[1])} after {', '.join(self._tree[1])}"
            )

    def note(self, made: Mapping[int, Total | None]) -> None:
        """Note new totals, None for a leaf that no rank has."""
        self._new |= {number: total for number, total in made.items() if total is not None}

    def has(self, number: int) -> bool:
        """Return whether a virtual rank has had a gradient of this leaf in this step."""
        return number in self._new

    def complete(self) -> dict[int, Array]:
        """End the sums of a round; return what the optimizer gets, nothing before the last.

        A leaf that no rank has had in it counts as zeros.
        """
        numbers = sorted(self._totals.keys() - self._new.keys())
        zeros = self.onto(numbers).completed([None] * len(numbers))
        self.note(dict(zip(numbers, zeros, strict=True)))
        self.is_complete = True
        if not self.is_last:
            return {}
        return {number: self.finished(total) for number, total in self._new.items()}

    def check_shown(self, worked: Sequence[int]) -> int | None:
        """Return, in the last round, the rank that plays the last virtual rank.

        It has the gradients that the optimizer applies, after whatever the program does with them.
        On one rank no other virtual rank sees them. `worked` are the ranks that had a backward pass
        in the round; without one the program has not seen them either.
        """
        self._worked |= any(self.round * self._size + rank < self.count for rank in worked)
        if not self.is_last:
            return None
        root = (self.count - 1) % self._size
        if self._worked and root not in worked:
            raise RuntimeError(
                f"DistributedOptimizer: virtual rank {self.count - 1}, the last one, had no "
                "backward pass in a step in which others had one, so the program has not seen, and "
                "could not clip, the gradients of all; differentiate 0 * loss where it has nothing"
            )
        return root

    def finished(self, total: Total) -> Array:
        """Return a total of all virtual ranks, divided if it is a mean, in the leaf's own dtype."""
        dtype = total.dtype or total.array.dtype
        made = allocate(total.array.shape, dtype)
        before = np.ascontiguousarray(total.array).reshape(-1)
        # A fold ends with a row; this one changes nothing.
        row = identity(before.shape, dtype)
        fold_on(self._op, dtype, before, self.count - 1, [row], made.reshape(-1), more=False)
        return made

    def next_round(self) -> None:
        """Go on to the next round, maybe that of another step."""
        if not self.is_complete:
            self.complete()
        self._totals = {} if self.is_last else self._new
        self._worked = self._worked and not self.is_last
        self._new, self.is_complete = {}, False
        self.round = (self.round + 1) % self.rounds

    def check_between_steps(self, what: str) -> None:
        """Raise in the middle of rounds, where what ranks have done depends on their number."""
        if self.round or self.is_complete:
            raise RuntimeError(
                f"{what}: {self.round + self.is_complete} of {self.rounds} rounds of virtual ranks "
                "are done, which is a place that another number of ranks does not have; save and "
                "load after the last round, where completes_step of the data container is True"
            )

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Give the totals of leaves their new numbers; drop the others'."""
        for name in ("_totals", "_new"):
            before: dict[int, Any] = getattr(self, name)
            setattr(self, name, {new: before[old] for old, new in numbers.items() if old in before})

    def copy(self) -> Self:
        """Return those of a copy of the optimizer, in the same round."""
        made = copy(self)
        made._totals, made._new = dict(self._totals), dict(self._new)
        return made
