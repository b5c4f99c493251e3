# ruff: noqa: RUF002 - formulas have Greek letters
"""How long does a reduction take along a chain of nodes, turn by turn?

The ranks of a node fold and send at the same time, and share its link: together their parts of a chunk of c bytes take
α + c β. What Python does in a turn is added in full.

The turns here are those of all nodes: what node i does in its own turn t, it does here in turn t + i, or later if it
waits for the last node. So what a turn waits for comes from an earlier one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from arraycomm._collectives.chain import (
    chunk_bytes,
    is_quicker,
    is_tree_quicker,
    largest_chunk,
    share_count,
)

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


def shares(size: int, nbytes: int, per_node: int) -> int:
    """Return in how many shares a rank folds and sends its part of a chunk."""
    return share_count(nbytes, size // per_node, chunks(size, nbytes, per_node)[0])


def copies(size: int, nbytes: int, per_node: int) -> tuple[int, int]:
    """Return how often the node that sends most sends the bytes of a chunk, as totals and as results."""
    nodes = size // per_node
    _, children = _results(nodes, nbytes)
    results = np.count_nonzero(children >= 0, axis=0)
    totals = np.arange(nodes) < nodes - 1
    most = int((results + totals * shares(size, nbytes, per_node)).argmax())
    return int(totals[most]), int(results[most])


def _results(nodes: int, nbytes: int) -> tuple[Array, Array]:
    """Return how many hops results take to each node, and to which nodes it sends them; -1 is none."""
    number = nodes - 1 - np.arange(nodes)
    if is_tree_quicker(nbytes, nodes):
        hops = np.array([(n + 1).bit_length() - 1 for n in number.tolist()])
        children = np.array([2 * number + 1, 2 * number + 2])
    else:
        hops, children = number, (number + 1)[None]
    return hops, np.where(children < nodes, nodes - 1 - children, -1)


def _there(cut: Array, numbers: Array) -> Array:
    """Return which of these chunks exist."""
    there: Array = (numbers >= 0) & (numbers < len(cut))
    return there


def _lengths(cut: Array, numbers: Array) -> Array:
    """Return the bytes of these chunks; none of those that do not exist."""
    lengths: Array = np.where(_there(cut, numbers), cut[np.clip(numbers, 0, len(cut) - 1)], 0)
    return lengths


@lru_cache(maxsize=256)
def in_chain(size: int, nbytes: int, machine: Machine, shared: bool = False) -> float:
    """Each rank in each turn: wait for a total, fold, send it; wait for a result, and send that."""
    lanes = machine.per_node
    nodes, cut = size // lanes, np.array(chunks(size, int(nbytes), lanes))
    last, count = nodes - 1, len(cut)
    number, (hops, children) = np.arange(nodes), _results(nodes, int(nbytes))
    pieces = shares(size, int(nbytes), lanes)
    # When each node begins a turn, and its link is free.
    begun, link = np.zeros((2, nodes))
    # Of each rank: its clock in a turn, when it has sent and received, and when a total and a result have come.
    clock, sent, received, result = np.zeros((4, nodes, lanes))
    total = np.zeros((pieces, nodes, lanes))
    # What Python does in a turn, and to fold a chunk and to pass on a result.
    python = machine.turn + lanes * machine.lane
    of_fold = 2 * pieces * machine.message + (pieces - 1) * machine.share
    of_result = (1 + np.count_nonzero(children >= 0, axis=0)) * machine.message

    def send(source: Array, target: Array, nbytes: Array) -> Array:
        """Send so many bytes from nodes to others, by one rank of a node after another; return the arrivals."""
        moved = (nbytes / lanes)[:, None] * machine.per_byte
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
                result[targets[some]] = send(source[some], targets[some], cut[chunk[some]])

    for turn in range(count + nodes + int(hops.max()) + 1):
        # The chunks that nodes fold, and those whose results they take.
        folded, taken = turn - 1 - number, turn - nodes - hops
        folds, takes = (_there(cut, numbers) for numbers in (folded, taken))
        active = _there(cut, folded + 1) | folds | takes | _there(cut, taken - 1)
        begun += active * python + folds * of_fold + takes * of_result
        begun += machine.copy_byte * (_lengths(cut, folded + 1) + _lengths(cut, taken - 1))
        folding, taking = np.flatnonzero(folds), np.flatnonzero(takes & (number < last))
        clock[folding], clock[taking] = begun[folding, None], begun[taking, None]
        arrived = result[taking].copy()
        if len(folding):
            rows = lanes - (folding == 0)
            share = cut[folded[folding]] / pieces
            took = (rows * share / lanes * machine.fold_byte)[:, None]
            on = folding < last
            for arrivals in total:
                clock[folding] = np.maximum(clock[folding], arrivals[folding]) + took
                arrivals[folding[on] + 1] = send(folding[on], folding[on] + 1, share[on])
            if folding[-1] == last:
                send_results(folding[-1:], folded[last:])
        if len(taking):
            clock[taking] = np.maximum(clock[taking], arrived)
            send_results(taking, taken[taking])
        busy = np.union1d(folding, taking)
        begun[busy] = clock[busy].max(axis=1, initial=0.0)
    return float(max(begun.max(), sent.max()))
