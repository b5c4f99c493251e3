# ruff: noqa: RUF002 - formulas have Greek letters
"""How long does a reduction take along a chain of nodes, turn by turn?

The ranks of a node fold and send at the same time, and share its link: together their parts of a chunk of c bytes take
α + c β. What Python does in a turn is added in full.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from arraycomm._collectives.chain import chunk_bytes, is_quicker, largest_chunk

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
    """Return how many turns a call takes: K + 2 (N − 1) + 2, of K chunks and N nodes."""
    return len(chunks(size, nbytes, per_node)) + 2 * (size // per_node - 1) + 2


@lru_cache(maxsize=256)
def in_chain(size: int, nbytes: int, machine: Machine, shared: bool = False) -> float:
    """Each rank in each turn: wait for a total, fold, send it; wait for a result, and send that."""
    lanes = machine.per_node
    nodes, cut = size // lanes, np.array(chunks(size, int(nbytes), lanes))
    last, count = nodes - 1, len(cut)
    # When each node begins a turn, and its link is free.
    begun, link = np.zeros((2, nodes))
    # Of each rank: its clock in a turn, when it has sent and received, and when a total and a result have come.
    clock, sent, received, total, result = np.zeros((5, nodes, lanes))
    python = lanes * machine.part + 4 * machine.begin + machine.step

    def send(source: slice, target: slice, part: Array) -> Array:
        """Send from nodes to their neighbours, by one rank of a node after another; return the arrivals."""
        moved = part[:, None] * machine.per_byte
        behind = moved * np.arange(lanes)
        ready = np.maximum(np.maximum(clock[source], sent[source]), link[source, None])
        leaves = np.maximum.accumulate(ready - behind, axis=1) + behind
        link[source] = leaves[:, -1] + moved[:, 0]
        sent[source] = leaves + machine.latency + moved
        received[target] = np.maximum(leaves, received[target]) + machine.latency + moved
        arrivals: Array = received[target].copy()
        return arrivals

    for turn in range(turns(size, int(nbytes), lanes)):
        begun += python
        # The nodes that fold, and those that take a result.
        first, end = max(turn - count, 0), min(turn, nodes)
        back, until = max(2 * last + 1 - turn, 0), min(2 * last + 1 - turn + count, last)
        for nodes_here in (slice(first, end), slice(back, until)):
            clock[nodes_here] = begun[nodes_here, None]
        came, arrived = total[first:end].copy(), result[back:until].copy()
        if first < end:
            part = cut[turn - 1 - np.arange(first, end)] / lanes
            rows = lanes - (np.arange(first, end) == 0)
            folded = (rows * part * machine.fold_byte)[:, None]
            clock[first:end] = np.maximum(clock[first:end], came) + folded
            if (stop := min(end, last)) > first:
                total[first + 1 : stop + 1] = send(
                    slice(first, stop), slice(first + 1, stop + 1), part[: stop - first]
                )
            if end == nodes:
                result[last - 1 : last] = send(slice(last, nodes), slice(last - 1, last), part[-1:])
        if back < until:
            clock[back:until] = np.maximum(clock[back:until], arrived)
            if (start := max(back, 1)) < until:
                part = cut[turn - 2 * last - 1 + np.arange(start, until)] / lanes
                result[start - 1 : until - 1] = send(
                    slice(start, until), slice(start - 1, until - 1), part
                )
        for nodes_here in (slice(first, end), slice(back, until)):
            begun[nodes_here] = clock[nodes_here].max(axis=1, initial=0.0)
    return float(max(begun.max(), sent.max()))
