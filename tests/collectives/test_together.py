"""`raise_together`: an exception on some ranks is one on all, and all are in step after it."""

from __future__ import annotations

from contextlib import suppress
from itertools import product

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from tests.support.on_ranks import each_rank_of

EXPECTED = (ZeroDivisionError, TypeError, ac.PeerError)


def _block(comm: Communicator, *, fails: bool, before: int = 0, count: int = 2) -> None:
    """A block of collectives, in the middle of which this rank may fail."""
    with ac.raise_together(comm):
        for _ in range(before):
            comm.allreduce(np.ones(count))
        if fails:
            raise ZeroDivisionError(f"on rank {comm.rank}")
        comm.allreduce(np.ones(count))
        comm.barrier()


def _alone(comm: Communicator, *, fails: bool) -> None:
    """A block without collectives."""
    with ac.raise_together(comm):
        if fails:
            raise ZeroDivisionError(f"on rank {comm.rank}")


@each_rank_of("few")
def test_exception_on_one_rank_is_one_on_all(comm: Communicator) -> None:
    for culprit in range(comm.size):
        with pytest.raises(EXPECTED, match=f"on rank {culprit}") as caught:
            _alone(comm, fails=comm.rank == culprit)
        if comm.rank == culprit:
            assert isinstance(caught.value, ZeroDivisionError)
        else:
            assert isinstance(caught.value, ac.PeerError)
            assert caught.value.rank == culprit
            assert "in _alone" in caught.value.traceback
        assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_exception_that_meets_calls_inside_the_block(comm: Communicator) -> None:
    """The others learn of it in a call of the block, and none waits at its end."""
    for culprit, before, count in product(range(comm.size), range(3), (2, 40_000)):
        with pytest.raises(EXPECTED, match=f"on rank {culprit}") as caught:
            _block(comm, fails=comm.rank == culprit, before=before, count=count)
        assert isinstance(caught.value, ZeroDivisionError) == (comm.rank == culprit)
        assert comm.allreduce(1) == comm.size


def _wrong_argument(comm: Communicator, *, fails: bool) -> None:
    with ac.raise_together(comm):
        if fails:
            raise ZeroDivisionError(f"on rank {comm.rank}")
        comm.allreduce("text" if comm.rank == 0 else np.ones(3))


@pytest.mark.parametrize("also_an_exception", [False, True])
@each_rank_of(3)
def test_wrong_argument_inside_the_block_is_told_once(
    comm: Communicator, also_an_exception
) -> None:
    with pytest.raises(EXPECTED):
        _wrong_argument(comm, fails=also_an_exception and comm.rank == 1)
    assert comm.allreduce(1) == comm.size


def _nested(comm: Communicator, culprit: int, *, in_inner: bool, handled: bool) -> None:
    with ac.raise_together(comm):
        if not in_inner and comm.rank == culprit:
            raise ZeroDivisionError
        try:
            _alone(comm, fails=in_inner and comm.rank == culprit)
        except EXPECTED:
            # Handled on one rank only, the exception of the inner block leaves the outer on all.
            if not handled or comm.rank != culprit:
                raise


@each_rank_of(3)
def test_blocks_nest(comm: Communicator) -> None:
    both = (True, False)
    for culprit, in_inner, handled in product(range(comm.size), both, both):
        with pytest.raises(EXPECTED):
            _nested(comm, culprit, in_inner=in_inner, handled=handled)
        assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_other_calls_than_the_end_of_the_block_are_a_mismatch(comm: Communicator) -> None:
    part = comm.dup()
    with pytest.raises(ac.MismatchError, match="raise_together"):
        part.barrier() if comm.rank == 0 else _alone(part, fails=False)
    assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_error_that_ended_the_communicator_leaves_the_block_as_it_is(comm: Communicator) -> None:
    part = comm.dup()
    with pytest.raises(ac.MismatchError), ac.raise_together(part):
        part.allreduce(np.ones(2 + (comm.rank == 0)))
    with pytest.raises(ac.CommunicatorClosedError, match="MismatchError"):
        _alone(part, fails=False)
    assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_a_block_that_handles_the_error_of_a_call_still_raises(comm: Communicator) -> None:
    def block(culprit: int, argument: object) -> None:
        with ac.raise_together(comm):
            if comm.rank == culprit:
                raise ValueError("left")
            with suppress(TypeError, ac.PeerError):
                comm.allreduce(argument)

    for culprit, argument in product(range(comm.size), (1, object())):
        with pytest.raises(ValueError if comm.rank == culprit else ac.PeerError) as caught:
            block(culprit, argument)
        assert comm.rank == culprit or f"rank {culprit} raised" in str(caught.value)
        with ac.raise_together(comm):
            assert comm.allreduce(1) == comm.size


def test_without_a_world_it_says_so() -> None:
    if not ac.is_initialized():
        with pytest.raises(ac.NotInitializedError):
            ac.raise_together()


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@each_rank_of(3)
def test_exceptions_that_are_hard_to_raise_or_to_show(comm: Communicator) -> None:
    def fail(comm: Communicator, kind: type[Exception]) -> None:
        with ac.raise_together(comm):
            if comm.rank == 0:
                raise kind("text")

    for kind in (StopIteration, StopAsyncIteration, SilentError):
        with pytest.raises(kind if comm.rank == 0 else ac.PeerError) as caught:
            fail(comm, kind)
        assert comm.rank == 0 or kind.__name__ in str(caught.value)
        assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_an_argument_whose_error_has_no_text(comm: Communicator) -> None:
    class Wrong:
        def __dlpack__(self, **_: object) -> None:
            raise SilentError

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    with pytest.raises((BufferError, ac.PeerError), match="SilentError whose __str__ raises"):
        comm.allreduce(1 if comm.rank else Wrong())
    assert comm.allreduce(1) == comm.size
