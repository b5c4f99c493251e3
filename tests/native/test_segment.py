"""Large arrays through memory that ranks share."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import product, repeat
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._folds import in_c
from arraycomm._native import compiled
from arraycomm._reduce import chain, segment, selection
from arraycomm.testing import run
from tests.support import internals
from tests.support.on_ranks import each_rank_of
from tests.support.oracle import expected, same_result

if compiled is None:
    pytest.skip("the native part was not built, or is not to be used", allow_module_level=True)

_KINDS = [
    ("sum", np.dtype(np.float32), (70_001,)),
    ("mean", np.dtype(ml_dtypes.bfloat16), (300, 401)),
    ("prod", np.dtype(np.complex128), (16_384,)),
    # One element in the last chunk.
    ("max", np.dtype(np.int32), ((32 << 10) + 1,)),
    ("xor", np.dtype(np.uint8), (262_147,)),
]


@pytest.fixture(autouse=True)
def preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefer the segment, in which a chunk is small, wherever all ranks can have one."""
    monkeypatch.setattr(selection, "is_preferred", lambda link, _: link.slot[1])
    monkeypatch.setattr(segment, "_CHUNK_BYTES", 32 << 10)


def _check(comm: Communicator) -> None:
    for number, (op, dtype, shape) in enumerate(_KINDS):
        drawn = [np.random.default_rng([number, r]) for r in range(comm.size)]
        # Negative ones have no place in unsigned integers: processors differ in what becomes of them.
        floats = [4 * rng.standard_normal(shape) for rng in drawn]
        arrays = [(abs(x) if dtype.kind == "u" else x).astype(dtype) for x in floats]
        want, x = expected(arrays, op), arrays[comm.rank]
        out = np.empty(shape, dtype)
        request = comm.iallreduce(x, op)
        assert comm.allreduce(x, op, out=out) is out
        for got in (out, request.wait(), comm.allreduce(x.copy(order="F"), op)):
            assert same_result(got, want, op)
        # In place, and into memory that overlaps the array's without being it.
        whole = np.concatenate([x.reshape(-1), np.zeros(9, dtype)])
        shifted = comm.allreduce(whole[: x.size], op, out=whole[9:])
        assert same_result(shifted, want.reshape(-1), op)
        assert same_result(comm.allreduce(x, op, out=x), want, op)


@pytest.mark.parametrize(("ranks", "streams"), [(2, True), (4, False)])
def test_large_arrays_go_through_the_segment(monkeypatch, ranks: int, streams: bool) -> None:
    """Copies in and out go past the caches, or through them."""
    monkeypatch.setattr(segment.SharedSegment, "ways", lambda *_: repeat((streams, None)))
    monkeypatch.setattr(segment, "CACHED_BYTES", 0 if streams else 1 << 40)

    def check(comm: Communicator) -> None:
        _check(comm)
        assert internals.segment(comm) is not None
        assert ac.explain(np.zeros(10**6), comm=comm).algorithm == "segment"

    run(ranks, check)


@pytest.mark.parametrize("ranks", [2, 4])
def test_calls_without_headers_wait_for_slow_ranks(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some ranks still fold and take the chunks of one call while others publish those of the next."""
    folded_of, slow = segment.SharedSegment._folded_of, set[int]()

    def late() -> None:
        time.sleep(0.002 * (threading.get_ident() in slow))

    def find_slowly(*chunk: Any) -> Any:
        late()
        return folded_of(*chunk)

    def check(comm: Communicator) -> None:
        unchecked, plan = comm.dup(check=False), None
        if comm.rank == comm.size - 1:
            slow.add(threading.get_ident())
        for number, chunks in enumerate([1, 1, 2, 3, 1, 5, 4, 1, 2, 2]):
            x = np.full(chunks * (32 << 10) // 4, number + 1, np.float32)
            assert (unchecked.allreduce(x) == (number + 1) * comm.size).all()
            plan = unchecked.plan({"x": x, "y": x[1:]}, "sum")
            assert (plan({"x": x, "y": x[1:]})["x"] == (number + 1) * comm.size).all()
        assert internals.segment(unchecked) is not None

    with monkeypatch.context() as patch:
        patch.setattr(segment.SharedSegment, "_folded_of", find_slowly)
        # A turn at a time.
        patch.setattr(segment, "NANOSECONDS", 0)
        ended = set[bool]()

        def watch(call: _Call) -> None:
            ended.add(call.ended)
            late()

        _watch_turns(patch, watch)
        run(ranks, check)
    assert ended == {False, True}


class _Call(NamedTuple):
    """What the native part is called with: the bytes of all, and for each chunk whether to stream, and its seconds."""

    nbytes: int
    streams: bytes
    seconds: Any
    large: bool
    ended: bool


def _watch_turns(patch: pytest.MonkeyPatch, watch: Callable[[_Call], None]) -> None:
    """Call `watch` whenever the native part has made turns."""
    reduce_natively = segment.SharedSegment.reduce_natively

    def watched(self: Any, go_on: Any, target: Any, count: int) -> Any:
        def go_on_watched(place: Any) -> Any:
            turn, step = go_on(place)
            _, _, _, streams, seconds, _, _, _, _, large, *_ = place
            watch(_Call(target.nbytes, streams, seconds, large, turn == count + 2))
            return turn, step

        return reduce_natively(self, go_on_watched, target, count)

    patch.setattr(segment.SharedSegment, "reduce_natively", watched)


def test_a_rank_without_the_native_part_keeps_all_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(segment, "compiled", None)
        run(2, _check)


def test_ranks_measure_which_copies_are_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    """For arrays that fit in the caches, and for larger ones; and again if that changes."""
    late, made = ["copy"], Counter[str]()

    def check(comm: Communicator) -> None:
        for late_one, quick in (("copy", "copyto"), ("copyto", "copy")):
            comm.barrier()
            late[0] = late_one
            comm.barrier()
            for length in (25 * 10**4, 2 * 10**6):
                x = np.ones(length)
                # The first ones try both.
                for _ in range(4 * 10**6 // length):
                    comm.allreduce(x)
                comm.barrier()
                made.clear()
                comm.barrier()
                for _ in range(4 * 10**6 // length):
                    comm.allreduce(x)
                comm.barrier()
                assert made[late_one] < made[quick] / 2, (late_one, length, made)

    def watch(call: _Call) -> None:
        if not call.ended:
            return
        assert (call.seconds > 0).all()
        assert (call.seconds < 1e-3).all()
        for number, streams in enumerate(call.streams):
            name = "copy" if streams else "copyto"
            made[name] += 1
            call.seconds[number, 0] = 1.0 if late[0] == name else 1e-9

    _watch_turns(monkeypatch, watch)
    monkeypatch.setattr(segment, "_BETWEEN_TRIALS", 30)
    run(2, check)


def test_what_was_quicker_in_a_trial_holds_until_the_next() -> None:
    copies = segment._Copies()
    ways = copies.ways()
    # Memory is new then.
    assert [next(ways) for _ in range(segment.ROWS)] == [(True, None)] * segment.ROWS
    for past, through in [(2.0, 1.0), (1.0, 2.0), (2.0, 1.0)]:
        # A trial in which the first chunk of each way takes longer.
        for number in range(2 * segment._TRIED):
            streams, seconds = next(ways)
            assert streams == (number < segment._TRIED)
            seconds += [(past if streams else through) + (number % segment._TRIED == 0), 0.5]
        assert next(ways)[1] is None
        # A call may end at any chunk.
        ways = copies.ways()
        for _ in range(segment._BETWEEN_TRIALS):
            assert next(ways) == (past < through, None)


def test_the_segment_is_used_as_was_measured() -> None:
    one = segment._CHUNK_BYTES
    for size, nbytes, quicker in [
        (2, one, True),
        (64, one, True),
        (9, one + 1, False),
        (8, one + 1, True),
        (8, 1 << 30, True),
    ]:
        assert segment.is_quicker(nbytes, size) == quicker


def test_a_chain_is_taken_if_it_sends_less_and_its_turns_take_less_than_that() -> None:
    assert chain.is_quicker(64 << 10, 2, 2, 1)
    # The total of 16-bit floats has twice their bytes: as many as the slices of three ranks.
    assert not chain.is_quicker(64 * (1 << 20), 2, 3, 2)
    assert chain.is_quicker(64 * (1 << 20), 2, 4, 2)
    # Two ranks of three nodes get what they would by slices.
    assert not chain.is_quicker(64 * (1 << 20), 3, 2, 1)
    assert not chain.is_quicker(8 * (1 << 20), 4, 2, 1)
    assert chain.is_quicker(64 * (1 << 20), 4, 2, 1)
    # With many ranks, slices are more messages than a chain has turns.
    assert chain.is_quicker(64 << 10, 2048, 64, 1)


@each_rank_of(2)
def test_ranks_without_shared_memory_do_without(comm: Communicator) -> None:
    with internals.forbid_segment(comm):
        _check(comm)


def test_copies_past_the_caches_are_copies_and_have_to_fit() -> None:
    for offset, nbytes in product((0, 1, 16, 63), (0, 5, 64, 1000)):
        x = np.random.default_rng(nbytes).integers(0, 256, nbytes + 64, np.uint8)
        out = np.zeros(nbytes + 128, np.uint8)
        compiled.copy(out[offset : offset + nbytes], x[3 : 3 + nbytes])
        assert (out[offset : offset + nbytes] == x[3 : 3 + nbytes]).all()
        assert not np.delete(out, slice(offset, offset + nbytes)).any()
    x = np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="must have the same elements"):
        compiled.copy(x[:4], x[4:7])
    with pytest.raises(ValueError, match="must not overlap"):
        compiled.copy(x, x)


def test_chunks_have_to_be_those_of_the_segment() -> None:
    """Each number at its limit is taken, and beyond it refused."""
    x, none, number = np.arange(8.0), np.zeros(8, np.uint8), in_c.number_of("sum", np.dtype(float))
    memory = np.zeros(512, np.uint8), np.zeros(192, np.uint8), np.zeros_like(x)
    right = *memory, bytes(1), np.zeros((1, 2)), 256, 0, 1, 64, False, 2, 1, 0, 0, 1 << 30
    wrong = {0: none, 1: none, 2: none, 3: b"", 4: none, 5: 120, 6: 1, 7: 0, 8: 32, 10: 0, 11: 0}
    for place, value in (*wrong.items(), (5, 252), (6, -1), (8, 0), (12, -1), (13, -1)):
        with pytest.raises(ValueError, match="the chunks are not as the segment has them"):
            compiled.reduce_chunks((*right[:place], value, *right[place + 1 :]), x, number)
    assert compiled.reduce_chunks(right, x, number) == (3, 2)
    assert (memory[2] == x).all()
