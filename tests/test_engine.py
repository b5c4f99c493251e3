from __future__ import annotations

import numpy as np

from arraycomm._communicator import Communicator, Options
from arraycomm._transports.threads import ThreadsTransport, make_group


class _Unthreaded(ThreadsTransport):
    """As over an MPI that allows one thread."""

    threaded = False


def test_request_that_is_thrown_away_is_no_failure() -> None:
    """The garbage collector ends its program, in the middle of whatever else goes on."""
    [first, *_] = make_group(2)
    comm = Communicator(_Unthreaded(first._group, 0), Options())
    comm.iallreduce(np.ones(3))
    comm._engine._queue.popleft()._program.close()
    assert comm._closed is None
