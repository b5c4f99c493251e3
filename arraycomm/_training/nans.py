"""`raise_on_nan`: which rank has a NaN, and where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView
from arraycomm._calls.operation import Context, Operation
from arraycomm._communicator import Communicator, runner_of
from arraycomm._dtypes import Kind, kind_of
from arraycomm._protocol.agreement import Agreement, UndeliveredError
from arraycomm._protocol.details import Detail, exchange_details
from arraycomm._protocol.header import Signature
from arraycomm._session import world
from arraycomm._transports.base import Steps
from arraycomm._trees.leaves import Leaves
from arraycomm._trees.pytrees import flatten

_INEXACT: Final = (Kind.NARROW, Kind.FLOAT, Kind.COMPLEX)


def raise_on_nan(tree: Any, *, infinite: bool = False, comm: Communicator | None = None) -> Any:
    """Raise on every rank if an array of some rank has a NaN; collective.

    For debugging: a reduction spreads a NaN to all ranks, and this says where it came from.

    Parameters
    ----------
    tree : array, number, or pytree of these
        What is to be looked at, for example gradients before they are reduced. Ranks may pass
        different trees. Leaves that are None, and dtypes without NaN, are passed over.
    infinite : bool
        Whether infinities count as well: their difference is a NaN. The same on every rank.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    pytree
        `tree` itself.

    Raises
    ------
    FloatingPointError
        On every rank: the ranks with a NaN, and for each the path and the index of its first one.
        The communicator can still be used.
    TypeError
        A leaf is no array of this rank; the message names its path.

    Notes
    -----
    One small exchange; every rank reads its arrays once. Those on a device are copied to the host.

    Examples
    --------
    >>> gradients = ac.allreduce_gradients(ac.raise_on_nan(gradients))
    """
    return runner_of(comm or world()).call(RaiseOnNan, tree, infinite)


@dataclass(frozen=True, slots=True)
class FoundNan(Detail):
    """The first NaN of a rank, in words; empty if it has none."""

    text: str


class RaiseOnNan(Operation):
    """See `raise_on_nan`."""

    name, code = "raise_on_nan", 60

    def __init__(self, context: Context, tree: Any, infinite: bool) -> None:
        super().__init__(context)
        if not isinstance(infinite, bool):
            raise TypeError(f"infinite must be True or False; got {infinite!r}")
        self._tree = tree
        self._leaves = Leaves(flatten(tree), context.host_tree.view)
        self._found = next(self._search(infinite), "")
        self.signature = Signature(self.name, "infinite" if infinite else None)
        self.word = int(bool(self._found))

    def _search(self, infinite: bool) -> Iterator[str]:
        for path, leaf in zip(self._leaves.paths, self._leaves.views, strict=True):
            if leaf is not None and kind_of(leaf.dtype) in _INEXACT:
                wrong = ~np.isfinite(leaf.array) if infinite else np.isnan(leaf.array)
                if wrong.any():
                    yield _where(path, leaf, wrong)

    def steps(self, agreement: Agreement) -> Steps:
        if not any(agreement.lengths()):
            return
        details = yield from exchange_details(self.group.control, FoundNan(self._found))
        found = [f"rank {rank}: {each.text}" for rank, each in enumerate(details) if each.text]
        raise UndeliveredError(FloatingPointError(f"{self.name}: {'; '.join(found)}"))

    def result(self, agreement: Agreement) -> Any:
        return self._tree


def _where(path: str, leaf: BufferView, wrong: Array) -> str:
    index = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
    value = leaf.array[index]
    place = f"{path}[{', '.join(map(str, index))}]" if index else path
    return f"{value} at {place}, {int(wrong.sum())} of {wrong.size} elements"
