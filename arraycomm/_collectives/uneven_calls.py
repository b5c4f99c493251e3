"""The collectives of rows whose number may differ between ranks: signatures and docstrings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from arraycomm._arrays.typing import ArrayT, ReceivedT
from arraycomm._calls.requests import ProcessBound
from arraycomm._calls.runner import Runner
from arraycomm._collectives.uneven import Allgatherv, Alltoallv, Gatherv, Scatterv
from arraycomm._entries import entries


# The runner trims errors itself.
@entries(trimmed=True)
class UnevenCalls(ProcessBound):
    """The calls of a communicator that join or share out rows."""

    _runner: Runner

    @overload
    def allgatherv(
        self,
        x: ArrayT,
        *,
        return_counts: Literal[False] = False,
        out: ArrayT | None = None,
        timeout: float | None = None,
    ) -> ArrayT: ...
    @overload
    def allgatherv(
        self,
        x: ArrayT,
        *,
        return_counts: Literal[True],
        out: ArrayT | None = None,
        timeout: float | None = None,
    ) -> tuple[ArrayT, list[int]]: ...
    def allgatherv(
        self, x: Any, *, return_counts: bool = False, out: Any = None, timeout: float | None = None
    ) -> Any:
        """Join all ranks' arrays along axis 0, whose length may differ; every rank gets the result.

        Parameters
        ----------
        x : array, shape (n, *S)
            This rank's rows; `n` may differ between ranks and be 0, S and dtype may not.
        return_counts : bool
            Whether to return the ranks' row counts as well.
        out : array, shape (sum of n, *S), optional
            Where the result goes.

        Returns
        -------
        array, shape (sum of n, *S), or (array, list of int)
            The rows of rank 0, then those of rank 1, and so on.
        """
        return self._runner.call_within(timeout, Allgatherv, x, return_counts, out)

    @overload
    def gatherv(
        self,
        x: ArrayT,
        root: int = 0,
        *,
        return_counts: Literal[False] = False,
        out: ArrayT | None = None,
        timeout: float | None = None,
    ) -> ArrayT | None: ...
    @overload
    def gatherv(
        self,
        x: ArrayT,
        root: int = 0,
        *,
        return_counts: Literal[True],
        out: ArrayT | None = None,
        timeout: float | None = None,
    ) -> tuple[ArrayT, list[int]] | None: ...
    def gatherv(
        self,
        x: Any,
        root: int = 0,
        *,
        return_counts: bool = False,
        out: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Join all ranks' arrays along axis 0, whose length may differ, on `root`.

        Parameters
        ----------
        x : array, shape (n, *S)
            This rank's rows; `n` may differ between ranks and be 0, S and dtype may not.
        root : int
            The rank that gets the result.
        return_counts : bool
            Whether `root` gets the ranks' row counts as well.
        out : array, shape (sum of n, *S), optional
            Where the result goes, on `root`.

        Returns
        -------
        array, shape (sum of n, *S), or (array, list of int), or None
            The rows of rank 0, then those of rank 1, and so on; None on the other ranks.
        """
        return self._runner.call_within(timeout, Gatherv, x, root, return_counts, out)

    def scatterv(
        self,
        x: ReceivedT | None = None,
        counts: Sequence[int] | None = None,
        root: int = 0,
        *,
        like: ReceivedT | None = None,
        out: ReceivedT | None = None,
        timeout: float | None = None,
    ) -> ReceivedT:
        """Give each rank its share of the rows of the array of `root`.

        Parameters
        ----------
        x : array, shape (n, *S), or None
            On `root` the array to share out; ignored on the other ranks.
        counts : sequence of int, or None
            On `root` how many rows each rank gets, n in all; ignored on the other ranks.
        root : int
            The rank that sends.
        like : array, optional
            On the other ranks: an array of the framework and device wanted. NumPy otherwise.
        out : array, shape (counts[rank], *S), optional
            Where this rank's rows go.

        Returns
        -------
        array, shape (counts[rank], *S)
            The first counts[0] rows on rank 0, the next counts[1] on rank 1, and so on.
        """
        return self._runner.call_within(timeout, Scatterv, x, counts, root, like, out)

    @overload
    def alltoallv(
        self,
        x: ArrayT,
        counts: Sequence[int],
        *,
        return_counts: Literal[False] = False,
        out: ArrayT | None = None,
        timeout: float | None = None,
    ) -> ArrayT: ...
    @overload
    def alltoallv(
        self,
        x: ArrayT,
        counts: Sequence[int],
        *,
        return_counts: Literal[True],
        out: ArrayT | None = None,
        timeout: float | None = None,
    ) -> tuple[ArrayT, list[int]]: ...
    def alltoallv(
        self,
        x: Any,
        counts: Sequence[int],
        *,
        return_counts: bool = False,
        out: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Send each rank its share of the rows, and get a share of everyone's.

        Parameters
        ----------
        x : array, shape (n, *S)
            The rows for rank 0, then those for rank 1, and so on; n may differ between ranks.
        counts : sequence of int
            How many rows go to each rank, n in all.
        return_counts : bool
            Whether to return as well how many rows came from each rank.
        out : array, shape (m, *S), optional
            Where the result goes; m is what all ranks send to this one.

        Returns
        -------
        array, shape (m, *S), or (array, list of int)
            The rows from rank 0, then those from rank 1, and so on.
        """
        return self._runner.call_within(timeout, Alltoallv, x, counts, return_counts, out)
