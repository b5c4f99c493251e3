"""A chain of nodes: what one node's ranks send goes on to the next node, in the order of ranks."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np

from arraycomm._dtypes import DType
from arraycomm._folds import fold_on
from arraycomm._transports.control import SharedControl
from arraycomm._transports.repeated import Handle

Bytes = np.ndarray[Any, Any]


def is_chain(members: Sequence[Sequence[int]]) -> bool:
    """Return whether there are several nodes, of several ranks each, with ranks in order."""
    in_order = [rank for ranks in members for rank in ranks]
    several = len(members) > 1 and min(map(len, members)) > 1
    return several and in_order == sorted(in_order)


class NodeChain(abc.ABC):
    """One rank's place in the chain of nodes with these `members`, for which `is_chain` holds.

    The steps of `control` are those of the ranks of this node alone.
    """

    def __init__(self, rank: int, members: Sequence[Sequence[int]], control: SharedControl) -> None:
        self.control, self._members, place = control, members, control.rank
        # The number of this rank's node, and how many nodes there are.
        self.node = next(node for node, ranks in enumerate(members) if rank in ranks)
        self.nodes = len(members)
        # The ranks of the smallest node, and of the largest.
        self.lanes, self.most = min(map(len, members)), max(map(len, members))
        self.first = members[self.node][0]
        # Whether this rank exchanges messages: the smallest node has a counterpart of it.
        self.carries = place < self.lanes
        # With whom on the neighbouring nodes it exchanges totals and results; -1 if there is none.
        self.before, self.after = self._peer(self.node - 1), self._peer(self.node + 1)

    def _peer(self, node: int) -> int:
        """Return the rank of a node that exchanges messages with this one; -1 if there is none."""
        there = self.carries and 0 <= node < self.nodes
        return self._members[node][self.control.rank] if there else -1

    @abc.abstractmethod
    def send(self, buffer: Bytes, peer: int) -> Handle:
        """Send bytes to a neighbour; several messages to one arrive in their order."""

    @abc.abstractmethod
    def recv(self, buffer: Bytes, peer: int) -> Handle:
        """Receive what a neighbour sends."""

    def fold_on(
        self, op: str, dtype: DType, total: Bytes | None, rows: Sequence[Bytes], out: Bytes
    ) -> None:
        """Fold this node's rows onto the total before it; on the last, `out` gets the result."""
        fold_on(op, dtype, total, self.first, rows, out, more=self.node + 1 < self.nodes)
