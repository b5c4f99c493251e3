"""The nonblocking form of each call: its signature, and one line that starts the call."""

from __future__ import annotations

from typing import Any

from arraycomm._calls.custom_ops import Op
from arraycomm._calls.requests import ProcessBound, Request
from arraycomm._calls.runner import Runner
from arraycomm._collectives.groups import Barrier
from arraycomm._collectives.movements import Allgather, Alltoall, Bcast, Gather, Scatter
from arraycomm._collectives.reductions import Allreduce, Reduce, ReduceScatter
from arraycomm._collectives.scans import Exscan, Scan
from arraycomm._collectives.uneven import Allgatherv, Alltoallv, Gatherv, Scatterv
from arraycomm._entries import entries, entry
from arraycomm._messages.matching import Status, Wildcard
from arraycomm._messages.messages import Messenger


# The runner trims errors itself.
@entries(trimmed=True)
class NonblockingCalls(ProcessBound):
    """The `i…` methods of a communicator: each starts that call, and returns a request."""

    _runner: Runner
    _messenger: Messenger

    def iallreduce(self, x: Any, op: str | Op = "sum", *, out: Any = None) -> Request:
        """Start `allreduce`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Allreduce, x, op, out)

    def ireduce(self, x: Any, op: str | Op = "sum", root: int = 0, *, out: Any = None) -> Request:
        """Start `reduce`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Reduce, x, op, root, out)

    def ibcast(self, x: Any = None, root: int = 0, *, like: Any = None, out: Any = None) -> Request:
        """Start `bcast`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Bcast, x, root, like, out)

    def iallgather(self, x: Any, *, out: Any = None) -> Request:
        """Start `allgather`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Allgather, x, out)

    def iallgatherv(self, x: Any, *, return_counts: bool = False, out: Any = None) -> Request:
        """Start `allgatherv`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Allgatherv, x, return_counts, out)

    def igather(self, x: Any, root: int = 0, *, out: Any = None) -> Request:
        """Start `gather`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Gather, x, root, out)

    def igatherv(
        self, x: Any, root: int = 0, *, return_counts: bool = False, out: Any = None
    ) -> Request:
        """Start `gatherv`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Gatherv, x, root, return_counts, out)

    def iscatter(
        self, x: Any = None, root: int = 0, *, like: Any = None, out: Any = None
    ) -> Request:
        """Start `scatter`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Scatter, x, root, like, out)

    def iscatterv(
        self, x: Any = None, counts: Any = None, root: int = 0, *, like: Any = None, out: Any = None
    ) -> Request:
        """Start `scatterv`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Scatterv, x, counts, root, like, out)

    def ireduce_scatter(
        self, x: Any, op: str | Op = "sum", *, counts: Any = None, out: Any = None
    ) -> Request:
        """Start `reduce_scatter`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(ReduceScatter, x, op, counts, out)

    def ialltoall(self, x: Any, *, out: Any = None) -> Request:
        """Start `alltoall`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Alltoall, x, out)

    def ialltoallv(
        self, x: Any, counts: Any, *, return_counts: bool = False, out: Any = None
    ) -> Request:
        """Start `alltoallv`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Alltoallv, x, counts, return_counts, out)

    def iscan(self, x: Any, op: str | Op = "sum", *, out: Any = None) -> Request:
        """Start `scan`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Scan, x, op, out)

    def iexscan(self, x: Any, op: str | Op = "sum", *, out: Any = None) -> Request:
        """Start `exscan`; leave `x` and `out` alone until the request is finished."""
        return self._runner.start(Exscan, x, op, out)

    def ibarrier(self) -> Request:
        """Start `barrier`."""
        return self._runner.start(Barrier)

    @entry
    def isend(self, x: Any, dest: int, tag: int = 0) -> Request:
        """Start `send`; leave `x` alone until the request is finished."""
        return self._messenger.isend(x, dest, tag)

    @entry
    def irecv(
        self,
        source: int | Wildcard,
        tag: int | Wildcard = 0,
        *,
        like: Any = None,
        out: Any = None,
        status: Status | None = None,
    ) -> Request:
        """Start `recv`; leave `out` alone until the request is finished, which fills `status`."""
        return self._messenger.irecv(source, tag, like, out, status)
