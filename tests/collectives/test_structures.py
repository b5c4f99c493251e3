"""Structures: record arrays come back as record arrays, and every byte order is converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._protocol.header import Signature, encode
from tests.support.on_ranks import each_rank_of

FIELDS = [("a", "<i4"), ("b", "<f8")]
MOVES: dict[str, Callable[[Communicator, Any], Any]] = {
    "allgather": lambda c, x: c.allgather(x)[-1],
    "bcast": lambda c, x: c.bcast(x, c.size - 1),
    "bcast to none": lambda c, x: c.bcast(x if c.rank == 0 else None, like=x),
    "scatter": lambda c, x: c.scatter(np.stack([x] * c.size).view(type(x)), like=x),
    "synchronize": lambda c, x: ac.synchronize({"x": [x]}, comm=c)["x"][0],
    "exchange": lambda c, x: ac.exchange(x, x, copy=True),
}


@pytest.mark.parametrize("move", MOVES)
@each_rank_of("few")
def test_record_arrays_come_back_as_such(comm: Communicator, move) -> None:
    x = np.rec.array([(1, 2.5), (3, 4.5)], dtype=FIELDS)
    got = MOVES[move](comm, x)
    assert type(got) is np.recarray
    assert got.dtype == x.dtype
    assert got.dtype.type is np.record
    assert (got.a.tolist(), got.b.tolist()) == ([1, 3], [2.5, 4.5])


@each_rank_of("few")
def test_records_outside_of_record_arrays(comm: Communicator) -> None:
    record = np.rec.array([(1, 2.5)], dtype=FIELDS)[0]
    got = comm.bcast(record)
    assert (type(got), got.a, got.b) == (np.record, 1, 2.5)
    plain = np.zeros(2, np.dtype((np.record, FIELDS)))
    assert comm.bcast(plain)[1].a == 0
    assert type(comm.bcast(plain)) is np.ndarray
    out = np.rec.array([(0, 0.0)], dtype=FIELDS)
    assert comm.bcast(np.array([(7, 8.0)], FIELDS), out=out) is out
    assert out.a.tolist() == [7]


@pytest.mark.parametrize("first", [np.void, np.record])
@each_rank_of("few")
def test_repeated_records_come_back_as_such(comm: Communicator, first: type) -> None:
    """Also if calls with plain structures were made before, whose dtypes are equal."""
    plain, records = (np.zeros(2, np.dtype((kind, FIELDS))) for kind in (np.void, np.record))
    turns = [plain] * 4 + [records] * 4
    for x in turns if first is np.void else reversed(turns):
        got = comm.allgather(x)
        assert (type(got), got.dtype.type) == (np.ndarray, x.dtype.type)


@pytest.mark.parametrize(
    "fields",
    [
        [("a", ">i4", (2,)), ("b", "<f8")],
        [("n", [("a", ">i4", (2,)), ("s", "<U2")]), ("b", "<f8", (1, 2))],
        [("n", [("m", [("a", ">f4", (3, 1))], (2,))])],
        {"names": ["a", "b"], "formats": [(">u2", (2,)), "u1"], "offsets": [4, 0], "itemsize": 16},
    ],
)
@pytest.mark.parametrize("kind", [np.ndarray, np.recarray])
@each_rank_of("few")
def test_subarrays_of_another_byte_order(comm: Communicator, fields, kind) -> None:
    foreign = np.dtype(fields)
    native = foreign.newbyteorder("=")
    raw = np.arange(3 * native.itemsize, dtype=np.uint8) % 50
    x = raw.view(native)
    if "n" in native.names and "s" in native["n"].names:
        x["n"]["s"] = "ab"
    mixed = x.astype(foreign) if comm.rank == 0 else x
    got = comm.allgather(mixed.view(kind))
    for row in got:
        assert row.dtype == native
        assert repr(row.tolist()) == repr(x.tolist())


def test_equal_structures_are_one_to_the_ranks() -> None:
    """NumPy's own alignment, which files do not keep, is no difference; an offset is one."""
    aligned = np.dtype([("a", "i1"), ("b", "i4")], align=True)
    spelled = {"names": ["a", "b"], "formats": ["i1", "i4"], "offsets": [0, 4], "itemsize": 8}
    equal = [aligned, np.dtype(spelled), np.lib.format.descr_to_dtype(aligned.descr)]
    equal += [np.dtype([("x", each, (2,))]) for each in equal]
    found = [encode(Signature("bcast", None, 0, dtype, ()), -1) for dtype in equal]
    assert found == [found[0]] * 3 + [found[3]] * 3
    other = np.dtype({**spelled, "offsets": [4, 0]})
    assert encode(Signature("bcast", None, 0, other, ()), -1) != found[0] != found[3]
