from __future__ import annotations

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._native import compiled
from arraycomm._reduce import algorithms, selection
from arraycomm._reduce.selection import Algorithm
from tests.support import internals
from tests.support.device import in_own_stream, linked_devices
from tests.support.on_ranks import each_rank_of


@pytest.mark.parametrize("count", [0, 1, 17, 4096, 4097, 65_537, 200_000])
def test_way_is_the_one_that_is_taken(on_ranks, few, count, monkeypatch) -> None:
    taken: set[str] = set()
    select = algorithms.select

    def spy(*args) -> Algorithm:
        algorithm = select(*args)
        # Known only once the ranks have told one another whether they all have the native part.
        without = algorithm == "segment" and compiled is None
        found = selection.without_segment(args[0], args[3]) if without else algorithm
        taken.add(found.value)
        return algorithm

    def check(comm: Communicator) -> None:
        x = np.ones(count)
        way = ac.explain(x, comm=comm).algorithm
        comm.barrier()
        taken.clear()
        comm.barrier()
        comm.allreduce(x)
        comm.barrier()
        inline = x.nbytes <= internals.inline_bytes(comm)
        assert taken == (set() if inline else {way})
        assert way == ("local" if comm.size == 1 else way)
        assert (way == "header") == (inline and comm.size > 1)

    monkeypatch.setattr(algorithms, "select", spy)
    on_ranks(few, check)


@pytest.mark.both_control_channels
@each_rank_of(3)
def test_one_chunk_goes_through_the_segment_whatever_the_mpi(comm: Communicator, transport) -> None:
    if transport != "mpi-messages":
        way = "slices" if compiled is None else "segment"
        assert ac.explain(np.ones(50_000), comm=comm).algorithm == way


@each_rank_of("few")
def test_copies_are_those_that_are_made(comm: Communicator) -> None:
    plain = np.ones((300, 200))
    swapped = plain.astype(">f8")
    for x, *copies in ((plain, 0, 0), (plain.T, 1, 0), (plain[::2], 1, 1), (swapped, 1, 1)):
        with comm.dup() as fresh:
            fresh.allreduce(x)
            ac.fsum(x, comm=fresh)
            made = [fresh.stats()[name]["copies"] for name in ("allreduce", "fsum")]
            assert [ac.explain(x, comm=fresh).copies, *made] == [copies[0], *copies]


@each_rank_of(3)
def test_words(comm: Communicator) -> None:
    said = str(ac.explain(np.ones(3, np.float32), "max", comm=comm))
    assert said.startswith(f"allreduce(max) of float32 (3,) (numpy) over {comm.backend}")
    assert "travel with the header" in said
    assert "no copy" in said
    assert "12 bytes sent by this rank" in said
    unchecked = comm.dup(check=False, reproducible=False)
    explained = ac.explain(np.ones(10**6), comm=unchecked)
    said = str(explained)
    words = {"slices": "each rank folds a slice", "segment": "memory that the ranks share"}
    assert words[explained.algorithm] in said
    assert "what the ranks call is not compared" in said
    assert "reproducible=False" in said
    by_function = ac.op(np.minimum)
    assert "by the function" in str(ac.explain(1.0, by_function, comm=comm))


@each_rank_of("few")
def test_errors_are_those_of_allreduce(comm: Communicator) -> None:
    with pytest.raises(TypeError, match="op 'sum' is not defined for bool"):
        ac.explain(np.ones(3, bool), comm=comm)
    with pytest.raises(TypeError, match="must be an array or a number"):
        ac.explain({}, comm=comm)
    if not ac.is_initialized():
        with pytest.raises(ac.NotInitializedError):
            ac.explain(1)


@pytest.mark.parametrize(
    ("name", "backend", "copies", "note"),
    [
        ("nccl", "nccl", 0, ""),
        ("mpi", "mpi", 0, ""),
        ("staged", "staged", 1, "by way of pinned memory, chunk by chunk: rank 0: no NCCL"),
    ],
)
def test_arrays_on_devices(on_ranks, name, backend, copies, note) -> None:
    def check(comm: Communicator) -> None:
        import cupy

        x = np.ones(200_000)
        there = cupy.asarray(x)
        before, host = ac.explain(there, comm=comm), ac.explain(x, comm=comm).algorithm
        assert (before.backend, before.algorithm) == (comm.backend, host)
        (note_before,) = before.notes
        assert note_before == (
            "by way of host memory, with a copy each way: "
            "no array on a device has been communicated so far"
        )
        comm.allreduce(there)
        said = ac.explain(there, comm=comm)
        algorithm = host if name == "staged" else "slices"
        assert (said.backend, said.algorithm, said.copies) == (backend, algorithm, copies)
        assert said.notes == ((note,) if note else ())
        assert ac.explain(there[::2], comm=comm).copies == copies + 1
        by_function = ac.explain(there, ac.op(np.multiply), comm=comm)
        assert by_function.backend == comm.backend
        small = ac.explain(there[:2], comm=comm).algorithm
        assert small == ("header" if name == "staged" else "gather")

    with linked_devices(name):
        on_ranks(3, in_own_stream(check))
