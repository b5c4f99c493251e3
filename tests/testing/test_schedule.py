from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._callsite import describe_exception
from arraycomm._communicator import Communicator
from arraycomm._reduce import selection
from arraycomm._transports.control import SharedControl
from arraycomm._transports.notes import FAILED, FINISHED
from arraycomm._transports.threads import make_group
from arraycomm.testing._ranks import schedule as _schedule
from arraycomm.testing._ranks.schedule import Baton, Schedule
from arraycomm.testing._ranks.scheduled_transport import scheduled
from tests.support import internals

# Longer than any run here takes, many times over.
_LIMIT = 30.0


class Outcome:
    """How one run of a program under a schedule ended, by rank."""

    def __init__(self, size: int) -> None:
        self.results: list[Any] = [None] * size
        self.errors: list[BaseException | None] = [None] * size
        self.threads: list[threading.Thread] = []
        self.baton: Baton

    @property
    def trace(self) -> list[tuple[int, str]]:
        return list(self.baton.trace)

    def ended(self) -> Outcome:
        deadline = time.monotonic() + _LIMIT
        for thread in self.threads:
            thread.join(max(deadline - time.monotonic(), 0.01))
            assert not thread.is_alive(), f"{self.baton.schedule}: {thread.name} did not end"
        return self

    def checked(self) -> Outcome:
        for error in self.errors:
            if error is not None:
                error.add_note(repr(self.baton.schedule))
                raise error
        return self


def start(
    size: int,
    schedule: Schedule | int,
    program: Callable[[Communicator], Any],
    *,
    links: list[Any] | None = None,
    timeout: float = 20.0,
    order: list[int] | None = None,
) -> Outcome:
    outcome = Outcome(size)
    wrapped, outcome.baton = scheduled(links or make_group(size), schedule)
    comms = [internals.communicator(link, timeout=timeout) for link in wrapped]

    def live(rank: int) -> None:
        comm, baton = comms[rank], outcome.baton
        try:
            baton.enter(rank)
            outcome.results[rank] = program(comm)
            exit_notice = FINISHED, ""
        except BaseException as error:
            outcome.errors[rank] = error
            exit_notice = FAILED, describe_exception(error)
        try:
            for member in internals.related(comm):
                if not internals.is_closed(member):
                    internals.announce_exit(member, *exit_notice)
        finally:
            baton.leave(rank)

    outcome.threads = [
        threading.Thread(target=live, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    for rank in order or range(size):
        outcome.threads[rank].start()
    return outcome


def drive(*args: Any, **options: Any) -> Outcome:
    return start(*args, **options).ended()


def replayed(*args: Any, **options: Any) -> Outcome:
    return drive(*args, **options).checked()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> float:
    """Lets a busy machine take its time; returns what the schedule grants by itself."""
    usual = _schedule._PATIENCE
    monkeypatch.setattr(_schedule, "_PATIENCE", _LIMIT)
    return usual


@pytest.fixture
def usual_patience(patience: float, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(_schedule, "_PATIENCE", patience)
    return patience


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every way of a large reduction be taken by arrays that are quick to fold."""
    monkeypatch.setattr(selection, "is_preferred", lambda _, nbytes: nbytes < _LARGE)
    monkeypatch.setattr(selection, "CHUNK_BYTES", 1 << 18)


# From here on by slices.
_LARGE = 200_000


def small(comm: Communicator) -> None:
    for call in range(8):
        x = np.arange(5) + 10 * comm.rank + call
        total = comm.size * (np.arange(5) + call) + 10 * sum(range(comm.size))
        np.testing.assert_array_equal(comm.allreduce(x), total)


def large(comm: Communicator) -> None:
    payload = internals.control(comm).payload
    limits = [payload + 8, 3 * payload, _LARGE]
    ways = [ac.explain(np.empty(nbytes // 8), comm=comm).algorithm for nbytes in limits]
    assert ways == ["segment", "segment", "slices"]
    for call, nbytes in enumerate([*limits, *limits]):
        x = np.arange(nbytes // 8) * (comm.rank + 1) + call
        total = np.arange(nbytes // 8) * sum(range(1, comm.size + 1)) + call * comm.size
        np.testing.assert_array_equal(comm.allreduce(x), total)
        root = call % comm.size
        reduced = comm.reduce(x, root=root)
        assert (reduced is None) == (comm.rank != root)
        if reduced is not None:
            np.testing.assert_array_equal(reduced, total)
        rows = comm.allgather(x[:5000])
        np.testing.assert_array_equal(rows[:, 1], np.arange(1, comm.size + 1) + call)
        assert comm.bcast(x, root)[1] == root + 1 + call


def groups(comm: Communicator) -> None:
    half = comm.split(comm.rank % 2, -comm.rank)
    assert half is not None
    copy = half.dup()
    for call in range(3):
        members = range(comm.rank % 2, comm.size, 2)
        assert half.allreduce(comm.rank + call) == sum(members) + call * len(members)
        assert copy.allgather_object(comm.rank) == list(members)[::-1]
        assert comm.allreduce(comm.rank, "max") == comm.size - 1
    alone = comm.split(None if comm.rank else 3)
    assert (alone is None) == (comm.rank > 0)
    copy.free()
    half.free()
    comm.barrier()


def requests(comm: Communicator) -> None:
    other = comm.dup()
    made = [
        other.iallreduce(comm.rank, "max"),
        comm.iallreduce(np.full(3, comm.rank)),
        comm.iallgather(np.full(5000, comm.rank)),
        comm.ibarrier(),
        comm.ibcast(np.full(9000, comm.rank), root=1),
        comm.iallreduce(comm.rank, "min"),
        other.iallgather(np.full(9000, comm.rank)),
    ]
    # Each rank waits in an order of its own, and one tests until it is there.
    turn = 2 * comm.rank % len(made)
    order = [*range(turn, len(made)), *range(turn)]
    results = {}
    for place in order[:: -1 if comm.rank % 2 else 1]:
        while comm.rank == 0 and not made[place].test():
            pass
        results[place] = made[place].wait()
    assert results[0] == comm.size - 1
    np.testing.assert_array_equal(results[1], [sum(range(comm.size))] * 3)
    assert [row[-1] for row in results[2]] == list(range(comm.size))
    assert results[4].tolist() == [1] * 9000
    assert results[5] == 0
    assert [row[-1] for row in results[6]] == list(range(comm.size))
    late = comm.iallreduce(1)
    assert comm.allreduce(comm.rank) == sum(range(comm.size))
    assert late.wait() == comm.size


PROGRAMS = [small, large, groups, requests]


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("program", PROGRAMS)
def test_same_seed_replays_the_same_order(program: Callable[[Communicator], None]) -> None:
    traces = set()
    for seed in range(3):
        first = drive(3, seed, program).checked().trace
        again = drive(3, seed, program, order=[2, 0, 1]).checked().trace
        assert len(first) > 30
        assert again == first
        traces.add(tuple(first))
    assert len(traces) == 3


class OneParity(SharedControl):
    """Wrong on purpose: a rank's next step overwrites one that others have yet to read."""

    def __init__(self, rank: int, size: int, memory: np.ndarray[Any, Any]) -> None:
        super().__init__(rank, size, memory)
        for both in (self.rows, self.words, self.mine, self.my_words):
            both[1] = both[0]  # type: ignore[index]

    def done(self) -> bool:
        words = self.words[0]
        return all(words[stamp] >= self.step for stamp in self.stamps)


def without_parities(size: int) -> list[Any]:
    links = make_group(size)
    for link in links:
        link.control = OneParity(link.rank, size, link._group.memory)
    return links


def sums(comm: Communicator) -> list[int]:
    return [comm.allreduce(100 * call + comm.rank) for call in range(5)]


def test_planted_race_is_found_and_replayed() -> None:
    right = [[300 * call + 3 for call in range(5)]] * 3

    def attempt(seed: int) -> Outcome:
        return drive(3, seed, sums, links=without_parities(3), timeout=5)

    found = next(seed for seed in range(200) if attempt(seed).results != right)
    first, again = attempt(found), attempt(found)
    assert first.errors == [None] * 3
    assert first.results != right
    assert (again.results, again.trace) == (first.results, first.trace)
    assert drive(3, found, sums).checked().results == right


def faulty(schedule: Schedule, program: Callable[[Communicator], None]) -> Outcome:
    """Run, and check that every rank ends well or in an error that says what happened."""
    outcome = drive(3, schedule, program)
    failed = {rank for rank, _ in outcome.baton.faults}
    assert outcome.baton.exact
    for rank, error in enumerate(outcome.errors):
        expected = (ac.TransportError, ac.PeerError)[rank not in failed :]
        # A request may be waited for after another that has closed the communicator.
        closed = isinstance(error, ac.CommunicatorClosedError)
        cause = error.__cause__ if closed and error is not None else error
        if error is not None and not isinstance(cause, expected):
            error.add_note(f"rank {rank}, {schedule}, {outcome.baton.faults}")
            raise error
        assert (error is not None) or rank not in failed
    if not failed:
        assert outcome.errors == [None] * 3
    return outcome


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(
    ("program", "seeds", "faults"),
    [(small, 25, 0.03), (large, 8, 0.006), (groups, 20, 0.03), (requests, 20, 0.03)],
)
def test_faults_end_every_rank_with_a_right_result_or_an_error(
    program: Callable[[Communicator], None], seeds: int, faults: float
) -> None:
    outcomes = [faulty(Schedule(seed, faults=faults), program) for seed in range(seeds)]
    injured = [outcome for outcome in outcomes if outcome.baton.faults]
    assert seeds // 4 < len(injured) < seeds


@pytest.mark.usefixtures("small_limits")
def test_rank_that_goes_on_after_a_fault_never_gets_a_wrong_number() -> None:
    def go_on(comm: Communicator) -> list[int]:
        """Tell by how much each result is wrong."""
        x = [np.full(9000, 1000 * call + comm.rank) for call in range(5)]
        wrong: list[int] = []
        for call in range(5):
            with suppress(ac.ArrayCommError):
                wrong.append(comm.iallreduce(x[call][:3]).wait()[0] - 3000 * call - 3)
            with suppress(ac.ArrayCommError):
                wrong.append(comm.allgather(x[call])[2, 5] - 1000 * call - 2)
            with suppress(ac.ArrayCommError):
                wrong.append(comm.allreduce(x[call][:3])[0] - 3000 * call - 3)
            with suppress(ac.ArrayCommError):
                wrong.append(comm.bcast(x[call][:5], root=1)[4] - 1000 * call - 1)
        return wrong

    lengths = set()
    for seed in range(30):
        for wrong in drive(3, Schedule(seed, faults=0.02), go_on).checked().results:
            assert not any(wrong), seed
            lengths.add(len(wrong))
    assert len(lengths) > 8


def test_faults_are_replayed_and_name_their_rank_and_schedule() -> None:
    schedule = Schedule(1, faults=0.2)
    first, again = drive(3, schedule, small), drive(3, schedule, small)
    assert first.baton.faults
    assert first.baton.faults == again.baton.faults
    assert first.trace == again.trace
    assert [str(error) for error in first.errors] == [str(error) for error in again.errors]
    rank, point = first.baton.faults[0]
    assert str(first.errors[rank]) == f"injected fault: {point} on rank {rank}, {schedule}"


def test_rank_that_blocks_elsewhere_does_not_stop_the_others(usual_patience: float) -> None:
    through = threading.Event()

    def block(comm: Communicator) -> bool:
        pair = comm.split(min(comm.rank, 1))
        assert pair is not None
        if comm.rank == 0:
            # Holds the baton sooner or later, until the others are through.
            return through.wait(_LIMIT)
        for _ in range(20):
            pair.barrier()
        through.set()
        return True

    started = time.monotonic()
    outcomes = [drive(3, seed, block).checked() for seed in range(4)]
    assert all(outcome.results == [True] * 3 for outcome in outcomes)
    assert time.monotonic() - started < 4 * (usual_patience + 1)
    assert not all(outcome.baton.exact for outcome in outcomes)


@pytest.mark.usefixtures("usual_patience")
def test_rank_that_never_enters_is_not_waited_for() -> None:
    links, baton = scheduled(make_group(2), 0)
    baton.enter(0)
    alone = links[0].split(0, [0])
    assert alone is not None
    assert internals.communicator(alone).allreduce(5) == 5
    assert not baton.exact


def test_timeout_is_reported_while_all_wait() -> None:
    def wait_crosswise(comm: Communicator) -> None:
        other = comm.dup()
        (comm if comm.rank else other).barrier()

    outcome = drive(3, 1, wait_crosswise, timeout=0.3)
    kinds = [type(error) for error in outcome.errors]
    # Who is told of another's end before its own time is up raises that.
    assert ac.CommTimeoutError in kinds
    assert set(kinds) <= {ac.CommTimeoutError, ac.PeerError}


@pytest.mark.usefixtures("usual_patience")
def test_other_threads_are_not_scheduled() -> None:
    """A thread of the user's own may call on a communicator of its own, at any time."""

    def beside(comm: Communicator) -> int:
        other = comm.dup()
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(other.allreduce(comm.rank)))
        thread.start()
        comm.barrier()
        thread.join(_LIMIT)
        return found[0]

    assert drive(3, 2, beside).checked().results == [3, 3, 3]


def test_schedule_shows_how_to_make_it_again_and_refuses_what_is_none() -> None:
    schedule = Schedule(12, faults=0.25)
    assert repr(schedule) == "Schedule(seed=12, faults=0.25)"
    assert eval(repr(schedule)) == schedule
    with pytest.raises(TypeError, match="integer"):
        Schedule("1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="faults is a probability"):
        Schedule(1, faults=1.5)
