from __future__ import annotations

import threading

import numpy as np
import pytest

from arraycomm._folds.float16 import round_to_half
from arraycomm._folds.ieee import ieee_mode, in_ieee_mode


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
