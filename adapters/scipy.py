"""SciPy: rank 0 runs the optimizer, and every rank evaluates functions on its share of the data.

No rank can take another path than the others, since only one of them decides.
"""

from __future__ import annotations

import enum
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from scipy import optimize, sparse

import arraycomm as ac
from arraycomm._errors import forgiving

__all__ = ["least_squares", "minimize"]


class _Kind(enum.IntEnum):
    """What rank 0 asks the ranks for."""

    END = enum.auto()
    FAILED = enum.auto()
    CALLBACK = enum.auto()
    FUN = enum.auto()
    JAC = enum.auto()
    HESS = enum.auto()
    HESSP = enum.auto()


_NAMES: Final = {kind: kind.name.lower() for kind in _Kind}
# The shapes of results, at a vector of this many numbers.
_SHAPES: Final[dict[_Kind, Callable[[int], tuple[int, ...]]]] = {
    _Kind.FUN: lambda count: (),
    _Kind.JAC: lambda count: (count,),
    _Kind.HESS: lambda count: (count, count),
    _Kind.HESSP: lambda count: (count,),
}


def minimize(
    fun: Callable[..., Any],
    x0: Any,
    args: Any = (),
    method: Any = None,
    jac: Any = None,
    hess: Any = None,
    hessp: Any = None,
    bounds: Any = None,
    constraints: Any = (),
    tol: float | None = None,
    callback: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    comm: ac.Communicator | None = None,
) -> optimize.OptimizeResult:
    """Minimize the sum over all ranks of a function, as `scipy.optimize.minimize` does; collective.

    Parameters
    ----------
    fun : callable, fun(x, *args) -> float
        This rank's part of the sum, usually over its share of the data.
    x0 : array, shape (n,)
        Where to start. Rank 0's counts.
    args : tuple, or a single argument
        Passed to this rank's `fun`, `jac`, `hess` and `hessp`. What is no tuple is one argument.
    method : str or callable, optional
        As for SciPy.
    jac : callable, bool, or str, optional
        This rank's part of the gradient, jac(x, *args) -> (n,); True if `fun` returns a pair of
        value and gradient. Otherwise SciPy takes differences of the sum.
    hess, hessp : callable, optional
        This rank's part of the Hessian, hess(x, *args) -> (n, n), or of its product with a vector,
        hessp(x, p, *args) -> (n,). For `hess` also what SciPy takes instead of a callable.
    bounds, constraints, tol, options
        As for SciPy. They are rank 0's alone: constraints are functions of x, not sums over ranks,
        and may not communicate.
    callback : callable, optional
        As for SciPy, which decides by its signature whether it gets `intermediate_result` or x. It
        is called on every rank that passes one, with the same values, and may communicate if all
        ranks pass one. StopIteration from any of them ends the optimization.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    scipy.optimize.OptimizeResult
        Rank 0's, on every rank.

    Raises
    ------
    Exception
        What a function of this rank, or on rank 0 SciPy, has raised.
    PeerError
        Another rank's function, or SciPy on rank 0, has raised. The communicator can still be used.
    TypeError
        A function that rank 0 asks for is missing on this rank.

    Notes
    -----
    Sums are taken in rank order. An evaluation costs a broadcast of x, one small exchange, and a
    reduction of the result to rank 0.

    Examples
    --------
    >>> import numpy as np
    >>> from arraycomm.adapters.scipy import minimize
    >>> from arraycomm.testing import run
    >>> def fit(comm):
    ...     target = np.arange(3.0)[comm.rank :: comm.size]  # this rank's share of the data
    ...     return minimize(lambda x: ((x - target) ** 2).sum(), np.zeros(1), comm=comm).x.round(4)
    >>> run(2, fit)
    [array([1.]), array([1.])]
    """
    comm = comm or ac.world()
    functions = {_Kind.FUN: fun, _Kind.JAC: jac, _Kind.HESS: hess, _Kind.HESSP: hessp}
    # As SciPy takes them: what is no tuple is one argument.
    given = args if isinstance(args, tuple) else (args,)
    bound = {kind: _bind(f, given, {}) for kind, f in functions.items() if callable(f)}
    team = _Team(comm, bound, callback, method, packs=jac is True)

    def run() -> optimize.OptimizeResult:
        objective = team.asks(_Kind.FUN)
        return optimize.minimize(
            (lambda x: _unpacked(objective(x))) if jac is True else (lambda x: objective(x)[()]),
            x0,
            method=method,
            jac=team.asks(_Kind.JAC) if callable(jac) else jac,
            hess=team.asks(_Kind.HESS) if callable(hess) else hess,
            hessp=team.asks(_Kind.HESSP) if callable(hessp) else hessp,
            bounds=bounds,
            constraints=constraints,
            tol=tol,
            callback=team.callback,
            options=dict(options) if options is not None else None,
        )

    return team.run(run)


def least_squares(
    fun: Callable[..., Any],
    x0: Any,
    jac: Any = "2-point",
    bounds: Any = (-np.inf, np.inf),
    method: str = "trf",
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    jac_sparsity: Any = None,
    callback: Callable[..., Any] | None = None,
    comm: ac.Communicator | None = None,
    **options: Any,
) -> optimize.OptimizeResult:
    """Solve a nonlinear least-squares problem, its residuals spread over the ranks; collective.

    As `scipy.optimize.least_squares` does on the residuals of all ranks, one rank's behind the
    other's.

    Parameters
    ----------
    fun : callable, fun(x, *args, **kwargs) -> (m,)
        This rank's residuals; m may differ between ranks, and be 0.
    x0 : array, shape (n,)
        Where to start. Rank 0's counts.
    jac : callable or str
        This rank's rows of the Jacobian, jac(x, *args, **kwargs) -> (m, n), an array or a SciPy
        sparse array; or how SciPy takes differences of the residuals.
    bounds, method, **options
        As for SciPy; rank 0's count.
    args, kwargs
        Passed to this rank's `fun` and `jac`.
    jac_sparsity : array or sparse array, shape (m, n), optional
        The pattern of this rank's rows; all ranks pass one, or none.
    callback, comm
        As for `minimize`. Callbacks need SciPy 1.16.

    Returns
    -------
    scipy.optimize.OptimizeResult
        Rank 0's, on every rank, with the residuals and the Jacobian of all ranks.

    Raises
    ------
    Exception, PeerError, TypeError
        As `minimize`.

    Notes
    -----
    An evaluation costs a broadcast of x, one small exchange, and a gather to rank 0.
    """
    comm = comm or ac.world()
    functions = {_Kind.FUN: fun, _Kind.JAC: jac}
    bound = {kind: _bind(f, args, kwargs or {}) for kind, f in functions.items() if callable(f)}
    team = _Rows(comm, bound, callback, method)

    def run() -> optimize.OptimizeResult:
        pattern = None if jac_sparsity is None else _stacked(patterns or [])
        extra = {"callback": team.callback} if team.callback is not None else {}
        return optimize.least_squares(
            team.asks(_Kind.FUN),
            x0,
            jac=team.asks(_Kind.JAC) if callable(jac) else jac,
            bounds=bounds,
            method=method,
            jac_sparsity=pattern,
            **extra,
            **options,
        )

    patterns = comm.gather_object(jac_sparsity)
    return team.run(run)


class _Team:
    """The ranks of one optimization: rank 0 asks, and all evaluate.

    `functions` are this rank's; `packs` says that `fun` returns a pair of value and gradient.
    """

    def __init__(
        self,
        comm: ac.Communicator,
        functions: dict[_Kind, Callable[..., Any]],
        callback: Callable[..., Any] | None,
        method: Any,
        *,
        packs: bool = False,
    ) -> None:
        self._comm, self._functions, self._packs = comm, functions, packs
        self._own_callback, self._method = callback, method
        # SciPy may evaluate in several threads.
        self._asking = threading.Lock()
        # The error of which all ranks know.
        self._known: BaseException | None = None
        with ac.raise_together(comm):
            if _Kind.FUN not in functions or not (callback is None or callable(callback)):
                raise TypeError("minimize and least_squares need a callable fun, and callback")
        said = comm.allgather_object((callback is not None, packs))
        self.callback = self._call_back if any(has for has, _ in said) else None
        pairs = [rank for rank, (_, packed) in enumerate(said) if packed]
        if 0 < len(pairs) < comm.size:
            raise TypeError(
                f"jac must be True on all ranks, or on none; it is on rank {pairs[0]} alone"
                if len(pairs) == 1
                else f"jac must be True on all ranks, or on none; it is on ranks {pairs}"
            )

    def run(self, solve: Callable[[], optimize.OptimizeResult]) -> optimize.OptimizeResult:
        """Run `solve` on rank 0, and serve it on the others; return its result on every rank."""
        if self._comm.rank > 0:
            self._serve()
        else:
            with self._telling_others():
                result = solve()
            self._tell(_Kind.END)
        return self._comm.bcast_object(result if self._comm.rank == 0 else None)

    def asks(self, kind: _Kind) -> Callable[..., Any]:
        """Return the function, for rank 0, that evaluates on all ranks."""

        def ask(*vectors: Any) -> Any:
            arrays = list(map(np.asarray, vectors))
            with self._asking, self._known_to_all():
                self._tell(kind, *arrays)
                return self._evaluate(kind, arrays)

        return ask

    def _serve(self) -> None:
        """Evaluate what rank 0 asks for, until it ends."""
        while True:
            told = self._comm.bcast(None)
            kind, count, dims = _Kind(int(told[0].real)), int(told[1].real), int(told[2].real)
            if kind is _Kind.END:
                return
            if kind is _Kind.FAILED:
                self._fail_together()
            # Rank 0 may go on behind an error: a method of the user's may expect it.
            with forgiving, self._known_to_all():
                if kind is _Kind.CALLBACK:
                    self._take_callback(self._comm.bcast_object(None))
                else:
                    vectors = np.split(told[3:], count)
                    self._evaluate(kind, vectors if dims else [vector[0] for vector in vectors])

    def _tell(self, kind: _Kind, *vectors: Any) -> None:
        """Tell the other ranks what to evaluate, and where: vectors, or numbers without axes."""
        dims = {vector.ndim for vector in vectors} or {1}
        if dims not in ({0}, {1}):
            raise ValueError(f"{_NAMES[kind]} takes vectors; got arrays of {dims} dimensions")
        told: list[Any] = [[kind, len(vectors), dims.pop()], *map(np.atleast_1d, vectors)]
        self._comm.bcast(np.concatenate(told))

    def _evaluate(self, kind: _Kind, vectors: Sequence[Any]) -> Any:
        with ac.raise_together(self._comm):
            if kind not in self._functions:
                raise TypeError(f"rank 0 has a callable {_NAMES[kind]}; this rank has none")
            local = self._local(kind, self._functions[kind](*vectors), np.size(vectors[0]))
        return self._joined(kind, local)

    def _local(self, kind: _Kind, value: Any, count: int) -> Any:
        """Return this rank's part at a vector of `count` numbers; raise if its shape is wrong."""
        packed = kind is _Kind.FUN and self._packs
        array = _packed(value) if packed else np.asarray(value)
        shape = (1 + count,) if packed else _SHAPES[kind](count)
        if array.size == 1 and (not shape or set(shape) == {1}):
            array = array.reshape(shape)
        if array.shape != shape:
            raise ValueError(
                f"{_NAMES[kind]} must return "
                f"{'a scalar value' if not shape else f'an array of shape {shape}'}"
                f"{' and a gradient' * packed}; got shape {array.shape}"
            )
        return array.astype(np.result_type(array.dtype, np.float64))

    def _joined(self, kind: _Kind, local: Any) -> Any:
        return self._comm.reduce(local)

    # Callbacks

    def _call_back(self, intermediate_result: Any) -> None:
        """Call back on all ranks; SciPy passes a result to a parameter of this name, or else x."""
        result = intermediate_result
        if not isinstance(result, optimize.OptimizeResult):
            result = optimize.OptimizeResult(x=np.array(result))
        with self._asking, self._known_to_all():
            self._tell(_Kind.CALLBACK)
            stops = self._take_callback(self._comm.bcast_object(result))
        if stops:
            raise StopIteration

    def _take_callback(self, result: optimize.OptimizeResult) -> bool:
        """Call this rank's callback, and return whether any rank's wants to stop."""
        stops = False
        with ac.raise_together(self._comm):
            try:
                if self._own_callback is not None:
                    stops = self._called_back(self._own_callback, result)
            except StopIteration:
                stops = True
        return bool(self._comm.allreduce(stops, "or"))

    def _called_back(self, callback: Callable[..., Any], result: optimize.OptimizeResult) -> bool:
        takes_result = set(inspect.signature(callback).parameters) == {"intermediate_result"}
        if takes_result and "fun" in result:
            callback(intermediate_result=result)
            return False
        if str(self._method).lower() == "trust-constr":
            return bool(callback(result.x, result))
        callback(result.x)
        return False

    # Errors

    @contextmanager
    def _known_to_all(self) -> Iterator[None]:
        """Remember an error in the block: all ranks hear of it there."""
        self._known = None
        try:
            yield
        except Exception as error:
            self._known = error
            raise

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """Make the other ranks raise as well if this one does."""
        try:
            yield
        except Exception as error:
            self._known = error
            try:
                self._tell(_Kind.FAILED)
            except ac.ArrayCommError:
                # The others have heard of this error, or are gone.
                raise error from None
            self._fail_together()

    def _fail_together(self) -> None:
        """Raise on all ranks the error of the last evaluation: each rank's own, or rank 0's."""
        known = self._known
        with ac.raise_together(self._comm):
            if known is not None and not isinstance(known, ac.PeerError):
                raise known
        assert known is not None
        raise known


class _Rows(_Team):
    """A team whose results are rows, one rank's behind the other's."""

    def _local(self, kind: _Kind, value: Any, count: int) -> Any:
        if isinstance(value, sparse.linalg.LinearOperator):
            raise TypeError("jac must return an array or a sparse array; got a LinearOperator")
        if kind is _Kind.FUN:
            wanted, array = 1, np.atleast_1d(np.asarray(value))
        else:
            columns = np.shape(value)[-1] if np.ndim(value) or sparse.issparse(value) else 1
            if columns != count:
                raise ValueError(f"jac must return rows of {count} numbers; got {columns}")
            if sparse.issparse(value):
                return sparse.csr_array(value)
            wanted, array = 2, np.atleast_2d(np.asarray(value))
        if array.ndim != wanted:
            raise ValueError(
                f"{_NAMES[kind]} must return an array of {wanted} dimensions; got {array.shape}"
            )
        return array.astype(np.result_type(array.dtype, np.float64))

    def _joined(self, kind: _Kind, local: Any) -> Any:
        if self._comm.allreduce(sparse.issparse(local), "or"):
            parts = self._comm.gather_object(local)
            return None if parts is None else _stacked(parts)
        return self._comm.gatherv(local)


def _bind(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    return lambda *vectors: function(*vectors, *args, **kwargs)


def _packed(pair: Any) -> Any:
    """Return value and gradient as one vector, so that they travel together."""
    value, gradient = pair
    return np.concatenate([np.reshape(value, 1), np.ravel(gradient)])


def _unpacked(packed: Any) -> tuple[Any, Any]:
    return packed[0], packed[1:]


def _stacked(parts: Sequence[Any]) -> Any:
    missing = [rank for rank, part in enumerate(parts) if part is None]
    if missing:
        raise TypeError(
            f"jac_sparsity must be passed on all ranks or on none; rank {missing[0]} has none"
        )
    return sparse.csr_array(sparse.vstack([sparse.csr_array(part) for part in parts]))
