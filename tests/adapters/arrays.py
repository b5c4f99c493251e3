"""NumPy's arrays as those of each framework, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import arraycomm as ac
from arraycomm._dtypes import name_of
from tests.adapters.remote import Remote

Array = NDArray[Any]


def to_torch(array: Array) -> Any:
    torch: Any = pytest.importorskip("torch")
    name = name_of(array.dtype)
    if array.dtype.type.__module__ == "ml_dtypes":
        integers = torch.from_numpy(array.view(f"i{array.itemsize}").copy())
        return integers.view(getattr(torch, name))
    return torch.from_numpy(array.copy())


def to_jax(array: Array) -> Any:
    jax: Any = pytest.importorskip("jax")
    with jax.enable_x64(True):
        return jax.device_put(array)


def to_strict(array: Array) -> Any:
    return pytest.importorskip("array_api_strict").asarray(array.copy())


MAKERS: dict[str, Callable[[Array], Any]] = {
    "numpy": np.copy,
    "torch": to_torch,
    "jax": to_jax,
    "array_api_strict": to_strict,
    "remote": Remote,
}


def elements(x: Any) -> Array:
    return x._elements if isinstance(x, Remote) else ac.exchange(x, "numpy")
