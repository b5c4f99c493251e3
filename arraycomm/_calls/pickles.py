"""Python objects as arrays of bytes, and back."""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any, Final

import numpy as np

from arraycomm._arrays.dlpack import describe
from arraycomm._arrays.exchange import exchange
from arraycomm._errors import raise_interrupt
from arraycomm._protocol.announced import check_pickle
from arraycomm._transports.base import Bytes

# Dtypes that torch reads from its own pickles. It pickles the storage of others so that it cannot.
_READABLE: Final = (
    *("torch.bool", "torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64"),
    *("torch.float16", "torch.bfloat16", "torch.float32", "torch.float64"),
    *("torch.complex64", "torch.complex128"),
)

_PARTS: Final = (
    "send parts that pickle takes, such as functions and classes that a module has by name"
)


def dumps(obj: Any, name: str = "obj", remedy: str = _PARTS) -> Bytes:
    """Return the pickle of an object, as an array of bytes; errors call the object by `name`."""
    stream = io.BytesIO()
    try:
        _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(obj)
    except Exception as error:
        raise_interrupt(error, MemoryError)
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
        if torch is None or not hasattr(torch, "UntypedStorage"):
            return NotImplemented
        if type(obj) is torch.UntypedStorage and obj.device.type != "meta":
            data = torch.empty(0, dtype=torch.uint8, device=obj.device).set_(obj)
            return _storage, (exchange(data, "numpy"), str(obj.device))
        if type(obj) is torch.Tensor and not (str(obj.dtype) in _READABLE or obj.is_quantized):
            plain = obj.detach().resolve_conj().resolve_neg()
            if plain.layout == torch.strided and plain.device.type != "meta":
                place = plain.storage_offset(), tuple(plain.shape), plain.stride()
                return _tensor, (plain.untyped_storage(), obj.dtype, place, obj.requires_grad)
        return NotImplemented


def _storage(data: Bytes, device: str) -> Any:
    return exchange(data, "torch", copy=True).to(device).untyped_storage()


def _tensor(storage: Any, dtype: Any, place: Any, requires_grad: bool) -> Any:
    torch = sys.modules["torch"]
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)
    return tensor.requires_grad_(requires_grad)
