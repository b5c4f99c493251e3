"""`arraycomm.op`: reductions by a user's function, in the framework of the caller's array."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView, allocate
from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import view
from arraycomm._calls.attempts import attempt_together
from arraycomm._checks import check_bool
from arraycomm._entries import entry
from arraycomm._protocol.group import Group
from arraycomm._transports.base import Steps


@dataclass(frozen=True)
class Op:
    """A reduction of the user's own; made by `op`."""

    fn: Callable[[Any, Any], Any]
    elementwise: bool = False

    @property
    def name(self) -> str:
        """What the ranks compare: they cannot compare functions."""
        return f"op({_name_of(self.fn)}{', elementwise=True' if self.elementwise else ''})"


def _name_of(fn: Any) -> str:
    """Name a function, or the type of an object that can be called: the same in every process."""
    if isinstance(fn, partial):
        return f"partial of {_name_of(fn.func)}"
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None)
    if name is None:
        fn, name = type(fn), type(fn).__qualname__
    return f"{getattr(fn, '__module__', None) or ''}.{name}"


@entry
def op(fn: Callable[[Any, Any], Any], *, elementwise: bool = False) -> Op:
    """Make a reduction of a function of two arrays, for `op=` of any reducing collective.

    Parameters
    ----------
    fn : callable
        `fn(a, b)` gets two arrays of one shape and dtype, in the caller's framework, and returns
        one of that shape and dtype. It need not be commutative: the fold is
        fn(fn(x0, x1), x2) and so on, in rank order. It need not be associative.
    elementwise : bool
        Whether element i of the result depends on the elements i alone. Then large arrays are
        sliced over the ranks, and `fn` gets one-dimensional slices; otherwise one rank folds.

    Returns
    -------
    Op
        Every rank passes one made from a function of the same module and name.

    Raises
    ------
    TypeError
        `fn` cannot be called; in the collective: `fn` returned another shape or dtype. What `fn`
        raises is raised on the rank that called it, and `PeerError` on the others, which then are
        still in step.

    Examples
    --------
    >>> import numpy as np
    >>> import arraycomm as ac
    >>> from arraycomm.testing import run
    >>> matmul = ac.op(np.matmul)
    >>> run(3, lambda comm: comm.allreduce(np.eye(2) * (comm.rank + 1), matmul)[0, 0])
    [6.0, 6.0, 6.0]
    """
    if not callable(fn):
        raise TypeError(f"op: fn must be a function of two arrays; got {fn!r}")
    return Op(fn, check_bool(elementwise, "op: elementwise"))


class Folding:
    """One rank's part in one reduction by a function: the fold, in the framework of its array."""

    def __init__(self, group: Group, operation: str, made: Op, source: BufferView) -> None:
        self._group, self._operation, self._op = group, operation, made
        self._like, self._dtype = source, source.dtype

    def prefixes(self, rows: Sequence[Array], shape: tuple[int, ...]) -> Iterator[Array]:
        """Yield the fold of the first row, of the first two, and so on, as flat arrays."""
        total = self._array(rows[0], shape)
        yield rows[0]
        for row in rows[1:]:
            total = self._op.fn(total, self._array(row, shape))
            yield self._checked(total, shape).reshape(-1)

    def fold(self, rows: Sequence[Array], shape: tuple[int, ...], target: Array) -> None:
        """Fold the rows into `target`."""
        *_, last = self.prefixes(rows, shape)
        target[...] = last

    def _array(self, row: Array, shape: tuple[int, ...]) -> Any:
        memory = allocate(shape, self._dtype)
        memory[...] = row.reshape(shape)
        return to_framework(memory, self._like)

    def _checked(self, result: Any, shape: tuple[int, ...]) -> Array:
        try:
            found = view(result)
        except TypeError as error:
            raise TypeError(f"{self._op.name} returned no array: {error}") from error
        if found.shape != shape or found.dtype != self._dtype:
            raise TypeError(
                f"{self._op.name} must return shape {shape} and dtype {self._dtype}, as it was "
                f"given; got shape {found.shape} and dtype {found.dtype}"
            )
        return np.ascontiguousarray(found.array)

    def together(self, attempt: Callable[[], Any] | None) -> Steps:
        """Do what only some ranks do, and return its result; raise on all if it fails on one."""
        return (yield from attempt_together(self._group, self._operation, attempt))
