"""A rank that waits for absent ones sleeps longer and longer between polls; one that waits for data does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arraycomm._communicator import Communicator
from arraycomm._protocol import progress, waiting
from arraycomm.testing import run

LONG = 0.5


def _barrier(comm: Communicator) -> None:
    comm.barrier()


def _reduce(comm: Communicator) -> None:
    # The second one takes the fast path.
    comm.allreduce(np.ones(2))
    comm.allreduce(np.ones(2))


def _request(comm: Communicator) -> None:
    comm.iallreduce(np.ones(2)).wait()


def _request_beside_a_message(comm: Communicator) -> None:
    peer = 1 - comm.rank
    messages = [comm.irecv(peer), comm.isend(np.ones(2), peer)] if comm.rank == 0 else []
    comm.iallreduce(np.ones(2)).wait()
    messages = messages or [comm.irecv(peer), comm.isend(np.ones(2), peer)]
    for message in messages:
        message.wait()


def _receive(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.recv(1)
    else:
        comm.send(np.ones(2), 0)


def _naps(monkeypatch: pytest.MonkeyPatch, call: Callable[[Communicator], None]) -> list[float]:
    """Return for how long rank 0 slept at once in a call for which rank 1 comes late."""
    waiter: list[threading.Thread] = []
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        if threading.current_thread() in waiter:
            naps.append(seconds)
        time.sleep(seconds)

    def check(comm: Communicator) -> None:
        call(comm)
        if comm.rank:
            time.sleep(LONG)
        else:
            waiter.append(threading.current_thread())
        call(comm)

    monkeypatch.setattr(waiting, "time", SimpleNamespace(sleep=sleep))
    run(2, check)
    return naps


@pytest.mark.parametrize("call", [_barrier, _reduce, _request])
def test_naps_grow_while_ranks_are_absent(monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    naps = _naps(monkeypatch, call)
    assert min(naps) < waiting._LONG_NAP / 4
    assert max(naps) == waiting._LONG_NAP


@pytest.mark.parametrize("call", [_receive, _request_beside_a_message])
def test_naps_stay_short_if_data_may_move(monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    assert set(_naps(monkeypatch, call)) == {waiting.NAP}


def test_the_thread_that_pushes_requests_naps_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        time.sleep(seconds)

    def check(comm: Communicator) -> None:
        if comm.rank:
            time.sleep(LONG)
        request = comm.iallreduce(np.ones(2))
        if comm.rank == 0:
            time.sleep(LONG)
        request.wait()

    monkeypatch.setattr(progress, "time", SimpleNamespace(sleep=sleep))
    run(2, check)
    assert min(naps) < waiting._LONG_NAP / 4
    assert max(naps) == waiting._LONG_NAP
