"""Arrays whose gradient another library wants are refused: it would be lost."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from arraycomm.testing import run


class Tensor:
    """An array of a library that is not known; `said` is what it says of its gradient."""

    def __init__(self, data: Any, said: dict[str, Any]) -> None:
        self._data = data
        vars(self).update(said)

    def detach(self) -> Tensor:
        return Tensor(self._data, {})

    def __dlpack__(self, **options: Any) -> Any:
        return self._data.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._data.__dlpack_device__()


def _tensorflow(forward: bool) -> Any:
    tensorflow = pytest.importorskip("tensorflow")
    x = tensorflow.constant([1.0, 2.0])
    if forward:
        tape = tensorflow.autodiff.ForwardAccumulator(x, tensorflow.ones(2))
        return tape, lambda: x * 2.0
    tape = tensorflow.GradientTape()

    def make() -> Any:
        tape.watch(x)
        return x * 2.0

    return tape, make


WANTED: dict[str, dict[str, Any]] = {
    "requires_grad": {"requires_grad": True},
    "NumPy's bool": {"requires_grad": np.True_},
    "Taichi": {"needs_grad": True},
    "NNabla": {"need_grad": True},
    "Paddle": {"stop_gradient": False},
}
NOT_WANTED: list[dict[str, Any]] = [
    {},
    {"requires_grad": False},
    {"requires_grad": None},
    {"requires_grad": lambda: True},
    {"stop_gradient": True},
]
CALLS: dict[str, Any] = {
    "allreduce": lambda comm, x: comm.allreduce(x),
    "bcast": lambda comm, x: comm.bcast(x, 0),
    "out": lambda comm, x: comm.allreduce(np.ones(3), out=x),
    "tree": lambda comm, x: ac.allreduce_tree([x], comm=comm),
    "plan": lambda comm, x: comm.plan([x])([x]),
    "synchronize": lambda comm, x: ac.synchronize([x], comm=comm),
    "exchange": lambda comm, x: ac.exchange(x, "numpy"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("said", WANTED)
def test_wanted_gradients_are_not_lost(said: str, call: str) -> None:
    def check(comm: Communicator) -> None:
        x = Tensor(np.ones(3), WANTED[said] if comm.rank == 0 else {})
        expected = TypeError if comm.rank == 0 else ac.PeerError
        with pytest.raises(expected, match=r"gradient would be lost; pass \S+\.detach\(\)"):
            CALLS[call](comm, x)
        # The remedy works.
        CALLS[call](comm, x.detach())

    run(1 if call == "exchange" else 2, check)


@pytest.mark.parametrize("said", NOT_WANTED, ids=range(len(NOT_WANTED)))
def test_arrays_without_wanted_gradient_are_taken(said: dict[str, Any]) -> None:
    assert ac.exchange(Tensor(np.ones(3), said), "numpy").sum() == 3


@pytest.mark.parametrize("forward", [False, True], ids=["backward", "forward"])
def test_tensors_that_tensorflow_records_are_refused(forward: bool) -> None:
    tape, make = _tensorflow(forward)
    tensorflow = pytest.importorskip("tensorflow")
    with tape:
        x = make()
        with pytest.raises(TypeError, match=r"pass tensorflow\.stop_gradient\(x\)"):
            ac.exchange(x, "numpy")
        assert ac.exchange(tensorflow.stop_gradient(x), "numpy").tolist() == [2, 4]
    assert ac.exchange(x, "numpy").tolist() == [2, 4]


def _warp() -> tuple[Any, Any]:
    warp = pytest.importorskip("warp")
    return warp.array([1.0, 2.0], dtype=float, requires_grad=True, device="cpu"), warp


def _paddle() -> tuple[Any, Any]:
    paddle = pytest.importorskip("paddle")
    return paddle.to_tensor([1.0, 2.0], stop_gradient=False), paddle


def _drjit() -> tuple[Any, Any]:
    drjit = pytest.importorskip("drjit")
    x = pytest.importorskip("drjit.llvm.ad").Float([1.0, 2.0])
    drjit.enable_grad(x)
    return x, drjit


@pytest.mark.parametrize("make", [_warp, _paddle, _drjit])
def test_arrays_of_other_libraries_are_refused(make: Any) -> None:
    x, library = make()
    with pytest.raises(TypeError, match=f"differentiated by {library.__name__}") as raised:
        ac.exchange(x, "numpy")
    [way] = re.findall("pass (.*)", str(raised.value))
    plain = eval(way, {"x": x, library.__name__: library})
    assert ac.exchange(plain, "numpy").tolist() == [1, 2]
