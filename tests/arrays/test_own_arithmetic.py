"""Arrays whose classes have arithmetic of their own, such as units and masks, are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from arraycomm.testing import run


class Quantity(np.ndarray[Any, Any]):
    """As astropy's and unyt's: an array of NumPy's with a unit."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        raise NotImplementedError


class Masked(np.ndarray[Any, Any]):
    """Arithmetic only in NumPy's functions."""

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class Wrapper:
    """As pint's: it shows the array's memory, and is none."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        raise NotImplementedError


class Named(np.ndarray[Any, Any]):
    """Without arithmetic of its own."""


def _tensor() -> Any:
    torch = pytest.importorskip("torch")

    class Units(torch.Tensor):  # type: ignore[misc, name-defined]
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    return torch.ones(3, dtype=torch.float64).as_subclass(Units)


REFUSED: dict[str, Any] = {
    "array_ufunc": lambda: np.ones(3).view(Quantity),
    "array_function": lambda: np.ones(3).view(Masked),
    "wrapper": lambda: Wrapper(np.ones(3)),
    "torch_function": _tensor,
}
CALLS: dict[str, Any] = {
    "allreduce": lambda comm, x: comm.allreduce(x),
    "bcast": lambda comm, x: comm.bcast(x, comm.rank),
    "allgather": lambda comm, x: comm.allgather(x),
    "out": lambda comm, x: comm.allreduce(np.ones(3), out=x),
    "tree": lambda comm, x: ac.allreduce_tree({"m": x}, comm=comm),
    "synchronize": lambda comm, x: ac.synchronize({"m": x}, comm=comm),
    "mean_metrics": lambda comm, x: ac.mean_metrics({"m": x}, 1, comm=comm),
    "send": lambda comm, x: comm.sendrecv(x, 0, 0),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", REFUSED)
def test_arithmetic_of_ones_own_is_refused_by_name(kind: str, call: str) -> None:
    """On one rank, and so on all: a unit must not get lost on any."""

    def check(comm: Communicator) -> None:
        mine = REFUSED[kind]() if comm.rank == 0 else np.ones(3)
        expected = TypeError if comm.rank == 0 else ac.ArrayCommError
        with pytest.raises(expected, match=r"a class with arithmetic of its own.*plain array"):
            CALLS[call](comm, mine)

    run(1 if call in ("bcast", "send") else 2, check)


def test_subclasses_without_arithmetic_are_taken() -> None:
    torch, literals = map(pytest.importorskip, ("torch", "jax._src.literals"))
    kinds = [
        # What JAX makes of NumPy's arrays in eager programs, as of a model's parameters.
        literals.TypedNdArray(np.ones(3)),
        np.ones(3).view(Named),
        np.rec.array(np.ones(3)),
        torch.nn.Buffer(torch.ones(3)),
        torch.ones(3).as_subclass(type("Named", (torch.Tensor,), {})),
    ]

    def check(comm: Communicator) -> None:
        for x in kinds:
            assert np.asarray(comm.allgather(x)).sum() == 3 * comm.size

    run(2, check)
