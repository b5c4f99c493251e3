"""Faults in trees."""

from __future__ import annotations

from typing import Final

from tests.planted.fault import Fault

_LEAVES: Final = "arraycomm/_trees/leaves.py"
_LAYOUT: Final = "arraycomm/_trees/layout.py"
_BUFFERS: Final = "arraycomm/_trees/buffers.py"
_SHARED: Final = "arraycomm/_trees/held.py"
_SEGMENT: Final = "arraycomm/_reduce/segment.py"
_SYNCHRONIZE: Final = "arraycomm/_trees/synchronize.py"
_REDUCE: Final = "arraycomm/_trees/reduce.py"

TREES: Final = (
    Fault(
        "bytes of other leaves: a small tree that repeats is folded from the bytes of its first dtype",
        "arraycomm/_prepared/small_trees.py",
        "            part = slice(start, start := start + bucket.nbytes)\n",
        "            part = slice(0, bucket.nbytes)\n",
        ("trees_that_repeat_give_what_they_give_once",),
        compiled=True,
    ),
    Fault(
        "missing in the third call: ranks that have reduced a gradient twice expect it from all",
        "arraycomm/_prepared/small_trees.py",
        "runner.placements.host_tree, made.negotiable\n",
        "runner.placements.host_tree, False\n",
        ("trees_that_repeat_give_what_they_give_once",),
        compiled=True,
    ),
    Fault(
        "tied leaf comes back as two: the results of an array that a tree has twice are two arrays",
        _LEAVES,
        "        if other != number and _are_same(results[number], results[other]):",
        "        if False:",
        ("ties_stay_ties", "ties_are_each_ranks_own_matter"),
    ),
    Fault(
        "tied leaf comes back as one: "
        "the results of an array that a tree has twice are one array, whatever other ranks have",
        _LEAVES,
        "        if other != number and _are_same(results[number], results[other]):",
        "        if other != number:",
        ("ties_are_each_ranks_own_matter",),
    ),
    Fault(
        "leaves that overlap: a leaf begins before the end of the one before it",
        _LAYOUT,
        "        ends[kind] = offset + nbytes + -nbytes % ALIGNMENT",
        "        ends[kind] = offset + nbytes - nbytes % ALIGNMENT",
        ("every_leaf_has_one_place_of_its_own", "allreduce_tree_reduces_every_leaf"),
    ),
    Fault(
        "leaf not aligned: leaves follow one another without a gap",
        _LAYOUT,
        "        ends[kind] = offset + nbytes + -nbytes % ALIGNMENT",
        "        ends[kind] = offset + nbytes",
        ("every_leaf_has_one_place_of_its_own",),
    ),
    Fault(
        "bucket in the wrong order: the leaves of a message are listed from the last one on",
        _LAYOUT,
        "        waiting.setdefault(kind, []).append(Piece(leaf, offset, nbytes))",
        "        waiting.setdefault(kind, []).insert(0, Piece(leaf, offset, nbytes))",
        ("large_leaves_of_one_dtype_and_the_others_keep_their_order",),
    ),
    Fault(
        "large leaf sent with others: "
        "a message of several leaves has the large one behind them as well",
        _LAYOUT,
        "                yield Transfer(bucket.dtype, start, base + offset, None)",
        "                yield Transfer(bucket.dtype, start, base + offset + nbytes, None)",
        ("every_leaf_lies_in_one_message_and_a_large_one_alone",),
    ),
    Fault(
        "cut leaf: a leaf that ends where a chunk does is left out of it",
        _LAYOUT,
        "            while first < len(pieces) and pieces[first].offset < stop:",
        "            while first < len(pieces) and pieces[first].offset + 64 < stop:",
        ("every_byte_of_every_leaf_lies_in_one_chunk",),
    ),
    Fault(
        "end of a chunk: every part of a leaf that is cut is taken from its beginning",
        "arraycomm/_trees/held.py",
        "self.flat(leaf)[first : first + nbytes]",
        "self.flat(leaf)[:nbytes]",
        ("shared_memory_does_not_matter",),
    ),
    Fault(
        "chunk folded too early: a chunk is folded before every rank has published it",
        _SEGMENT,
        "            if number:\n                yield self.control",
        "            if number > 1:\n                yield self.control",
        ("shared_memory_does_not_matter",),
    ),
    Fault(
        "last rank's part of a chunk: nobody folds the last rank's part of a chunk",
        _SEGMENT,
        "                fold(op, published.dtype, [row[own] for row in published.rows], folded[own])",
        "                if self.control.rank < self.control.size - 1:\n"
        "                    rows = [row[own] for row in published.rows]\n"
        "                    fold(op, published.dtype, rows, folded[own])",
        ("shared_memory_does_not_matter",),
    ),
    Fault(
        "no zeros for a missing gradient: "
        "the memory of a gradient that a rank lacks keeps what was in it",
        _BUFFERS,
        "        slot[...] = 0 if array is None else array",
        "        slot[...] = slot if array is None else array",
        ("missing_gradients_count_as_zeros",),
    ),
    Fault(
        "missing on all ranks: a gradient that no rank has becomes zeros",
        _REDUCE,
        "        self._present = [n for n, leaf in enumerate(agreed) if leaf.kind != NONE]",
        "        self._present = [n for n, leaf in enumerate(agreed) if leaf.kind != NONE][:1]",
        ("missing_gradients_count_as_zeros",),
    ),
    Fault(
        "plan of another op: a plan sums, whatever its op",
        "arraycomm/_trees/plan.py",
        "            fusion.fold_payloads(self.group, packed, agreement, plan.op)",
        '            fusion.fold_payloads(self.group, packed, agreement, "sum" if plan.op == "mean" else plan.op)',
        ("a_plan_does_what_allreduce_tree_does",),
    ),
    Fault(
        "last bucket forgotten: the last of several buckets of a tree is not reduced",
        "arraycomm/_trees/fusion.py",
        "            yield from algorithms.allreduce_in_turn(link, pairs, op)",
        "            yield from algorithms.allreduce_in_turn(link, pairs[:-1] or pairs, op)",
        ("buckets_do_not_matter",),
    ),
    Fault(
        "last bucket of small trees: the last of several dtypes of a small tree is not reduced",
        "arraycomm/_trees/fusion.py",
        "        for number, bucket in enumerate(self.buckets):",
        "        for number, bucket in enumerate(self.buckets[:-1] or self.buckets):",
        ("allreduce_tree_reduces_every_leaf",),
    ),
    Fault(
        "arrays of rank 0: "
        "`synchronize` takes numbers and strings from the root, arrays from rank 0",
        _SYNCHRONIZE,
        "            yield from algorithms.bcast(transport, memory, self.root)",
        "            yield from algorithms.bcast(transport, memory, 0)",
        ("synchronize_gives_all_the_values_of_root", "synchronize_is_idempotent"),
    ),
    Fault(
        "containers changed: a list comes back as a tuple",
        _SYNCHRONIZE,
        "        return self._flat.rebuild(tied(leaves, results[: len(leaves)]), held)",
        "        rebuilt = self._flat.rebuild(tied(leaves, results[: len(leaves)]), held)\n"
        "        return tuple(rebuilt) if type(rebuilt) is list else rebuilt",
        ("synchronize_gives_all_the_values_of_root",),
    ),
    Fault(
        "generator copied: a random generator is replaced by a copy",
        "arraycomm/_trees/nodes.py",
        "        return Node([], [], lambda _: leaf, stayed=[(path, leaf)])",
        "        return Node([], [], lambda _: copy.copy(leaf))",
        ("synchronize_leaves_functions_and_generators_alone",),
    ),
    Fault(
        "whole tree of the wrong kind: "
        "if some rank passes None, arrays of others become those of the root's kind",
        _SYNCHRONIZE,
        '            arrays.append(_part(leaf, "tree").array or part.array)',
        "            arrays.append(part.array)",
        ("none_takes_the_tree_of_root",),
    ),
    Fault(
        "digest of whole blocks: torch leaves out the last block of an array if it is not full",
        "arraycomm/_training/comparison/digests.py",
        "    parts = [raw[:whole].view(torch.int64), rest.view(torch.int64)]",
        "    parts = [raw[:whole].view(torch.int64)]",
        ("a_digest_is_that_of_the_bits_and_their_order",),
    ),
    Fault(
        "gradients that overlap: results are written over gradients that share memory",
        "arraycomm/_trees/fusion.py",
        "return frozenset(found) if found and _are_apart(sources) else _NONE",
        "return frozenset(found)",
        ("results_may_be_written_over_gradients",),
    ),
    Fault(
        "keys as they come: the keys of a dict are in the order in which a rank has put them in",
        "arraycomm/_trees/pytrees.py",
        "    other_keys = kind in (dict, defaultdict) and not are_plain(entries)",
        "    other_keys = False",
        ("keys_come_in_one_order_whatever_that_of_their_insertion",),
    ),
    Fault(
        "held things by text: what containers hold is the same if it prints the same",
        "arraycomm/_trees/static.py",
        "            return _short(repr(value), value)",
        "            return _short(str(value), value)",
        ("what_containers_hold_is_compared_and_sent",),
    ),
    Fault(
        "held things kept: `synchronize` leaves each rank what its containers hold",
        _SYNCHRONIZE,
        "            held[number] = taken_over(held[number], value)",
        "            pass",
        ("what_containers_hold_is_compared_and_sent",),
    ),
)
