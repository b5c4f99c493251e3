"""Solve the shallow-water equations with JAX: two currents break up into eddies, on any number of ranks.

    python shallow_water.py                # one process; needs no MPI
    arraycomm run -n 4 shallow_water.py    # four, of which each has a quarter of the basin

Each rank has a rectangle of the basin. A step takes three rows or columns of cells from each of its four neighbours. All
steps between two lines of output are one compiled program. `--picture eddies.png` draws the vorticity.

The basin is periodic in both directions, and turns. Depth h and velocity (u, v) are on a C-grid:

    ∂h/∂t = -∇·(h u),    ∂u/∂t = -(f + ζ)/h k × (h u) - ∇(g h + u²/2),    ζ = k·∇×u

in the form of Sadourny (J. Atmos. Sci. 32, 1975, 680-689) that conserves the mass and, but for the error of the
time steps, the energy.
"""

import argparse
import struct
import time
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

import arraycomm as ac
from arraycomm.adapters.jax import allreduce, sendrecv

LENGTH = 1e6  # of the basin, which is square, in metres
DEPTH = 30.0  # at rest, in metres
GRAVITY = 9.81
TURN = 1e-4  # the Coriolis parameter, f
CURRENT = 3.0  # the speed of the two currents, and their half width
WIDTH = 3e4
DAY = 86400.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=128, help="cells along each side of the basin")
    parser.add_argument("--days", type=float, default=6.0)
    parser.add_argument("--friction", type=float, default=150.0, help="in square metres a second")
    parser.add_argument("--lines", type=int, default=6, help="lines of output")
    parser.add_argument("--picture", type=Path, help="where to draw the vorticity, as PNG")
    return parser.parse_args(arguments)


# The ranks' parts of the basin


class Part(NamedTuple):
    """The cells of a rank, and its neighbours, of which each may be any rank, also itself."""

    rows: range
    columns: range
    north: int
    south: int
    east: int
    west: int


def part_of(rank: int, size: int, cells: int) -> Part:
    """Return the part of a rank if the basin is cut into rows and columns of rectangles."""
    down = max(n for n in range(1, size + 1) if size % n == 0 and n * n <= size)
    across = size // down
    row, column = divmod(rank, across)

    def rank_at(row: int, column: int) -> int:
        return row % down * across + column % across

    return Part(
        rows=range(row * cells // down, (row + 1) * cells // down),
        columns=range(column * cells // across, (column + 1) * cells // across),
        north=rank_at(row + 1, column),
        south=rank_at(row - 1, column),
        east=rank_at(row, column + 1),
        west=rank_at(row, column - 1),
    )


def with_halo(fields: jax.Array, width: int, part: Part, comm: ac.Communicator) -> jax.Array:
    """Return the fields with a frame of the neighbours' cells around this rank's."""
    # The rows that go north and south have the columns from west and east at their ends: the corners.
    for axis, before, after in ((2, part.west, part.east), (1, part.south, part.north)):
        first = lax.slice_in_dim(fields, 0, width, axis=axis)
        last = lax.slice_in_dim(fields, -width, None, axis=axis)
        from_before = sendrecv(last, dest=after, source=before, comm=comm)
        from_after = sendrecv(first, dest=before, source=after, comm=comm)
        fields = jnp.concatenate([from_before, fields, from_after], axis)
    return fields


# The equations. An array has a row for each y and a column for each x. With the depth in the middle of a cell, u is
# in the middle of its eastern side, v of its northern side, and the vorticity at the corner between these.


def east(a: jax.Array) -> jax.Array:
    """Return the eastern of each two neighbours: all but the first column."""
    return a[..., 1:]


def west(a: jax.Array) -> jax.Array:
    return a[..., :-1]


def north(a: jax.Array) -> jax.Array:
    return a[..., 1:, :]


def south(a: jax.Array) -> jax.Array:
    return a[..., :-1, :]


def within(a: jax.Array) -> jax.Array:
    """Return an array without its outermost cells."""
    return a[..., 1:-1, 1:-1]


def vorticity(u: jax.Array, v: jax.Array, spacing: float) -> jax.Array:
    """Return the vorticity at the corners between cells."""
    return (south(east(v) - west(v)) - west(north(u) - south(u))) / spacing


def diffusion(a: jax.Array, spacing: float) -> jax.Array:
    row, column = a[1:-1], a[:, 1:-1]
    return (row[:, 2:] + row[:, :-2] + column[2:] + column[:-2] - 4 * within(a)) / spacing**2


def tendency(fields: jax.Array, spacing: float, friction: float) -> jax.Array:
    """Return the time derivatives of (h, u, v), for all cells but the outermost."""
    h, u, v = fields
    along, up = west(u) * (west(h) + east(h)) / 2, south(v) * (south(h) + north(h)) / 2
    depth = (south(west(h)) + south(east(h)) + north(west(h)) + north(east(h))) / 4
    potential = (TURN + vorticity(u, v, spacing)) / depth
    squares = north(west(u) ** 2 + east(u) ** 2) + east(south(v) ** 2 + north(v) ** 2)
    energy = GRAVITY * north(east(h)) + squares / 4

    turned_up = east(potential * (west(up) + east(up)) / 2)
    turned_along = north(potential * (south(along) + north(along)) / 2)
    h_slope = (west(along) - east(along))[1:-1] + (south(up) - north(up))[:, 1:-1]
    u_slope = (south(turned_up) + north(turned_up)) / 2
    v_slope = -(west(turned_along) + east(turned_along)) / 2
    u_slope -= south(east(energy) - west(energy)) / spacing
    v_slope -= west(north(energy) - south(energy)) / spacing
    return jnp.stack(
        [
            h_slope / spacing,
            u_slope + friction * diffusion(u, spacing),
            v_slope + friction * diffusion(v, spacing),
        ]
    )


class Basin(NamedTuple):
    """What a program is compiled for."""

    comm: ac.Communicator
    part: Part
    spacing: float
    seconds: float
    friction: float


def advance(fields: jax.Array, basin: Basin) -> jax.Array:
    """Make a step of the third-order Runge-Kutta method of Shu and Osher."""

    def forward(fields: jax.Array) -> jax.Array:
        return within(fields) + basin.seconds * tendency(fields, basin.spacing, basin.friction)

    # Each of the three stages has one frame less than the one before, so the ranks exchange once a step.
    now = with_halo(fields, 3, basin.part, basin.comm)
    first = forward(now)
    second = 0.75 * within(within(now)) + 0.25 * forward(first)
    return (fields + 2 * forward(second)) / 3


@partial(jax.jit, static_argnames="basin")
def totals(fields: jax.Array, basin: Basin) -> jax.Array:
    """Return the mass and the energy of the whole basin, divided by density and area of a cell."""
    h, u, v = with_halo(fields, 1, basin.part, basin.comm)
    along = east(west(u) ** 2 * (west(h) + east(h)))[1:-1]
    up = north(south(v) ** 2 * (south(h) + north(h)))[:, 1:-1]
    h = within(h)
    cells = jnp.stack([h, GRAVITY * h**2 / 2 + (along + up) / 4])
    return allreduce(cells.sum(axis=(1, 2)), comm=basin.comm)


@partial(jax.jit, static_argnames=("steps", "basin"))
def simulate(fields: jax.Array, steps: int, basin: Basin) -> tuple[jax.Array, jax.Array]:
    """Return the fields after some steps, and the totals: one program, with all its messages."""
    fields, _ = lax.scan(lambda now, _: (advance(now, basin), None), fields, length=steps)
    return fields, totals(fields, basin)


def initial_fields(part: Part, spacing: float) -> jax.Array:
    """Return two opposite currents, which the slope of the surface balances, with waves across them."""
    y = (np.array(part.rows)[:, None] + 0.5) * spacing
    x = (np.array(part.columns)[None, :] + 0.5) * spacing
    lower, upper = (y - LENGTH / 4) / WIDTH, (y - 3 * LENGTH / 4) / WIDTH
    u = CURRENT * (1 / np.cosh(lower) ** 2 - 1 / np.cosh(upper) ** 2)
    slope = TURN * CURRENT * WIDTH / GRAVITY * (np.tanh(lower) - np.tanh(upper))
    waves = sum(np.cos(2 * np.pi * (k * x + y) / LENGTH) for k in (2, 3, 5))
    return jnp.stack(np.broadcast_arrays(DEPTH - slope, u, 0.05 * waves))


# The picture


@partial(jax.jit, static_argnames="basin")
def vorticity_of(fields: jax.Array, basin: Basin) -> jax.Array:
    _, u, v = with_halo(fields, 1, basin.part, basin.comm)
    return north(east(vorticity(u, v, basin.spacing)))


def gathered(field: jax.Array, part: Part, cells: int, comm: ac.Communicator) -> Any:
    """Return a field of the whole basin on rank 0, and None on the others."""
    pieces = comm.gather_object((part.rows, part.columns, np.asarray(field)))
    if pieces is None:
        return None
    whole = np.empty((cells, cells))
    for rows, columns, values in pieces:
        whole[np.ix_(rows, columns)] = values
    return whole


def draw(path: Path, field: NDArray[Any]) -> None:
    """Write an array as a picture: negative numbers blue, positive ones red, north at the top."""
    shade = np.clip(field[::-1, :, None] / np.abs(field).max(), -1, 1)
    ends = np.where(shade < 0, [0.10, 0.30, 0.65], [0.75, 0.12, 0.12])
    pixels = np.uint8(255 * (1 - np.abs(shade) ** 0.7 * (1 - ends)))
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 2, 0, 0, 0)
    chunks = {b"IHDR": header, b"IDAT": zlib.compress(rows, 9), b"IEND": b""}
    with path.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for name, data in chunks.items():
            check = struct.pack(">I", zlib.crc32(name + data))
            file.write(struct.pack(">I", len(data)) + name + data + check)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    jax.config.update("jax_enable_x64", True)

    # Every rank runs this whole program. It is one of several under `arraycomm run`, and otherwise the only one.
    comm = ac.init()
    if options.cells < 3 * comm.size:
        raise SystemExit(f"--cells must be at least 3 for each of the {comm.size} ranks")
    part = part_of(comm.rank, comm.size, options.cells)
    spacing = LENGTH / options.cells
    # Three quarters of what is stable for the fastest waves.
    longest = 0.45 * spacing / np.sqrt(GRAVITY * DEPTH)
    seconds = options.days * DAY / options.lines
    steps = int(np.ceil(seconds / longest))
    basin = Basin(comm, part, spacing, seconds / steps, options.friction)

    fields = initial_fields(part, spacing)
    before = np.asarray(totals(fields, basin))
    program = simulate.lower(fields, steps, basin).compile()
    for line in range(1, options.lines + 1):
        began = time.perf_counter()
        fields, now = program(fields)
        change = np.asarray(now) / before - 1
        rate = steps / (time.perf_counter() - began)
        ac.println(
            f"day {line * options.days / options.lines:g}: mass changed by {change[0]:.1e}, "
            f"energy by {change[1]:.1e}; {rate:.0f} steps/s",
            ranks=0,
        )

    if options.picture:
        whole = gathered(vorticity_of(fields, basin), part, options.cells, comm)
        if comm.rank == 0:
            draw(options.picture, whole)


if __name__ == "__main__":
    main()
