"""The nonblocking form of each collective: its signature, and one line that starts the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import numpy as np

from arraycomm._arrays.typing import ArrayT, DTypeT, NewShape, ReceivedT, Rows
from arraycomm._calls.custom_ops import Op
from arraycomm._calls.requests import ProcessBound, Request
from arraycomm._calls.runner import Runner
from arraycomm._collectives.groups import Barrier
from arraycomm._collectives.movements import Allgather, Alltoall, Bcast, Gather, Scatter
from arraycomm._collectives.reductions import Allreduce, Reduce, ReduceScatter
from arraycomm._collectives.scans import Exscan, Scan
from arraycomm._collectives.uneven import Allgatherv, Alltoallv, Gatherv, Scatterv
from arraycomm._dtypes import OpName
from arraycomm._entries import entries
from arraycomm._prepared.fast_path import start


# The runner trims errors itself.
@entries(trimmed=True)
class NonblockingCalls(ProcessBound):
    """The `i…` methods of collectives: each starts that call, and returns a request."""

    _runner: Runner

    def iallreduce(
        self, x: ArrayT, op: OpName | Op = "sum", *, out: ArrayT | None = None
    ) -> Request[ArrayT]:
        """Start `allreduce`; leave `x` and `out` alone until the request is finished."""
        return start(self._runner, Allreduce, x, (op,), out)

    def ireduce(
        self, x: ArrayT, op: OpName | Op = "sum", root: int = 0, *, out: ArrayT | None = None
    ) -> Request[ArrayT | None]:
        """Start `reduce`; leave `x` and `out` alone until the request is finished."""
        return start(self._runner, Reduce, x, (op, root), out)

    def ibcast(
        self,
        x: ArrayT | None = None,
        root: int = 0,
        *,
        like: ArrayT | None = None,
        out: ArrayT | None = None,
    ) -> Request[ArrayT]:
        """Start `bcast`; leave `x` and `out` alone until the request is finished."""
        return start(self._runner, Bcast, x, (root, like), out)

    @overload
    def iallgather(self, x: Rows[DTypeT], *, out: Any = None) -> Request[NewShape[DTypeT]]: ...
    @overload
    def iallgather(self, x: ArrayT, *, out: ArrayT | None = None) -> Request[ArrayT]: ...
    def iallgather(self, x: Any, *, out: Any = None) -> Request[Any]:
        """Start `allgather`; leave `x` and `out` alone until the request is finished."""
        return start(self._runner, Allgather, x, (), out)

    @overload
    def iallgatherv(
        self, x: ArrayT, *, return_counts: Literal[False] = False, out: ArrayT | None = None
    ) -> Request[ArrayT]: ...
    @overload
    def iallgatherv(
        self, x: ArrayT, *, return_counts: Literal[True], out: ArrayT | None = None
    ) -> Request[tuple[ArrayT, list[int]]]: ...
    def iallgatherv(self, x: Any, *, return_counts: bool = False, out: Any = None) -> Request[Any]:
        """Start `allgatherv`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Allgatherv, x, return_counts, out)

    @overload
    def igather(
        self, x: Rows[DTypeT], root: int = 0, *, out: Any = None
    ) -> Request[NewShape[DTypeT] | None]: ...
    @overload
    def igather(
        self, x: ArrayT, root: int = 0, *, out: ArrayT | None = None
    ) -> Request[ArrayT | None]: ...
    def igather(self, x: Any, root: int = 0, *, out: Any = None) -> Request[Any]:
        """Start `gather`; leave `x` and `out` alone until the request is finished."""
        return start(self._runner, Gather, x, (root,), out)

    @overload
    def igatherv(
        self,
        x: ArrayT,
        root: int = 0,
        *,
        return_counts: Literal[False] = False,
        out: ArrayT | None = None,
    ) -> Request[ArrayT | None]: ...
    @overload
    def igatherv(
        self, x: ArrayT, root: int = 0, *, return_counts: Literal[True], out: ArrayT | None = None
    ) -> Request[tuple[ArrayT, list[int]] | None]: ...
    def igatherv(
        self, x: Any, root: int = 0, *, return_counts: bool = False, out: Any = None
    ) -> Request[Any]:
        """Start `gatherv`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Gatherv, x, root, return_counts, out)

    @overload
    def iscatter(
        self,
        x: np.ndarray[Any, DTypeT] | None = None,
        root: int = 0,
        *,
        like: None = None,
        out: None = None,
    ) -> Request[NewShape[DTypeT]]: ...
    @overload
    def iscatter(
        self,
        x: ReceivedT | None = None,
        root: int = 0,
        *,
        like: ReceivedT | None = None,
        out: ReceivedT | None = None,
    ) -> Request[ReceivedT]: ...
    def iscatter(
        self, x: Any = None, root: int = 0, *, like: Any = None, out: Any = None
    ) -> Request[Any]:
        """Start `scatter`; leave `x` and `out` alone until the request is finished."""
        return start(self._runner, Scatter, x, (root, like), out)

    def iscatterv(
        self,
        x: ReceivedT | None = None,
        counts: Sequence[int] | None = None,
        root: int = 0,
        *,
        like: ReceivedT | None = None,
        out: ReceivedT | None = None,
    ) -> Request[ReceivedT]:
        """Start `scatterv`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Scatterv, x, counts, root, like, out)

    @overload
    def ireduce_scatter(
        self,
        x: np.ndarray[Any, DTypeT],
        op: OpName | Op = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: None = None,
    ) -> Request[NewShape[DTypeT]]: ...
    @overload
    def ireduce_scatter(
        self,
        x: ArrayT,
        op: OpName | Op = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: ArrayT | None = None,
    ) -> Request[ArrayT]: ...
    def ireduce_scatter(
        self,
        x: Any,
        op: OpName | Op = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: Any = None,
    ) -> Request[Any]:
        """Start `reduce_scatter`; leave `x` and `out` alone until the request is finished."""
        return start(self._runner, ReduceScatter, x, (op, counts), out)

    def ialltoall(self, x: ArrayT, *, out: ArrayT | None = None) -> Request[ArrayT]:
        """Start `alltoall`; leave `x` and `out` alone until the request is finished."""
        return start(self._runner, Alltoall, x, (), out)

    @overload
    def ialltoallv(
        self,
        x: ArrayT,
        counts: Sequence[int],
        *,
        return_counts: Literal[False] = False,
        out: ArrayT | None = None,
    ) -> Request[ArrayT]: ...
    @overload
    def ialltoallv(
        self,
        x: ArrayT,
        counts: Sequence[int],
        *,
        return_counts: Literal[True],
        out: ArrayT | None = None,
    ) -> Request[tuple[ArrayT, list[int]]]: ...
    def ialltoallv(
        self, x: Any, counts: Sequence[int], *, return_counts: bool = False, out: Any = None
    ) -> Request[Any]:
        """Start `alltoallv`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Alltoallv, x, counts, return_counts, out)

    def iscan(
        self, x: ArrayT, op: OpName | Op = "sum", *, out: ArrayT | None = None
    ) -> Request[ArrayT]:
        """Start `scan`; leave `x` and `out` alone until the request is finished."""
        return start(self._runner, Scan, x, (op,), out)

    def iexscan(
        self, x: ArrayT, op: OpName | Op = "sum", *, out: ArrayT | None = None
    ) -> Request[ArrayT | None]:
        """Start `exscan`; leave `x` and `out` alone until the request is finished."""
        return start(self._runner, Exscan, x, (op,), out)

    def ibarrier(self) -> Request[None]:
        """Start `barrier`."""
        return start(self._runner, Barrier)
