"""Optimizers that are plain objects with a method `update(params, grads)`."""

from __future__ import annotations

import copy
import inspect
from typing import Any, NoReturn

import arraycomm as ac
from arraycomm.adapters._numpy_shards import Sharding, check_per_parameter, set_state, state_of

__all__ = ["DistributedOptimizer", "gather_state", "load_state", "synchronize"]

DistributedOptimizer = ac.DistributedOptimizer
synchronize = ac.synchronize


def check(optimizer: Any) -> None:
    """Raise unless `optimizer` has a method `update`, and is not distributed already."""
    if isinstance(optimizer, Distributed):
        raise ValueError("DistributedOptimizer: this optimizer is distributed already")
    if not callable(getattr(optimizer, "update", None)):
        raise TypeError(
            "DistributedOptimizer: optimizer must be a torch optimizer, an optax "
            "transformation, or an object with a method update(params, grads); "
            f"got {type(optimizer).__name__}"
        )
    first = _first_argument(optimizer.update)
    if first.startswith("grad") or first == "updates":
        raise TypeError(
            "DistributedOptimizer: update must take the parameters first, update(params, grads); "
            f"{type(optimizer).__name__}.update takes {first!r} first; wrap it in an object that "
            "takes them in this order"
        )


def check_shard(optimizer: Any) -> None:
    """Raise unless this optimizer can be sharded."""
    check_per_parameter(optimizer)


def _first_argument(update: Any) -> str:
    """Return the name of the first argument, or an empty string if it is not known."""
    try:
        return next(iter(inspect.signature(update).parameters), "")
    except (TypeError, ValueError):
        return ""


class Distributed:
    """An optimizer whose gradients are reduced over all ranks before each update.

    Everything but `update` is the wrapped optimizer's own: its attributes can be read and set.
    """

    def __init__(self, optimizer: Any, gradients: Any) -> None:
        sharding = None if gradients.shards is None else Sharding(gradients.shards)
        vars(self).update(_optimizer=optimizer, _gradients=gradients, _sharding=sharding)

    def update(self, params: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce `grads`, and update with the result; collective.

        If gradients are accumulated and this is not the last step, `params` is returned as it is.

        Parameters
        ----------
        params, grads : pytree
            As the wrapped optimizer takes them; `grads` of the same structure on every rank.
        *args, **kwargs
            Passed on.
        """
        complete, reduced = self._gradients.add(grads)
        if not complete:
            return params

        def update(params: Any, grads: Any) -> Any:
            return self._optimizer.update(params, grads, *args, **kwargs)

        if self._sharding is None:
            return update(params, reduced)
        return self._sharding.update(update, params, reduced)

    def compression_state(self) -> dict[int, Any]:
        """Return what a compression remembers on this rank, to be saved; local.

        Returns
        -------
        dict
            Of plain containers and arrays, by the numbers of the gradients' leaves; empty without an
            object as `compression`.
        """
        states = self._gradients.compressor.states
        return {} if states is None else states.saved()

    def load_compression_state(self, saved: dict[int, Any]) -> None:
        """Go on from what `compression_state` has returned, on this rank; local.

        Parameters
        ----------
        saved : dict
            What this rank has saved.
        """
        if self._gradients.compressor.states is not None:
            self._gradients.compressor.states.load(saved)

    def __copy__(self) -> Distributed:
        return self._copied(copy.copy(self._optimizer))

    def __deepcopy__(self, memo: dict[int, Any]) -> Distributed:
        return self._copied(copy.deepcopy(self._optimizer, memo))

    def _copied(self, optimizer: Any) -> Distributed:
        made = Distributed(optimizer, self._gradients.copy())
        if self._sharding is not None:
            vars(made).update(_sharding=self._sharding.copy())
        return made

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # The wrapped optimizer's own state could be pickled, but not that it is distributed.
        raise TypeError(
            "DistributedOptimizer: a distributed optimizer cannot be pickled, since it stands for "
            "ranks of this process; pickle the plain optimizer, and pass it to DistributedOptimizer "
            "in each process"
        )

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

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
    Collective. A sharded optimizer is given lists of parameters, so it keeps what belongs to them in
    lists. Such a list becomes a tree like the parameters here.

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
    ...     optimizer.update({"a": np.zeros(1), "b": np.zeros(2)}, {"a": np.ones(1), "b": np.ones(2)})
    ...     state = gather_state(optimizer)
    ...     return len(optimizer.momenta), None if state is None else sorted(state["momenta"])
    >>> run(2, train)
    [(1, ['a', 'b']), (1, None)]
    """
    inner, gradients, sharding = _parts("gather_state", optimizer)
    if sharding is None:
        return state_of(inner) if gradients.comm.rank == root else None
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

    Notes
    -----
    Local. An object with `load_state_dict(state)` gets its part by that; the attributes of any other
    one are set.

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
    if sharding is None:
        set_state(inner, state)
    else:
        sharding.load(inner, state, params)


def _parts(function: str, optimizer: Any) -> tuple[Any, Any, Any]:
    """Return the wrapped optimizer of a distributed one, its gradients, and its division if it has one."""
    if not isinstance(optimizer, Distributed):
        raise ValueError(
            f"{function}: this optimizer is not distributed; pass one that DistributedOptimizer returned"
        )
    own = vars(optimizer)
    return own["_optimizer"], own["_gradients"], own["_sharding"]
