"""`RankFilter`: records of Python's `logging` that say which rank they are of."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from arraycomm._calls.arguments import check_several
from arraycomm._communicator import Communicator
from arraycomm._entries import entries
from arraycomm._session import is_initialized, world


@entries()
class RankFilter(logging.Filter):
    """Filter of `logging`: adds `rank` and `size` to records, and may pass those of some ranks.

    Add it to a handler, or to a logger. Local: it never communicates.

    Parameters
    ----------
    ranks : int or iterable of int, optional
        The ranks whose records pass; all by default. Ranks that there are not pass nothing.
    comm : Communicator, optional
        Whose ranks count; `world()` by default. Before `init` a process is rank 0 of 1.

    Raises
    ------
    TypeError
        `ranks` is something else.

    Examples
    --------
    >>> import logging
    >>> import arraycomm as ac
    >>> handler = logging.StreamHandler()
    >>> handler.addFilter(ac.RankFilter())
    >>> handler.setFormatter(logging.Formatter("[%(rank)d/%(size)d] %(message)s"))
    """

    def __init__(
        self, ranks: int | Iterable[int] | None = None, comm: Communicator | None = None
    ) -> None:
        super().__init__()
        wanted = "RankFilter: ranks must be a rank or several"
        self._comm, self._ranks = comm, None if ranks is None else check_several(ranks, wanted)

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the rank to a record; return whether the record passes."""
        comm = self._comm or (world() if is_initialized() else None)
        rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
        vars(record).update(rank=rank, size=size)
        return self._ranks is None or rank in self._ranks
