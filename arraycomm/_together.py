"""An exception on some ranks becomes one on all of them."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from arraycomm._collectives.operation import agreement_only
from arraycomm._session import world

if TYPE_CHECKING:
    from arraycomm._collectives.operation import Call
    from arraycomm._communicator import Communicator

_NAME = "raise_together"


class raise_together:  # noqa: N801 - used as a function, like contextlib.suppress
    """Context manager: an exception in the block of one rank raises on every rank; collective.

    For what a rank does alone and others rely on: reading its part of a file, say. Every rank enters
    the block, and leaves it with an exception, or none does.

    Parameters
    ----------
    comm : Communicator, optional
        `world()` by default.

    Raises
    ------
    Exception
        Whatever was raised on this rank, also where others raised as well.
    PeerError
        On the ranks whose block went well, or whose call inside it met a rank that had left the
        block: with the rank that raised, and its traceback. The communicator goes on.

    Notes
    -----
    The end of the block is one small exchange; its begin costs nothing. Blocks may contain
    collectives, and other blocks. `SystemExit` and `KeyboardInterrupt` pass through.

    Examples
    --------
    >>> with raise_together():
    ...     part = np.load(f"part-{comm.rank}.npy")
    """

    def __init__(self, comm: Communicator | None = None) -> None:
        self._comm = comm or world()

    def __enter__(self) -> None:
        self._comm._together.append(self._comm._control.step)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        comm = self._comm
        depth, began = len(comm._together), comm._together[-1]
        try:
            if isinstance(error, Exception):
                step, told_depth = comm._control.left_together
                # Where all were told while this rank was in a call of the block, they know.
                if comm._closed is None and not (step > began and told_depth <= depth):
                    _tell(comm, error)
            elif error is None:
                comm._call(_NAME, lambda _: agreement_only(_NAME))
        finally:
            comm._together.pop()


def _tell(comm: Communicator, error: Exception) -> None:
    """Raise `error` in place of taking part in a call; the caller raises it here."""

    def prepare(comm: Communicator) -> Call:
        raise error

    try:
        comm._call(_NAME, prepare)
    except Exception as raised:
        if raised is not error:
            raise
