"""Checks of the shallow-water solver of the documents, on four ranks: `python -m tests.docs.shallow_waters DIRECTORY`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import arraycomm as ac
from docs.examples import shallow_water as solver
from tests.support.launched import perform

# No multiple of two or three: ranks have parts of several shapes.
CELLS = 17
STEPS = 5


def basin_of(comm: ac.Communicator, friction: float) -> solver.Basin:
    spacing = solver.LENGTH / CELLS
    part = solver.part_of(comm.rank, comm.size, CELLS)
    return solver.Basin(comm, part, spacing, 0.45 * spacing / 20, friction)


def start_of(basin: solver.Basin) -> Any:
    """Return fields that are balanced nowhere and have no symmetry; the same for any number of ranks."""
    waves = np.random.default_rng(0).normal(size=(3, CELLS, CELLS))
    mine = waves[:, np.array(basin.part.rows)[:, None], basin.part.columns]
    return np.asarray(solver.initial_fields(basin.part, basin.spacing)) + mine


def any_number_of_ranks_gives_the_bits_of_one() -> None:
    world = ac.world()
    found = set()
    # Four ranks; then three of them, and the other one alone.
    for group in (0, world.rank // 3):
        comm = world.split(group)
        basin = basin_of(comm, friction=1e4)
        start = start_of(basin)
        fields, _ = solver.simulate(start, STEPS, basin)
        assert not np.allclose(fields, start, rtol=0.01)
        whole = [solver.gathered(field, basin.part, CELLS, comm) for field in fields]
        bits = np.stack(whole).tobytes() if comm.rank == 0 else b""
        found |= {(size, bits) for size, bits in world.allgather_object((comm.size, bits)) if bits}
    assert sorted(size for size, _ in found) == [1, 3, 4]
    assert len({bits for _, bits in found}) == 1


def the_scheme_conserves_mass_and_energy() -> None:
    basin = basin_of(ac.world(), friction=0.0)

    @jax.jit
    def rates(fields: Any) -> Any:
        wide = solver.with_halo(fields, 1, basin.part, basin.comm)
        slope = solver.tendency(wide, basin.spacing, basin.friction)
        return jax.jvp(partial(solver.totals, basin=basin), (fields,), (slope,))

    amounts, change = map(np.asarray, rates(start_of(basin)))
    # What a step would add, beside what there is: each of the sums rounds some hundred times.
    assert (np.abs(change * basin.seconds / amounts) < 1e3 * np.finfo(float).eps).all(), change


def the_gradient_through_all_steps_is_that_of_differences() -> None:
    # It takes seconds to compile, on every rank.
    comm = ac.world().split(0 if ac.world().rank < 2 else None)
    if comm is None:
        return
    basin = basin_of(comm, friction=1e4)
    start = start_of(basin)
    own = np.random.default_rng(comm.rank)
    weights, direction = own.normal(size=(2, *start.shape))

    @jax.jit
    @jax.value_and_grad
    def loss(fields: Any) -> Any:
        # This rank's part of the sum; what it has sent to others is in theirs.
        return (weights * solver.simulate(fields, 2, basin)[0] ** 2).sum()

    def value(by: float) -> Any:
        return comm.allreduce(np.asarray(loss(start + by * direction)[0]))

    slope = comm.allreduce(np.vdot(loss(start)[1], direction))
    # Rounded sums of a few thousand numbers of 1e3, and an error of the third order in the difference.
    np.testing.assert_allclose(slope, (value(1e-4) - value(-1e-4)) / 2e-4, rtol=1e-6)


def the_program_runs() -> None:
    picture = Path(sys.argv[1]) / "eddies.png"
    solver.main(["--cells", "17", "--days", "0.1", "--lines", "2", "--picture", str(picture)])


CHECKS = [
    any_number_of_ranks_gives_the_bits_of_one,
    the_scheme_conserves_mass_and_energy,
    the_program_runs,
    # Last, since two ranks wait for it.
    the_gradient_through_all_steps_is_that_of_differences,
]

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    # Compiled as it is written: LLVM would join products and sums, in arrays of some shapes only.
    jax.config.update("jax_disable_most_optimizations", True)
    ac.init(timeout=60)
    perform(CHECKS)
