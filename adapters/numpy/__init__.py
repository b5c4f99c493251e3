"""Optimizers that are plain objects, and some of arraycomm's own for arrays of every framework."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

from arraycomm import DistributedOptimizer, synchronize
from arraycomm._calls.arguments import check_root
from arraycomm._training.comparison.verification import Inputs
from arraycomm.adapters.numpy._inputs import StepInputs, signature_of
from arraycomm.adapters.numpy._optimizers import SGD, Adam, Momentum
from arraycomm.adapters.numpy._shards import Sharding, check_per_parameter, set_state, state_of

__all__ = [
    "SGD",
    "Adam",
    "DistributedOptimizer",
    "Momentum",
    "gather_state",
    "load_state",
    "synchronize",
]

_METHODS: Final = ("update", "step", "__call__")
_PROTOCOL: Final = (
    "a torch optimizer, an optax transformation, a thinc optimizer, an object with a method "
    "update(params, grads), update(params, grads, state) or step(params, grads), or a function of "
    "these"
)


def check(optimizer: Any) -> None:
    """Raise unless `optimizer` follows the protocol, and is not distributed already."""
    if isinstance(optimizer, Distributed):
        raise ValueError("DistributedOptimizer: this optimizer is distributed already")
    if isinstance(optimizer, type):
        raise TypeError(
            "DistributedOptimizer: optimizer must be an object; got the class "
            f"{optimizer.__name__}; pass an instance, {optimizer.__name__}(...)"
        )
    found = _methods_of(optimizer)
    if not found:
        raise TypeError(
            f"DistributedOptimizer: optimizer must be {_PROTOCOL}; got {type(optimizer).__name__}"
        )
    refusals = [_refusal(optimizer, name) for name in found]
    if None not in refusals:
        raise TypeError(f"DistributedOptimizer: {refusals[0]}")


check_shard = check_per_parameter


def _methods_of(optimizer: Any) -> list[str]:
    """Return those of the protocol's methods that an object has; containers' are something else."""
    if isinstance(optimizer, dict | set | frozenset | list | tuple):
        return []
    return [name for name in _METHODS if callable(getattr(optimizer, name, None))]


def _refusal(optimizer: Any, name: str) -> str | None:
    """Say why a method cannot take parameters and gradients in this order, if it cannot."""
    signature = signature_of(_method(optimizer, name))
    called = type(optimizer).__name__ + ("" if name == "__call__" else f".{name}")
    if inspect.isroutine(optimizer):
        called = getattr(optimizer, "__name__", called)
    if signature is None:
        return None
    first = next(iter(signature.parameters), "")
    if first.startswith("grad") or first == "updates":
        return (
            f"an optimizer must take the parameters first, (params, grads); {called} takes "
            f"{first!r} first; wrap it in an object that takes them in this order"
        )
    try:
        signature.bind_partial(None, None)
    except TypeError:
        return (
            f"an optimizer must take parameters and gradients, (params, grads), and return the new "
            f"parameters; got {called}{signature}; wrap it in an object with a method "
            "update(params, grads)"
        )
    return None


def _method(optimizer: Any, name: str) -> Any:
    # The signature of a function is its own, not that of its __call__.
    return optimizer if name == "__call__" else getattr(optimizer, name)


def _state_argument(method: Any) -> str | None:
    """Return the name of the argument after the gradients, if that is the optimizer's state."""
    signature = signature_of(method)
    names = [] if signature is None else list(signature.parameters)
    return names[2] if len(names) > 2 and "state" in names[2] else None


class Method(NamedTuple):
    """A method of the protocol: why it cannot be called, and what it calls the state, if so."""

    refusal: str | None
    state: str | None = None


class Distributed:
    """An optimizer whose gradients are reduced over all ranks before each step.

    `update`, `step` and calls of the object itself, as far as the wrapped optimizer has them,
    reduce the gradients, which are the second argument, and call the wrapped one with the result;
    collective. What it returns is returned. A step whose gradients are only accumulated returns the
    first argument, or a pair of it and the state if a state is passed as the third.

    Everything else is the wrapped optimizer's own: its attributes can be read and set.
    """

    _inputs: StepInputs

    def __init__(self, optimizer: Any, gradients: Any) -> None:
        sharding = None if gradients.shards is None else Sharding(gradients.shards)
        vars(self).update(
            _optimizer=optimizer,
            _gradients=gradients,
            _methods=self._find_methods(optimizer),
            _sharding=sharding,
            _inputs=StepInputs(optimizer, is_sharded=sharding is not None),
        )

    @staticmethod
    def _find_methods(optimizer: Any) -> dict[str, Method]:
        return {
            name: Method(_refusal(optimizer, name), _state_argument(_method(optimizer, name)))
            for name in _methods_of(optimizer)
        }

    def __call__(self, params: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a step, if the wrapped optimizer is called itself."""
        if "__call__" not in self._methods:
            raise TypeError(f"{type(self._optimizer).__name__} cannot be called; use its methods")
        return self._step("__call__", params, grads, *args, **kwargs)

    def _step(self, name: str, params: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        method = _method(self._optimizer, name)
        refusal, of_state = self._methods[name]
        if self._sharding is not None and of_state is not None:
            refusal = (
                f"{type(self._optimizer).__name__}.{name} takes the state as an argument, of which "
                "a sharded optimizer keeps a part; let the object keep it, or pass shard=False"
            )
        if refusal is not None:
            self._gradients.fail(TypeError(f"DistributedOptimizer: {refusal}"))
        passes_state = of_state is not None and (bool(args) or of_state in kwargs)
        state = (args[0] if args else kwargs[of_state]) if passes_state else None
        complete, reduced = self._gradients.add(grads, None, self._inputs_of(params, state))
        if complete:
            with self._gradients.taking_step():
                if self._sharding is None:
                    return method(params, reduced, *args, **kwargs)
                return self._sharding.update(
                    lambda own, grads: method(own, grads, *args, **kwargs), params, reduced
                )
        return (params, state) if passes_state else params

    def _inputs_of(self, params: Any, state: Any) -> Callable[[], Inputs]:
        """Return what returns what a step depends on, given its arguments."""
        return self._inputs.of(params, state)

    def __copy__(self) -> Distributed:
        return self._copied(copy.copy(self._optimizer))

    def __deepcopy__(self, memo: dict[int, Any]) -> Distributed:
        return self._copied(copy.deepcopy(self._optimizer, memo))

    def _copied(self, optimizer: Any) -> Distributed:
        made = type(self)(optimizer, self._gradients.copy())
        if self._sharding is not None:
            vars(made).update(_sharding=copy.copy(self._sharding))
        return made

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # The wrapped optimizer's own state could be pickled, but not that it is distributed.
        raise TypeError(
            "DistributedOptimizer: a distributed optimizer cannot be pickled, since it stands for "
            "ranks of this process; pickle the plain optimizer, and pass it to "
            "DistributedOptimizer in each process"
        )

    def __arraycomm_tree__(self) -> tuple[Any, Callable[[Any], Any]]:
        if self._sharding is not None:
            raise TypeError(
                "this optimizer is sharded, so no rank has the state of another one's parameters; "
                "load a whole state on every rank by "
                "arraycomm.adapters.numpy.load_state(optimizer, state, params)"
            )

        def rebuild(leaves: list[Any]) -> Distributed:
            # Maybe another object, as of a dataclass. It is the same on all ranks: none is behind.
            [optimizer] = leaves
            vars(self).update(_optimizer=optimizer, _inputs=StepInputs(optimizer, is_sharded=False))
            self._gradients.failed_steps = 0
            return self

        return [self._optimizer], rebuild

    def __getattr__(self, name: str) -> Any:
        if name in {"_optimizer", "_methods", "_sharding", "_inputs"}:
            raise AttributeError(name)
        found = getattr(self._optimizer, name)
        return functools.partial(self._step, name) if name in self._methods else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optimizer, name, value)


distribute = Distributed


def gather_state(optimizer: Any, *, root: int = 0) -> dict[str, Any] | None:
    """Return the whole state of a sharded optimizer on one rank.

    Parameters
    ----------
    optimizer : object
        A distributed one, sharded or not.
    root : int
        The rank that gets the state.

    Returns
    -------
    dict or None
        On `root` what the state of the wrapped optimizer would be if it were not sharded: its
        `state_dict()` if it has one, otherwise its attributes. None on the other ranks.

    Raises
    ------
    ValueError
        The optimizer is not distributed.
    TypeError
        The ranks have something in their states that is neither the same on all ranks, nor a list
        with one array for each parameter of the rank, nor a dict of such things.

    Notes
    -----
    Collective. A sharded optimizer is given lists of parameters, so it keeps what belongs to them
    in lists. A list of arrays becomes a tree like the parameters here; a list of dicts, lists or
    tuples stays a list, in the order of the leaves.

    Examples
    --------
    >>> import numpy as np
    >>> import arraycomm as ac
    >>> from arraycomm.adapters.numpy import gather_state
    >>> from arraycomm.testing import run
    >>> class Momentum:
    ...     per_parameter = True
    ...     def update(self, params, grads):
    ...         before = vars(self).get("momenta", [0] * len(params))
    ...         self.momenta = [0.5 * m + g for m, g in zip(before, grads)]
    ...         return [p - m for p, m in zip(params, self.momenta)]
    >>> def train(comm):
    ...     optimizer = ac.DistributedOptimizer(Momentum(), comm=comm, shard=True)
    ...     params = {"a": np.zeros(1), "b": np.zeros(2)}
    ...     optimizer.update(params, {"a": np.ones(1), "b": np.ones(2)})
    ...     state = gather_state(optimizer)
    ...     return len(optimizer.momenta), None if state is None else sorted(state["momenta"])
    >>> run(2, train)
    [(1, ['a', 'b']), (1, None)]
    """
    inner, gradients, sharding = _parts("gather_state", optimizer)
    if sharding is None:
        here = gradients.comm.rank == check_root(root, gradients.comm.size)
        return state_of(inner) if here else None
    whole: dict[str, Any] | None = sharding.gather(inner, root)
    return whole


def load_state(optimizer: Any, state: dict[str, Any], params: Any) -> None:
    """Give a distributed optimizer a whole state, of which a sharded one keeps this rank's part.

    Parameters
    ----------
    optimizer : object
        A distributed one, sharded or not.
    state : dict
        What `gather_state` returned, also in a job with another number of ranks, on every rank.
    params : pytree
        The parameters that the optimizer will update.

    Raises
    ------
    ValueError
        The optimizer is not distributed.
    TypeError
        The state is None.

    Notes
    -----
    Local. An object with `load_state_dict(state)` gets its part by that; the attributes of any
    other one are set.

    Examples
    --------
    >>> import numpy as np
    >>> import arraycomm as ac
    >>> from arraycomm.adapters.numpy import load_state
    >>> from arraycomm.testing import run
    >>> class Momentum:
    ...     per_parameter = True
    ...     def update(self, params, grads):
    ...         self.momenta = [0.5 * m + g for m, g in zip(self.momenta, grads)]
    ...         return [p - m for p, m in zip(params, self.momenta)]
    >>> params = {"a": np.zeros(1), "b": np.zeros(2)}
    >>> whole = {"momenta": {"a": np.ones(1), "b": np.ones(2)}}
    >>> def resume(comm):
    ...     optimizer = ac.DistributedOptimizer(Momentum(), comm=comm, shard=True)
    ...     load_state(optimizer, whole, params)
    ...     return [momentum.shape for momentum in optimizer.momenta]
    >>> run(2, resume)
    [[(2,)], [(1,)]]
    """
    inner, _, sharding = _parts("load_state", optimizer)
    if state is None:
        raise TypeError(
            "load_state: state is None, as gather_state returns it on all ranks but its root; pass "
            "the root's on every rank, for example by comm.bcast_object(state)"
        )
    if sharding is None:
        set_state(inner, state)
    else:
        sharding.load(inner, state, params)


def _parts(function: str, optimizer: Any) -> tuple[Any, Any, Any]:
    """Return the wrapped optimizer of a distributed one, its gradients, and its division if any."""
    if not isinstance(optimizer, Distributed):
        raise ValueError(
            f"{function}: this optimizer is not distributed; pass one that DistributedOptimizer "
            "returned"
        )
    own = vars(optimizer)
    if own["_gradients"].virtual is not None:
        own["_gradients"].virtual.check_between_steps(function)
    return own["_optimizer"], own["_gradients"], own["_sharding"]
