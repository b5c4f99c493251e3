# ruff: noqa: RUF002 - formulas have Greek letters
"""How long does a reduction take on p ranks, as closed formulas?

A message of n bytes takes α + n β (Hockney 1994), a fold γ for each byte that is added. Movements are
lists of `Rounds`: so many messages, one after another, of so many bytes, while `leaving` ranks of a
node send to other nodes and share the node's link. What Python does for each rank is counted too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final, NamedTuple

from arraycomm._collectives import exchange, grid
from arraycomm._collectives.chain import PASSED_BYTES
from arraycomm._collectives.chunks import overlapping_chunk
from arraycomm._collectives.segment import ROWS
from arraycomm._collectives.selection import CHUNK_BYTES, choose
from arraycomm._transports.base import DIRECT_RANKS
from arraycomm._transports.control import PAYLOAD, message_slot, shared_slot
from arraycomm._transports.rank_grid import LEAST_RANKS, sides
from arraycomm._transports.routes import parts_of
from docs.studies.scaling.chained import chunks as chained_chunks
from docs.studies.scaling.chained import copies as chained_copies
from docs.studies.scaling.chained import in_chain, is_chained
from docs.studies.scaling.chained import shares as chained_shares

ELEMENT: Final = 4  # float32
# Where MPICH 5.0.2 leaves recursive doubling (powers of two) and Bruck's algorithm (others) for a
# ring in MPI_Iallgather and MPI_Iallgatherv, by the bytes that every rank has in the end.
RING_FROM: Final = 524_288
RING_FROM_ODD: Final = 81_920
# The most bytes of a message between two ranks that exchange everything; see `arraycomm._transports.mpi_pieces`.
PIECE: Final = 64_000


@dataclass(frozen=True, slots=True)
class Machine:
    """What things take, in seconds.

    Attributes
    ----------
    latency, per_byte
        α and β between nodes.
    near_latency, near_byte
        The same within a node.
    seen, seen_byte
        Until others see a slot in shared memory, and for each byte of another rank's that is read.
    fold_byte
        γ, for each byte that is added to others.
    copy_byte
        For each byte that is copied within memory.
    call, step, begin, message, slot, row, part
        What Python and MPI do on a rank: λ for each call, for each further step of the control channel,
        for each movement that is started, for each message that is begun and waited for, σ for each slot that is
        read, φ for each row that is folded with the header, and ψ for each rank's part of a chunk that is moved and
        folded.
    turn, lane, share
        The same in a turn of a chain, and in it for each rank of the node, and for each further share of a chunk.
    entry, piece
        The same over a grid, for each rank of the row and of the column, and for each row that is folded.
    per_node
        Ranks on a node.
    """

    latency: float
    per_byte: float
    near_latency: float
    near_byte: float
    fold_byte: float
    seen: float = 0.0
    seen_byte: float = 0.0
    copy_byte: float = 0.0
    call: float = 0.0
    step: float = 0.0
    begin: float = 0.0
    message: float = 0.0
    slot: float = 0.0
    row: float = 0.0
    part: float = 0.0
    turn: float = 0.0
    lane: float = 0.0
    share: float = 0.0
    entry: float = 0.0
    piece: float = 0.0
    per_node: int = 1


class Rounds(NamedTuple):
    """`count` messages of `nbytes` one after another; `leaving` ranks of a node send to others."""

    count: int
    nbytes: float
    leaving: float


Movement = list[Rounds]


def seconds(movement: Sequence[Rounds], machine: Machine) -> float:
    """Return how long a movement takes."""
    return sum(rounds.count * _message(rounds, machine) for rounds in movement)


def _message(rounds: Rounds, machine: Machine) -> float:
    near = machine.near_latency + rounds.nbytes * machine.near_byte
    far = machine.latency + rounds.leaving * rounds.nbytes * machine.per_byte
    if not rounds.leaving:
        return near
    return far if rounds.leaving >= machine.per_node else max(near, far)


# Movements: `nbytes` is what a rank has in the end, or at the start; the same on every rank


def exponent(size: int) -> int:
    """Return the least k with 2 ** k >= size."""
    return (size - 1).bit_length()


def leaving(distance: int, size: int, per_node: int) -> int:
    """How many ranks of a node send to another node when each sends so many ranks further."""
    return min(distance, size - distance, per_node) if size > per_node else 0


def pairwise(size: int, nbytes: float, per_node: int = 1) -> Movement:
    """All to all, one partner at a time: (p − 1) α + n β (p − 1) / p.

    With s ranks a node, p − s of the p − 1 partners of a rank are on other nodes.
    """
    if size <= per_node:
        return [Rounds(size - 1, nbytes / size, 0)]
    shared = (size - per_node) * per_node / (size - 1)
    return [Rounds(size - 1, nbytes / size, shared)]


def ring(size: int, nbytes: float, per_node: int = 1) -> Movement:
    """Allgather from neighbour to neighbour: (p − 1) α + n β (p − 1) / p."""
    return [Rounds(size - 1, nbytes / size, int(size > per_node))]


def bruck(size: int, nbytes: float, per_node: int = 1) -> Movement:
    """Allgather in which what is known doubles: ⌈log₂ p⌉ α + n β (p − 1) / p."""
    return [
        Rounds(1, min(d, size - d) * nbytes / size, leaving(d, size, per_node))
        for d in _distances(size)
    ]


def bruck_alltoall(size: int, nbytes: float, per_node: int = 1) -> Movement:
    """All to all through others, about half of it in each round: ⌈log₂ p⌉ (α + n β / 2)."""
    return [
        Rounds(1, _with_bit(d, size) * nbytes / size, leaving(d, size, per_node))
        for d in _distances(size)
    ]


def doubling(size: int, nbytes: float, per_node: int = 1) -> Movement:
    """Allreduce of everything in each round: log₂ p (α + n β), and two rounds more for other p."""
    whole = [
        Rounds(1, nbytes, _crossing(1 << k, size, per_node)) for k in range(size.bit_length() - 1)
    ]
    return _with_odd_ranks(whole, size, nbytes, per_node)


def rabenseifner(size: int, nbytes: float, per_node: int = 1) -> Movement:
    """Reduce-scatter by halving and allgather by doubling: 2 log₂ p α + 2 n β (p − 1) / p."""
    halves = [
        Rounds(1, nbytes / (2 << k), _crossing(1 << k, size, per_node))
        for k in range(size.bit_length() - 1)
    ]
    return _with_odd_ranks([*halves, *reversed(halves)], size, nbytes, per_node)


def spread(size: int, nbytes: float, per_node: int = 1) -> Movement:
    """Allgather by messages of each rank: (p − 1) α + n β (p − 1) / p.

    A rank sends its block once to each other node, and passes on in its node what it gets so.
    """
    here = min(per_node, size)
    nodes = size // here
    return [Rounds(nodes - 1, nbytes / size, here), Rounds(nodes * (here - 1), nbytes / size, 0)]


def allgather_between(size: int, nbytes: float, per_node: int = 1) -> Movement:
    """Allgather between nodes: by messages of their own if the ranks are few, or by the MPI."""
    return (spread if size <= DIRECT_RANKS else mpich_allgather)(size, nbytes, per_node)


def mpich_allgather(size: int, nbytes: float, per_node: int = 1) -> Movement:
    """Allgather as MPICH 5.0.2 chooses it; recursive doubling costs what Bruck's does."""
    return (bruck if mpich_doubles(size, nbytes) else ring)(size, nbytes, per_node)


def mpich_doubles(size: int, nbytes: float) -> bool:
    """Tell whether MPICH 5.0.2 gathers so many bytes in few rounds, not round a ring."""
    even = size & (size - 1) == 0
    return nbytes < (RING_FROM if even else RING_FROM_ODD)


def _distances(size: int) -> list[int]:
    return [1 << k for k in range(exponent(size))]


def _with_bit(bit: int, size: int) -> int:
    """How many of the numbers below `size` have this bit."""
    whole, rest = divmod(size, 2 * bit)
    return whole * bit + max(0, rest - bit)


def _crossing(distance: int, size: int, per_node: int) -> int:
    """How many ranks of a node exchange with another node, at a power of two as distance.

    With several ranks a node this holds for powers of two; otherwise pairs and nodes are out of line.
    """
    return per_node if size > per_node and distance >= per_node else 0


def _with_odd_ranks(movement: Movement, size: int, nbytes: float, per_node: int) -> Movement:
    """Ranks beyond a power of two hand their array to a neighbour, and get the result from it."""
    if size & (size - 1) == 0:
        return movement
    aside = Rounds(1, nbytes, per_node % 2 if size > per_node else 0)
    return [aside, *movement, aside]


# What the library's own calls move


def messages(movement: Sequence[Rounds]) -> int:
    """Return how many messages a rank sends."""
    return sum(rounds.count for rounds in movement)


def sent_bytes(movement: Sequence[Rounds]) -> float:
    """Return how many bytes a rank sends."""
    return sum(rounds.count * rounds.nbytes for rounds in movement)


def header_movement(size: int, shared: bool, per_node: int = 1, payload_bytes: int = 0) -> Movement:
    """Return the messages of a header, of the first rank of a node: none in shared memory.

    Ranks that agree have one header in common. Without shared memory, each rank of a single node counts as a node.
    """
    if shared:
        return []
    alone = size <= per_node
    nodes = size if alone else -(-size // per_node)
    # Two ranks know how long their messages are.
    record = payload_bytes if nodes == size == 2 else _words(payload_bytes)
    rounds = bruck(nodes, record * size, per_node if alone else 1)
    return [moved._replace(nbytes=PAYLOAD + moved.nbytes) for moved in rounds]


def _words(nbytes: float) -> int:
    return 8 * ceil(nbytes / 8)


def _chunks(size: int, nbytes: float, per_node: int) -> Movement:
    if size <= per_node:
        cut, allgather = _cut(nbytes, CHUNK_BYTES), mpich_allgather
    else:
        cut, allgather = _overlapping_cut(size, nbytes), allgather_between
    return [
        rounds
        for chunk in cut
        for rounds in pairwise(size, chunk, per_node) + allgather(size, chunk, per_node)
    ]


def _overlapping_cut(size: int, nbytes: float, chunk: int | None = None) -> list[int]:
    return _cut(nbytes, overlapping_chunk(int(nbytes), size, chunk))


def _cut(nbytes: float, chunk: int) -> list[int]:
    whole, rest = divmod(int(nbytes), chunk)
    return [chunk] * whole + [rest] * bool(rest)


def _along_nodes(size: int, nbytes: float, per_node: int) -> Movement:
    """Each rank of a node between others sends its part of every total, and of every result."""
    totals, results = chained_copies(size, int(nbytes), per_node)
    shares = chained_shares(size, int(nbytes), per_node)
    of_node = [
        (Rounds(totals * shares, part / shares, per_node), Rounds(results, part, per_node))
        for part in (chunk / per_node for chunk in chained_chunks(size, int(nbytes), per_node))
    ]
    return [rounds for both in of_node for rounds in both if rounds.count]


def _exchanged(size: int, nbytes: float, per_node: int) -> Movement:
    """Two ranks send one another everything."""
    cut = exchanged_chunks(nbytes)
    return [Rounds(len(cut), cut[0], 1)]


def exchanged_chunks(nbytes: float) -> list[int]:
    """Return the bytes of each message that two ranks exchange."""
    chunk = exchange.chunk_bytes(int(nbytes), PIECE)
    return [chunk] * -(-int(nbytes) // chunk)


def _over_grid(size: int, nbytes: float, per_node: int) -> Movement:
    """The movements of all chunks."""
    return [
        rounds
        for chunk in grid_chunks(size, nbytes)
        for movement in _chunk_over_grid(size, chunk, per_node)
        for rounds in movement
    ]


def _chunk_over_grid(size: int, chunk: int, per_node: int) -> list[Movement]:
    """All to all along the rows and along the columns, and the results back; slices are equally long."""
    rows, columns = sides(size)
    crossing = per_node if size > per_node else 0
    back = mpich_allgather(rows, chunk / columns)
    return [
        pairwise(columns, chunk, per_node),
        [Rounds(rows - 1, chunk / rows, crossing)],
        [rounds._replace(leaving=crossing) for rounds in back],
        mpich_allgather(columns, chunk, per_node),
    ]


def grid_chunks(size: int, nbytes: float) -> list[int]:
    """Return the bytes of each chunk, in as many elements as make slices equally long."""
    whole = int(nbytes)
    step = -(-grid.chunk_bytes(whole, *sides(size)) // ELEMENT) * ELEMENT
    return [-(-chunk // (ELEMENT * size)) * ELEMENT * size for chunk in _cut(whole, step)]


def _no_messages(size: int, nbytes: float, per_node: int) -> Movement:
    return []


# For each algorithm that the library may choose: its messages, without those of the header.
MOVEMENTS: Final[dict[str, Callable[[int, float, int], Movement]]] = {
    "header": _no_messages,
    "steps": _no_messages,
    "slices": _chunks,
    "exchange": _exchanged,
    "chain": _along_nodes,
    "grid": _over_grid,
}


def broadcast(size: int, nbytes: float) -> Movement:
    """Broadcast in k pieces, one rank a node, until the last piece is everywhere.

    In a chain (p + k − 2) (α + n β / k). In a binary tree each rank sends every piece twice, and a piece is as late
    as it has gone to a second child: (2 k − 2 + about 2 log p) (α + n β / k).
    """
    pieces = parts_of(range(int(nbytes)), size)
    if _are_chained(size, len(pieces)):
        steps = size + len(pieces) - 2
    else:
        numbers = range(max(size // 2, 1), size + 1)
        steps = 2 * len(pieces) - 2 + max(n.bit_length() + n.bit_count() - 2 for n in numbers)
    return [Rounds(steps, nbytes / max(len(pieces), 1), 1)]


def sent_by_root(size: int, nbytes: float) -> Movement:
    """Return the messages of the rank that sends most in a broadcast, with one rank a node."""
    pieces = parts_of(range(int(nbytes)), size)
    copies = 1 if _are_chained(size, len(pieces)) else 2
    return [Rounds(copies * len(pieces), nbytes / len(pieces), 1)]


def scattered_and_gathered(size: int, nbytes: float) -> Movement:
    """Broadcast as MPI libraries send large arrays: parts by a tree, then a ring."""
    parts = [Rounds(1, nbytes / (2 << k), 1) for k in range(exponent(size))]
    return parts + ring(size, nbytes)


def _are_chained(size: int, pieces: int) -> bool:
    return size < pieces + size.bit_length()


# For each other collective: the messages of the rank that sends most, for `nbytes` a rank between nodes,
# up to one chunk. In `scatter`, `alltoall` and `reduce_scatter` these are the slices of all ranks together.
COLLECTIVES: Final[dict[str, Callable[[int, float], Movement]]] = {
    "barrier": lambda p, n: [],
    "bcast": sent_by_root,
    "bcast of 32 MiB": lambda p, n: sent_by_root(p, 32 << 20),
    "allgather": lambda p, n: allgather_between(p, n * p),
    "gather": lambda p, n: [Rounds(1, n, 1)],
    "scatter": lambda p, n: [Rounds(p - 1, n / p, 1)],
    "alltoall": pairwise,
    "reduce": lambda p, n: [*pairwise(p, n), Rounds(1, n / p, 1)],
    "reduce_scatter": pairwise,
    "scan": lambda p, n: 2 * pairwise(p, n),
}


# Headers


def header_in_shared_memory(size: int, machine: Machine) -> float:
    """The header in shared memory: λ + p σ, and the time until others see a slot."""
    return machine.call + machine.seen + size * machine.slot


def header_of_messages(size: int, machine: Machine) -> float:
    """The header between nodes, of ranks that agree: λ + ⌈log₂ N⌉ (α + 128 β).

    The first rank of a node waits until it sees the slots of its node, and the others until they see all.
    """
    moved = _seconds_of_header(size, machine, 0)
    seen = 2 * machine.seen if _are_shared(size, machine) else 0.0
    return machine.call + moved + seen


def _seconds_of_header(size: int, machine: Machine, payload_bytes: float) -> float:
    """One rank of each node sends."""
    movement = header_movement(size, False, machine.per_node, ceil(payload_bytes))
    return seconds(movement, replace(machine, per_node=1))


def _are_shared(size: int, machine: Machine) -> bool:
    """Tell whether several ranks of a node share what the first of them gets from other nodes."""
    return 1 < machine.per_node < size


def header(size: int, machine: Machine, shared: bool) -> float:
    """Return the seconds of the header as it is built."""
    return (header_in_shared_memory if shared else header_of_messages)(size, machine)


# Reductions


def payload(size: int, shared: bool) -> int:
    """What fits in a slot beside the header."""
    return (shared_slot if shared else message_slot)(size) - PAYLOAD


def chosen(size: int, nbytes: int, shared: bool, per_node: int = 1) -> str:
    """Return the algorithm that arraycomm chooses; see `arraycomm._collectives.selection.choose`."""
    algorithm = str(choose(nbytes, size, payload(size, shared), shared))
    if algorithm != "slices" or shared:
        return algorithm
    nodes = size // per_node
    if size == 2:
        return "exchange"
    if is_chained(size, nbytes, per_node) and not _has_grid(size, nbytes, per_node, nodes):
        return "chain"
    return "grid" if _has_grid(size, nbytes, per_node) else algorithm


def _has_grid(size: int, nbytes: int, per_node: int, nodes: int = 0) -> bool:
    chained = nodes * PASSED_BYTES
    return size >= LEAST_RANKS and grid.is_quicker(nbytes, *sides(size), per_node, chained)


def allreduce(size: int, nbytes: int, machine: Machine, *, shared: bool) -> float:
    """Return the seconds of arraycomm's allreduce: its header, and the algorithm it chooses."""
    algorithm = chosen(size, nbytes, shared, machine.per_node)
    return header(size, machine, shared) + ALGORITHMS[algorithm](size, nbytes, machine, shared)


def in_header(size: int, nbytes: float, machine: Machine, shared: bool) -> float:
    """What the header brought along is folded: p φ + (p − 1) n γ, and (p − 1) n β between nodes."""
    moved = 0.0
    if shared or _are_shared(size, machine):
        moved = (size - 1) * nbytes * machine.seen_byte
    if not shared:
        bare = _seconds_of_header(size, machine, 0)
        moved += _seconds_of_header(size, machine, nbytes) - bare
    return moved + _fold_rows(size, nbytes, machine)


def in_steps(size: int, nbytes: float, machine: Machine, shared: bool) -> float:
    """A slot's worth after another, each as with the header."""
    steps = ceil(nbytes / payload(size, shared))
    each = machine.step + machine.seen + size * (machine.slot + machine.row)
    read = (size - 1) * nbytes * machine.seen_byte
    return steps * each + read + _fold_all(size, nbytes, machine)


def in_slices(
    size: int, nbytes: float, machine: Machine, shared: bool = False, chunk: int | None = None
) -> float:
    """Chunk by chunk: pairwise all to all, fold of a slice, allgather of the slices.

    In shared memory one chunk comes after another. Between nodes a slice is folded while others are under way.
    Chunks have the library's length if no other one is passed.
    """
    if shared:
        cut = _cut(nbytes, CHUNK_BYTES)
        return sum(_slices(size, n, machine, pairwise, mpich_allgather) for n in cut)
    cut, per_node = _overlapping_cut(size, nbytes, chunk), machine.per_node
    scattered = [seconds(pairwise(size, n, per_node), machine) for n in cut]
    folded = [_fold_slice(size, n, machine) for n in cut]
    gathered = [seconds(allgather_between(size, n, per_node), machine) for n in cut]
    local = 2 * machine.begin + size * machine.part
    return _overlapping(scattered, folded, gathered) + len(cut) * local


def _overlapping(
    scattered: Sequence[float], folded: Sequence[float], gathered: Sequence[float]
) -> float:
    """Return when all chunks are done, if a rank begins what it can and messages go one by one.

    The slices of the next chunk are on their way before those of a chunk are folded, as in the library.
    """
    network = came = scattered[0]
    clock = done = 0.0
    for number, fold in enumerate(folded):
        after = came
        if number + 1 < len(folded):
            network = after = max(network, clock) + scattered[number + 1]
        # Gatherings do not overlap with one another.
        clock = max(max(clock, came) + fold, done)
        network = done = max(network, clock) + gathered[number]
        came = after
    return done


def in_exchange(size: int, nbytes: float, machine: Machine, shared: bool = False) -> float:
    """Two ranks send one another chunk by chunk, of which a few are under way, and fold what has come.

    Each chunk is copied in, folded and copied out.
    """
    cut = exchanged_chunks(nbytes)
    begun = 2 * machine.message + 2 * machine.copy_byte * cut[0]
    sent, folded = 0.0, [0.0] * ROWS
    for chunk in cut:
        sent = max(sent, folded[-ROWS]) + begun + machine.latency + chunk * machine.per_byte
        folded.append(max(folded[-1], sent) + chunk * machine.fold_byte)
    return folded[-1]


def in_grid(size: int, nbytes: float, machine: Machine, shared: bool = False) -> float:
    """Slices along rows, sorted, and along columns; a fold; and the results back: two chunks in turns."""
    lengths = sides(size)
    # Of each movement: what Python does before it, along columns or rows.
    python = [machine.begin + lengths[by] * machine.entry / 2 for by in (1, 0, 0, 1)]
    # The even chunks, and the odd ones: what a rank does before each movement, and how long it takes.
    programs: list[deque[tuple[float, float]]] = [deque(), deque()]
    for number, chunk in enumerate(grid_chunks(size, nbytes)):
        movements = _chunk_over_grid(size, chunk, machine.per_node)
        fold = _fold_slice(size, chunk, machine) + size * machine.piece
        work = 0.0, chunk * machine.copy_byte, fold, 0.0
        programs[number % 2] += [
            (before + begins, seconds(movement, machine))
            for before, begins, movement in zip(work, python, movements, strict=True)
        ]
    network = clock = 0.0
    waiting: deque[tuple[deque[tuple[float, float]], float]] = deque((p, 0.0) for p in programs)
    while waiting:
        program, moved = waiting.popleft()
        clock = max(clock, moved)
        if program:
            before, moving = program.popleft()
            clock += before
            network = max(network, clock) + moving
            waiting.append((program, network))
    return clock


def one_chunk(size: int, nbytes: float, machine: Machine) -> float:
    """One chunk of `in_slices` between nodes, of any length."""
    return _slices(size, nbytes, machine, pairwise, allgather_between)


def in_rank_order(size: int, nbytes: float, machine: Machine) -> float:
    """The fastest algorithm in rank order, without chunks; not built.

    Slices of the whole array by either all to all and either allgather, or, for few bytes,
    everything gathered by all. Slices have an element at least.
    """
    whole = max(nbytes, ELEMENT * size)
    sliced = min(
        _slices(size, whole, machine, alltoall, allgather)
        for alltoall in (pairwise, bruck_alltoall)
        for allgather in (ring, bruck)
    )
    gathered = seconds(bruck(size, nbytes * size, machine.per_node), machine)
    return min(sliced, gathered + _fold_rows(size, nbytes, machine))


def by_doubling(size: int, nbytes: float, machine: Machine) -> float:
    """Recursive doubling as in MPI libraries: the order of the fold is not that of the ranks."""
    folds = size.bit_length() - 1 + (size & (size - 1) != 0)
    moved = seconds(doubling(size, nbytes, machine.per_node), machine)
    return moved + folds * nbytes * machine.fold_byte


def by_halving(size: int, nbytes: float, machine: Machine) -> float:
    """Rabenseifner's algorithm as in MPI libraries; the order of the fold is not that of the ranks."""
    even = 1 << (size.bit_length() - 1)
    folded = nbytes * ((even - 1) / even + (even != size))
    moved = seconds(rabenseifner(size, nbytes, machine.per_node), machine)
    return moved + folded * machine.fold_byte


def mpi_allreduce(size: int, nbytes: float, machine: Machine) -> float:
    """The faster of an MPI library's two; it has no header and no Python."""
    return min(by_doubling(size, nbytes, machine), by_halving(size, nbytes, machine))


def _slices(
    size: int,
    nbytes: float,
    machine: Machine,
    alltoall: Callable[..., Movement],
    allgather: Callable[..., Movement],
) -> float:
    moved = alltoall(size, nbytes, machine.per_node) + allgather(size, nbytes, machine.per_node)
    local = 2 * machine.begin + size * machine.part
    return seconds(moved, machine) + local + _fold_slice(size, nbytes, machine)


def _fold_rows(size: int, nbytes: float, machine: Machine) -> float:
    return size * machine.row + _fold_all(size, nbytes, machine)


def _fold_all(size: int, nbytes: float, machine: Machine) -> float:
    return (size - 1) * nbytes * machine.fold_byte


def _fold_slice(size: int, nbytes: float, machine: Machine) -> float:
    return (size - 1) / size * nbytes * machine.fold_byte


ALGORITHMS: Final[dict[str, Callable[[int, float, Machine, bool], float]]] = {
    "header": in_header,
    "steps": in_steps,
    "slices": in_slices,
    "exchange": in_exchange,
    "chain": in_chain,
    "grid": in_grid,
}
