"""Python objects as arrays of bytes, and back."""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any, Final

import numpy as np

from arraycomm._arrays.dlpack import describe
from arraycomm._arrays.exchange import exchange
from arraycomm._protocol.announced import check_pickle
from arraycomm._transports.base import Bytes

# Dtypes that torch pickles in a way that it cannot read itself.
_UNREADABLE: Final = frozenset(
    f"torch.{name}" for name in ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
)


_PARTS: Final = (
    "send parts that pickle takes, such as functions and classes that a module has by name"
)


def dumps(obj: Any, name: str = "obj", remedy: str = _PARTS) -> Bytes:
    """Return the pickle of an object, as an array of bytes; errors call the object by `name`."""
    stream = io.BytesIO()
    try:
        _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(obj)
    except MemoryError:
        raise
    except Exception as error:
        raise TypeError(f"{name} cannot be pickled ({describe(error)}); {remedy}") from error
    return np.frombuffer(stream.getbuffer(), np.uint8)


def loads(rank: int, data: Bytes | bytes) -> Any:
    """Return the object of a pickle that `rank` has sent."""
    try:
        return pickle.loads(data if isinstance(data, bytes) else data.data)
    except Exception as error:
        check_pickle(rank, data, error)
        raise


class Pickled:
    """An object as a call is given it; it is pickled once, where its pickle is asked for."""

    # Those of an array, by which calls with arrays are found again: objects have none.
    dtype, shape = None, None

    def __init__(self, obj: Any) -> None:
        self._obj = obj
        self._data: Bytes | None = None

    def data(self) -> Bytes:
        """Return the pickle."""
        if self._data is None:
            self._data = dumps(self._obj)
        return self._data

    @property
    def nbytes(self) -> int:
        """Bytes of the pickle."""
        return len(self.data())

    def packed(self, room: int) -> Bytes | None:
        """Return the pickle; None if it has more bytes than `room`."""
        data = self.data()
        return data if len(data) <= room else None

    def taken(self, received: list[bytes], exchange: Any, rows: Bytes) -> list[bytes]:
        """Return the pickles that came, which are loaded later."""
        return received


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        kind = getattr(torch, "Tensor", None)
        if kind is not None and type(obj) is kind and str(obj.dtype) in _UNREADABLE:
            return _tensor, (exchange(obj, "numpy"), str(obj.device))
        return NotImplemented


def _tensor(array: Any, device: str) -> Any:
    return exchange(array, "torch", copy=True).to(device)
