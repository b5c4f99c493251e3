"""Faults in what an argument means, where it may have any value, and in what a call tells."""

from __future__ import annotations

from typing import Final

from tests.planted.fault import Fault

_GROUPS: Final = "arraycomm/_collectives/groups.py"
_MATCHING: Final = "arraycomm/_messages/matching.py"
_RECEIVING: Final = "arraycomm/_messages/receiving.py"
_DATA: Final = "arraycomm/_training/batches/data.py"
_ORDER: Final = "arraycomm/_training/batches/order.py"
_SPLIT: Final = ("split_partitions",)
_SENT: Final = ("messages_arrive_as_they_were_sent",)
_RECEIVED: Final = ("messages_go_where_the_receiver_says",)
_OBJECTS: Final = ("objects_are_messages_too",)
_OUT: Final = ("every_collective_fills_out",)
_ITEMS: Final = ("container_holds_every_item_exactly_once",)
_PLACES: Final = ("extremes_are_where_they_are_said_to_be",)
_LINES: Final = ("lines_are_printed_in_the_order_of_ranks",)
_OPTIMIZERS: Final = ("optimizers_step_as_those_of_torch",)

ARGUMENTS: Final = (
    Fault(
        "compression of any name: an unknown name of a compression is found wrong too late",
        "arraycomm/_trees/reduce.py",
        "(isinstance(compression, str) and compression in COMPRESSIONS)",
        "(isinstance(compression, str) or compression in COMPRESSIONS)",
        ("every_wrong_value_is_an_error_on_every_rank_which_go_on",),
    ),
    Fault(
        "wrong out of a result that comes: what is wrong with it is raised before data moves",
        "arraycomm/_calls/placement.py",
        "            self._errors.append(error)",
        "            raise",
        ("wrong_out_of_a_later_known_shape_concerns_its_rank_alone",),
    ),
    Fault(
        "keys clamped: keys of `split` above 99 are 99",
        _GROUPS,
        "    members.sort(key=lambda rank: (replies[rank][2], rank))",
        "    members.sort(key=lambda rank: (min(replies[rank][2], 99), rank))",
        _SPLIT,
    ),
    Fault(
        "colors modulo 100: colors of `split` that differ by hundreds are one",
        _GROUPS,
        "    members = [r for r, (taking, other, _) in enumerate(replies) if taking and other == color]",
        "    members = [r for r, (t, other, _) in enumerate(replies) if t and not (other - color) % 100]",
        _SPLIT,
    ),
    Fault(
        "no color is a color: a rank that passes None is in the group of 0",
        _GROUPS,
        "    number = colors.index(color) if takes_part else None",
        "    number = colors.index(color) if takes_part or color in colors else None",
        _SPLIT,
    ),
    Fault(
        "figures of a duplicate lost: `stats` forgets the calls of a communicator that is freed",
        "arraycomm/_calls/statistics.py",
        "            _add(self._totals, duplicate.totals())",
        "            duplicate.totals()",
        ("dup_is_independent",),
    ),
    Fault(
        "some tags: a receive of any tag takes those below 16",
        _MATCHING,
        "    tags = range(TAGS) if tag is ANY_TAG",
        "    tags = range(16) if tag is ANY_TAG",
        _SENT,
    ),
    Fault(
        "tags modulo 4096: tags that differ by 4096 are one",
        _MATCHING,
        "        return tag\n",
        "        return tag % 4096\n",
        _SENT,
    ),
    Fault(
        "like is nothing: a message is an array of NumPy whatever is wanted",
        "arraycomm/_calls/refusals.py",
        "        return Wanted(wanted_kind(None, like, out), None)",
        "        return Wanted(wanted_kind(None, None, out), None)",
        _RECEIVED,
        frameworks=True,
    ),
    Fault(
        "sent while written: `sendrecv` sends a long array that its result is written over",
        "arraycomm/_messages/sending.py",
        "any(_may_change(data, out) for out in outs if out is not None):",
        "False:",
        _RECEIVED,
    ),
    Fault(
        "any tag looked for: `probe` names a message with another tag",
        _MATCHING,
        "found := self._transport.probe(source, tags)",
        "found := self._transport.probe(source, range(1 << 20))",
        _OBJECTS,
    ),
    Fault(
        "object as it was: `recv_object` returns the bytes of a long pickle",
        _RECEIVING,
        "            return loads(source, target.deliver()) if pickled else target.deliver()",
        "            short = pickled and found.elements is not None\n"
        "            return loads(source, target.deliver()) if short else target.deliver()",
        _OBJECTS,
    ),
    Fault(
        "tags of a byte: a blocking send has the last byte of its tag",
        "arraycomm/_messages/messages.py",
        "self._sender.message, x, dest, tag, timeout)",
        "self._sender.message, x, dest, tag & 255, timeout)",
        ("a_line_of_ranks_passes_on_what_it_gets",),
    ),
    Fault(
        "another message: the error of a wait names the tag after the one that is waited for",
        "arraycomm/_messages/delivery.py",
        'f"tag {self.tags[0]}"',
        'f"tag {self.tags[0] + 1}"',
        ("message_that_does_not_come_is_named",),
    ),
    Fault(
        "grid by columns: the rank at some coordinates is that of the transposed grid",
        "arraycomm/_collectives/grid.py",
        "for at, count, _ in axes], self.dims))",
        'for at, count, _ in axes], self.dims, order="F"))',
        ("rows_move_along_the_axes_of_a_grid",),
    ),
    Fault(
        "neighbors confused: blocks of a rank that is both neighbors are taken one for the other",
        "arraycomm/_collectives/neighbors.py",
        "key=lambda at: at ^ 1)",
        "key=lambda at: at)",
        ("neighbors_get_the_blocks_that_go_their_way",),
    ),
    Fault(
        "blocks in the header: the one that goes away from this rank is taken for the one that comes",
        "arraycomm/_collectives/neighbors.py",
        "_block(rank, payload, at ^ 1, self._count)",
        "_block(rank, payload, at, self._count)",
        ("neighbors_get_the_blocks_that_go_their_way",),
    ),
    Fault(
        "halo from the other side: what goes to the rank before goes to the one after",
        "arraycomm/_collectives/grid.py",
        "for rank in self.shift(axis)]",
        "for rank in self.shift(axis)[::-1]]",
        ("halos_are_those_of_the_whole_array",),
    ),
    Fault(
        "two of a kind: `raise_on_difference` lets pass what is one thing or another on all ranks",
        "arraycomm/_training/comparison/sameness.py",
        "        if len(set(agreement.free_words())) == 1:",
        "        if len(set(agreement.free_words())) <= 2:",
        ("what_is_wrong_on_one_rank_is_raised_on_all",),
    ),
    Fault(
        "shared in spite of copy: `exchange` shares memory with `copy=True`",
        "arraycomm/_arrays/exchange.py",
        "    if framework.takes_over(array.dtype) and (unfit or (copy is True and not private)):",
        "    if framework.takes_over(array.dtype) and unfit:",
        ("exchanged_arrays_have_the_same_elements",),
        frameworks=True,
    ),
    Fault(
        "out of a scan ignored: the result is a new array",
        "arraycomm/_collectives/scans.py",
        "            self.target = self.make_target(self.source.shape, out)",
        "            self.target = self.make_target(self.source.shape, None)",
        _OUT,
    ),
    Fault(
        "out of rows ignored: the result of the forms of any length is a new array",
        "arraycomm/_collectives/uneven.py",
        "            shape, self._out, must_not_alias=must_not_alias, deferred=True",
        "            shape, None, must_not_alias=must_not_alias, deferred=True",
        _OUT,
    ),
    Fault(
        "counts of the root lost: `gatherv` returns no counts",
        "arraycomm/_collectives/uneven.py",
        "        with_counts = self._return_counts and self.target is not None",
        "        with_counts = self._return_counts and self.root is None",
        ("uneven_forms_join_rows",),
    ),
    Fault(
        "complex numbers with themselves: `exscan` folds a rank's own complex numbers too",
        "arraycomm/_collectives/scans.py",
        "        return self.rows(agreement)[: self._count]",
        '        return self.rows(agreement)[: self._count + (self.flat.dtype.kind == "c")]',
        ("scan_is_the_fold_of_the_ranks_so_far",),
    ),
    Fault(
        "error of rank 2: the third rank hears of no other rank's error",
        "arraycomm/_calls/runner.py",
        "            self.leave_by(error)\n            raise\n        self.statistics",
        "            self.leave_by(error)\n"
        '            if self.group.rank == 2 and type(error).__name__ == "PeerError":\n'
        "                return None\n            raise\n        self.statistics",
        ("wrong_argument_is_an_error_on_every_rank",),
    ),
    Fault(
        "compressed means: compressed gradients are averaged whatever the op",
        "arraycomm/_trees/reduce.py",
        "        super().__init__(context, memory, tree, op, bucket_bytes, compression, onto)",
        '        op = "mean" if compression else op\n'
        "        super().__init__(context, memory, tree, op, bucket_bytes, compression, onto)",
        ("compressed_gradients_are_folds_rounded_once_more",),
    ),
    Fault(
        "exchanged in place: `alltoall` writes over rows that it has not sent",
        "arraycomm/_collectives/movements.py",
        "        self.target = self.make_target(self.source.shape, out, must_not_alias=True)",
        "        self.target = self.make_target(self.source.shape, out)",
        ("rows_may_be_exchanged_in_place",),
    ),
    Fault(
        "limit of a call ignored: a call waits as long as its communicator says",
        "arraycomm/_calls/runner.py",
        "                if timeout is not None:",
        "                if timeout is not None and timeout > 1:",
        ("rank_that_does_not_come_is_named",),
    ),
    Fault(
        "another rank missing: the error of a wait names the rank after the one that is missing",
        "arraycomm/_protocol/waits/watchdog.py",
        "        missing = [r for r in self._control.missing() if r not in there]\n",
        "        missing = [(r + 1) % self._control.size for r in self._control.missing()]\n",
        ("rank_that_does_not_come_is_named",),
    ),
    Fault(
        "last place: `maxloc` returns the last rank that has the largest element",
        "arraycomm/_collectives/movements.py",
        '        places = wide.argmax(0) if self.op == "max" else wide.argmin(0)',
        '        places = len(wide) - 1 - wide[::-1].argmax(0) if self.op == "max" else wide.argmin(0)',
        _PLACES,
    ),
    Fault(
        "epoch ignored: all epochs are in one order",
        _ORDER,
        "spawn_key=(epoch,)",
        "spawn_key=()",
        _ITEMS,
    ),
    Fault(
        "never shuffled: a shuffled container is in the order of its data",
        _ORDER,
        '    if settings["shuffle"] and len(index):',
        '    if settings["shuffle"] and not len(index):',
        _ITEMS,
    ),
    Fault(
        "weight of filling: items that fill up a batch count",
        _DATA,
        "            yield Batch(items, np.pad(weights, (0, missing)) if missing else weights)",
        '            yield Batch(items, np.pad(weights, (0, missing), "edge") if missing else weights)',
        ("padded_batches_are_the_others_filled_up_with_items_of_no_weight",),
    ),
    Fault(
        "lines turned round: `println` writes the last rank's line first",
        "arraycomm/_println.py",
        '        write("".join(lines), file)',
        '        write("".join(reversed(lines)), file)',
        _LINES,
    ),
    Fault(
        "momentum dampened: a gradient is multiplied by 1 - momentum",
        "arraycomm/adapters/numpy/_optimizers.py",
        '        velocity = self.momentum * state["velocity"] + grad',
        '        velocity = self.momentum * state["velocity"] + (1 - self.momentum) * grad',
        _OPTIMIZERS,
    ),
)

_REDUCED: Final = ("allreduce_is_the_fold_in_rank_order",)

NATIVE: Final = (
    Fault(
        "divided by one less: a mean in C is the sum divided by a rank less",
        "arraycomm/_native/folds.c",
        "        divide(block, out, out, block->earlier.rows + row + 1);",
        "        divide(block, out, out, block->earlier.rows + row + !row);",
        _REDUCED,
    ),
    Fault(
        "own part read too early: a rank folds what its row of the segment had before",
        "arraycomm/_native/chunks.c",
        "    rows[chunks->slots.rank] = own;",
        "    (void)own;",
        _REDUCED,
    ),
    Fault(
        "last bytes of a chunk: those of a result stay as they were",
        "arraycomm/_native/chunks.c",
        "        copy(chunks->large, chunks->out + span.start, folded, span.nbytes);",
        "        copy(chunks->large, chunks->out + span.start, folded, span.nbytes - 8);",
        _REDUCED,
    ),
    Fault(
        "rounding errors left out: exact sums in C are the sums in doubles",
        "arraycomm/_native/exact.c",
        "reals[i] = sums[i] + lost[i];",
        "reals[i] = sums[i];",
        ("a_fold_is_the_sum_of_fractions", *_REDUCED),
    ),
    Fault(
        "lost carry in C: words of an exact sum keep 32 bits, and what was more is gone",
        "arraycomm/_native/exact.c",
        "        words[place + 1] += over;",
        "        words[place + 1] += over * (place != 33);",
        ("words_are_the_same_integers_in_c",),
    ),
    Fault(
        "chunks emptied too late: the sums of fractions of more numbers run into their counts",
        "arraycomm/_native/exact.c",
        "MOST_NUMBERS = 1 << (COUNT - 20)",
        "MOST_NUMBERS = 1 << (COUNT - 19)",
        ("any_number_of_equal_numbers_may_be_added_up",),
    ),
    Fault(
        "digests not compared: headers are alike whatever the ranks called",
        "arraycomm/_native/slots.c",
        "        if (memcmp(slot_of(slots, step, rank) + HEADER, expected + (size_t)rank * nbytes, nbytes)) "
        "return false;",
        "        if (!expected) return false;",
        ("disagreement_is_an_error_on_every_rank",),
    ),
)
