"""The example of a compression that remembers and makes collectives: PowerSGD."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from tests.support.on_ranks import each_rank_of

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from docs.examples import powersgd

FRAMEWORKS = ("numpy", "torch", "jax")
SIZE = 3
SHAPES = ((6, 4), (3, 2, 5), (7,), (1, 3))
EPS = float(np.finfo(np.float32).eps)


def gradients(rank: int, step: int) -> list[Any]:
    random = np.random.default_rng((rank, step))
    return [random.normal(size=shape).astype(np.float32) for shape in SHAPES]


def reduced(
    comm: ac.Communicator, hook: Any, framework: str, steps: int, op: str = "mean"
) -> list[tuple[list[Any], list[Any]]]:
    """Return what each step gives, and the states before it, as NumPy's."""
    found = []
    states = [hook.init(ac.exchange(g, framework)) for g in gradients(0, 0)]
    for step in range(steps):
        before = [
            s if s is None else [np.asarray(ac.exchange(a, "numpy")).copy() for a in s]
            for s in states
        ]
        arrays = [ac.exchange(g, framework) for g in gradients(comm.rank, step)]
        got, states = hook.reduce(arrays, states, op, comm)
        assert [type(g) for g in got] == [type(a) for a in arrays]
        found.append(([np.asarray(ac.exchange(g, "numpy")).copy() for g in got], before))
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS)
@each_rank_of(SIZE)
def test_with_full_rank_it_is_the_mean(comm: ac.Communicator, framework: str) -> None:
    pytest.importorskip(framework)
    steps = reduced(comm, powersgd.PowerSGD(rank=9), framework, 3)
    for step, (got, states) in enumerate(steps):
        rows = [gradients(rank, step) for rank in range(SIZE)]
        for n, shape in enumerate(SHAPES):
            want = np.mean([row[n] for row in rows], axis=0, dtype="f8")
            if len(shape) == 1:
                np.testing.assert_array_equal(got[n], comm.allreduce(rows[comm.rank][n], "mean"))
                continue
            # Each product of a vector of length k errs by k·eps of the vectors' lengths. The columns of
            # the basis span those of the mean as well as the factor Q is conditioned, if they are few.
            matrix = want.reshape(shape[0], -1)
            largest = max(np.linalg.norm(row[n]) + np.linalg.norm(states[n][1]) for row in rows)
            spanned = np.linalg.cond(states[n][0]) * np.linalg.cond(matrix)
            bound = 4 * (sum(matrix.shape) + SIZE) * EPS * largest * spanned
            assert np.abs(got[n] - want).max() <= bound < 0.1 * np.abs(want).max()


@pytest.mark.parametrize(("size", "op"), [(1, "mean"), (SIZE, "sum")])
@each_rank_of("size")
def test_what_low_rank_leaves_out_is_added_to_the_next_steps(
    comm: ac.Communicator, size: int, op: str
) -> None:
    steps = 4
    seen = reduced(comm, powersgd.PowerSGD(rank=1), "numpy", steps + 1, op)
    for n, shape in enumerate(SHAPES):
        given = [comm.allreduce(gradients(comm.rank, step)[n], op) for step in range(steps)]
        total = np.sum([got[n] for got, _ in seen[:steps]], axis=0, dtype="f8")
        for got, _ in seen:
            rows = comm.allgather(got[n])
            assert rows.tobytes() == got[n].tobytes() * size
            assert len(shape) == 1 or np.linalg.matrix_rank(got[n].reshape(shape[0], -1)) == 1
        if len(shape) > 1:
            left = comm.allreduce(seen[steps][1][n][1], op).reshape(shape)
            assert min(shape[0], np.prod(shape[1:])) == 1 or np.abs(left).max() > 0.1
            total += left
        size_of = steps * size * max(np.abs(array).max() for array in given)
        bound = 4 * steps * (sum(shape) + size) * EPS * size_of * 10
        assert np.abs(total - np.sum(given, axis=0, dtype="f8")).max() <= bound


def test_digits_are_learned_about_as_well_as_without(capfd: pytest.CaptureFixture[str]) -> None:
    powersgd.main(epochs=1)
    ac.finalize()
    said = r"accuracy (0\.\d+) with full rank, (0\.\d+) with rank 2"
    plain, compressed = map(float, re.search(said, capfd.readouterr().out).groups())
    assert plain > 0.7
    # Of 297 images; five standard deviations of what one of 80 % gets right.
    assert abs(plain - compressed) < 5 * np.sqrt(0.8 * 0.2 / 297)
