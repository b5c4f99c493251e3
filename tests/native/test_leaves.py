"""The leaves of trees as the native part holds, copies and folds them."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from arraycomm._collectives import segment
from arraycomm._communicator import Communicator
from arraycomm._folds.in_c import number_of
from arraycomm._native import compiled
from arraycomm._trees.held import Held
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


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_plan_reduces_held_leaves(monkeypatch: pytest.MonkeyPatch, ranks, streams) -> None:
    monkeypatch.setattr(segment, "_CHUNK_BYTES", 32 << 10)
    monkeypatch.setattr(segment.SharedSegment, "ways", lambda *_: repeat((streams, None)))
    filled: list[bool] = []
    fill = Held.fill

    def noting(held: Held, row: Any, parts: Any, *, streams: bool) -> None:
        filled.append(streams)
        fill(held, row, parts, streams=streams)

    monkeypatch.setattr(Held, "fill", noting)

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
    assert set(filled) == {streams and ranks > 1}


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
    held.fill(row, np.array([(0, 0, 4000, 0)], np.int64), False)
    assert row.view(_FLOAT).tolist() == list(range(1000))


@pytest.mark.parametrize(
    "part", [(1, 0, 8, 0), (-1, 0, 8, 0), (0, 12, 8, 0), (0, -4, 8, 0), (0, 0, 8, 12), (0, 0, 8, -4),
             (0, 0, -8, 0), (0, 2**62, 8, 0)]
)  # fmt: skip
def test_parts_outside_the_memory_are_refused(part: tuple[int, ...]) -> None:
    x, row = np.ones(4, _FLOAT), np.zeros(16, np.uint8)
    held = compiled.hold(np.ndarray, [x], (_FLOAT,), ((4,),))
    parts = np.array([(0, 0, 4, 0), part], np.int64)
    with pytest.raises(ValueError, match="parts do not lie"):
        held.fill(row, parts, True)
    with pytest.raises(ValueError, match="parts do not lie"):
        held.fold(number_of("sum", _FLOAT), [row, row], 0, parts, row.copy())
    assert not row.any()


def test_rows_that_do_not_fit_are_refused() -> None:
    x, row, sums = np.ones(4, _FLOAT), np.zeros(16, np.uint8), number_of("sum", _FLOAT)
    held = compiled.hold(np.ndarray, [x], (_FLOAT,), ((4,),))
    parts = np.array([(0, 0, 16, 0)], np.int64)
    for rows, own, out in [
        ([row, row[:8]], 0, row.copy()),
        ([row, row], 0, row[:8].copy()),
        ([row, row], 2, row.copy()),
        ([row] * 9, 0, row.copy()),
        ([], 0, row.copy()),
    ]:
        with pytest.raises(ValueError, match="rows"):
            held.fold(sums, rows, own, parts, out)
    with pytest.raises(ValueError, match="parts do not lie"):
        held.fold(sums, [row], 0, np.array([(0, 0, 3, 0)], np.int64), row.copy())
