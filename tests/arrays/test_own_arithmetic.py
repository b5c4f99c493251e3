"""Arrays whose classes have arithmetic of their own, such as units and masks, are refused by name."""

from __future__ import annotations

import enum
import http
import itertools
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from arraycomm.testing import run


def _own(base: Any, name: str) -> Any:
    """Return a subclass with a method of its own, which a mixin brings in."""

    def method(self: Any, *args: Any) -> Any:
        raise NotImplementedError

    return type("Own", (type("Mixin", (), {name: method}), base), {})


def _array(name: str) -> Any:
    return np.ones(3).view(_own(np.ndarray, f"__{name}__"))


def _tensor(*names: str) -> Any:
    torch = pytest.importorskip("torch")

    class Units(torch.Tensor):  # type: ignore[misc, name-defined]
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), options: Any = None
        ) -> Any:
            return super().__torch_function__(func, types, args, options or {})

    kinds = [_own(torch.Tensor, f"__{name}__") for name in names] or [Units]
    return torch.ones(3, dtype=torch.float64).as_subclass(kinds[0])


class Wrapper:
    """As pint's: it shows the array's memory, and is none."""

    __array_wrap__ = None

    def __init__(self, array: Any) -> None:
        self._array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        raise NotImplementedError


def _quantity(library: str, make: str) -> Any:
    return eval(make, {library.rpartition(".")[2]: pytest.importorskip(library)})


# And how the message says to get the plain array or number.
ARRAYS: dict[str, tuple[Any, str]] = {
    **{
        name: (lambda name=name: _array(name), r"numpy\.asarray\(\S+\)")
        for name in (
            *("add", "radd", "iadd", "matmul", "rpow", "lt", "neg"),
            *("array_ufunc", "array_function", "array_wrap"),
        )
    },
    "matrix": (lambda: np.ones((1, 3)).view(np.matrix), r"numpy\.asarray\(\S+\)"),
    "wrapper": (lambda: Wrapper(np.ones(3)), "the plain array"),
    "tensor add": (lambda: _tensor("add"), "as_subclass"),
    "tensor function": (_tensor, "as_subclass"),
    "astropy": (lambda: _quantity("astropy.units", "[1.0] * units.m"), r"numpy\.asarray"),
    "unyt": (lambda: _quantity("unyt", "unyt.unyt_array([1.0], 'm')"), r"numpy\.asarray"),
    "pint": (lambda: _quantity("pint", "pint.UnitRegistry().Quantity([1.0], 'm')"), "magnitude"),
    "quantities": (
        lambda: _quantity("quantities", "quantities.Quantity([1.0], 'm')"),
        r"numpy\.asarray",
    ),
}
NUMBERS: dict[str, tuple[Any, str]] = {
    "float": (lambda: _own(float, "__add__")(1), r"float\(\S+\)"),
    "int": (lambda: _own(int, "__rmul__")(1), r"int\(\S+\)"),
    "complex": (lambda: _own(complex, "__truediv__")(1), r"complex\(\S+\)"),
    "scalar": (lambda: _own(np.float64, "__sub__")(1), r"\.item\(\)"),
}
CALLS: dict[str, Any] = {
    "allreduce": lambda comm, x: comm.allreduce(x),
    "bcast": lambda comm, x: comm.bcast(x, comm.rank),
    "allgather": lambda comm, x: comm.allgather(x),
    "out": lambda comm, x: comm.allreduce(np.ones(3), out=x),
    "tree": lambda comm, x: ac.allreduce_tree({"m": x}, comm=comm),
    "plan": lambda comm, x: comm.plan({"m": x}),
    "mean_metrics": lambda comm, x: ac.mean_metrics({"m": x}, 1, comm=comm),
    "send": lambda comm, x: comm.sendrecv(x, 0, 0),
    "exchange": lambda comm, x: ac.exchange(x, "numpy"),
    # A number is sent as it is.
    "synchronize": lambda comm, x: ac.synchronize({"m": x}, comm=comm),
}
_TABLE = [
    *((kind, "allreduce") for kind in (*ARRAYS, *NUMBERS)),
    *itertools.product(("add", "array_ufunc", "matrix", "wrapper", "tensor function"), CALLS),
    *itertools.product(("float",), list(CALLS)[:-1]),
]
_LOCAL = ("bcast", "send", "exchange")


@pytest.mark.parametrize(("kind", "call"), dict.fromkeys(_TABLE))
def test_arithmetic_of_ones_own_is_refused_by_name(kind: str, call: str) -> None:
    """On one rank, and so on all: a unit must not get lost on any."""
    make, way = (ARRAYS | NUMBERS)[kind]
    x = make()

    def check(comm: Communicator) -> None:
        mine = x if comm.rank == 0 else np.ones(3)
        expected = TypeError if comm.rank == 0 else ac.ArrayCommError
        with pytest.raises(expected, match=rf"a class with arithmetic of its own.*{way}"):
            CALLS[call](comm, mine)

    run(1 if call in _LOCAL else 2, check)


class Plain:
    """An array that keeps NumPy's functions away, as Paddle's do."""

    __array_ufunc__ = None
    __array_function__ = None

    def __init__(self, data: Any) -> None:
        self._data = data

    def __add__(self, other: Any) -> Any:
        raise NotImplementedError

    def __dlpack__(self, **options: Any) -> Any:
        return self._data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, None]:
        return 1, None


def _torch_kinds() -> dict[Any, Any]:
    torch = pytest.importorskip("torch")
    disabled = torch._C._disabled_torch_function_impl
    plain = type("Plain", (torch.Tensor,), {"__torch_function__": disabled})
    image = type(_tensor())
    # Of a package whose classes say only more of a tensor: what it shows.
    image.__module__ = "torchvision.tv_tensors"
    return {
        torch.nn.Buffer(torch.ones(3)): torch.Tensor,
        torch.nn.Parameter(torch.ones(3), requires_grad=False): torch.Tensor,
        torch.ones(3).as_subclass(type("Named", (torch.Tensor,), {})): torch.Tensor,
        torch.ones(3).as_subclass(plain): torch.Tensor,
        torch.ones(3).as_subclass(image): torch.Tensor,
    }


def _plain_kinds(tmp_path: Any) -> list[tuple[Any, type]]:
    memory = np.memmap(tmp_path / "memory", np.float64, "w+", shape=(3,))
    memory[:] = 1
    literals = pytest.importorskip("jax._src.literals")
    number = type("Number", (float,), {"unit": "m"})
    opted_out = type("OptedOut", (np.ndarray,), {"__array_ufunc__": None})
    return [
        # What JAX makes of NumPy's arrays in eager programs, as of a model's parameters.
        (literals.TypedNdArray(np.ones(3)), np.ndarray),
        (np.ones(3).view(type("Named", (np.ndarray,), {})), np.ndarray),
        (np.ones(3).view(opted_out), np.ndarray),
        (Plain(np.ones(3)), np.ndarray),
        (memory, np.ndarray),
        (np.rec.array(np.ones(3)), np.ndarray),
        (number(3), float),
        (np.float64(3), np.float64),
        (enum.IntEnum("Color", ["RED", "GREEN", "BLUE"]).BLUE, int),
        (enum.IntFlag("Flag", ["A", "B"])(3), int),
        (http.HTTPStatus(http.HTTPStatus.OK), int),
        *_torch_kinds().items(),
    ]


@pytest.mark.parametrize("call", ["allreduce", "allgather", "tree"])
def test_subclasses_without_arithmetic_come_back_plain(call: str, tmp_path: Any) -> None:
    kinds = _plain_kinds(tmp_path)

    def check(comm: Communicator) -> None:
        for x, kind in kinds:
            result = CALLS[call](comm, x)
            if call == "tree":
                result = result["m"]
            assert type(result) is kind or call == "allgather", type(x)
            is_sum = {"allreduce": comm.size, "allgather": comm.size, "tree": 1}[call]
            if not isinstance(x, http.HTTPStatus):
                assert np.asarray(result).sum() == 3 * is_sum, type(x)

    kinds = [(x, kind) for x, kind in kinds if call != "tree" or not isinstance(x, int)]
    run(2, check)


def test_numbers_that_are_plain_are_the_root_s_everywhere() -> None:
    color = enum.IntEnum("Color", ["RED", "GREEN"]).GREEN

    def check(comm: Communicator) -> None:
        assert comm.bcast(color) == 2
        assert comm.allreduce(enum.IntFlag("Flag", ["A", "B"])(comm.rank + 1), "or") == 3

    run(2, check)
