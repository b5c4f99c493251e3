"""The grid of ranks: what it is chosen for, and its results, which are those of slices to the bit."""

from __future__ import annotations

from math import prod

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm._collectives import grid
from arraycomm._collectives.grid import chunk_bytes, is_quicker
from arraycomm._communicator import Communicator
from arraycomm._transports import rank_grid
from arraycomm._transports.rank_grid import RankGrid, sides
from tests.support import internals
from tests.support.on_ranks import LAUNCH

MIB = 1 << 20

# The choice


@given(st.integers(1, 1 << 18))
def test_sides_are_the_divisors_closest_to_one_another(size) -> None:
    rows, columns = sides(size)
    assert rows <= columns
    assert rows * columns == size
    assert not any(size % between == 0 for between in range(rows + 1, columns))


def test_a_grid_is_taken_if_its_messages_save_more_than_its_bytes_cost() -> None:
    assert not is_quicker(16 * MIB, 32, 32, 1)
    assert is_quicker(14 * MIB, 32, 32, 1)
    assert is_quicker(100 * MIB, 256, 512, 1)
    # The ranks of a node share its link.
    assert not is_quicker(14 * MIB, 32, 32, 8)
    # A row is no grid.
    assert not is_quicker(1 << 10, 1, 1031, 1)


def test_a_grid_is_taken_in_place_of_a_long_chain_for_small_arrays() -> None:
    assert is_quicker(1 * MIB, 256, 512, 64, 1024 * MIB)
    assert not is_quicker(8 * MIB, 256, 512, 64, 1024 * MIB)
    assert not is_quicker(1 * MIB, 12, 12, 64, 1 * MIB)


def test_large_arrays_have_pairs_of_chunks() -> None:
    assert chunk_bytes(1 * MIB, 32, 32) == 1 * MIB
    assert chunk_bytes(8 * MIB, 32, 32) == 4 * MIB
    assert chunk_bytes(8 * MIB, 256, 512) == 8 * MIB
    assert chunk_bytes(100 * MIB, 256, 512) == 50 * MIB
    assert chunk_bytes(400 * MIB, 256, 512) == 100 * MIB


def test_without_many_ranks_there_is_none(on_ranks, size) -> None:
    def check(comm: Communicator) -> None:
        assert internals.transport(comm).grid is None

    on_ranks(size, check)


# The results


def _in_a_grid(comm: Communicator, columns: int) -> Communicator:
    """Return a further communicator, whose ranks are a grid; its row and column are groups of their own."""
    made = comm.dup()
    link, rank, size = internals.transport(made), comm.rank, comm.size
    lines = []
    for color, members in (
        (rank // columns, range(rank // columns * columns, (rank // columns + 1) * columns)),
        (rank % columns, range(rank % columns, size, columns)),
    ):
        line = link.split(color, list(members))
        assert line is not None
        lines.append(line)
    link.grid = RankGrid(rank, size // columns, columns, lines[0], lines[1], 1)
    return made


def _row_major(size: int) -> list[int]:
    return [columns for columns in range(1, size + 1) if size % columns == 0]


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 9, 12])
def test_results_have_the_bits_of_the_order_of_ranks(
    on_ranks, ranks, transport, monkeypatch
) -> None:
    """With fewer elements than ranks, as many, and in several chunks; in place as well."""
    if transport != "threads" and ranks > (LAUNCH.size if LAUNCH else 0):
        pytest.skip("there are not so many ranks")
    monkeypatch.setattr(grid, "CHUNK_BYTES", 1000)

    def check(comm: Communicator) -> None:
        for columns in _row_major(ranks):
            made = _in_a_grid(comm, columns)
            link = internals.transport(made)
            for dtype, op in (("float32", "sum"), ("bfloat16", "mean"), ("complex128", "prod")):
                kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
                for count in (1, ranks - 1, ranks, 61, 1001):
                    rng = np.random.default_rng((comm.rank, count))
                    x = rng.standard_normal(count).astype(kind)
                    expected = comm.allreduce(x, op)
                    for target in (np.empty_like(x), x):
                        link.take(grid.scratch_bytes(x.nbytes, ranks), np.dtype(np.uint8)).fill(255)
                        internals.group(made).engine.run(grid.allreduce(link, x, target, op))
                        assert target.tobytes() == expected.tobytes()
            link.grid = None

    on_ranks(ranks, check)


@pytest.mark.skipif(LAUNCH is None or LAUNCH.size != 4, reason="needs to be run under mpiexec -n 4")
def test_over_mpi_rows_and_columns_have_communicators(monkeypatch) -> None:
    """Also for trees, requests and several dtypes; and nothing is left of them."""
    from mpi4py import MPI

    monkeypatch.setattr(rank_grid, "LEAST_RANKS", 4)
    monkeypatch.setattr(grid, "is_quicker", lambda *_: True)
    made = internals.mpi_communicator(MPI.COMM_WORLD.Dup(), nodes=[0, 1, 1, 0])
    link, plain = internals.transport(made), internals.mpi_communicator(MPI.COMM_WORLD.Dup())
    assert link.grid is not None
    assert (link.grid.rows, link.grid.columns, link.grid.lanes) == (2, 2, 2)
    for dtype in ("float16", "int64", "float32"):
        x = (100 * np.random.default_rng(made.rank).standard_normal(100_003)).astype(dtype)
        explained = ac.explain(x, comm=made)
        assert explained.algorithm == "grid"
        assert explained.sent == x.nbytes + x.nbytes * 3 // 4
        expected = plain.allreduce(x)
        assert made.allreduce(x).tobytes() == expected.tobytes()
        assert made.iallreduce(x).wait().tobytes() == expected.tobytes()
        tree = {"a": x, "b": x[:10].astype(np.float64)}
        reduced, whole = (ac.allreduce_tree(tree, "sum", comm=comm) for comm in (made, plain))
        assert all(reduced[k].tobytes() == whole[k].tobytes() for k in tree)
    assert prod(np.shape(made.allgather(np.ones(3)))) == 12
    for comm in (made, plain):
        comm.free()
