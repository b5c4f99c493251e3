"""Transports and communicators of simulated ranks, on which the library's own code runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from arraycomm import Communicator
from arraycomm._collectives import chain, exchange
from arraycomm._collectives.exchange import ExchangeSegment
from arraycomm._collectives.segment import ChunkTask
from arraycomm._dtypes import DType
from arraycomm._transports.base import DIRECT_RANKS, Blocks, Bytes, Handle, Transport
from arraycomm._transports.control import PAYLOAD, ControlChannel, message_slot, shared_slot
from arraycomm._transports.node_chain import NodeChain, is_chain
from arraycomm._transports.pairs import ExchangePairs, PlainPair
from arraycomm._transports.rank_grid import LEAST_RANKS, RankGrid, sides
from docs.studies.scaling import movements
from docs.studies.scaling.measure import communicator
from docs.studies.scaling.model import PIECE
from docs.studies.scaling.network import Group, Movement, Network, Plan, Planner


def transports(network: Network, ranks: Iterable[int] | None = None) -> list[SimulatedTransport]:
    """Return the transport of each rank of a network, or of some of them."""
    world = _Members(Group(network, range(network.size)))
    return [SimulatedTransport(world, r) for r in ranks or range(network.size)]


def communicators(network: Network) -> list[Communicator]:
    """Return a communicator for each rank of a network; its calls may wait for ever."""
    return [communicator(transport, None) for transport in transports(network)]


class _Members:
    """What the transports of one group share: the slots of all ranks, for each parity of a step."""

    def __init__(self, group: Group) -> None:
        self.group = group
        slot = (shared_slot if group.together else message_slot)(group.size)
        self.rows = [np.zeros((group.size, slot), np.uint8) for _ in range(2)]
        self.scratch: Bytes = np.empty(0, np.uint8)
        self.nodes: dict[int, list[int]] = {}
        for rank, node in enumerate(group.network.node[group.members].tolist()):
            self.nodes.setdefault(node, []).append(rank)
        self._memory: dict[int, Bytes] = {}
        self._children: dict[tuple[int, int], _Members] = {}

    def of_node(self, node: int) -> _Members:
        """Return what the members on one node share."""
        return self.child(-1, node, self.nodes[node])

    def memory_of(self, node: int, place: NodeChain) -> Bytes:
        """Return the shared segment of a node."""
        if node not in self._memory:
            self._memory[node] = np.zeros(chain.ChainSegment.nbytes_of(place), np.uint8)
        return self._memory[node]

    def child(self, split: int, color: int, members: Sequence[int]) -> _Members:
        """Return what all callers with the same arguments share."""
        key = (split, color)
        if key not in self._children:
            self._children[key] = _Members(self.group.part(members))
        return self._children[key]


class SimulatedControl(ControlChannel):
    """A control channel whose ranks share one copy of what all of them show.

    Between nodes, the first rank of each sends the records of its node; on one node a step takes no message.
    """

    def __init__(self, members: _Members, rank: int) -> None:
        size, slot = members.rows[0].shape
        mine = [np.zeros(slot, np.uint8) for _ in range(2)]
        super().__init__(rank, size, members.rows, mine)
        self.shared = members.group.together
        self._group = members.group
        self._node = int(members.group.network.node[members.group.members[rank]])
        self._movement: Movement | None = None

    def post(self, nbytes: int | None = None) -> None:
        self.step += 1
        parity = self.step & 1
        self.my_words[parity][0] = self.step
        planner = _shown if self.shared else _sent
        shown = self.payload if nbytes is None else nbytes
        part = (self.mine[parity], self.rows[parity], shown, self._node)
        self._movement = self._group.meet(self.rank, ("step", self.step), planner, part)

    def done(self) -> bool:
        return self._movement is None or self._movement.done()

    def missing(self) -> list[int]:
        return []


class SimulatedChain(NodeChain):
    """One rank's place in a chain of nodes; folds take time, and move data if the network does."""

    # No other message has this tag.
    _TAG: ClassVar[int] = -1

    def __init__(self, members: _Members, rank: int) -> None:
        group = members.group
        self._group, self._rank, self._place = group, rank, int(group.members[rank])
        node = int(group.network.node[self._place])
        here = members.nodes[node]
        control: Any = SimulatedControl(members.of_node(node), here.index(rank))
        super().__init__(rank, list(members.nodes.values()), control)

    def send(self, buffer: Bytes, peer: int) -> Handle:
        return self._group.send(self._rank, peer, self._TAG, buffer)

    def recv(self, buffer: Bytes, peer: int) -> Handle:
        return self._group.receive(peer, self._rank, self._TAG, buffer)

    def fold_on(
        self, op: str, dtype: DType, total: Bytes | None, rows: Sequence[Bytes], out: Bytes
    ) -> None:
        adds = len(rows) - (total is None)
        self._group.network.fold(self._place, adds * rows[0].nbytes)
        if self._group.network.moves_data:
            super().fold_on(op, dtype, total, rows, out)


class SimulatedExchange(ExchangeSegment):
    """The chunks that two ranks exchange; folds take time, and move data if the network does."""

    # No other message has this tag.
    _TAG: ClassVar[int] = -2

    def __init__(self, control: ControlChannel, group: Group) -> None:
        rank = control.rank
        self._network, self._place, peer = group.network, int(group.members[rank]), 1 - rank
        exchange_pairs = ExchangePairs(
            PIECE,
            lambda send, recv: PlainPair(
                lambda: group.receive(peer, rank, self._TAG, recv),
                lambda: group.send(rank, peer, self._TAG, send),
            ),
            OSError,
        )
        super().__init__(control, exchange_pairs)

    def fold_part(self, chunk_task: ChunkTask, number: int, op: str) -> None:
        self._network.fold(self._place, chunk_task.rows[0].nbytes)
        if self._network.moves_data:
            super().fold_part(chunk_task, number, op)


class SimulatedLine:
    """The movements of a row or a column of a grid."""

    def __init__(self, members: _Members, rank: int) -> None:
        self._group, self._rank, self._begun = members.group, rank, 0

    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        """Send block r to rank r; receive rank r's block in block r."""
        return self._meet(_alltoall, send, recv)

    def allgather(self, recv: Blocks) -> Handle:
        """Send this rank's own block of `recv` to all, and receive theirs, in place."""
        return self._meet(_allgather, recv)

    def _meet(self, planner: Planner, *part: object) -> Handle:
        self._begun += 1
        return self._group.meet(self._rank, ("movement", self._begun), planner, part)


class SimulatedTransport(Transport):
    """One rank of a simulated group."""

    name = "simulated"
    threaded = False

    def __init__(self, members: _Members, rank: int) -> None:
        group = members.group
        self._members, self._group, self._network = members, group, group.network
        self._place = int(group.members[rank])
        self.rank, self.size = rank, group.size
        self._nodes: list[int] = group.network.node[group.members].tolist()
        own = self._nodes[rank]
        self.local_rank = self._nodes[:rank].count(own)
        self.local_size = self._nodes.count(own)
        self.control = SimulatedControl(members, rank)
        self.overlaps = not group.together
        self._direct = self.overlaps and self.size <= DIRECT_RANKS
        self._begun = 0
        self._splits = 0
        if self.overlaps and self.size == 2:
            segment = SimulatedExchange(self.control, group)
            self.exchange_pairs = segment.exchange_pairs
            exchange.install(self, segment)
        places = list(members.nodes.values())
        if self.overlaps and is_chain(places):
            self.chain = SimulatedChain(members, rank)
            chain.install(self, self.chain, members.memory_of(own, self.chain))
        rows, columns = sides(self.size)
        if self.overlaps and self.size >= LEAST_RANKS and rows > 1:
            row, column = divmod(rank, columns)
            of_row = members.child(-2, row, range(row * columns, (row + 1) * columns))
            of_column = members.child(-3, column, range(column, self.size, columns))
            lines = SimulatedLine(of_row, column), SimulatedLine(of_column, row)
            self.grid = RankGrid(rank, rows, columns, *lines, max(map(len, places)))

    def alltoall(self, send: Blocks, recv: Blocks) -> Handle:
        return self._meet(_alltoall, send, recv)

    def allgather(self, recv: Blocks) -> Handle:
        if self._direct:
            return self._meet(_spread, recv, self._nodes)
        return self._meet(_allgather, recv)

    def gather(self, send: Bytes, recv: Blocks | None, root: int) -> Handle:
        return self._meet(_gather, send, recv, root)

    def scatter(self, send: Blocks | None, recv: Bytes, root: int) -> Handle:
        return self._meet(_scatter, send, recv, root)

    def bcast(self, buffer: Bytes, root: int) -> Handle:
        return self._meet(_bcast, buffer, root, self._nodes)

    def _meet(self, planner: Planner, *part: object) -> Handle:
        self._begun += 1
        return self._group.meet(self.rank, ("movement", self._begun), planner, part)

    def send(self, buffer: Bytes, dest: int, tag: int) -> Handle:
        return self._group.send(self.rank, dest, tag, buffer)

    def recv(self, buffer: Bytes, source: int, tag: int) -> Handle:
        return self._group.receive(source, self.rank, tag, buffer)

    def probe(self, source: int | None, tags: range) -> tuple[int, int] | None:
        return self._group.find(source, self.rank, tags)

    def take(self, count: int, dtype: DType) -> Bytes:
        if self._network.moves_data:
            return super().take(count, dtype)
        # Nobody writes it, so that all ranks can have the same.
        nbytes = count * dtype.itemsize
        if self._members.scratch.nbytes < nbytes:
            self._members.scratch = np.empty(nbytes, np.uint8)
        return self._members.scratch[:nbytes].view(dtype)

    def fold(self, op: str, dtype: DType, rows: Sequence[Bytes], out: Bytes) -> None:
        self._network.fold(self._place, (len(rows) - 1) * out.nbytes)
        if self._network.moves_data:
            super().fold(op, dtype, rows, out)

    def prefixes(self, op: str, dtype: DType, rows: Sequence[Bytes], outs: Sequence[Bytes]) -> None:
        self._network.fold(self._place, (len(rows) - 1) * rows[0].nbytes)
        if self._network.moves_data:
            super().prefixes(op, dtype, rows, outs)

    def split(self, color: int | None, members: Sequence[int]) -> Transport | None:
        self._splits += 1
        if color is None:
            return None
        shared = self._members.child(self._splits, color, members)
        return SimulatedTransport(shared, members.index(self.rank))

    def free(self) -> None:
        """Nothing is held."""

    def nodes(self) -> Sequence[int]:
        return self._nodes


# Movements, of what all ranks have passed


def _alltoall(parts: Sequence[tuple[Blocks, Blocks]]) -> Plan:
    def deliver() -> None:
        for rank, (_, into) in enumerate(parts):
            for peer, (sent, _) in enumerate(parts):
                into.block(peer)[...] = sent.block(rank)

    return Plan(movements.alltoall(np.array([sent.counts for sent, _ in parts])), deliver)


def _allgather(parts: Sequence[tuple[Blocks]]) -> Plan:
    blocks = [part[0] for part in parts]
    return Plan(movements.allgather(blocks[0].counts), partial(_copy_all, blocks))


def _spread(parts: Sequence[tuple[Blocks, Sequence[int]]]) -> Plan:
    blocks, nodes = [part[0] for part in parts], parts[0][1]
    return Plan(movements.spread(blocks[0].counts, nodes), partial(_copy_all, blocks))


def _copy_all(blocks: Sequence[Blocks]) -> None:
    for rank, own in enumerate(blocks):
        for into in blocks:
            into.block(rank)[...] = own.block(rank)


def _gather(parts: Sequence[tuple[Bytes, Blocks | None, int]]) -> Plan:
    root = parts[0][2]
    into = parts[root][1]
    assert into is not None

    def deliver() -> None:
        for rank, (sent, _, _) in enumerate(parts):
            into.block(rank)[...] = sent

    return Plan(movements.gather(into.counts, root), deliver)


def _scatter(parts: Sequence[tuple[Blocks | None, Bytes, int]]) -> Plan:
    root = parts[0][2]
    sent = parts[root][0]
    assert sent is not None

    def deliver() -> None:
        for rank, (_, into, _) in enumerate(parts):
            into[...] = sent.block(rank)

    return Plan(movements.scatter(sent.counts, root), deliver)


def _bcast(parts: Sequence[tuple[Bytes, int, Sequence[int]]]) -> Plan:
    _, root, nodes = parts[0]
    sent = parts[root][0]

    def deliver() -> None:
        for into, *_ in parts:
            if into is not sent:
                into[...] = sent

    return Plan(movements.bcast(nodes, len(sent), root), deliver)


def _sent(parts: Sequence[tuple[memoryview, Bytes, int, int]]) -> Plan:
    nodes, shown = [part[3] for part in parts], [part[2] for part in parts]
    pair = len(set(nodes)) == len(nodes) == 2
    alike = len({bytes(part[0][8:PAYLOAD]) for part in parts}) == len(set(shown)) == 1
    records = [n if pair else -(-n // 8) * 8 for n in shown]
    if alike:
        schedule = movements.among_nodes(nodes, records, PAYLOAD)
    else:
        schedule = movements.among_nodes(nodes, [PAYLOAD + nbytes for nbytes in records])
    return Plan(schedule, _shown(parts).deliver, needed=True, by_nodes=True)


def _shown(parts: Sequence[tuple[memoryview, Bytes, int, int]]) -> Plan:
    def deliver() -> None:
        for rank, (mine, rows, *_) in enumerate(parts):
            rows[rank] = mine

    return Plan(None, deliver, needed=True)
