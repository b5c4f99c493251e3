from __future__ import annotations

import threading

import numpy as np
import pytest

from arraycomm._folds import fold, fold_on
from arraycomm._folds.float16 import round_to_half, widen_half
from arraycomm._folds.ieee import ieee_mode, in_ieee_mode
from tests.support.oracle import CASES, IDS, sample


@pytest.mark.parametrize("which", ["all", "finite"])
def test_every_float16_is_widened_as_numpy_does_it(which) -> None:
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    if which == "finite":
        half = half[np.isfinite(half)]
    wide = np.empty(half.shape, np.float32)
    widen_half(wide, half)
    expected = half.astype(np.float32)
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(wide), nan)
    assert wide[~nan].tobytes() == expected[~nan].tobytes()


def _between_float16() -> np.ndarray:
    """Every float16, the middle of it and the next, and the float32 on both sides of that."""
    half = np.sort(np.arange(1 << 16, dtype=np.uint16).view(np.float16))
    half = half[np.isfinite(half)].astype(np.float32)
    middle = (half[1:] + half[:-1]) / 2
    around = [np.nextafter(middle, np.float32(end)) for end in (-np.inf, np.inf)]
    return np.concatenate([half, middle, *around])


@pytest.mark.parametrize("extreme", [None, 65519.9, 65520.0, -1e30, np.inf, np.nan])
def test_float32_is_rounded_to_float16_as_numpy_does_it(extreme) -> None:
    wide = _between_float16()
    if extreme is not None:
        wide = np.append(wide, np.float32(extreme))
    for values in (wide, np.float32([0.0, -0.0, -1e-30, 1e-45])):
        with np.errstate(over="ignore"):
            expected = values.astype(np.float16)
            half = np.empty(values.shape, np.float16)
            round_to_half(half, values.copy())
        assert np.array_equal(half.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=IDS)
def test_rows_of_one_array_are_folded_as_others(dtype, op) -> None:
    for rows, count in ((1, 1), (2, 0), (17, 5)):
        slots = np.zeros((rows, count + 7), dtype)
        slots[:, 2 : 2 + count] = [sample(dtype, count, rank, op) for rank in range(rows)]
        block = slots[:, 2 : 2 + count]
        one, other = np.empty((2, count), dtype)
        fold(op, dtype, block, one)
        fold(op, dtype, list(block), other)
        assert one.tobytes() == other.tobytes()


def test_an_exact_sum_has_no_parts() -> None:
    rows, out = [np.ones(3)], np.empty(3)
    for total, more in ((None, True), (rows[0], False)):
        with pytest.raises(ValueError, match="takes all rows at once"):
            fold_on("fsum", out.dtype, total, 0, rows, out, more=more)


def test_mode_is_left_as_it_was_found() -> None:
    torch = pytest.importorskip("torch")
    seen: list[bool] = []

    def flushing() -> None:
        torch.set_flush_denormal(True)
        seen.append(in_ieee_mode())
        with ieee_mode():
            seen.append(in_ieee_mode())
        seen.append(in_ieee_mode())

    thread = threading.Thread(target=flushing)
    thread.start()
    thread.join()
    assert seen == [False, True, False]
    assert in_ieee_mode()
