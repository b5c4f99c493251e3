"""Steps of a shallow-water model in the benchmark: one program, in which either library exchanges halos.

The linear equations on a periodic grid, by the scheme of Lax and Friedrichs. Each rank has a tile of the
grid, with a halo of one cell around it, which it gets from the four ranks beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from math import isqrt
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array
from docs.studies.benchmarks.cases import Calls, Field, as_numpy
from docs.studies.benchmarks.programs import import_mpi4jax

STEPS: Final = 10
CELLS: Final = 256
_COURANT: Final = 0.25
# Values are about 1; programs of other shapes round other sums together.
_TOLERANCE: Final = 1e-5

# Sends an array to one rank, and returns the one that another rank sends.
Exchange = Callable[[Any, int, int], Any]


class Tiles:
    """The ranks as a grid: who is beside whom."""

    def __init__(self, rank: int, size: int) -> None:
        self.rows = max(n for n in range(1, isqrt(size) + 1) if size % n == 0)
        self.columns = size // self.rows
        self.row, self.column = divmod(rank, self.columns)

    def beside(self, down: int, right: int) -> int:
        """Return the rank this many tiles further down and to the right."""
        row, column = (self.row + down) % self.rows, (self.column + right) % self.columns
        return row * self.columns + column


def steps(state: Any, tiles: Tiles, exchange: Exchange, count: int = STEPS) -> Any:
    """Return the height and both velocities, shape (3, rows + 2, columns + 2), some steps later."""
    import jax

    def step(_: int, state: Any) -> Any:
        return _advance(_with_halos(state, tiles, exchange))

    return jax.lax.fori_loop(0, count, step, state)


def _with_halos(state: Any, tiles: Tiles, exchange: Exchange) -> Any:
    up, down = tiles.beside(-1, 0), tiles.beside(1, 0)
    left, right = tiles.beside(0, -1), tiles.beside(0, 1)
    state = state.at[:, 0, :].set(exchange(state[:, -2, :], down, up))
    state = state.at[:, -1, :].set(exchange(state[:, 1, :], up, down))
    state = state.at[:, :, 0].set(exchange(state[:, :, -2], right, left))
    return state.at[:, :, -1].set(exchange(state[:, :, 1], left, right))


def _advance(state: Any) -> Any:
    import jax.numpy as jnp

    above, below = state[:, :-2, 1:-1], state[:, 2:, 1:-1]
    left, right = state[:, 1:-1, :-2], state[:, 1:-1, 2:]
    down, across = below - above, right - left
    slopes = jnp.stack([across[1] + down[2], across[0], down[0]])
    inner = (above + below + left + right) / 4 - _COURANT / 2 * slopes
    return state.at[:, 1:-1, 1:-1].set(inner)


class WaterCase:
    """A grid that is divided over the ranks, with the same waves for every contender."""

    dtype_name = "float32"

    def __init__(self, field: Field, cells: int = CELLS) -> None:
        self.tiles = Tiles(field.rank, field.size)
        self._cells, self._grid = cells, (self.tiles.rows * cells, self.tiles.columns * cells)
        shape = (3, *self._grid)
        self.whole = np.random.default_rng(1).standard_normal(shape, np.float32)
        self.nbytes = 4 * 3 * cells * cells

    def start(self) -> Array:
        """Return this rank's tile, with zeros around it."""
        return _framed(self._own(self.whole))

    def _own(self, whole: Array) -> Array:
        row, column = (
            slice(place * self._cells, (place + 1) * self._cells)
            for place in (self.tiles.row, self.tiles.column)
        )
        return whole[:, row, column]

    @cached_property
    def _expected(self) -> Array:
        """This rank's tile as one process with the whole grid has it."""
        import jax

        program = jax.jit(lambda state: steps(state, Tiles(0, 1), lambda x, *_: x))
        return self._own(_inner(as_numpy(program(_framed(self.whole)))))

    def verify(self, framework: str, answer: Callable[[], Array]) -> str:
        """Return what is wrong with an answer on this rank, or an empty string."""
        furthest = float(np.abs(_inner(answer()) - self._expected).max())
        if furthest <= _TOLERANCE:
            return ""
        return f"after {STEPS} steps a cell is {furthest:.1e} from that of one process"


def water(key: str, field: Field, case: WaterCase, framework: str) -> Calls:
    """Return the calls of one compiled program, or raise `UnsupportedError`."""
    import jax
    import jax.numpy as jnp

    exchange = _by_mpi4jax(field) if key == "mpi4jax" else _by_arraycomm(field)
    program = jax.jit(lambda state: steps(state, case.tiles, exchange))
    state = jnp.array(case.start())
    return lambda: program(state).block_until_ready(), lambda: as_numpy(program(state))


def _by_arraycomm(field: Field) -> Exchange:
    from arraycomm.adapters.jax import sendrecv

    return lambda x, dest, source: sendrecv(x, dest, source, comm=field.comm)


def _by_mpi4jax(field: Field) -> Exchange:
    sendrecv = import_mpi4jax().sendrecv
    return lambda x, dest, source: sendrecv(x, x, source, dest, comm=field.mpi)


def _framed(tiles: Array) -> Array:
    return np.pad(tiles, [(0, 0), (1, 1), (1, 1)])


def _inner(state: Array) -> Array:
    return state[:, 1:-1, 1:-1]


WAYS: Final = {key: partial(water, key) for key in ("jit", "mpi4jax")}
