"""SGD, Momentum and Adam: one code for arrays of every framework."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import arraycomm as ac
from arraycomm.adapters.numpy import SGD, Adam, Momentum
from arraycomm.testing import run
from tests.adapters.gradients import STEPS, gradients, reduced, zeros
from tests.support.frameworks import INSTALLED, content, make
from tests.support.on_ranks import each_rank_of

FRAMEWORKS = [framework for framework in INSTALLED if framework != "mlx"]
RATE = 0.125


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: SGD(RATE),
    "Momentum": lambda: Momentum(RATE),
    "Nesterov": lambda: Momentum(RATE, nesterov=True),
    # With an epsilon so large that the size of the gradients matters, not their sign alone.
    "Adam": lambda: Adam(RATE, epsilon=0.01),
}


def _expected(kind: str, size: int) -> dict[str, Any]:
    """Return what NumPy's arrays of double precision come to; laws compare that with torch."""
    plain = OPTIMIZERS[kind]()
    params = {name: param.astype(np.float64) for name, param in zeros().items()}
    for step in range(STEPS):
        mean = reduced(size, step, "mean")
        params = plain.update(
            params, {name: grad.astype(np.float64) for name, grad in mean.items()}
        )
    return params


def _assert_near(got: Any, expected: Any) -> None:
    """A step of each optimizer makes at most a dozen roundings of numbers below 8 in float32."""
    _, _, data = content(got)
    bound = STEPS * 12 * 8 * np.finfo(np.float32).eps
    np.testing.assert_allclose(np.frombuffer(data, np.float32), expected, rtol=0, atol=bound)


def _train(comm: ac.Communicator, kind: str, framework: str) -> Any:
    optimizer = ac.DistributedOptimizer(OPTIMIZERS[kind](), comm=comm)
    params = {name: make(framework, param) for name, param in zeros().items()}
    for step in range(STEPS):
        mine = {name: make(framework, g) for name, g in gradients(comm.rank, step).items()}
        params = optimizer.update(params, mine)
    assert type(params["a"]) is type(mine["a"])
    return params


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_framework_takes_the_same_steps(kind: str, framework: str) -> None:
    make(framework, np.zeros(1))
    expected, results = _expected(kind, 3), run(3, _train, kind, framework)
    for name, want in expected.items():
        assert len({content(params[name]) for params in results}) == 1
        _assert_near(results[0][name], want)


def test_ranks_of_several_frameworks_take_the_same_steps() -> None:
    size = len(FRAMEWORKS)
    for got in run(size, lambda comm: _train(comm, "Adam", FRAMEWORKS[comm.rank])):
        _assert_near(got["a"], _expected("Adam", size)["a"])


@pytest.mark.parametrize("forgotten", [False, True])
@each_rank_of(3)
def test_arrays_of_several_frameworks_are_compared_before_they_are_rounded(
    comm: ac.Communicator, forgotten: bool
) -> None:
    framework = ("numpy", "torch", "jax")[comm.rank]
    optimizer = ac.DistributedOptimizer(SGD(RATE), comm=comm, verify_every=1)
    values = np.ones(3, np.float32) + np.float32(1e-6 * comm.rank * forgotten)
    said = r"params is not .*call arraycomm.sync"
    with pytest.raises(ac.MismatchError, match=said) if forgotten else nullcontext():
        for _ in range(4):
            params = optimizer.update(make(framework, values), make(framework, values))
            # Each rank rounds in its own way.
            values = np.nextafter(np.asarray(params, np.float32), np.float32(comm.rank))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64, np.complex64])
def test_parameters_keep_their_dtype_and_arguments_their_values(dtype: Any, kind: str) -> None:
    params, grads = {"w": [np.ones(3, dtype), None]}, {"w": [np.full(3, 0.5, dtype), None]}
    optimizer = OPTIMIZERS[kind]()
    for _ in range(2):
        new = optimizer.update(params, grads)
        assert new["w"][0].dtype == dtype
        assert (new["w"][0].real < 1).all()
    assert new["w"][1] is None
    assert (params["w"][0] == 1).all()
    assert (grads["w"][0] == 0.5).all()


@pytest.mark.parametrize("kind", [Adam, Momentum])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrow_floats_are_updated_in_float32(dtype: Any, kind: Any) -> None:
    # Small ones have no square in float16, and neither has epsilon.
    slopes, narrow, wide = np.array([0, 2.0**-14, 3], dtype), kind(), kind()
    found = narrow.update(np.ones(3, dtype), slopes)
    wanted = wide.update(np.ones(3, np.float32), slopes.astype(np.float32))
    np.testing.assert_array_equal(found, wanted.astype(dtype))
    np.testing.assert_equal(narrow.state, wide.state)


def test_a_parameter_without_gradient_stays_and_takes_no_step() -> None:
    optimizer = Adam(RATE)
    params = [np.ones(2), 1.0, np.float32(1), np.ones(())]
    first = optimizer.update(params, [None, 1.0, np.float32(1), np.ones(())])
    assert first[0] is params[0]
    assert [state["count"] for state in optimizer.state] == [0, 1, 1, 1]
    assert [type(leaf) for leaf in first[1:]] == [float, np.ndarray, np.ndarray]
    optimizer.learning_rate = 0.5
    # Its first step is one with the sign of the gradient, whatever steps the others have taken.
    assert np.allclose(optimizer.update(first, [np.full(2, 7.0), *first[1:]])[0], 0.5)


@pytest.mark.parametrize(
    ("make_params", "grads", "kind", "said"),
    [
        (lambda: np.ones(2, int), np.ones(2), TypeError, r"params\['w'\].*floating-point.*int64"),
        (lambda: np.ones(2), np.ones(3), TypeError, r"params\['w'\].*got \(3,\) for \(2,\)"),
        (lambda: "text", np.ones(2), TypeError, r"params\['w'\].*str"),
        (lambda: [np.ones(2)], np.ones(2), ValueError, "grads must have the structure of params"),
    ],
)
def test_wrong_arguments_are_named(make_params, grads, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        SGD().update({"w": make_params()}, {"w": grads})


def test_wrong_settings_and_other_leaves_are_refused() -> None:
    for wrong in (lambda: SGD(-1), lambda: Momentum(momentum=2), lambda: Adam(beta1=1.0)):
        with pytest.raises(ValueError, match="must be a number from 0"):
            wrong()
    optimizer = Momentum()
    optimizer.update([1.0], [1.0])
    with pytest.raises(ValueError, match="got 2 after 1"):
        optimizer.update([1.0, 2.0], [1.0, 2.0])


def test_parameters_of_torch_keep_no_history(torch: Any) -> None:
    param = torch.ones(2, requires_grad=True)
    with pytest.raises(TypeError, match=r"call update inside torch.no_grad\(\)"):
        SGD().update(param, torch.ones(2))
    with torch.no_grad():
        assert SGD(0.5).update(param, torch.ones(2)).tolist() == [0.5, 0.5]
