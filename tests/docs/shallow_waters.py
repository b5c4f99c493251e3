"""Checks of the shallow-water solver of the documents, on four ranks: `python -m tests.docs.shallow_waters DIRECTORY`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import arraycomm as ac
from docs.examples import shallow_water as solver
from tests.support.launched import checks_in, perform

# No multiple of two or three: ranks have parts of several shapes.
CELLS = 17
STEPS = 5


def basin_of(comm: ac.Communicator) -> solver.Basin:
    spacing = solver.LENGTH / CELLS
    part = solver.part_of(comm.rank, comm.size, CELLS)
    return solver.Basin(comm, part, spacing, 0.45 * spacing / 20, friction=1e4)


def start_of(basin: solver.Basin) -> Any:
    """Return fields that are balanced nowhere and have no symmetry; the same for any number of ranks."""
    waves = np.random.default_rng(0).normal(size=(3, CELLS, CELLS))
    mine = waves[:, np.array(basin.part.rows)[:, None], basin.part.columns]
    return np.asarray(solver.initial_fields(basin.part, basin.spacing)) + mine


def any_number_of_ranks_gives_the_bits_of_one() -> None:
    world = ac.world()
    found = set()
    # Four ranks, whose parts have neighbours on all sides; then one of them alone.
    for group in (0, 0 if world.rank == 0 else None):
        comm = world.split(group)
        if comm is None:
            break
        basin = basin_of(comm)
        start = start_of(basin)
        fields, _ = solver.simulate(start, STEPS, basin)
        assert not np.allclose(fields, start, rtol=0.01)
        whole = [solver.gathered(field, basin.part, CELLS, comm) for field in fields]
        found.add(np.stack(whole).tobytes() if comm.rank == 0 else b"")
    assert len(found) == 1


def the_program_runs() -> None:
    picture = Path(sys.argv[1]) / "eddies.png"
    solver.main(["--cells", "17", "--days", "0.02", "--lines", "2", "--picture", str(picture)])


CHECKS = checks_in(globals())

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    # Compiled as it is written: LLVM would join products and sums, in arrays of some shapes only.
    jax.config.update("jax_disable_most_optimizations", True)
    ac.init(timeout=60)
    perform(CHECKS)
