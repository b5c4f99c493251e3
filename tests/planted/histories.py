"""Faults that show in calls made again, from other memory, of other sizes, or after other calls."""

from __future__ import annotations

from typing import Final

from tests.planted.fault import Fault

_FAST: Final = "arraycomm/_prepared/fast_path.py"
_AGAIN: Final = ("calls_made_again_give_what_numpy_says",)
_MPI: Final = "mpi properties/test_history_laws.py"

HISTORIES: Final = (
    Fault(
        "overlap not looked at: a large array that is reduced again is written over what is not read yet",
        _FAST,
        "            and (out is x or not np.may_share_memory(x, out))\n",
        "",
        _AGAIN,
        compiled=True,
    ),
    Fault(
        "first axis only: the native part takes leaves that have a plan's first axis for the plan's",
        "arraycomm/_native/leaves.c",
        "    for (int axis = 0; axis < buffer->ndim; ++axis)\n        if (PyLong_AsSsize_t(PyTuple_GetItem(shape",
        "    for (int axis = 0; axis < (buffer->ndim > 0); ++axis)\n        if (PyLong_AsSsize_t(PyTuple_GetItem(shape",
        _AGAIN,
    ),
    Fault(
        "weights of few digits: means of metrics have weights in float32",
        "arraycomm/_training/metrics.py",
        "        local = check_weight(weight)\n",
        "        local = float(np.float32(check_weight(weight)))\n",
        ("metrics_are_means_by_weight",),
    ),
    Fault(
        "last chunk taken from the first: the last chunk of a result is what was folded of another",
        "arraycomm/_native/chunks.c",
        "(number + 1) % (size_t)chunks->folded_count)",
        "(number + (number < 7)) % (size_t)chunks->folded_count)",
        _AGAIN,
    ),
    Fault(
        "fifth chunk over the first: a chunk is published where the one before the last lies",
        "arraycomm/_native/chunks.c",
        "(number % (size_t)chunks->row_count *",
        "(number % (number > 4 ? 1 : (size_t)chunks->row_count) *",
        _AGAIN,
    ),
    Fault(
        "sixth chunk left out: of more than five chunks without a segment, the sixth is not folded",
        "arraycomm/_reduce/chunks.py",
        "        yield begun.pop(0)\n        fold(number)\n",
        "        yield begun.pop(0)\n        if number != 5:\n            fold(number)\n",
        _AGAIN,
        run=_MPI,
    ),
    Fault(
        "request from the end: a prepared request sends the elements from the last to the first",
        _FAST,
        "        exchange.post(own)\n",
        "        exchange.post(own if not isinstance(own, np.ndarray) else own.reshape(-1)[::-1].copy())\n",
        (*_AGAIN, "requests_that_repeat_give_what_blocking_calls_give"),
        compiled=True,
    ),
    Fault(
        "out of another stride: a prepared call writes into an `out` with gaps as if it had none",
        _FAST,
        "        fits = type(out) is np.ndarray and (out.dtype, out.shape) == gets and out.flags.carray\n",
        "        fits = type(out) is np.ndarray and (out.dtype, out.shape) == gets\n",
        _AGAIN,
        compiled=True,
    ),
    Fault(
        "divided exchange: a rank goes on with messages between nodes that an interrupt has divided",
        "arraycomm/_transports/undivided.py",
        "        self._divided = kind is not None",
        "        self._divided = False",
        ("a_wait_between_nodes_interrupted_at_any_moment_goes_on_or_raises",),
        run="mpi properties/test_giving_up_laws.py",
    ),
    Fault(
        "piece of the middle: of messages in more than three pieces the third is left out",
        "arraycomm/_transports/mpi/pieces.py",
        "    return [memory[i:j] for i, j in zip(bounds, [*bounds[1:], len(memory)], strict=True)]",
        "    pieces = [memory[i:j] for i, j in zip(bounds, [*bounds[1:], len(memory)], strict=True)]\n"
        "    return [*pieces[:2], *pieces[1:2], *pieces[3:]] if count > 3 else pieces",
        _AGAIN,
        run=_MPI,
    ),
    Fault(
        "dtype of a repeated call: the native part takes an array of another dtype for one before",
        "arraycomm/_native/exchange.c",
        "self->ops[entry] == op && exchange->dtype == dtype && has_form",
        "self->ops[entry] == op && has_form",
        _AGAIN,
    ),
    Fault(
        "dtype of a plan's leaf: the native part takes leaves of any dtype for a plan's",
        "arraycomm/_native/leaves.c",
        "!= type || !has_dtype(array, dtype)) return",
        "!= type || !(has_dtype(array, dtype) || true)) return",
        _AGAIN,
    ),
    Fault(
        "kind of a root: a root that is no integer is taken in a call made before with one that equals it",
        _FAST,
        "place, *map(type, rest))",
        "place)",
        _AGAIN,
        compiled=True,
    ),
    Fault(
        "requests overtaken: a large array that is reduced again does not wait for requests",
        _FAST,
        "            if exchange is None or self._engine.queue or self._group.closed is not None:\n                return False\n            try:\n                chunks",
        "            if exchange is None or self._group.closed is not None:\n                return False\n            try:\n                chunks",
        _AGAIN,
        compiled=True,
    ),
    Fault(
        "memory of a tensor before: results of prepared calls of tensors are all one tensor",
        "arraycomm/_arrays/frameworks/torch.py",
        "        def make() -> tuple[Any, int]:\n            made = empty()\n",
        "        kept = empty()\n\n        def make() -> tuple[Any, int]:\n            made = kept\n",
        ("tensors_that_repeat_are_read_as_they_are_once",),
        frameworks=True,
        compiled=True,
    ),
    Fault(
        "end of a streamed copy: a copy past the caches leaves out what is not a multiple of eight bytes",
        "arraycomm/_native/slots.c",
        "    memcpy(to, x, nbytes);\n}\n\nvoid end_stream(void)\n{\n    _mm_sfence",
        "    memcpy(to, x, nbytes & ~(size_t)7);\n}\n\nvoid end_stream(void)\n{\n    _mm_sfence",
        _AGAIN,
    ),
    Fault(
        "own part of a chunk: the native part folds a part that begins too early",
        "arraycomm/_native/chunks.c",
        "count * rank / size * itemsize, count * (rank + 1)",
        "count / size * rank * itemsize, count * (rank + 1)",
        _AGAIN,
    ),
    Fault(
        "headers of others: a repeated call looks at the first rank's header alone",
        "arraycomm/_native/slots.c",
        "    for (int rank = 0; rank < slots->size; ++rank)\n        if (memcmp(slot_of",
        "    for (int rank = 0; rank < 1; ++rank)\n        if (memcmp(slot_of",
        ("disagreement_is_an_error_on_every_rank",),
    ),
    Fault(
        "halves rounded twice: exact sums of float16 are rounded to float32 first",
        "arraycomm/_native/exact.c",
        "wide[i] = make_odd_float(reals[i]);",
        "wide[i] = (float)reals[i];",
        ("a_fold_is_the_sum_of_fractions",),
    ),
    Fault(
        "room of an exact sum: words that do not fit into a slot are to travel with the header",
        "arraycomm/_collectives/exact_sums.py",
        "nbytes = self._words * WORD.itemsize * min",
        "nbytes = self._words + WORD.itemsize * min",
        ("rows_may_be_spread_over_ranks_in_any_way",),
    ),
)
