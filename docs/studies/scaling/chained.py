# ruff: noqa: RUF002 - formulas have Greek letters
"""How long does a reduction take along a chain of nodes, turn by turn?

The ranks of a node fold and send at the same time, and share its link: together their parts of a chunk of c bytes take
α + c β. What Python does in a turn is added in full.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from arraycomm._collectives.chain import chunk_bytes, is_quicker, is_tree_quicker, largest_chunk

if TYPE_CHECKING:
    from docs.studies.scaling.model import Machine

Array = np.ndarray[Any, Any]


def is_chained(size: int, nbytes: int, per_node: int) -> bool:
    """Tell whether the library takes a chain of so many ranks in place of slices, for float32."""
    nodes = size // per_node
    return per_node > 1 and nodes > 1 and is_quicker(nbytes, nodes, per_node, 1)


def chunks(size: int, nbytes: int, per_node: int) -> list[int]:
    """Return the bytes of each chunk."""
    chunk = chunk_bytes(nbytes, size // per_node, largest_chunk(per_node))
    return [min(chunk, nbytes - start) for start in range(0, nbytes, chunk)]


def turns(size: int, nbytes: int, per_node: int) -> int:
    """Return how many turns a call takes: K + N + h + 1, of K chunks and N nodes, if results take up to h hops."""
    hops = _results(size // per_node, nbytes)[0].max()
    return len(chunks(size, nbytes, per_node)) + size // per_node + int(hops) + 1


def copies(size: int, nbytes: int, per_node: int) -> int:
    """Return how often the node that sends most sends the bytes of a chunk, as totals and as results."""
    nodes = size // per_node
    _, children = _results(nodes, nbytes)
    return int((np.count_nonzero(children >= 0, axis=0) + (np.arange(nodes) < nodes - 1)).max())


def _results(nodes: int, nbytes: int) -> tuple[Array, Array]:
    """Return how many hops results take to each node, and to which nodes it sends them; -1 is none."""
    number = nodes - 1 - np.arange(nodes)
    if is_tree_quicker(nbytes, nodes):
        hops = np.array([(n + 1).bit_length() - 1 for n in number.tolist()])
        children = np.array([2 * number + 1, 2 * number + 2])
    else:
        hops, children = number, (number + 1)[None]
    return hops, np.where(children < nodes, nodes - 1 - children, -1)


def _lengths(cut: Array, numbers: Array) -> Array:
    """Return the bytes of these chunks; none of those that do not exist."""
    there = (numbers >= 0) & (numbers < len(cut))
    lengths: Array = np.where(there, cut[np.clip(numbers, 0, len(cut) - 1)], 0)
    return lengths


@lru_cache(maxsize=256)
def in_chain(size: int, nbytes: int, machine: Machine, shared: bool = False) -> float:
    """Each rank in each turn: wait for a total, fold, send it; wait for a result, and send that."""
    lanes = machine.per_node
    nodes, cut = size // lanes, np.array(chunks(size, int(nbytes), lanes))
    last, count = nodes - 1, len(cut)
    number, (hops, children) = np.arange(nodes), _results(nodes, int(nbytes))
    # When each node begins a turn, and its link is free.
    begun, link = np.zeros((2, nodes))
    # Of each rank: its clock in a turn, when it has sent and received, and when a total and a result have come.
    clock, sent, received, total, result = np.zeros((5, nodes, lanes))
    messages = 2 + copies(size, int(nbytes), lanes)
    python = machine.turn + lanes * machine.lane + messages * machine.message

    def send(source: Array, target: Array, chunk: Array) -> Array:
        """Send from nodes to others, by one rank of a node after another; return the arrivals."""
        moved = (cut[chunk] / lanes)[:, None] * machine.per_byte
        behind = moved * np.arange(lanes)
        ready = np.maximum(np.maximum(clock[source], sent[source]), link[source, None])
        leaves = np.maximum.accumulate(ready - behind, axis=1) + behind
        link[source] = leaves[:, -1] + moved[:, 0]
        sent[source] = leaves + machine.latency + moved
        received[target] = np.maximum(leaves, received[target]) + machine.latency + moved
        arrivals: Array = received[target].copy()
        return arrivals

    def send_results(source: Array, chunk: Array) -> None:
        for targets in children[:, source]:
            some = targets >= 0
            if some.any():
                result[targets[some]] = send(source[some], targets[some], chunk[some])

    for turn in range(turns(size, int(nbytes), lanes)):
        begun += python + machine.copy_byte * (
            _lengths(cut, turn - number) + _lengths(cut, turn - nodes - hops - 1)
        )
        # The chunks that nodes fold, and those whose results they take.
        folded, taken = turn - 1 - number, turn - nodes - hops
        folding = np.flatnonzero((folded >= 0) & (folded < count))
        taking = np.flatnonzero((taken >= 0) & (taken < count) & (number < last))
        clock[folding], clock[taking] = begun[folding, None], begun[taking, None]
        arrived = result[taking].copy()
        if len(folding):
            rows = lanes - (folding == 0)
            took = (rows * (cut[folded[folding]] / lanes) * machine.fold_byte)[:, None]
            clock[folding] = np.maximum(clock[folding], total[folding]) + took
            on = folding[folding < last]
            total[on + 1] = send(on, on + 1, folded[on])
            if folding[-1] == last:
                send_results(folding[-1:], folded[last:])
        if len(taking):
            clock[taking] = np.maximum(clock[taking], arrived)
            send_results(taking, taken[taking])
        busy = np.union1d(folding, taking)
        begun[busy] = clock[busy].max(axis=1, initial=0.0)
    return float(max(begun.max(), sent.max()))
