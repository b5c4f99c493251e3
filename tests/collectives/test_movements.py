"""The collectives that move arrays: what they take and count; what each rank gets is held by laws."""

from __future__ import annotations

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm.testing.conformance._movements import arguments_of_collectives
from tests.support.on_ranks import each_rank_of


@each_rank_of("few")
def test_fields_that_overlap_are_refused_where_the_others_cannot_know_them(
    comm: Communicator,
) -> None:
    dtype = np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 0]})
    x = np.zeros((comm.size, 2), dtype)
    for name in ("bcast", "scatter"):
        with pytest.raises(ac.PeerError if comm.rank else TypeError, match=name):
            getattr(comm, name)(None if comm.rank else x)
    assert comm.alltoall(x).dtype == dtype


@pytest.mark.parametrize("kind", [tuple, np.array, iter, lambda c: np.array(c, np.uint8)])
@each_rank_of("few")
def test_counts_may_be_any_sequence_of_integers(comm: Communicator, kind) -> None:
    x, counts = np.arange(comm.size * 2.0), [2] * comm.size
    assert comm.scatterv(x, kind(counts)).tolist() == x[2 * comm.rank :][:2].tolist()
    got, received = comm.alltoallv(x, kind(counts), return_counts=True)
    assert got.tolist() == x[2 * comm.rank :][:2].tolist() * comm.size
    assert received == counts
    assert {type(count) for count in received} == {int}


@each_rank_of(3)
def test_what_the_other_ranks_pass_to_scatter_is_ignored(comm: Communicator) -> None:
    x = np.arange(comm.size * 2.0).reshape(comm.size, 2)
    counts = [2, *[0] * (comm.size - 2), comm.size - 2]
    mine = (x, counts) if comm.rank == 0 else ("no array", "no counts")
    assert comm.scatter(mine[0]).tolist() == x[comm.rank].tolist()
    assert len(comm.scatterv(*mine)) == counts[comm.rank]


@each_rank_of("few")
def test_statistics_count_the_bytes_that_were_passed(comm: Communicator) -> None:
    x = np.ones((comm.size, 9))
    for name, arguments in arguments_of_collectives(comm, x, "sum", 0).items():
        passed = x if comm.rank == 0 or name not in ("bcast", "scatter", "scatterv") else None
        for _ in range(2):
            getattr(comm, name)(passed, *arguments[1:])
        numbers = comm.stats()[name]
        nbytes = 0 if passed is None else x.nbytes
        assert (numbers["calls"], numbers["bytes"]) == (2, 2 * nbytes), name
        assert numbers["seconds"] > 0


@pytest.mark.parametrize("shape", [(2**41, 0), (2**59, 0), (2**60, 0), (2**57, 0, 8)], ids=str)
@each_rank_of(3)
def test_empty_rows_may_be_any_number_that_arrays_have(
    comm: Communicator, shape: tuple[int, ...]
) -> None:
    rows, x, fits = shape[0], np.empty(shape, np.float32), shape in ((2**41, 0), (2**59, 0))
    parts = [rows] + [0] * (comm.size - 1)
    calls = (
        lambda: comm.allgatherv(x),
        lambda: comm.gatherv(x),
        lambda: comm.alltoallv(x, parts),
        lambda: comm.scatterv(x, parts),
    )
    for call in calls[: 4 if fits else 3] * 3:
        if fits:
            found = call()
            assert found is None or len(found) in {comm.size * rows, rows, 0}
        else:
            with pytest.raises(ValueError, match=f"no array can have the {3 * rows} rows"):
                call()
    assert comm.allreduce(1) == comm.size
