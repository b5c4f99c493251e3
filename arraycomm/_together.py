"""`raise_together`: an exception on some ranks becomes an exception on all of them."""

from __future__ import annotations

from types import TracebackType

from arraycomm._collectives.groups import SmallExchange
from arraycomm._communicator import Communicator, runner_of
from arraycomm._entries import entries
from arraycomm._protocol.mismatch import peer_error
from arraycomm._session import world


class RaiseTogether(SmallExchange):
    """See `raise_together`."""

    name, code = "raise_together", 37


@entries()
class raise_together:  # noqa: N801 - used as a function, like contextlib.suppress
    """Context manager: an exception in the block of one rank raises on every rank; collective.

    For work that a rank does alone and other ranks rely on, such as reading its part of a file.
    Every rank enters the block. Either all ranks leave it with an exception, or none does.

    Parameters
    ----------
    comm : Communicator, optional
        `world()` by default.

    Raises
    ------
    Exception
        Whatever was raised on this rank, even if other ranks raised too.
    PeerError
        On ranks that raised nothing, or whose call inside the block met a rank that had left it:
        with the rank that raised, and its traceback; also if the block has handled the error of
        that call. The communicator can still be used.

    Notes
    -----
    The end of the block is one small exchange; its beginning costs nothing. Blocks may contain
    collectives and other blocks. `SystemExit` and `KeyboardInterrupt` pass through.

    Examples
    --------
    >>> with raise_together():
    ...     part = np.load(f"part-{comm.rank}.npy")
    """

    def __init__(self, comm: Communicator | None = None) -> None:
        self._runner = runner_of(comm or world())
        self._group = self._runner.group

    def __enter__(self) -> None:
        self._group.open_together.append(self._group.control.step)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        group = self._group
        depth, began = len(group.open_together), group.open_together[-1]
        try:
            step, left_depth, details = group.control.left_together
            # All ranks heard of it while this rank was in a call of the block.
            is_known = step > began and left_depth <= depth
            if isinstance(error, Exception):
                if group.closed is None and not is_known:
                    self._runner.fail(RaiseTogether.name, error)
            elif error is None:
                if is_known and group.closed is None:
                    # The block has handled the error of that call.
                    raise peer_error(RaiseTogether.name, details)
                self._runner.call(RaiseTogether)
        finally:
            group.open_together.pop()
            # Its traceback has this frame, and with it those of the block.
            del error, trace
