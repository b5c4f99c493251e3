"""Checks of worlds that end well, in one program of three ranks; see `test_runtime.py`.

They are in step: each leaves no world behind, or the one that it found. The last ones close communicators
and use none of them again, so that the program's end shows that this is no failure.
"""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout, suppress
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from tests.support import internals
from tests.support.launched import checks_in, perform

RANKS = 3


def finalize_frees_and_init_begins_again() -> None:
    for _ in range(3):
        comm = ac.init()
        assert comm.split(comm.rank % 2).dup().allreduce(1) in (1, 2)
        assert comm.iallreduce(1).wait() == RANKS
        ac.finalize()
        assert not ac.is_initialized()


def finalize_completes_requests_of_duplicates_first() -> None:
    comm = ac.init()
    out = np.empty(10**6)
    comm.dup().iallreduce(np.ones(10**6), out=out)
    with pytest.warns(RuntimeWarning, match="never waited for"):
        ac.finalize()
    assert (out == RANKS).all()


def finalize_counts_messages_that_no_rank_has_received() -> None:
    comm = ac.init()
    for _ in range(2 if comm.rank == 0 else 0):
        comm.send(1, 1, 3)
    with pytest.warns(RuntimeWarning, match="^finalize: 2 of the messages .* never been received"):
        ac.finalize()


def finalize_ends_what_it_cannot_free() -> None:
    comm = ac.init()
    other = comm.dup()
    out = np.empty(2)
    for _ in range(3):
        comm.allreduce(np.ones(2), out=out)
    with pytest.raises(ac.MismatchError):
        comm.dup().allreduce(np.ones(2 + comm.rank))
    ac.finalize()
    for ended in (comm, other):
        with pytest.raises(ac.CommunicatorClosedError, match="arraycomm was finalized"):
            ended.allreduce(np.ones(2), out=out)
    assert ac.init().allreduce(1) == RANKS
    ac.finalize()


def from_mpi_leaves_the_world_and_the_given_communicator_alone() -> None:
    from mpi4py import MPI

    given = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank == 0)
    with ac.Communicator.from_mpi(given, timeout=30) as comm:
        assert comm.size == given.size
        assert comm.allreduce(1) == given.size
    assert not ac.is_initialized()
    assert given.allreduce(1) == given.size
    given.Free()


def from_mpi_keeps_the_grid_of_a_cartesian_communicator() -> None:
    from mpi4py import MPI

    cart = MPI.COMM_WORLD.Create_cart([RANKS, 1], [True, False])
    with ac.Communicator.from_mpi(cart, timeout=30) as grid:
        assert isinstance(grid, ac.GridCommunicator)
        assert (list(grid.dims), list(grid.coords)) == (cart.dims, cart.coords)
        assert list(grid.periods) == [True, False]
        for axis, steps in [(0, 1), (1, 1), (1, -1), (0, 2)]:
            beyond = {MPI.PROC_NULL: ac.PROC_NULL}
            assert grid.shift(axis, steps) == tuple(
                beyond.get(rank, rank) for rank in cart.Shift(axis, steps)
            )
        assert grid.dup().sub([True, False]).size == RANKS
    cart.Free()


def wrong_argument_to_from_mpi_on_one_rank_raises_on_all() -> None:
    from mpi4py import MPI

    given, wrong = MPI.COMM_WORLD, MPI.COMM_WORLD.rank == 1
    for option, value, error, said in (
        ("timeout", -1, ValueError, "timeout must be positive"),
        ("check", 1, TypeError, "check must be True or False"),
        ("device", 0, TypeError, "init: device must be"),
        ("device", ["cpu"] * 2, ValueError, "got 2 for 3 ranks"),
        ("backend", "self", ValueError, "backend must be one of auto, mpi, nccl; got 'self'"),
    ):
        with pytest.raises(error if wrong else ac.PeerError, match=said) as caught:
            ac.Communicator.from_mpi(given, **({option: value} if wrong else {}))
        text = str(caught.value)
        assert wrong or text.startswith("init: rank 1 raised instead of taking part"), text
        with ac.Communicator.from_mpi(given) as comm:
            assert comm.allreduce(1) == RANKS


def what_is_no_intracommunicator_is_refused_by_from_mpi() -> None:
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(min(MPI.COMM_WORLD.rank, 1))
    other = part.Create_intercomm(0, MPI.COMM_WORLD, 1 - min(MPI.COMM_WORLD.rank, 1))
    for wrong, said in (
        (other, r"got Intercomm; pass what its Merge returns"),
        (MPI.COMM_NULL, "got COMM_NULL"),
        (None, "got NoneType"),
        ("world", "got str"),
    ):
        with pytest.raises(TypeError, match=f"from_mpi: mpi4py_comm must be .*{said}"):
            ac.Communicator.from_mpi(wrong, timeout=30)
    merged = other.Merge()
    with ac.Communicator.from_mpi(merged, timeout=30) as comm:
        assert comm.allreduce(1) == RANKS
    for made in (merged, other, part):
        made.Free()


def from_mpi_has_the_backends_of_init() -> None:
    from mpi4py import MPI

    for backend in ("auto", "mpi"):
        with ac.Communicator.from_mpi(MPI.COMM_WORLD, backend=backend) as comm:
            assert (comm.backend, comm.allreduce(1)) == ("mpi", RANKS)
    with pytest.raises(ac.BackendUnavailableError, match="backend 'nccl' cannot be had"):
        ac.Communicator.from_mpi(MPI.COMM_WORLD, backend="nccl")
    backend = "mpi" if MPI.COMM_WORLD.rank else "auto"
    with pytest.raises(ac.MismatchError, match=", mpi"):
        ac.Communicator.from_mpi(MPI.COMM_WORLD, backend=backend)


def list_of_devices_is_taken_by_local_rank() -> None:
    with pytest.raises(ValueError, match=r"by local rank; got 2 for 3 ranks: \['cpu', 'cpu'\]"):
        ac.init(device=["cpu"] * 2)
    assert not ac.is_initialized()
    assert ac.init(device=["cpu"] * RANKS).device == "cpu"
    ac.finalize()


def verbose_prints_facts_on_rank_0() -> None:
    from mpi4py import MPI

    with redirect_stdout(io.StringIO()) as printed:
        ac.init(verbose=MPI.COMM_WORLD.rank == 0)
    lines = printed.getvalue().splitlines()
    if MPI.COMM_WORLD.rank:
        assert not lines
    else:
        assert lines[:2] == ["arraycomm: backend: mpi", "arraycomm: ranks: 3 on 1 node"]
        assert lines[2] == f"arraycomm: MPI: {MPI.Get_library_version().splitlines()[0].strip()}"
        assert lines[3:5] == ["arraycomm: devices: cpu", "arraycomm: check: on"]
    ac.finalize()


def options_that_differ_are_a_mismatch() -> None:
    from mpi4py import MPI

    with pytest.raises(ac.MismatchError, match="check=False"):
        ac.init(check=MPI.COMM_WORLD.rank != 1)
    assert not ac.is_initialized()


def world_is_the_whole_job() -> None:
    comm = ac.init()
    assert comm.backend == "mpi"
    assert comm.size == comm.mpi_comm.size == RANKS
    assert comm.allreduce(comm.rank) == 3
    assert (comm.local_rank, comm.local_size) == (comm.rank, RANKS)
    ac.println("hello")


def mpi_without_room_for_a_communicator_is_told_what_to_do() -> None:
    from mpi4py import MPI

    class Full:
        def Split(self, *_: Any) -> None:  # noqa: N802 - MPI's name
            raise MPI.Exception(MPI.ERR_OTHER)

        Idup = Split

    comm = ac.world()
    transport = internals.transport(comm)
    usual, transport.mpi_comm = transport.mpi_comm, Full()
    with pytest.raises(ac.TransportError, match=r"free\(\) those that are no longer used"):
        comm.dup()
    transport.mpi_comm = usual
    assert comm.allreduce(1) == RANKS


def error_of_mpi_on_one_rank_is_told_to_all() -> None:
    """Rank 1 sends more than announces a message, which Open MPI would write past the memory for that."""
    from mpi4py import MPI

    if MPI.get_vendor()[0] == "Open MPI":
        return
    part = ac.world().dup()
    raw = internals.transport(part).mpi_comm
    _sent = raw.Isend(bytes(100_000), 0, 5) if part.rank == 1 else None
    with pytest.raises(ac.PeerError if part.rank else ac.TransportError, match="Message truncated"):
        part.barrier() if part.rank else part.recv(1, 5)
    with pytest.raises(ac.CommunicatorClosedError):
        part.barrier()
    assert ac.world().allreduce(1) == RANKS


def communicators_and_trees_share_files_without_a_name() -> None:
    """A process that dies while a file has a name would leave it behind."""
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    comm = ac.world().dup()
    tree = {"w": np.ones(200_000)}
    assert ac.allreduce_tree(tree, "sum", comm=comm)["w"][-1] == RANKS
    comm.free()
    assert not [path for path in opened if "arraycomm-" in path]


def files_have_a_name_if_a_rank_cannot_open_others() -> None:
    comm = ac.world()
    with internals.unnamed_files_refused(here=comm.rank == 1), comm.dup() as part:
        assert part.allreduce(1) == RANKS
        assert internals.control(part).shared == internals.control(comm).shared
        tree = {"w": np.ones(200_000)}
        assert ac.allreduce_tree(tree, "sum", comm=part)["w"][-1] == RANKS


def requests_go_on_without_a_thread() -> None:
    """Rank 1 pushes its request on while it waits in another communicator."""
    comm, other = ac.world().dup(timeout=20), ac.world().dup(timeout=20)
    with internals.threads_refused(here=comm.rank == 1):
        requests = [comm.iallreduce(np.ones(400_000)) for _ in range(2)]
        if comm.rank != 1:
            requests[1].wait()
        other.barrier()
        assert [result[0] for result in ac.waitall(requests)] == [RANKS, RANKS]
    comm.free()
    other.free()


def handled_error_within_a_duplicate_leaves_the_world_open() -> None:
    with suppress(KeyError), ac.world().dup():
        raise KeyError
    assert ac.world().allreduce(1) == RANKS


def rank_that_closed_a_communicator_alone_goes_on_with_the_others() -> None:
    """It is interrupted before it takes part in anything, so that nobody learns of it in a step."""

    class Interrupted:
        @property
        def __array_interface__(self) -> Any:
            raise KeyboardInterrupt

    part = ac.world().dup()
    if part.rank == 1:
        with pytest.raises(KeyboardInterrupt):
            part.allreduce(Interrupted())
        assert "rank 1 of 3, closed>" in repr(part)
    ac.world().barrier()


CHECKS = checks_in(globals())

if __name__ == "__main__":
    if sys.argv[1] == "messages":
        internals.refuse_shared_memory()
    perform(CHECKS)
