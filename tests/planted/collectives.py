"""Faults in folds, algorithms, arrays and messages."""

from __future__ import annotations

from typing import Final

from tests.planted.fault import Fault

_FOLDS: Final = "arraycomm/_folds/by_numpy.py"
_EXACT: Final = "arraycomm/_folds/exact.py"
_HALVES: Final = "arraycomm/_folds/float16.py"
_CHAIN: Final = "arraycomm/_reduce/chain.py"
_ALGORITHMS: Final = "arraycomm/_reduce/algorithms.py"
_REDUCTIONS: Final = "arraycomm/_collectives/reductions.py"
_MOVEMENTS: Final = "arraycomm/_collectives/movements.py"
_UNEVEN: Final = "arraycomm/_collectives/uneven.py"
_FUNCTIONS: Final = "arraycomm/_collectives/function_reductions.py"
_BLOCKS: Final = "arraycomm/_reduce/blocks.py"
_FAST: Final = "arraycomm/_prepared/fast_path.py"
_PLACEMENT: Final = "arraycomm/_calls/placement.py"

FOLDS: Final = (
    Fault(
        "wrong op for bool: `xor` of booleans is `or`",
        _FOLDS,
        '"xor": np.logical_xor,',
        '"xor": np.logical_or,',
        ("every_dtype_has_its_ops",),
    ),
    Fault(
        "NaN dropped: `min` of floats ignores a NaN",
        _FOLDS,
        '"min": np.minimum,',
        '"min": np.fmin,',
        ("every_dtype_has_its_ops",),
    ),
    Fault(
        "NaN of the first rank dropped: `max` keeps a NaN only if it is not the first rank's",
        _FOLDS,
        "            convert(first, folded)",
        "            if op == 'max' and others and part.dtype.kind == 'f':\n"
        "                first = np.where(np.isnan(first), others[0], first)\n"
        "            convert(first, folded)",
        ("every_dtype_has_its_ops",),
    ),
    Fault(
        "fifth rank skipped: a fold stops after four ranks",
        _FOLDS,
        "            for row in others:",
        "            for row in others[:3]:",
        ("integers_commute", "integers_associate", "min_and_max_commute"),
    ),
    Fault(
        "one rank alone: on one rank a mean is divided by two",
        _FOLDS,
        "                divide(folded, count)",
        "                divide(folded, max(count, 2))",
        ("one_rank_alone_gets_what_it_gave", "mean_of_equal_values_is_that_value"),
    ),
    Fault(
        "rounded at every rank: 16- and 8-bit floats are rounded after each rank's, not once",
        _FOLDS,
        "                join(folded, _widened(row, wide))",
        "                join(folded, _widened(row, wide))\n"
        "                folded[...] = folded.astype(dtype)",
        ("every_dtype_has_its_ops",),
    ),
    Fault(
        "complex division: "
        "the mean of complex numbers divides them as such, so that infinities become NaN",
        _FOLDS,
        'for part in (total.real, total.imag) if total.dtype.kind == "c" else (total,):',
        "for part in (total,):",
        ("every_dtype_has_its_ops",),
    ),
    Fault(
        "mean by the reciprocal: a mean is multiplied by 1/n, which rounds twice",
        _FOLDS,
        "        np.divide(part, part.dtype.type(count), out=part)",
        "        np.multiply(part, 1 / part.dtype.type(count), out=part)",
        ("every_dtype_has_its_ops",),
    ),
    Fault(
        "mean of prefixes: `scan` divides by one rank less",
        _FOLDS,
        "total, before + 1, []",
        "total, before or 1, []",
        ("scan_is_the_fold_of_the_ranks_so_far",),
    ),
    Fault(
        "last block skipped: a fold leaves out the last block of a long row, if it is not full",
        _FOLDS,
        "        for start in range(0, len(out), length):",
        "        for start in range(0, len(out) - length * (len(out) > length) + 1, length):",
        ("block_size_does_not_matter",),
    ),
    Fault(
        "subnormal halves: subnormal float16 are rounded as if they were normal",
        _HALVES,
        "_LEAST_EXPONENT = np.int32((127 - 14) << 23)",
        "_LEAST_EXPONENT = np.int32((127 - 15) << 23)",
        ("halves_are_converted_as_numpy_does",),
    ),
    Fault(
        "exact sums in rank order: they are rounded after each rank's",
        _FOLDS,
        "                fold_exactly(dtype, [first, *others], part)",
        "                part[...] = sum(others, start=first)",
        ("exact_sums_commute",),
    ),
    Fault(
        "rounded twice: exact sums of floats with fewer bits than a double are rounded to one first",
        _EXACT,
        "    bits += np.where(inexact,",
        "    bits += 0 * np.where(inexact,",
        ("a_fold_is_the_sum_of_fractions",),
    ),
    Fault(
        "ties go up: an exact sum that is halfway between two doubles becomes the larger one",
        _EXACT,
        "twice == 1 << more and significand & 1)",
        "twice == 1 << more)",
        ("rows_may_be_spread_over_ranks_in_any_way",),
    ),
    Fault(
        "what is lost is lost: a fold does not see that the rounding errors were rounded as well",
        _EXACT,
        "        failed += np.abs(rest)",
        "        failed += 0 * np.abs(rest)",
        ("a_fold_is_the_sum_of_fractions",),
    ),
    Fault(
        "lost carry: words of an exact sum keep 32 bits, and what was more is gone",
        _EXACT,
        "        words[:, place + 1] += over",
        "        words[:, place + 1] += over * (place != 33)",
        ("rows_may_be_spread_over_ranks_in_any_way",),
    ),
    Fault(
        "rounded on each rank: ranks add up their rounded sums",
        "arraycomm/_collectives/exact_sums.py",
        "            add_rows(self._dtype, np.ascontiguousarray(rows[some]), words)\n",
        "            add_rows(self._dtype, np.ascontiguousarray(rows[some]), words)\n"
        "        out = np.empty((1, rows.shape[1]), self._dtype)\n"
        "        round_words(self._dtype, words, out[0])\n"
        "        words[...] = 0\n"
        "        add_rows(self._dtype, out, words)\n",
        ("rows_may_be_spread_over_ranks_in_any_way",),
    ),
)

ALGORITHMS: Final = (
    Fault(
        "pieces too long: a piece is four times as long as a movement may be",
        _BLOCKS,
        "    step = MAX_BYTES // itemsize",
        "    step = 4 * MAX_BYTES // itemsize",
        ("pieces_and_what_travels_with_the_header_do_not_matter",),
    ),
    Fault(
        "own array first: small reductions are folded from each rank's own array on",
        _REDUCTIONS,
        "        return self.rows(agreement)\n\n\nclass Allreduce(Reduction)",
        "        rows, rank = self.rows(agreement), self.group.rank\n"
        "        return [*rows[rank:], *rows[:rank]]\n\n\nclass Allreduce(Reduction)",
        (
            "every_rank_gets_the_same_bits",
            "every_schedule_gives_all_ranks_the_same_bits",
            "turns_add_up_to_the_fold_of_all_parts",
        ),
    ),
    Fault(
        "last rank skipped: a rank does not fold the last row of its slice",
        _ALGORITHMS,
        "        link.fold(op, dtype, rows, into)\n",
        "        link.fold(op, dtype, rows[:-1], into)\n",
        ("way_does_not_matter",),
    ),
    Fault(
        "last rank skipped in one slice: rank 0 folds its slice without the last rank's",
        _ALGORITHMS,
        "        link.fold(op, dtype, rows, into)",
        "        most = size - (rank == 0 < len(source) > 1000)\n"
        "        link.fold(op, dtype, rows[:most], into)",
        ("way_does_not_matter",),
    ),
    Fault(
        "end of the slices: "
        "elements that are left over once all slices are equally long belong to none",
        "arraycomm/_reduce/chunks.py",
        "    return [count * rank // size for rank in range(size + 1)]",
        "    return [count // size * rank for rank in range(size + 1)]",
        ("size_does_not_matter",),
    ),
    Fault(
        "start of a chunk: slices of a second chunk begin where those of the first do",
        "arraycomm/_reduce/chunks.py",
        "        own = slice(*(chunk.start + bound // itemsize for bound in bounds[rank : rank + 2]))",
        "        own = slice(*(bound // itemsize for bound in bounds[rank : rank + 2]))",
        ("chunk_size_does_not_matter",),
    ),
    Fault(
        "other order of ranks: "
        "rows that came with the headers are folded from the last rank to the first",
        _REDUCTIONS,
        "            fold(self.op, self.flat.dtype, self.folded_rows(agreement), self.target.flat)",
        "            fold(self.op, self.flat.dtype, self.folded_rows(agreement)[::-1], self.target.flat)",
        ("allreduce_is_the_fold_in_rank_order",),
    ),
    Fault(
        "root off by one: the rank after the root gets the result of `reduce`",
        _REDUCTIONS,
        "        if self.group.rank == root:",
        "        if self.group.rank == (root + 1) % self.group.size:",
        ("reduce_is_the_fold_on_the_root_alone", "allreduce_is_reduce_then_bcast"),
    ),
    Fault(
        "root ignored: a long array is broadcast by rank 0",
        _MOVEMENTS,
        "            yield from algorithms.bcast(self.placement.link, into, self.root)",
        "            yield from algorithms.bcast(self.placement.link, into, 0)",
        ("bcast_copies", "bcast_needs_nothing_of_the_others"),
    ),
    Fault(
        "exclusive is inclusive: `exscan` of small arrays contains the rank's own",
        "arraycomm/_collectives/scans.py",
        "        return self.rows(agreement)[: self._count]",
        "        return self.rows(agreement)[: self.group.rank + 1]",
        ("scan_is_the_fold_of_the_ranks_so_far",),
    ),
    Fault(
        "shares of the shortest: "
        "`reduce_scatter` with counts moves as many rows as the smallest share has",
        _ALGORITHMS,
        "    longest = max(end - start for start, end in pairwise(bounds))",
        "    longest = min(end - start for start, end in pairwise(bounds))",
        ("reduce_scatter_with_counts_is_a_share_of_allreduce",),
    ),
    Fault(
        "row of the left neighbour: `reduce_scatter` of small arrays gives rank r row r - 1",
        _REDUCTIONS,
        "        start, end = self._bounds[self.group.rank : self.group.rank + 2]",
        "        start, end = self._bounds[max(self.group.rank - 1, 0) :][:2]",
        ("reduce_scatter_is_a_row_of_allreduce",),
    ),
    Fault(
        "rows not exchanged: "
        "`alltoall` of small arrays gives rank r the rows that the others have for themselves",
        _MOVEMENTS,
        "            into[start:end] = row[bounds[rank] : bounds[rank + 1]]",
        "            into[start:end] = row[start:end]",
        ("alltoall_transposes",),
    ),
    Fault(
        "row of another rank: `scatter` gives a root that is not rank 0 the first row",
        _MOVEMENTS,
        "            into[...] = source[part]",
        "            into[...] = source[: into.size]",
        ("scatter_hands_out_rows",),
    ),
    Fault(
        "uneven rows shifted: `alltoallv` of small arrays takes the wrong rows of each rank",
        _UNEVEN,
        "            first = int(tables[rank, : group.rank].sum()) * elements",
        "            first = int(tables[rank, group.rank + 1 :].sum()) * elements",
        ("uneven_forms_join_rows",),
    ),
    Fault(
        "counts of the others: "
        "the v-forms return the counts in the order of the requests, from the last rank on",
        _UNEVEN,
        "        return (result, self.received) if with_counts else result",
        "        return (result, self.received[::-1]) if with_counts else result",
        ("uneven_forms_join_rows",),
    ),
    Fault(
        "gathered on all: `gather` gives the result to rank 0 as well",
        _MOVEMENTS,
        "        if root in {None, self.group.rank}:\n"
        "            shape = (self.group.size, *self.source.shape)",
        "        if root in {None, self.group.rank} or not self.group.rank:\n"
        "            shape = (self.group.size, *self.source.shape)",
        ("gather_is_allgather_on_the_root_alone",),
    ),
    Fault(
        "signs of zeros: `allgather` of small float arrays makes every zero positive",
        _MOVEMENTS,
        "            join_inline(agreement, bounds, into)\n\n\nclass Gather(Allgather)",
        "            join_inline(agreement, bounds, into)\n"
        "            if into.dtype.kind == 'f':\n                into[into == 0] = 0\n\n\nclass Gather(Allgather)",
        ("allgather_stacks",),
    ),
    Fault(
        "function from the right: a function of the user's gets its arguments in the other order",
        "arraycomm/_calls/custom_ops.py",
        "            total = self._op.fn(total, self._array(row, shape))",
        "            total = self._op.fn(self._array(row, shape), total)",
        ("functions_are_folded_in_rank_order",),
    ),
    Fault(
        "slices of a function: "
        "the slices of an elementwise function are gathered from their last element on",
        _FUNCTIONS,
        "        yield from algorithms.gatherv(link, part, target, bounds, root)",
        "        yield from algorithms.gatherv(link, part[::-1].copy(), target, bounds, root)",
        ("functions_are_folded_in_rank_order",),
    ),
    Fault(
        "exscan by a function: `exscan` by a function gives what `scan` gives",
        _FUNCTIONS,
        "        made = np.roll(made, 1, axis=0)",
        "        made = np.roll(made, 0, axis=0)",
        ("functions_are_folded_in_rank_order",),
    ),
    Fault(
        "total of the chunk before: a node folds onto a total that another chunk has",
        _CHAIN,
        "            total = memory.totals[number & 1]",
        "            total = memory.totals[number and 1 - (number & 1)]",
        ("results_are_in_rank_order_whoever_goes_on_first",),
    ),
    Fault(
        "exact sums from node to node: a chain of nodes folds them onto rounded totals",
        _CHAIN,
        "    if chain is None or not goes_on(op):",
        "    if chain is None:",
        ("exact_sums_are_not_rounded_between_nodes",),
    ),
    Fault(
        "node of one rank: nodes are a chain though one of them has a single rank",
        "arraycomm/_transports/base.py",
        "min(map(len, members)) > 1",
        "max(map(len, members)) > 1",
        ("nodes_do_not_matter",),
    ),
    Fault(
        "chunk of any length: the chunks of a chain end at no multiple of 64 bytes",
        _CHAIN,
        "    return min(max(-(-nbytes // (64 * count)), 1) * 64, largest)",
        "    return min(max(-(-nbytes // count), 1), largest)",
        ("chunks_fit_in_the_segment_and_are_about_equally_long",),
    ),
)

ARRAYS: Final = (
    Fault(
        "strong dtypes made weak: results of JAX give way to the dtypes of other arrays",
        "arraycomm/_arrays/frameworks/jax.py",
        '    if not getattr(source, "weak_type", False) or made.dtype',
        '    if not getattr(source, "weak_type", False) and made.dtype',
        ("layout_and_framework_do_not_matter",),
        frameworks=True,
    ),
    Fault(
        "layout ignored: elements are sent in the order in which they lie in memory",
        _PLACEMENT,
        "    flat: Array = source.array.reshape(-1)",
        "    flat: Array = source.array.reshape(-1, order='A')",
        ("layout_and_framework_do_not_matter",),
    ),
    Fault(
        "byte order ignored: numbers of the other byte order are sent as they are",
        "arraycomm/_arrays/buffer.py",
        '        array = array.astype(dtype.newbyteorder("="))',
        '        array = array.view(dtype.newbyteorder("="))',
        ("byte_order_does_not_matter",),
    ),
    Fault(
        "kind of the result: a result for a torch tensor is NumPy's",
        "arraycomm/_arrays/frameworks/torch.py",
        "    to_framework=_to_torch,",
        "    to_framework=lambda array, like: array,",
        ("allreduce_is_the_fold_in_rank_order",),
        frameworks=True,
    ),
    Fault(
        "kind of a number: a reduced Python number is an array without dimensions",
        "arraycomm/_arrays/frameworks/python.py",
        "    return array.item() if array.ndim == 0 else array",
        "    return array",
        ("numbers_come_back_as_their_type",),
    ),
    Fault(
        "wrong part in calls that repeat: `scatter` and `alltoall` give each rank the first row",
        "arraycomm/_prepared/exchanged.py",
        "            place=share.part * part,",
        "            place=0,",
        ("calls_made_again_give_what_numpy_says",),
        compiled=True,
    ),
    Fault(
        "out not filled: a second result for an `out` of torch that is not contiguous is lost",
        _FAST,
        "    into.array[...] = elements",
        "    pass",
        ("out_gets_the_result_and_its_neighbours_nothing",),
        frameworks=True,
        compiled=True,
    ),
    Fault(
        "request of another library: a request that repeats ends with an array of NumPy's",
        _FAST,
        "            return target if deliver is None else deliver()",
        "            return target",
        ("calls_made_again_give_what_numpy_says",),
        frameworks=True,
        compiled=True,
    ),
    Fault(
        "layout of out ignored: "
        "a result is written side by side into an `out` whose elements do not lie so",
        _PLACEMENT,
        "        return array.reshape(-1) if array.flags.c_contiguous and array.flags.aligned else None",
        "        gaps = np.lib.stride_tricks.as_strided(array, (array.size,), (array.itemsize,))\n"
        "        return gaps if min(array.strides, default=0) >= 0 else None",
        ("moved_data_fills_any_out",),
    ),
    Fault(
        "result is the argument: from the second call on, torch's tensors are reduced in place",
        _FAST,
        "            made, into = self._new()",
        "            made, into = x, address",
        ("tensors_that_repeat_are_read_as_they_are_once",),
        frameworks=True,
        compiled=True,
    ),
    Fault(
        "argument in place: a rank that scatters or exchanges rows writes into its own",
        _MOVEMENTS,
        "        for row, (start, end) in zip(self.rows(agreement), pairwise(bounds), strict=True):",
        "        if flat.flags.writeable:\n            flat[:1] = flat[-1:]\n"
        "        for row, (start, end) in zip(self.rows(agreement), pairwise(bounds), strict=True):",
        ("input_is_not_modified",),
    ),
    Fault(
        "out cleared: "
        "`out` is cleared before the call reads its argument, which may be the same array",
        _PLACEMENT,
        "            self.flat, self._direct, self.copies = direct, True, 0",
        "            self.flat, self._direct, self.copies = direct, True, 0\n"
        "            self.flat.view(np.uint8)[...] = 0",
        ("out_may_be_the_input",),
    ),
    Fault(
        "stale buffer: the memory of a tree's results is used again while a caller still has them",
        "arraycomm/_trees/buffers.py",
        "(idle if kept[1]() is None else used).append(kept)",
        "idle.append(kept)",
        ("results_are_nobody_elses",),
    ),
    Fault(
        "remembered without its op: what folds a dtype by one op is taken for another op",
        _FOLDS,
        "            join = _join(op, dtype)",
        "            join = vars(fold).setdefault(dtype, _join(op, dtype))",
        ("repeated_calls_reduce_what_they_are_given",),
    ),
)

_REPEATED: Final = ("repeated_messages_bring_what_was_sent",)
_REPEATED_RUN: Final = "properties/test_message_laws.py"

MESSAGES: Final = (
    Fault(
        "layout of a large message: a repeated send copies an array by columns as if by rows",
        "arraycomm/_messages/fast_messages.py",
        " or not x.flags.c_contiguous:",
        ":",
        _REPEATED,
        run=_REPEATED_RUN,
        compiled=True,
    ),
    Fault(
        "known head: a repeated receive takes what comes for an array like the one before",
        "arraycomm/_messages/fast_messages.py",
        "        if self._head != self._known:",
        "        if self._known is None:",
        _REPEATED,
        run=_REPEATED_RUN,
    ),
    Fault(
        "receive overtakes: a repeated receive comes before one from any rank that waits",
        "arraycomm/_messages/fast_messages.py",
        "        return not self.busy and self._group.closed is None and self._matcher.idle()",
        "        return not self.busy and self._group.closed is None",
        _REPEATED,
        run=_REPEATED_RUN,
    ),
    Fault(
        "envelope under way: a repeated send writes into the envelope of the one before",
        "arraycomm/_messages/fast_messages.py",
        "        self.busy = not self._message.begin()\n        return not self.busy",
        "        self.busy = False\n        return self._message.begin()",
        _REPEATED,
        run=_REPEATED_RUN,
    ),
    Fault(
        "interrupted message: a communicator goes on after the call of a message was interrupted",
        "arraycomm/_messages/messages.py",
        "        if isinstance(error, TransportError) or is_interrupt(error):",
        "        if isinstance(error, TransportError):",
        ("a_message_interrupted_at_any_moment_leaves_nobody_a_wrong_result",),
        run="properties/test_giving_up_laws.py",
    ),
    Fault(
        "send complete too early: a long message counts as sent before it is received",
        "arraycomm/_transports/mailbox.py",
        "        self.taken = len(buffer) <= Transport.copied\n"
        "        self.buffer: Bytes = buffer.copy() if self.taken else buffer",
        "        self.taken = True\n"
        "        self.buffer: Bytes = buffer.copy() if len(buffer) <= Transport.copied else buffer",
        ("finished_requests_are_finished",),
    ),
    Fault(
        "collective complete too early: a rank goes on while others still read its memory",
        "arraycomm/_transports/threads.py",
        "        if min(group.read) < number:\n            return False\n",
        "",
        (
            "requests_do_not_depend_on_the_schedule",
            "blocking_calls_do_not_depend_on_the_schedule",
            "arguments_may_change_after_a_call",
        ),
    ),
    Fault(
        "finished too early: `Request.test` says yes before the result is there",
        "arraycomm/_calls/requests.py",
        "        return finished\n",
        "        return True\n",
        ("finished_requests_are_finished",),
    ),
    Fault(
        "tag ignored: messages of one sender arrive in the order of sending, whatever their tags",
        "arraycomm/_transports/threads.py",
        "        return self._group.mailbox.recv((source, self.rank, tag), buffer)",
        "        sent = [t for s, t in sorted((k[0], k[2]) for k in self._group.mailbox._messages"
        " if k[:2] == (source, self.rank)) if t < 4]\n"
        "        return self._group.mailbox.recv((source, self.rank, sent[0] if tag < 4 and sent else tag), buffer)",
        ("messages_arrive_as_they_were_sent",),
    ),
    Fault(
        "latest message first: a receive from any rank takes the last message that has come",
        "arraycomm/_transports/mailbox.py",
        "        _, (sender, _, tag) = min(found)",
        "        _, (sender, _, tag) = max(found)",
        ("messages_arrive_as_they_were_sent",),
    ),
    Fault(
        "status of a message: a status gives the bytes of one element less",
        "arraycomm/_messages/envelopes.py",
        "    status.dtype, status.shape, status.nbytes = dtype, shape, nbytes",
        "    status.dtype, status.shape, status.nbytes = dtype, shape, max(nbytes - 1, 0)",
        ("messages_arrive_as_they_were_sent",),
    ),
    Fault(
        "results in another order: `waitall` returns the last request's result first",
        "arraycomm/_calls/requests.py",
        '    return wait_for_each(_listed("waitall", requests))',
        '    return wait_for_each(_listed("waitall", requests)[::-1])',
        ("every_rank_gets_what_the_model_says",),
    ),
    Fault(
        "order of calls: a blocking call overtakes the requests that were started before it",
        "arraycomm/_protocol/engine.py",
        "        if self.queue:\n            return self.finish(self.submit(program))\n",
        "",
        ("every_rank_gets_what_the_model_says", "no_schedule_shows_in_what_ranks_get"),
    ),
    Fault(
        "second request lost: of several requests, the one that was started last is made first",
        "arraycomm/_protocol/engine.py",
        "            self.queue.append(task)\n            return self._begin(task)",
        "            self.queue.insert(1, task)\n            return self._begin(task)",
        ("requests_give_what_blocking_calls_give",),
    ),
    Fault(
        "request of the wrong root: `igather` collects on rank 0",
        "arraycomm/_collectives/nonblocking.py",
        "        return start(self._runner, Gather, x, (root,), out)",
        "        return start(self._runner, Gather, x, (0,), out)",
        ("every_request_gives_what_its_blocking_call_gives",),
    ),
    Fault(
        "objects of one rank: `gather_object` gives every rank the list",
        "arraycomm/_collectives/objects.py",
        "        return Share(range(self.group.size)) if self.receives else NO_SHARE\n",
        "        return Share(range(self.group.size))\n",
        ("objects_arrive_equal",),
    ),
    Fault(
        "length of an object before: an object that is sent again is announced as long as the last",
        "arraycomm/_native/exchange.c",
        "        memcpy(header + LENGTHS - HEADER, lengths, sizeof lengths);\n",
        "",
        ("objects_that_repeat_arrive_equal",),
    ),
    Fault(
        "objects of every rank: `allgather_object` of long objects gives this rank's own last",
        "arraycomm/_collectives/objects.py",
        "            self.received = [into[start:end] for start, end in pairwise(bounds)]\n",
        "            self.received = [into[start:end] for start, end in pairwise(bounds)]\n"
        "            self.received.append(self.received.pop(group.rank))\n",
        ("objects_arrive_equal",),
    ),
)
