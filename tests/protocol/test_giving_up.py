"""What an interrupt has left in the middle is no result, of the rank itself and of others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from arraycomm._protocol.waits.progress import ProgressThread
from arraycomm._transports import mailbox, threads
from properties.test_giving_up_laws import (
    PACKAGE,
    Moments,
    Stop,
    TimeUpError,
    by_an_interrupt,
    made,
    over_rings,
)
from tests.support import internals
from tests.support.on_ranks import alone

pytestmark = alone


@pytest.mark.parametrize(
    ("part", "source"), [("_transports/processes", 0), ("_messages/matching", ac.ANY_SOURCE)]
)
def test_a_wait_for_messages_interrupted_at_any_moment_goes_on_or_raises(
    part: str, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that all comes in the wait.
    monkeypatch.setattr(ProgressThread, "refused", True)
    last, count, xs = 0, 0, [np.full(3, 7.0), np.full(3, 8.0)]

    def rank(c: Communicator) -> None:
        requests = [c.irecv(source) for _ in xs] if c.rank else []
        c.barrier()
        for x in [] if c.rank else xs:
            c.send(x, 1)
        time.sleep(0.02)
        with suppress(Stop, ac.TransportError):
            for request, x in zip(requests, xs, strict=False):
                try:
                    got = moments.of(request.wait)
                except Stop:
                    got = request.wait()
                np.testing.assert_equal(got, x)

    while last <= count:
        moments = Moments(last, f"{PACKAGE}/{part}")
        on_threads(rank, over_rings(2))
        last, count = last + 1, max(count, moments.count)


@pytest.mark.parametrize(
    ("size", "module", "call"),
    [
        (2, mailbox, lambda c, x: c.recv(0) if c.rank else c.send(x, 1)),
        (9, threads, lambda c, out: c.allreduce(np.ones(200_000), out=out)),
    ],
    ids=["message", "reduction"],
)
def test_nobody_gets_what_a_rank_has_changed_after_it_gave_up(
    size: int, module: Any, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, copy, changed = np.ones(200_000), module.copy, threading.Event()

    def late(into: Any, source: Any) -> None:
        assert not np.may_share_memory(source, given) or changed.wait(5)
        copy(into, source)

    def rank(c: Communicator) -> None:
        for _ in range(3):
            call(c, np.ones(200_000))
        with pytest.raises(ac.PeerError if c.rank else Stop):
            by_an_interrupt(c, lambda c, _: call(c, given)) if c.rank == 0 else call(c, given + 0)
        if c.rank == 0:
            given[:] = -1
            changed.set()

    monkeypatch.setattr(module, "copy", late)
    on_threads(rank, threads.make_group(size))


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("name", ["allreduce", "reduce", "objects", "tree"])
def test_what_a_handler_raises_is_not_taken_for_a_failure_at_any_moment(
    name: str, before: int
) -> None:
    def rank() -> Callable[[], Any]:
        c = internals.communicator(threads.make_group(1)[0], timeout=1.0)
        for _ in range(before):
            made(3)[name](c, None)
        return lambda: made(3)[name](c, None)

    (seen := Moments()).of(rank())
    # The last ones may not come again: what is kept for all communicators is there by then.
    for last in range(1, seen.count + 1, 1 + seen.count // 60):
        with suppress(TimeUpError):
            Moments(last, raises=TimeUpError).of(rank())


def on_threads(rank: Callable[[Communicator], None], links: list[Any]) -> None:
    ranks = [internals.communicator(link, timeout=1.0) for link in links]
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(rank, ranks))
