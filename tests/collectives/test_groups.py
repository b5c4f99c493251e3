from __future__ import annotations

import gc
import signal

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._transports.threads import make_group
from tests.support import internals
from tests.support.on_ranks import each_rank_of


@each_rank_of("few")
def test_ranks_of_one_node_are_together(comm: Communicator) -> None:
    node = comm.split_by_node()
    assert (node.rank, node.size) == (comm.local_rank, comm.local_size)


@each_rank_of("few")
def test_shrink_says_where_it_is_possible(comm: Communicator) -> None:
    with pytest.raises(ac.BackendUnavailableError, match="mpiexec --with-ft ulfm"):
        comm.shrink()
    assert comm.allreduce(1) == comm.size


@pytest.mark.parametrize("times", [1, 2])
def test_interrupt_while_mpi_makes_a_communicator_comes_once_it_is_there(
    monkeypatch, times
) -> None:
    comm = internals.communicator(make_group(1)[0])
    split = internals.transport(comm).split
    done = []

    def interrupted(*args: object) -> object:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        done.append(True)
        return split(*args)

    monkeypatch.setattr(internals.transport(comm), "split", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        comm.dup()
    # Somebody who interrupts twice does not want to wait.
    assert done == ([True] if times == 1 else [])
    assert len(internals.related(comm)) == 3 - times
    assert signal.getsignal(signal.SIGINT) is handler


class _Step:
    """The smallest optimizer."""

    def update(self, parameters, gradients):
        return [p - g for p, g in zip(parameters, gradients, strict=True)]


def _trained(comm: ac.Communicator) -> object:
    optimizer = ac.DistributedOptimizer(_Step(), comm=comm)
    (got,) = optimizer.update([np.zeros(3)], [np.full(3, comm.rank + 1.0)])
    assert (got == -(comm.size + 1) / 2).all()
    return optimizer


@each_rank_of(3)
def test_duplicates_that_nobody_sees_are_freed_once_no_rank_uses_them(
    comm: ac.Communicator,
) -> None:
    part = comm.dup()
    before = len(internals.group(part).related)
    kept = _trained(part)
    for turn in range(24):
        made = _trained(part)
        # One rank lets go of it later than the others.
        late = made if comm.rank == turn % comm.size else None
        del made
        if turn % 8 == 0:
            gc.collect(0)
            there = len(internals.group(part).children)
            again = _trained(part)
            # What one rank still has is not freed.
            assert len(internals.group(part).children) > (there if turn == 0 else 1)
            del again
        del late
    gc.collect(0)
    del kept
    gc.collect(0)
    last = _trained(part)
    assert len(internals.group(part).related) - before < 8
    part.free()
    assert len(internals.group(comm).related) == before - 1
    with pytest.raises(ac.CommunicatorClosedError, match="it was freed"):
        last.update([np.zeros(3)], [np.zeros(3)])  # type: ignore[attr-defined]


@each_rank_of(2)
def test_hidden_duplicate_that_an_error_has_closed_does_not_hold_up_free(
    comm: ac.Communicator,
) -> None:
    part = comm.dup()
    wrong, right = ac.DistributedOptimizer(_Step(), comm=part), _trained(part)
    with pytest.raises(ac.MismatchError):
        wrong.update([np.zeros(3 + comm.rank)], [np.zeros(3 + comm.rank)])
    before = len(internals.group(comm).related)
    part.free()
    # The part, and the two.
    assert len(internals.group(comm).related) == before - 3
    for optimizer in (wrong, right):
        with pytest.raises(ac.CommunicatorClosedError):
            optimizer.update([np.zeros(3)], [np.zeros(3)])  # type: ignore[attr-defined]
    assert comm.allreduce(1) == comm.size
