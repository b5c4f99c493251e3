"""Reductions of many ranks by few messages: slices go along the rows of a grid of ranks, and then along its columns.

Slice s of p, of which rank (s % rows) * columns + s // rows folds the elements of all ranks, so that the slices that
a column folds lie side by side. A rank sends each rank of its row those of that rank's column, and gets as much
from each. Then it sends each rank of its column the slice which that one folds, of all ranks of its own row: so they
arrive in rank order. The results go back by columns and rows. This takes 2 (rows + columns) messages in place of 2 p,
and every element goes between ranks once more. Two chunks are under way: one moves while the other one is sorted or
folded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import Final

from arraycomm._collectives.blocks import blocks_of, raw
from arraycomm._transports.base import Blocks, Flat, Steps, Transport

# The most bytes of a chunk.
CHUNK_BYTES: Final = 128 << 20
# The bytes that a link takes in the latency of a message, while a rank sorts a byte, and while it sorts and folds it.
_MESSAGE: Final = 32 << 10
_SORTED: Final = 3
_WORKED: Final = 5


def is_preferred(transport: Transport, nbytes: int, chained: int = 0) -> bool:
    """Tell whether so many bytes are better reduced over the grid of a transport; see `is_quicker`."""
    grid = transport.grid
    return grid is not None and is_quicker(nbytes, grid.rows, grid.columns, grid.lanes, chained)


def is_quicker(nbytes: int, rows: int, columns: int, lanes: int, chained: int = 0) -> bool:
    """Tell whether a grid is quicker than slices, or than a chain if `chained` is not 0.

    `lanes` ranks of a node share its link, over which each element goes once more than by slices. Along a chain
    each goes twice; the link takes `chained` bytes in the time in which a chunk goes from node to node.
    """
    if chained:
        messages = 2 * (rows + columns) * _MESSAGE
        return nbytes * (3 * lanes - 2 + _SORTED) + messages < chained
    fewer = 2 * (rows * columns - rows - columns + 1)
    return nbytes * (lanes + _SORTED) < fewer * _MESSAGE


def chunk_bytes(nbytes: int, rows: int, columns: int) -> int:
    """Return the bytes of a chunk of so many bytes in all: there are one, or pairs of equally long ones.

    Half of the work hides behind messages if there are two chunks, which have the latencies of twice as many messages.
    """
    if nbytes <= CHUNK_BYTES and nbytes * _WORKED < 4 * (rows + columns) * _MESSAGE:
        return nbytes
    return -(-nbytes // (2 * max(-(-nbytes // (2 * CHUNK_BYTES)), 1)))


def scratch_bytes(nbytes: int, size: int, itemsize: int = 16) -> int:
    """Return the bytes of scratch memory that suffice for so many bytes of elements of this size."""
    return 2 * (min(nbytes, 2 * CHUNK_BYTES) + 2 * size * itemsize)


def allreduce(transport: Transport, source: Flat, target: Flat, op: str) -> Steps:
    """Fold all ranks' `source` into every rank's `target`; the two may be the same memory."""
    grid = transport.grid
    assert grid is not None
    rows, columns, itemsize = grid.rows, grid.columns, source.itemsize
    step = -(-chunk_bytes(source.nbytes, rows, columns) // itemsize)
    parts = [slice(start, start + step) for start in range(0, len(source), step)]
    under_way = min(len(parts), 2)
    memory: Flat = transport.take(
        under_way * 2 * rows * columns * -(-step // (rows * columns)), source.dtype
    )
    yield from _in_turns(
        [
            _reduce_chunks(transport, source, target, op, parts[number::2], own)
            for number, own in enumerate(memory.reshape(under_way, -1))
        ]
    )


def _in_turns(programs: Iterable[Steps]) -> Steps:
    """Let each program go on in its turn, to where it waits for the next thing, when what it waited for has come."""
    waiting = [(program, handle) for program in programs for handle in islice(program, 1)]
    while waiting:
        program, handle = waiting.pop(0)
        yield handle
        waiting += [(program, further) for further in islice(program, 1)]


def _reduce_chunks(
    transport: Transport,
    source: Flat,
    target: Flat,
    op: str,
    parts: Iterable[slice],
    memory: Flat,
) -> Steps:
    for part in parts:
        yield from _reduce_chunk(transport, source[part], target[part], op, memory)


def _reduce_chunk(transport: Transport, source: Flat, target: Flat, op: str, memory: Flat) -> Steps:
    grid = transport.grid
    assert grid is not None
    rows, columns = grid.rows, grid.columns
    row, column = divmod(grid.rank, columns)
    count, dtype = len(source), source.dtype
    longest = -(-count // (rows * columns))
    # Where what each column folds begins, and each slice of this rank's column: the last ones are short, or empty.
    bounds = [min(rows * longest * number, count) for number in range(columns + 1)]
    ends = [
        min(bounds[column] + longest * number, bounds[column + 1]) for number in range(rows + 1)
    ]
    come, sent = memory[: 2 * rows * columns * longest].reshape(2, -1)

    # From each rank of the row, all slices of this column; then to each rank of the column, its slice of this row.
    brought = [ends[-1] - ends[0]] * columns
    yield grid.row.alltoall(blocks_of(source, bounds), _spaced(come, rows * longest, brought))
    by_slice = sent.reshape(rows, columns, longest)
    by_slice[...] = come.reshape(columns, rows, longest).transpose(1, 0, 2)
    lengths = [columns * longest * (end > start) for start, end in pairwise(ends)]
    came = _spaced(come, columns * longest, [lengths[row]] * rows)
    yield grid.column.alltoall(_spaced(sent, columns * longest, lengths), came)

    if lengths[row]:
        own, folded = slice(*ends[row : row + 2]), sent[:longest]
        transport.fold(op, dtype, come.reshape(-1, longest), folded)
        target[own] = folded[: own.stop - own.start]
    yield grid.column.allgather(blocks_of(target, ends))
    yield grid.row.allgather(blocks_of(target, bounds))


def _spaced(array: Flat, apart: int, counts: Sequence[int]) -> Blocks:
    """Return so many elements for each rank, which begin so far apart, as blocks of bytes."""
    itemsize = array.itemsize
    offsets = range(0, len(counts) * apart * itemsize, apart * itemsize)
    return Blocks(raw(array), [count * itemsize for count in counts], offsets)
