"""SciPy's optimizers over sums and rows of all ranks, against one process on all data."""

from __future__ import annotations

import itertools
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from tests.support.on_ranks import each_rank_of

scipy_optimize = pytest.importorskip("scipy.optimize")
datasets = pytest.importorskip("sklearn.datasets")

from scipy import sparse  # noqa: E402

from arraycomm.adapters.scipy import least_squares, minimize  # noqa: E402

# Of the penalty of the logistic regression, so that its minimum is unique.
LAMBDA = 1.0


def _digits() -> tuple[Any, Any]:
    x, y = datasets.load_digits(return_X_y=True)
    return np.c_[x / 16, np.ones(len(x))][:, ::8], np.where(y < 5, -1.0, 1.0)


class Logistic(NamedTuple):
    """The part of a penalized logistic regression that one of `size` ranks has."""

    x: Any
    y: Any
    share: float

    @classmethod
    def of(cls, rank: int, size: int) -> Logistic:
        x, y = _digits()
        return cls(x[rank::size], y[rank::size], LAMBDA / size)

    def value(self, w: Any) -> Any:
        return np.logaddexp(0, -self.y * (self.x @ w)).sum() + self.share / 2 * (w @ w)

    def gradient(self, w: Any) -> Any:
        s = 1 / (1 + np.exp(self.y * (self.x @ w)))
        return -self.x.T @ (self.y * s) + self.share * w

    def hessian(self, w: Any) -> Any:
        s = 1 / (1 + np.exp(self.y * (self.x @ w)))
        return (self.x.T * (s * (1 - s))) @ self.x + self.share * np.eye(len(w))


def _check_minimum(w: Any) -> None:
    """Compare with one process: a point is as far from the minimum as its gradient over LAMBDA."""
    whole = Logistic.of(0, 1)
    alone = scipy_optimize.minimize(
        whole.value, np.zeros(len(w)), jac=whole.gradient, hess=whole.hessian, method="trust-exact"
    ).x
    bound = (np.linalg.norm(whole.gradient(w)) + np.linalg.norm(whole.gradient(alone))) / LAMBDA
    assert np.linalg.norm(w - alone) <= bound
    assert bound < 0.1


@pytest.mark.parametrize("method", ["L-BFGS-B", "BFGS", "Newton-CG", "trust-constr"])
@each_rank_of("few")
def test_every_method_finds_the_minimum_of_all_data(comm: Communicator, method: str) -> None:
    part = Logistic.of(comm.rank, comm.size)
    options: dict[str, Any] = {
        "BFGS": {"fun": lambda w: (part.value(w), part.gradient(w)), "jac": True},
        "Newton-CG": {"hessp": lambda w, p: part.hessian(w) @ p},
        "trust-constr": {"hess": part.hessian},
    }.get(method, {})
    options = {"fun": part.value, "jac": part.gradient, **options}
    result = minimize(x0=np.zeros(9), method=method, comm=comm, **options)
    _check_minimum(result.x)
    found = (result.x.tolist(), result.fun)
    assert comm.allgather_object(found) == [found] * comm.size


@each_rank_of(3)
def test_methods_without_derivatives_bounds_constraints_and_args(comm: Communicator) -> None:
    """Rosenbrock's function, whose terms are spread over the ranks."""

    def terms(x: Any, scale: float) -> float:
        parts = [scale * 100 * (x[1] - x[0] ** 2) ** 2, scale * (1 - x[0]) ** 2]
        return sum(parts[comm.rank :: comm.size])

    def found(method: str, **options: Any) -> Any:
        return minimize(terms, np.array([-1.0, 2.0]), (2.0,), method=method, comm=comm, **options)

    free = found("Nelder-Mead", options={"xatol": 1e-5, "fatol": 1e-8})
    # At a distance d from the minimum the function is at least 0.2 d², its least curvature / 2.
    assert np.linalg.norm(free.x - 1) <= np.sqrt(free.fun / 0.2) < 1e-2
    bounded = found("L-BFGS-B", jac="3-point", bounds=[(None, 0.5), (None, None)])
    assert np.allclose(bounded.x, [0.5, 0.25], atol=1e-4)
    constraint = {"type": "eq", "fun": lambda x: x[0] + x[1] - 1}
    assert abs(found("SLSQP", tol=1e-12, constraints=constraint).x.sum() - 1) < 1e-9


@pytest.mark.parametrize("jac", ["rows", "sparse rows", "cs"])
@each_rank_of("few")
def test_least_squares_has_the_residuals_of_all_ranks(comm: Communicator, jac: str) -> None:
    x, y = datasets.load_diabetes(return_X_y=True)
    y = (y - y.mean()) / y.std()
    exact = np.linalg.lstsq(x, y, rcond=None)[0]
    # The last of several ranks has no data.
    sharing = max(comm.size - 1, 1)
    rows = slice(comm.rank, None, sharing) if comm.rank < sharing else slice(0, 0)
    part, target = x[rows], y[rows]
    derivative = {"rows": lambda w: part, "sparse rows": lambda w: sparse.csr_array(part)}.get(
        jac, jac
    )
    result = least_squares(lambda w: part @ w - target, np.zeros(10), derivative, comm=comm)
    assert len(result.fun) == len(y)
    # The distance is bounded by the gradient over the least eigenvalue of XᵀX.
    bound = np.linalg.norm(x.T @ (x @ result.x - y)) / np.linalg.eigvalsh(x.T @ x)[0]
    assert np.linalg.norm(result.x - exact) <= bound + 1e-10
    assert bound < 1e-2


@each_rank_of(3)
def test_callbacks_are_called_on_all_ranks_and_may_communicate(comm: Communicator) -> None:
    part, seen = Logistic.of(comm.rank, comm.size), []

    def by_result(intermediate_result: Any) -> None:
        seen.append(comm.allreduce(intermediate_result.fun, "max"))
        if comm.rank == comm.size - 1 and len(seen) == 3:
            raise StopIteration

    def by_point(x: Any) -> None:
        seen.append(x)

    def by_state(x: Any, state: Any) -> bool:
        return state.nit == 2

    def run(callback: Any, method: Any = None) -> Any:
        options = {"method": method, "jac": part.gradient, "callback": callback, "comm": comm}
        return minimize(part.value, np.zeros(9), **options)

    assert run(by_state, "Trust-Constr").nit == 2

    assert run(by_result).nit == len(seen) == 3
    assert seen == sorted(seen, reverse=True)
    assert comm.allgather_object(seen) == [seen] * 3
    seen.clear()
    run(by_point if comm.rank == 1 else None)
    assert (len(seen) > 3) is (comm.rank == 1)


def _raising_fun(comm: Communicator) -> Any:
    def fun(x: Any) -> Any:
        if comm.rank == 1 and x[0] != 0:
            raise ZeroDivisionError("no such point")
        return (x**2).sum() - x.sum()

    return minimize(fun, np.zeros(2), comm=comm)


def _raising_callback(comm: Communicator) -> Any:
    def callback(x: Any) -> None:
        if comm.rank == 1:
            raise ZeroDivisionError("no such point")

    return minimize(lambda x: ((x - 1) ** 2).sum(), np.zeros(2), callback=callback, comm=comm)


@pytest.mark.parametrize("fit", [_raising_fun, _raising_callback])
@each_rank_of(3)
def test_error_of_one_rank_is_raised_on_all(comm: Communicator, fit: Any) -> None:
    kind = ZeroDivisionError if comm.rank == 1 else ac.PeerError
    with pytest.raises(kind, match="no such point") as caught:
        fit(comm)
    assert comm.rank == 1 or caught.value.rank == 1
    assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_error_of_scipy_on_rank_0_is_raised_on_all(comm: Communicator) -> None:
    constraint = {"type": "eq", "fun": lambda x: 1 / 0}
    for kind, said, arguments in (
        (ValueError, "Unknown solver steepest", {"method": "steepest"}),
        (ZeroDivisionError, "division", {"constraints": constraint}),
    ):
        with pytest.raises(ac.PeerError if comm.rank else kind, match=said):
            minimize(lambda x: (x**2).sum(), np.ones(2), comm=comm, **arguments)
        assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_functions_that_ranks_lack_are_named(comm: Communicator) -> None:
    def value(x: Any) -> Any:
        return (x**2).sum()

    last = comm.rank == comm.size - 1
    pattern = None if comm.rank == 1 else np.ones((2, 2))
    said = "rank 0 has a callable jac; this rank has none"
    with pytest.raises(TypeError if last else ac.PeerError, match=said):
        minimize(value, np.ones(2), jac=None if last else lambda x: 2 * x, comm=comm)
    with pytest.raises(TypeError if last else ac.PeerError, match="need a callable fun"):
        minimize(None if last else value, np.ones(2), comm=comm)
    with pytest.raises(TypeError if comm.rank == 0 else ac.PeerError, match="rank 1 has none"):
        least_squares(lambda x: x, np.ones(2), jac_sparsity=pattern, comm=comm)
    assert comm.allreduce(1) == comm.size


# SciPy's conventions -------------------------------------------------------------------------------


def _outcome(call: Any) -> Any:
    """Return where a call ends, or the type of its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return np.round(call().x, 4).tolist()
        except (TypeError, ValueError) as error:
            return type(error)


def _shifted(x: Any, *args: Any) -> Any:
    total = sum(np.sum(np.frombuffer(a.encode(), "u1") if isinstance(a, str) else a) for a in args)
    return x - total / 100


def _value(x: Any, *args: Any) -> Any:
    return (_shifted(x, *args) ** 2).sum()


def _gradient(x: Any, *args: Any) -> Any:
    return 2 * _shifted(x, *args)


def _with_gradient(x: Any, *args: Any) -> Any:
    return _value(x, *args), _gradient(x, *args)


def _scalar_method(fun: Any, x0: Any, args: Any = (), **options: Any) -> Any:
    return scipy_optimize.OptimizeResult(x=np.atleast_1d(fun(np.float64(2.0), *args)), success=True)


X0 = np.array([1.0, 2.0])
ARGS: dict[str, Any] = {
    "tuple": (1.0, 2.0),
    "named tuple": NamedTuple("Pair", [("a", float), ("b", float)])(1.0, 2.0),
    "empty": (),
    "array": np.array([3.0, 4.0]),
    "number": 5.0,
    "list": [1, 2],
    "text": "ab",
}
MINIMIZE: dict[str, dict[str, Any]] = {
    "plain": {},
    "x0 of numbers": {"x0": [1, 2]},
    "x0 of one": {"x0": 3.0},
    "jac": {"jac": _gradient},
    "jac is True": {"fun": _with_gradient, "jac": True},
    "jac of text": {"jac": "3-point"},
    "jac as a column": {"jac": lambda x, *args: 2 * _shifted(x, *args)[:, None]},
    "jac of another length": {"jac": lambda x, *args: np.ones(3)},
    "vector": {"fun": lambda x, *args: _shifted(x, *args) ** 2},
    "value in an array": {"fun": lambda x, *args: np.array([_value(x, *args)])},
    "bounds": {"bounds": [(2, 3), (None, 1)], "method": "L-BFGS-B"},
    "tol": {"tol": 1e-3, "method": "Nelder-Mead"},
    "options": {"options": {"maxiter": 2}, "method": "CG"},
    "constraints": {"constraints": {"type": "eq", "fun": lambda x: x[0] - 1}},
    "hessp": {"method": "Newton-CG", "jac": _gradient, "hessp": lambda x, p, *args: 2 * p},
    "hess": {
        "method": "trust-exact",
        "jac": _gradient,
        "hess": lambda x, *args: 2 * np.eye(len(x)),
    },
    "own method of numbers": {"method": _scalar_method},
    "unknown method": {"method": "no such"},
}
LEAST_SQUARES: dict[str, dict[str, Any]] = {
    "plain": {},
    "x0 of one": {"x0": 3.0},
    "jac": {"jac": lambda x, *args: np.eye(len(x))},
    "jac of text": {"jac": "cs"},
    "jac of another width": {"jac": lambda x, *args: np.ones((len(x), 3))},
    "bounds": {"bounds": ([0, 0], [3, 1.5]), "x0": [1, 1]},
    "method": {"method": "lm"},
    "loss": {"loss": "soft_l1", "f_scale": 0.1},
    "x_scale": {"x_scale": "jac"},
    "max_nfev": {"max_nfev": 3},
    "number": {"fun": lambda x, *args: (_shifted(x, *args) ** 2).sum()},
    "matrix": {"fun": lambda x, *args: np.ones((2, 2))},
}


def _rows(cases: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Every kind of `args` in the first case, and others with a tuple or with what is none."""
    first, *others = cases
    turns = zip(others, itertools.cycle(("tuple", "array")), strict=False)
    return [*((first, args) for args in ARGS), *turns]


def _assert_as_scipy(on_ranks: Any, name: str, options: dict[str, Any], factor: bool) -> None:
    want = _outcome(lambda: getattr(scipy_optimize, name)(**options))
    ours = {"minimize": minimize, "least_squares": least_squares}[name]

    def check(comm: Communicator) -> None:
        got = _outcome_of_ranks(comm, lambda: ours(**options, comm=comm), want)
        if isinstance(want, type) or isinstance(got, type):
            assert got == want
        else:
            got = np.array(got) / (comm.size if factor else 1)
            np.testing.assert_allclose(got, want, atol=2e-3)

    on_ranks(3, check)


@pytest.mark.parametrize(("case", "args"), _rows(MINIMIZE))
def test_minimize_takes_every_argument_as_scipy_does(on_ranks, case: str, args: str) -> None:
    """The sum of equal parts has the minimum of each; what SciPy refuses is refused on every rank."""
    options = {"fun": _value, "x0": X0, **MINIMIZE[case], "args": ARGS[args]}
    _assert_as_scipy(on_ranks, "minimize", options, factor=case == "own method of numbers")


@pytest.mark.parametrize(("case", "args"), _rows(LEAST_SQUARES))
def test_least_squares_takes_every_argument_as_scipy_does(on_ranks, case: str, args: str) -> None:
    options = {"fun": _shifted, "x0": X0, **LEAST_SQUARES[case], "args": ARGS[args]}
    _assert_as_scipy(on_ranks, "least_squares", options, factor=False)


def _outcome_of_ranks(comm: Communicator, call: Any, want: Any) -> Any:
    """Return where a call ends; if SciPy refuses it, any error of this rank's or of another one's counts."""
    try:
        got = _outcome(call)
    except ac.PeerError:
        got = want if isinstance(want, type) else ac.PeerError
    comm.barrier()
    return want if isinstance(want, type) and isinstance(got, type) else got


@each_rank_of(3)
def test_jac_is_true_on_all_ranks_or_on_none(comm: Communicator) -> None:
    own = _with_gradient if comm.rank == 0 else _value
    with pytest.raises(TypeError, match=r"jac must be True on all ranks.*rank 0 alone"):
        minimize(own, X0, jac=comm.rank == 0, comm=comm)
    comm.barrier()


@pytest.mark.parametrize("odd", [0, 1])
@each_rank_of(3)
def test_shape_of_one_rank_is_an_error_on_all(comm: Communicator, odd: int) -> None:
    wide = np.ones(3 if comm.rank == odd else 2)
    error = ValueError if comm.rank == odd else ac.PeerError
    said = r"jac must return an array of shape \(2,\); got shape \(3,\)"
    with pytest.raises(error, match=said):
        minimize(_value, X0, jac=lambda x: wide, comm=comm)
    comm.barrier()


@each_rank_of(3)
def test_a_method_may_go_on_behind_an_error(comm: Communicator) -> None:
    """The other ranks hear of the error, and evaluate what comes next."""

    def brave(fun: Any, x0: Any, args: Any = (), **options: Any) -> Any:
        for x in (x0, x0 + 1):
            try:
                value = fun(x)
            except FloatingPointError:
                continue
        return scipy_optimize.OptimizeResult(x=x, fun=value, success=True)

    def value(x: Any) -> Any:
        if comm.rank == 0 and x[0] == X0[0]:
            raise FloatingPointError("not there")
        return _value(x)

    found = minimize(value, X0, method=brave, comm=comm)
    assert found.x.tolist() == (X0 + 1).tolist()
    assert found.fun == comm.size * _value(X0 + 1)
    comm.barrier()
