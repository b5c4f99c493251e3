"""Capsules of every age are read in place, released once, and asked for in the right way."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest

from arraycomm._arrays.dlpack import _DLTensor, _Versioned
from arraycomm._arrays.results import view_out
from arraycomm._arrays.views import view
from arraycomm._dtypes import BY_NAME
from tests.support.frameworks import pointer

CPU_DEVICE = (1, 0)


class _Unversioned(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.pythonapi["PyCapsule_New"]
_new.restype = ctypes.py_object
_new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, _DESTRUCTOR)
_name_of = ctypes.pythonapi["PyCapsule_GetName"]
_name_of.restype = ctypes.c_char_p
_name_of.argtypes = (ctypes.c_void_p,)  # a capsule that is being destroyed must not be an object
_pointer_of = ctypes.pythonapi["PyCapsule_GetPointer"]
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.c_void_p, ctypes.c_char_p)

_alive: dict[int, Any] = {}


@_DESTRUCTOR
def _destroy(capsule: int) -> None:
    """Do what a consumer's last act would be, if nobody consumed the capsule."""
    name = _name_of(capsule)
    if not name.startswith(b"used_"):
        released = _alive.pop(_pointer_of(capsule, name))
        released[1].released += 1


class Producer:
    """Shows an array by DLPack, with whatever a test wants to be different.

    `changes` overwrites fields of the tensor, `versioned` None follows `max_version`.
    """

    def __init__(self, array: Any, *, versioned: bool | None = None, name: bytes | None = None,
                 flags: int = 0, version: tuple[int, int] = (1, 0), **changes: Any) -> None:  # fmt: skip
        self.array = array
        self.versioned, self.name, self.flags, self.version = versioned, name, flags, version
        self.changes = changes
        self.requests: list[dict[str, Any]] = []
        self.released = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU_DEVICE

    def __dlpack__(self, **keywords: Any) -> Any:
        self.requests.append(keywords)
        versioned = "max_version" in keywords if self.versioned is None else self.versioned
        return self.capsule(versioned)

    def capsule(self, versioned: bool) -> Any:
        managed = _Versioned() if versioned else _Unversioned()
        lists = _fill(managed.tensor, self.array, self.changes)
        if versioned:
            managed.major, managed.minor = self.version
            managed.flags = self.flags
        address = ctypes.addressof(managed)
        _alive[address] = (managed, self, lists)
        default = b"dltensor_versioned" if versioned else b"dltensor"
        self.name_in_use = self.name or default
        return _new(address, self.name_in_use, _destroy)


def _fill(tensor: Any, array: Any, changes: dict[str, Any]) -> list[Any]:
    row = BY_NAME[array.dtype.name]
    tensor.data = array.__array_interface__["data"][0]
    tensor.device_type, tensor.device_id = CPU_DEVICE
    tensor.ndim = array.ndim
    tensor.code, tensor.bits, tensor.lanes = row.dlpack, row.dtype.itemsize * 8, 1
    lists = []
    for field, default in (("shape", array.shape), ("strides", _counts(array))):
        values = changes.get(field, default)
        if values is not None:
            numbers = (ctypes.c_int64 * max(len(values), 1))(*values)
            lists.append(numbers)
            setattr(tensor, field, ctypes.cast(numbers, ctypes.POINTER(ctypes.c_int64)))
    for field in changes.keys() - {"shape", "strides"}:
        setattr(tensor, field, changes[field])
    return lists


def _counts(array: Any) -> tuple[int, ...]:
    return tuple(step // array.itemsize for step in array.strides)


@pytest.mark.parametrize("versioned", [True, False])
def test_memory_is_read_in_place(versioned: bool) -> None:
    for name in BY_NAME:
        array = np.arange(6).astype(BY_NAME[name].dtype).reshape(2, 3)[:, ::-1]
        found = view(Producer(array, versioned=versioned))
        assert (found.dtype, found.strides) == (array.dtype, array.strides)
        assert pointer(found.array) == pointer(array)
        assert found.array.tobytes() == array.tobytes()
        assert not found.copied
        # Without a version nobody says that it may be written.
        assert found.readonly is not versioned


def test_shapes_at_the_edge_and_null_pointers() -> None:
    for shape in ((), (0, 3), (1, 1, 1)):
        array = np.ones(shape, np.int16)
        assert view(Producer(array)).array.tolist() == array.tolist()
    for versioned in (True, False):
        producer = Producer(np.array(5), versioned=versioned, shape=None, strides=None)
        assert view(producer).array.item() == 5
    assert view(Producer(np.ones((0, 2)), data=None)).shape == (0, 2)
    # No strides mean C order.
    array = np.arange(6).reshape(2, 3)
    assert view(Producer(array, strides=None)).array.tolist() == array.tolist()
    found = view(Producer(np.arange(6), byte_offset=16, shape=(4,)))
    assert found.array.tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(("flags", "readonly", "copied"), [(0, 0, 0), (1, 1, 0), (2, 0, 1)])
def test_flags(flags: int, readonly: bool, copied: bool) -> None:
    found = view(Producer(np.ones(3), flags=flags))
    assert (found.readonly, found.copied) == (readonly, copied)
    assert found.array.flags.writeable is not bool(readonly)


def test_a_copy_cannot_be_a_destination() -> None:
    producer = Producer(np.ones(3), flags=2)
    with pytest.raises(BufferError, match=r"^out shows only a copy of its memory"):
        view_out(producer, (3,), np.dtype("f8"))


@pytest.mark.parametrize("versioned", [True, False])
def test_memory_is_released_once_after_its_last_use(versioned: bool) -> None:
    producer = Producer(np.arange(3.0), versioned=versioned)
    part = view(producer).array[1:].T
    gc.collect(0)
    assert producer.released == 0
    assert part.tolist() == [1, 2]
    del part
    gc.collect(0)
    assert producer.released == 1


def test_producers_are_asked_for_a_version_they_may_ignore() -> None:
    producer = Producer(np.ones(3), versioned=False)
    view(producer)
    assert producer.requests == [{"max_version": (1, 0)}]
    # Later minor versions are read, and older producers asked without keywords.
    assert view(Producer(np.ones(3), version=(1, 9))).array.tolist() == [1, 1, 1]
    assert view(Old(np.arange(3))).array.tolist() == [0, 1, 2]


class Old(Producer):
    """Knows no keyword but stream."""

    def __dlpack__(self, stream: Any = None) -> Any:
        return self.capsule(versioned=False)


class Elsewhere(Producer):
    """Lives on a device that only its own framework reaches, and copies to the host on demand."""

    known: frozenset[str] = frozenset(("max_version", "dl_device", "copy"))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (8, 0)

    def __dlpack__(self, **keywords: Any) -> Any:
        if keywords.keys() - self.known:
            raise TypeError("unexpected keyword")
        assert keywords["dl_device"] == CPU_DEVICE
        return super().__dlpack__(**keywords)


@pytest.mark.parametrize(
    "known", [("max_version", "dl_device", "copy"), ("dl_device", "copy"), ("dl_device",)]
)
def test_other_devices_are_asked_for_a_copy_on_the_host(known: tuple[str, ...]) -> None:
    producer = Elsewhere(np.arange(3), flags=2)
    producer.known = frozenset(known)
    found = view(producer)
    assert found.array.tolist() == [0, 1, 2]
    assert found.copied
    assert producer.requests[0].keys() == set(known)


def test_other_devices_without_a_way_to_the_host() -> None:
    producer = Elsewhere(np.arange(3))
    producer.known = frozenset()
    with pytest.raises(BufferError, match=r"^x\.__dlpack__\(\) raised TypeError: unexpected"):
        view(producer)


def test_device_memory_is_not_touched_as_host_memory() -> None:
    class OnDevice(Producer):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

    producer = OnDevice(np.arange(3))
    with pytest.raises(BufferError, match="CuPy"):
        view(producer)
    assert producer.requests == []


def test_refusal_falls_through_to_the_next_protocol() -> None:
    class Both(Producer):
        def __dlpack__(self, **keywords: Any) -> Any:
            raise BufferError("not today")

        @property
        def __array_interface__(self) -> Any:
            return self.array.__array_interface__

    assert view(Both(np.arange(3))).array.tolist() == [0, 1, 2]
