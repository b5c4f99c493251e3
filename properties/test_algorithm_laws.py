"""Laws of the ways in which a reduction moves its data: all give the same bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm._reduce import chunks as chunking
from arraycomm._reduce import selection
from arraycomm.testing import given
from arraycomm.testing import strategies as ranked
from arraycomm.testing._arrays.frameworks import elements_of
from arraycomm.testing.conformance._checks import check_copy, check_elements
from arraycomm.testing.conformance._inputs import (
    Reduction,
    reductions,
    reductions_of_rows,
    reductions_of_sizes,
)
from arraycomm.testing.conformance._movements import arguments_of_collectives
from properties.programs import as_they_end, minus
from tests.support import internals


class _Choice(threading.local):
    """What the rank of this thread is to choose; another may still be at an earlier call."""

    way: str | None = None
    chunk: int | None = None


_choice = _Choice()


@pytest.fixture(scope="module", autouse=True)
def _choices_are_made_here() -> Iterator[None]:
    without_segment, is_preferred = selection.without_segment, selection.is_preferred
    step, overlapping_chunk = chunking.step, chunking.overlapping_chunk

    def without_segment_here(link, nbytes):
        drawn = _choice.way is not None and link.size > 1
        return selection.Algorithm.SLICES if drawn else without_segment(link, nbytes)

    def is_preferred_here(link, nbytes):
        if _choice.way is None:
            return is_preferred(link, nbytes)
        return _choice.way == "segment" and link.slot[1]

    def overlapping_chunk_here(*about):
        return overlapping_chunk(*about) if _choice.chunk is None else 8 * _choice.chunk

    def step_here(*about):
        return step(*about) if _choice.chunk is None else _choice.chunk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "without_segment", without_segment_here)
        patch.setattr(selection, "is_preferred", is_preferred_here)
        patch.setattr(chunking, "overlapping_chunk", overlapping_chunk_here)
        patch.setattr(chunking, "step", step_here)
        yield


@contextmanager
def _choosing(way: str, chunk: int | None = None) -> Iterator[None]:
    _choice.way, _choice.chunk = way, chunk
    try:
        yield
    finally:
        _choice.way = _choice.chunk = None


def check_reduction(comm, reduction: Reduction, root: int) -> None:
    # Nothing is so small that it travels with the header.
    internals.set_inline_bytes(comm, -1)
    op, x, want = reduction.op, reduction.arrays.build(comm.rank), reduction.fold()
    check_elements(elements_of(comm.allreduce(x, op)), want, op)
    result = comm.reduce(x, op, root)
    assert (result is None) == (comm.rank != root)
    if result is not None:
        check_elements(elements_of(result), want, op)


@given(
    reduction=reductions() | reductions_of_sizes(),
    way=st.sampled_from(("segment", "slices")),
    root=ranked.roots(),
)
def test_way_does_not_matter(comm, reduction, way, root) -> None:
    with _choosing(way):
        check_reduction(comm, reduction, root)
        # What follows is seldom drawn.
        base = np.arange(comm.size * 9_000).reshape(comm.size, -1)
        share = comm.reduce_scatter(base * (comm.rank + 1), ac.op(minus))
        assert np.array_equal(share, base[comm.rank] * (2 - sum(range(comm.size + 1))))
        empty = np.empty((comm.size, 0), np.float32)
        comm.reduce(empty, root=root)
        results = comm.allreduce(empty), comm.scan(empty), comm.reduce_scatter(empty)
        assert [result.size for result in results] == [0, 0, 0]


@given(
    reduction=reductions_of_rows(),
    root=ranked.roots(),
    ways=st.lists(
        st.sampled_from(("wait", "test", "all", "any", "two", "refused")), min_size=3, max_size=6
    ),
)
def test_requests_that_repeat_give_what_blocking_calls_give(comm, reduction, root, ways) -> None:
    """Alone or beside others, waited for in any order or only tested, and after an error."""
    for turn, way in enumerate([*("wait", "wait"), *ways]):
        x = reduction.arrays.build((comm.rank + turn) % comm.size)
        for name, args in arguments_of_collectives(comm, x, reduction.op, root).items():
            begin, call = getattr(comm, f"i{name}"), getattr(comm, name)
            wants = [call(*args, timeout=60)] * (2 if way in ("two", "all", "any") else 1)
            if way == "refused":
                wrong = begin(object() if comm.rank == root else x, *args[1:])
                with pytest.raises(TypeError if comm.rank == root else ac.PeerError):
                    wrong.wait()
            requests = [begin(*args) for _ in wants]
            if way == "two":
                wants.append(call(*args))
                requests.append(begin(*args))
            while way == "test" and not requests[0].test():
                pass
            while way == "all" and not ac.testall(requests):
                pass
            order = sorted(range(len(wants)), key=lambda place: (place + comm.rank) % 3)
            if way == "any":
                results = dict(enumerate(as_they_end(requests)))
            else:
                results = {place: requests[place].wait() for place in order}
            for place, want in enumerate(wants):
                assert type(results[place]) is type(want), name
                if want is not None:
                    got = elements_of(results[place])
                    check_elements(got, elements_of(want), reduction.op)


@given(
    reduction=reductions(shapes=st.integers(1, 20_000)),
    chunks=st.integers(1, 50),
    root=ranked.roots(),
)
def test_chunk_size_does_not_matter(comm, reduction, chunks, root) -> None:
    count = reduction.arrays.value[0].shape[0]
    with _choosing("slices", -(-count // chunks)):
        check_reduction(comm, reduction, root)


@given(
    reduction=reductions_of_rows(),
    root=ranked.roots(),
    movement=st.sampled_from((2 << 10, 4 << 10)),
    room=st.sampled_from(("a count", "some", "a row", "all", "all and counts")),
    more=st.integers(-1, 1),
    check=st.booleans(),
)
def test_pieces_and_what_travels_with_the_header_do_not_matter(
    comm, reduction, root, movement, room, more, check
) -> None:
    """Of collectives, of objects, and of messages that are under way together."""
    op, x, elements = reduction.op, reduction.arrays.build(comm.rank), reduction.arrays.elements()
    size, source, nbytes = comm.size, (comm.rank - 1) % comm.size, elements[0].nbytes
    inline = {
        "a count": 8,
        "some": 128,
        "a row": nbytes // size + more,
        "all": nbytes + more,
        "all and counts": nbytes + 8 * size + more,
    }
    uneven = [*[0] * (size - 1), size]

    def called(part) -> list:
        arguments = arguments_of_collectives(part, x, op, root)
        found = [getattr(part, name)(*args) for name, args in arguments.items()]
        return [*found, part.reduce_scatter(x, op, counts=uneven), part.alltoallv(x, uneven)]

    wants = called(comm)
    with internals.small_limits(comm, internals.slots(), 1 << 10, movement):
        part = comm.dup(check=check)
        internals.set_inline_bytes(part, min(inline[room], internals.control(part).payload))
        spans = internals.spans(part)
        for got, want in zip(called(part), wants, strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                check_elements(elements_of(got), elements_of(want), op)
        texts = ["é" * (700 * rank) for rank in range(size)]
        assert part.allgather_object(texts[comm.rank]) == texts
        assert part.bcast_object(texts[comm.rank], root) == texts[root]
        assert part.gather_object(texts[comm.rank], root) == (texts if comm.rank == root else None)
        receives = [part.irecv(source) for _ in range(3)]
        sends = [part.isend(x, (comm.rank + 1) % size) for _ in receives]
        for number in (1, 2, 0):
            check_copy(elements_of(receives[number].wait()), elements[source])
        ac.waitall(sends)
        assert max(spans, default=0) <= movement
