"""The leaves of trees as the native part holds, copies and folds them."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from arraycomm._communicator import Communicator
from arraycomm._folds.in_c import number_of
from arraycomm._native import compiled
from arraycomm._reduce import segment
from arraycomm.testing import run
from tests.support.oracle import expected, same_result

if compiled is None:
    pytest.skip("the native part was not built, or is not to be used", allow_module_level=True)

_FLOAT = np.dtype(np.float32)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_SHAPES = [(3, 70_001), (), (0, 4), (1,), (255, 257), *[(1000 + n,) for n in range(50)]]


def _tree(rank: int) -> list[Any]:
    """Leaves of two dtypes, of which some are cut by chunks, some have no elements, and some few."""
    rng = np.random.default_rng(rank)
    dtypes = [_BFLOAT16 if n % 3 else _FLOAT for n in range(len(_SHAPES))]
    drawn = [4 * rng.standard_normal(shape) for shape in _SHAPES]
    return [np.array(x).astype(dtype) for x, dtype in zip(drawn, dtypes, strict=True)]


@pytest.mark.parametrize(("ranks", "streams"), [(1, True), (2, False), (4, True), (9, False)])
def test_a_plan_reduces_held_leaves(
    monkeypatch: pytest.MonkeyPatch, ranks: int, streams: bool
) -> None:
    monkeypatch.setattr(segment, "_CHUNK_BYTES", 32 << 10)
    monkeypatch.setattr(segment.SharedSegment, "ways", lambda *_: repeat((streams, None)))

    def check(comm: Communicator) -> None:
        for op in ("sum", "mean", "max"):
            trees = [_tree(rank) for rank in range(comm.size)]
            plan = comm.plan(trees[comm.rank], op)
            for _ in range(2):
                got = plan(trees[comm.rank])
                for leaf, *rows in zip(got, *trees, strict=True):
                    assert leaf.flags.writeable
                    assert same_result(leaf, expected(rows, op), op)

    run(ranks, check)


def test_other_leaves_are_not_held() -> None:
    class Derived(np.ndarray):
        pass

    x = np.ones((2, 3), _FLOAT)
    spec = ((_FLOAT,), ((2, 3),))
    assert compiled.hold(np.ndarray, [x], *spec) is not None
    others = [x.T, x[:, ::2], x[:1], x.reshape(6), x.astype(np.int32), x.view(Derived), 1.0, None]
    for other in [*others, x.astype(">f4")]:
        assert compiled.hold(np.ndarray, [other], *spec) is None
    for leaves in ([], [x, x]):
        assert compiled.hold(np.ndarray, leaves, *spec) is None


def test_held_memory_stays() -> None:
    x = np.arange(1000, dtype=_FLOAT)
    held, row = compiled.hold(np.ndarray, [x], (_FLOAT,), ((1000,),)), np.zeros(4000, np.uint8)
    with pytest.raises(ValueError, match="resize"):
        x.resize(1 << 20)
    del x
    np.ones(1000, _FLOAT)
    held.fill(row, np.array([(0, 0, 4000, 0)], np.int64))
    assert row.view(_FLOAT).tolist() == list(range(1000))


def test_parts_outside_the_memory_are_refused() -> None:
    x, row = np.ones(4, _FLOAT), np.zeros(16, np.uint8)
    held = compiled.hold(np.ndarray, [x], (_FLOAT,), ((4,),))
    for part in [(1, 0, 8, 0), (-1, 0, 8, 0), (0, 12, 8, 0), (0, -4, 8, 0), (0, 0, 8, 12),
                 (0, 0, 8, -4), (0, 0, -8, 0), (0, 2**62, 8, 0)]:  # fmt: skip
        parts = np.array([(0, 0, 4, 0), part], np.int64)
        with pytest.raises(ValueError, match="parts do not lie"):
            held.fill(row, parts)
        assert not row.any(), part


_CHUNK, _SLOT = 64, 192
# Chunks of a tree of one leaf, and their parts: this rank folds all of it, and takes the results.
_TREE = np.array([(64, 0, 0, 0, 1, 2), (40, 0, 2, 2, 3, 4)], np.int64)
_PARTS = np.array([(0, 0, 64, 0), (-1, 0, 64, 0), (0, 64, 40, 0), (-1, 64, 40, 0)], np.int64)


def _place(**changes: Any) -> tuple[Any, ...]:
    """Say where a rank alone reduces 26 elements, but for some changes."""
    values = {
        "slots": np.zeros(2 * _SLOT, np.uint8),
        "segment": np.zeros(7 * _CHUNK, np.uint8),
        "out": np.zeros(104, np.uint8),
        "streams": b"\0\1",
        "seconds": np.zeros((2, 2)),
        "slot": _SLOT,
        "rank": 0,
        "size": 1,
        "chunk": _CHUNK,
        "large": True,
        "rows": 4,
        "folded": 3,
        "turn": 0,
        "step": 0,
        "nanoseconds": 10**9,
    }
    return tuple({**values, **changes}.values())


def _summed(tree: Any) -> Any:
    """Put the number of the fold into the chunks of a tree."""
    return tree + np.eye(6, dtype=np.int64)[1] * number_of("sum", _FLOAT)


def _reduce_tree(tree: Any, parts: Any, x: Any = None) -> list[float]:
    x = np.arange(26, dtype=_FLOAT) if x is None else x
    held = compiled.hold(np.ndarray, [x], (_FLOAT,), ((26,),))
    held.reduce(place := _place(), _summed(tree), parts, _CHUNK, 104)
    found: list[float] = place[2].view(_FLOAT).tolist()
    return found


def test_one_rank_gets_its_own_elements() -> None:
    x, sums = np.arange(26, dtype=_FLOAT), number_of("sum", _FLOAT)
    held = compiled.hold(np.ndarray, [x], (_FLOAT,), ((26,),))
    for reduce in (
        lambda place: compiled.reduce_chunks(place, x.view(np.uint8), sums),
        lambda place: held.reduce(place, _summed(_TREE), _PARTS, _CHUNK, 104),
    ):
        assert reduce(place := _place()) == (4, 3)
        assert (place[4] > 0).all()
        assert place[2].view(_FLOAT).tolist() == list(range(26))


def test_results_go_to_leaves_and_to_the_buffer_as_the_parts_say() -> None:
    x, parts = np.arange(26, dtype=_FLOAT), _PARTS.copy()
    # The results of the second chunk, elsewhere.
    parts[3] = (0, 0, 40, 0)
    assert _reduce_tree(_TREE, parts, x) == [*range(16), *[0] * 10]
    assert x.tolist() == [*range(16, 26), *range(10, 26)]
    locked = x.copy()
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="parts do not lie"):
        _reduce_tree(_TREE, parts, locked)
    assert _reduce_tree(_TREE, _PARTS, locked) == x.tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"out": np.zeros(100, np.uint8)},
        {"streams": b"\0"},
        {"streams": b"\0\0\0"},
        {"chunk": 128, "segment": np.zeros(7 * 128, np.uint8)},
        {"chunk": 32},
        {"chunk": 60},
        {"turn": -1},
    ],
    ids=str,
)
def test_chunks_are_those_of_the_array_and_of_the_tree(changes) -> None:
    """What segments have to be besides is tested beside them."""
    x, sums = np.arange(26, dtype=_FLOAT), number_of("sum", _FLOAT)
    held = compiled.hold(np.ndarray, [x], (_FLOAT,), ((26,),))
    with pytest.raises(ValueError, match="not as the segment has them"):
        compiled.reduce_chunks(_place(**changes), x.view(np.uint8), sums)
    with pytest.raises(ValueError, match="not as the segment has them"):
        held.reduce(_place(**changes), _summed(_TREE), _PARTS, _CHUNK, 104)


def test_arrays_without_whole_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="whole elements"):
        compiled.reduce_chunks(_place(), np.zeros(103, np.uint8), number_of("sum", _FLOAT))
    with pytest.raises(ValueError, match="no fold has the number"):
        compiled.reduce_chunks(_place(), np.zeros(104, np.uint8), 10**4)


@pytest.mark.parametrize(
    ("table", "row", "column", "value"),
    [
        *((_TREE, 1, 0, value) for value in (0, -1, 39, 65)),
        *((_TREE, 1, 1, value) for value in (-1, 10**4)),
        *((_TREE, 1, 2, value) for value in (-1, 3)),
        *((_TREE, 1, 3, value) for value in (1, 4)),
        *((_TREE, 1, 4, value) for value in (1, 5)),
        *((_TREE, 1, 5, value) for value in (2, 5)),
        *((_PARTS, 2, 0, value) for value in (-1, 1)),
        *((_PARTS, 2, 1, value) for value in (-4, 65, 2**62)),
        *((_PARTS, 2, 2, value) for value in (-4, 38, 44)),
        *((_PARTS, 2, 3, value) for value in (-4, 4, 2**62)),
        *((_PARTS, 3, 0, value) for value in (-2, 1)),
        *((_PARTS, 3, 1, value) for value in (-4, 65, 2**62)),
        *((_PARTS, 3, 2, value) for value in (-4, 44)),
        *((_PARTS, 3, 3, value) for value in (-4, 4, 2**62)),
    ],
)
def test_chunks_of_trees_outside_their_memory_are_refused(table, row, column, value) -> None:
    changed = table.copy()
    changed[row, column] = value
    tables = (changed, _PARTS) if table is _TREE else (_TREE, changed)
    # The number of a fold is added to that column.
    if table is _TREE and column == 1:
        changed[row, column] -= number_of("sum", _FLOAT)
    with pytest.raises(ValueError, match="parts do not lie in the leaves and in the chunks"):
        _reduce_tree(*tables)
