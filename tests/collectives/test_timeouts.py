"""The timeout of one call, in place of its communicator's."""

from __future__ import annotations

import inspect
import time

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm.testing import run
from arraycomm.testing.conformance._failures import calls_that_wait
from tests.support.on_ranks import alone, each_rank_of


@alone
def test_every_call_waits_as_long_as_its_own_timeout_says() -> None:
    def check(comm: Communicator) -> set[str]:
        names = {*calls_that_wait(comm), "send", "send_object"}
        for name in sorted(names):
            part = comm.dup()
            sends = {
                "send": (part.send, (np.ones(30_000), 1 - comm.rank)),
                "send_object": (part.send_object, (b"x" * 300_000, 1 - comm.rank)),
            }
            call, arguments = (calls_that_wait(part) | sends)[name]
            if comm.rank == 0:
                with pytest.raises(ac.CommTimeoutError, match=r"\(timeout 0\.05 s\)"):
                    call(*arguments, timeout=0.05)
                with pytest.raises(ac.CommunicatorClosedError):
                    part.barrier()
            comm.barrier()
        return names

    names, _ = run(2, check)
    methods = inspect.getmembers(Communicator, inspect.isfunction)
    found = {name for name, one in methods if "timeout" in inspect.signature(one).parameters}
    # Laws have all kinds of receives.
    assert found - names == {"recv", "recv_object", "probe", "sendrecv"}


@alone
@each_rank_of(2)
def test_waiting_for_earlier_requests_counts_from_the_call(comm: Communicator) -> None:
    """The request has waited for longer than the call may when the call begins."""
    if comm.rank == 0:
        request = comm.iallreduce(1)
        time.sleep(1.6)
        assert comm.allreduce(2, timeout=1.5) == 4
        assert request.wait() == 2
    else:
        time.sleep(1.8)
        assert comm.iallreduce(1).wait() == 2
        comm.allreduce(2)
