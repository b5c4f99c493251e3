"""Ranks as threads of this process, for tests, notebooks and debuggers."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Final

from arraycomm._arrays.typing import T, Ts
from arraycomm._checks import check_at_least, check_seconds
from arraycomm._communicator import Communicator
from arraycomm._transports.threads import make_group
from arraycomm.testing._failures import first_failure
from arraycomm.testing._internals import communicator_over
from arraycomm.testing._ranks.schedule import Schedule
from arraycomm.testing._ranks.scheduled_transport import scheduled
from arraycomm.testing._ranks.threads import RankThread, run_threads

# Seconds beyond the timeout in which a rank may find out that it has waited for too long, also if
# others keep the cores busy.
_SLACK: Final = 2.0


def run(
    size: int,
    fn: Callable[[Communicator, *Ts], T],
    *args: *Ts,
    timeout: float | None = 60.0,
    schedule: Schedule | int | None = None,
) -> list[T]:
    """Run `fn(comm, *args)` on `size` ranks, each a thread of this process.

    Parameters
    ----------
    size : int
        How many ranks.
    fn : callable
        Called on every rank with that rank's communicator and `args`. The arguments are the same
        objects on every rank.
    timeout : float or None
        Seconds after which a rank that still waits for others raises `CommTimeoutError`. After one
        rank has failed, another that continues in Python for that long is interrupted. None means
        never.
    schedule : Schedule or int, optional
        A seed that chooses the order in which the ranks run, and a `Schedule` also where the
        transport fails. The same seed replays the same order.

    Returns
    -------
    list
        What `fn` returned, in rank order.

    Raises
    ------
    BaseException
        The error that caused those of the other ranks, with notes that name its rank and say how
        the others ended. Which error that is does not depend on time.

    Notes
    -----
    Threads share the state of the process: seeds of random generators, the environment, and the
    caches of JAX, whose jitted collectives need a process for each rank.

    Examples
    --------
    >>> import arraycomm.testing
    >>> arraycomm.testing.run(3, lambda comm: comm.allreduce(comm.rank))
    [3, 3, 3]
    """
    size = check_at_least(size, 1, "run: size, the first argument,")
    limit = check_seconds(timeout, "run: timeout")
    links, baton = make_group(size), None
    if schedule is not None:
        links, baton = scheduled(links, schedule)
    ranks = [
        RankThread(communicator_over(link, limit), lambda comm: fn(comm, *args), baton)
        for link in links
    ]
    run_threads(ranks, inf if limit is None else limit + _SLACK)
    first = first_failure(ranks)
    if first is not None:
        if baton is not None:
            exactly = "" if baton.exact else " (not exactly: a rank was held up outside arraycomm)"
            first.add_note(f"replay it with schedule={baton.schedule!r}{exactly}")
        raise first
    return [rank.result for rank in ranks]
