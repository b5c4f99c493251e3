"""Arrays that lie about themselves end in an exception, never in a crash of the interpreter.

The cases run in another process. One that ends it is a failure, and the rest goes on in a new one.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arraycomm._arrays.views import view
from tests.arrays.test_dlpack import Producer

_CASES: dict[str, tuple[Callable[[], Any], str]] = {}

Maker = Callable[[], Any]


def case(words: str) -> Callable[[Maker], Maker]:
    """Name what the message must hold for what the function makes."""

    def register(make: Maker) -> Maker:
        _CASES[make.__name__.strip("_")] = (make, words)
        return make

    return register


def table(kind: Callable[..., Any], rows: dict[str, tuple[dict[str, Any], str]]) -> None:
    """Add cases that are made by one class with different arguments."""
    for name, (arguments, words) in rows.items():
        _CASES[f"{kind.__name__}: {name}"] = (lambda a=arguments: kind(**a), words)


def capsule(**changes: Any) -> Any:
    return Producer(np.ones((2, 3), np.float32), **changes)


table(
    capsule,
    {
        "wrong name": ({"name": b"tensor"}, "must return a DLPack capsule.*another name"),
        "used versioned": ({"name": b"used_dltensor_versioned"}, "already used"),
        "major version 2": ({"version": (2, 0)}, r"version 2\.0; only 1\.x"),
        "negative ndim": ({"ndim": -1}, "-1 dimensions"),
        "ndim 2**31 - 1": ({"ndim": 2**31 - 1}, "2147483647 dimensions"),
        "negative length": ({"shape": (-2, 3)}, "no array can have"),
        "overflowing shape": ({"shape": (2**62, 2**62)}, "overflows"),
        "overflowing bytes": ({"shape": (2**61, 3)}, "overflows"),
        "strides leave memory": ({"strides": (2**62, 1)}, "leave the address space"),
        "negative strides leave": ({"strides": (-(2**60), 1)}, "leave the address space"),
        "null data": ({"data": None}, "null pointer"),
        "huge offset": ({"byte_offset": 2**64 - 4}, "leave the address space|overflows|strides"),
        "null shape": ({"shape": None}, "shape is a null pointer"),
        "lanes 4": ({"lanes": 4}, "4 lanes"),
        "code 99": ({"code": 99}, "code 99"),
        "opaque handle": ({"code": 3, "bits": 64}, "code 3"),
        "float of 128 bits": ({"bits": 128}, "with 128 bits"),
        "misaligned": ({"byte_offset": 1}, "misaligned"),
        "says host, is on a device": ({"device_type": 2}, "device type 2"),
        "unversioned null shape": ({"versioned": False, "shape": None}, "shape is a null"),
    },
)


class Returns:
    """Gives `value` where a capsule is due; raises it if it is an exception."""

    def __init__(self, value: Any, device: Any = (1, 0)) -> None:
        self.value, self.device = value, device

    def __dlpack_device__(self) -> Any:
        return self.device

    def __dlpack__(self, **keywords: Any) -> Any:
        if isinstance(self.value, BaseException):
            raise self.value
        return self if isinstance(self.value, str) else self.value


table(
    Returns,
    {
        "None": ({"value": None}, "must return a DLPack capsule; got NoneType"),
        "a number": ({"value": 5}, "got int"),
        "itself": ({"value": "itself"}, "got Returns"),
        "an array": ({"value": np.ones(3)}, "got ndarray"),
        "ValueError": ({"value": ValueError("no")}, "raised ValueError: no"),
        "device None": ({"value": None, "device": None}, "__dlpack_device__.*raised TypeError"),
        "device of words": ({"value": None, "device": ("cpu", 0)}, "raised TypeError"),
        "unknown device": ({"value": None, "device": (77, 0)}, "must return a DLPack capsule"),
    },
)


def plain(**attributes: Any) -> Any:
    """An object whose class has these attributes and nothing else."""
    return type("Plain", (), attributes)()


def recurse(self: Any, name: str) -> Any:
    return getattr(self, name + "_")


def endless(self: Any) -> Any:
    return self.__dlpack_device__()


table(
    plain,
    {
        "endless recursion": (
            {"__dlpack_device__": endless, "__dlpack__": lambda self: None},
            "raised RecursionError",
        ),
        "dlpack is no function": (
            {"__dlpack__": 3},
            "raised AttributeError|raised TypeError|must return",
        ),
        "attribute raises": (
            {"__dlpack__": property(lambda self: 1 // 0)},
            "__dlpack__ raised ZeroDivisionError",
        ),
        "attribute recurses": ({"__getattr__": recurse}, "raised RecursionError"),
        "every attribute is there": (
            {"__getattr__": lambda self, name: lambda *a, **k: None},
            "must return a DLPack capsule|raised|must be",
        ),
        "interface is no dict": ({"__array_interface__": 3}, "__array_interface__ must be a dict"),
        "struct is no capsule": ({"__array_struct__": 3}, "unnamed capsule; got int"),
        "struct is a named capsule": (
            {"__array_struct__": Producer(np.ones(3)).capsule(versioned=True)},
            "unnamed capsule; got PyCapsule",
        ),
        "cuda interface is no dict": (
            {"__cuda_array_interface__": 3},
            "must be a dict|CuPy|device memory",
        ),
    },
)


@case("already used")
def consumed_twice() -> Any:
    class Cached(Producer):
        def __dlpack__(self, **keywords: Any) -> Any:
            return self.kept

    producer = Cached(np.ones(3), name=b"used_dltensor_versioned")
    producer.kept = producer.capsule(versioned=True)
    return producer


def interface(**changes: Any) -> Any:
    memory = np.ones((2, 3), np.float32)

    class Described:
        owner = memory

    described = Described()
    described.__array_interface__ = {**memory.__array_interface__, **changes}
    return described


table(
    interface,
    {
        "null pointer": ({"data": (0, False)}, "null pointer"),
        "huge address": ({"data": (2**64, False)}, "begin with an address"),
        "address at the end": ({"data": (2**63 - 8, False)}, "address space"),
        "data a number": ({"data": 8}, "does not fit its buffer"),
        "data too short": ({"data": bytearray(8)}, "does not fit its buffer"),
        "offset outside": ({"data": bytearray(24), "offset": 8}, "does not fit its buffer"),
        "offset of words": ({"data": bytearray(24), "offset": "a"}, "number of bytes"),
        "strides before the buffer": (
            {"data": bytearray(24), "strides": (-12, 4)},
            "does not fit its buffer",
        ),
        "no data": ({"data": None}, "does not fit its buffer"),
        "bad typestr": ({"typestr": "nonsense"}, "type string"),
        "typestr None": ({"typestr": None}, "type string"),
        "empty type": ({"typestr": "|V0", "descr": None}, "type string"),
        "objects": ({"typestr": "|O", "descr": None}, "Python objects"),
        "objects in fields": (
            {"typestr": "|V8", "descr": [("a", "|O")]},
            "Python objects|type string",
        ),
        "fields of another size": ({"typestr": "|V4", "descr": [("a", "<f8")]}, "type string"),
        "longdouble": ({"typestr": f"<f{np.dtype(np.longdouble).itemsize}"}, "not supported|type"),
        "version 2": ({"version": 2}, "version 3; got 2"),
        "shape a list": ({"shape": [2, 3]}, "tuple of integers"),
        "negative length": ({"shape": (-2, 3)}, "no array can have"),
        "overflowing shape": ({"shape": (2**62, 2**62)}, "overflows"),
        "too few strides": ({"strides": (4,)}, r"strides \(4,\)"),
        "strides that leave memory": ({"strides": (2**62, 4)}, "leave the address space"),
        "mask": ({"mask": np.ones((2, 3), bool)}, "mask"),
    },
)


class _Inter(ctypes.Structure):
    _fields_ = (
        ("two", ctypes.c_int), ("nd", ctypes.c_int), ("kind", ctypes.c_char),
        ("itemsize", ctypes.c_int), ("flags", ctypes.c_int), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("data", ctypes.c_void_p), ("descr", ctypes.c_void_p),
    )  # fmt: skip


def struct(**changes: Any) -> Any:
    memory, shape = np.ones(2, np.float32), (ctypes.c_ssize_t * 1)(2)
    fields = {
        "two": 2, "nd": 1, "kind": b"f", "itemsize": 4, "flags": 0x701,
        "shape": ctypes.addressof(shape), "strides": None, "data": memory.ctypes.data,
    }  # fmt: skip
    inter = _Inter(**{**fields, **changes})
    new = ctypes.pythonapi["PyCapsule_New"]
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

    class Structured:
        keep = (memory, shape, inter)
        __array_struct__ = new(ctypes.addressof(inter), None, None)

    return Structured()


table(
    struct,
    {
        "no two": ({"two": 3}, "integer 2; got 3"),
        "null data": ({"data": None}, "null pointer"),
        "null shape": ({"shape": None}, "shape is a null pointer"),
        "negative ndim": ({"nd": -1}, "-1 dimensions"),
        "ndim 2**31 - 1": ({"nd": 2**31 - 1}, "2147483647 dimensions"),
        "unknown kind": ({"kind": b"?"}, "type string"),
        "negative itemsize": ({"itemsize": -4}, "type string"),
        "objects": ({"kind": b"O", "itemsize": 8}, "Python objects|type string"),
    },
)


@case("released|shows no memory")
def released_memoryview() -> Any:
    memory = memoryview(b"abc")
    memory.release()
    return memory


@case("shows no memory|closed")
def closed_mmap() -> Any:
    import mmap

    mapped = mmap.mmap(-1, 8)
    mapped.close()
    return mapped


@case("format|Python objects|not supported")
def pointers() -> Any:
    return (ctypes.POINTER(ctypes.c_int) * 2)()


@case("Python objects|format")
def ctypes_objects() -> Any:
    return (ctypes.py_object * 2)()


@case("mask")
def cuda_interface_with_mask() -> Any:
    class Masked:
        def __init__(self) -> None:
            form = {"version": 3, "shape": (2,), "typestr": "<f4", "data": (8, False)}
            self.__cuda_array_interface__ = {**form, "mask": self}

    return Masked()


def run_cases(first: int) -> None:
    """Run the cases from this number on, and write one line of JSON for each."""
    for name, (make, _) in list(_CASES.items())[first:]:
        try:
            found = repr(view(make()).array.tobytes())
            outcome = ("nothing", found)
        except Exception as error:
            outcome = (type(error).__name__, str(error))
        sys.stdout.write(json.dumps((name, *outcome)) + "\n")
        sys.stdout.flush()


@cache
def outcomes() -> dict[str, tuple[str, str]]:
    """Return what came of each case, over as many processes as it took."""
    found: dict[str, tuple[str, str]] = {}
    while len(found) < len(_CASES):
        code = f"from {__name__} import run_cases; run_cases({len(found)})"
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", code],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        for line in done.stdout.splitlines():
            name, *outcome = json.loads(line)
            found[name] = tuple(outcome)
        if len(found) < len(_CASES):
            name = list(_CASES)[len(found)]
            found[name] = (f"crash (status {done.returncode})", done.stderr[-2000:])
    return found


@pytest.mark.parametrize("name", _CASES)
def test_malformed_arrays_are_refused(name: str) -> None:
    kind, message = outcomes()[name]
    assert kind in {"BufferError", "TypeError"}, message
    assert message.startswith(("x", "dtype "))
    with pytest.raises(BufferError, match=_CASES[name][1]):
        raise BufferError(message)
