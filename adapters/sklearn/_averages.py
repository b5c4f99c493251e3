"""Estimators of scikit-learn whose parameters are averaged over ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from sklearn.linear_model import Perceptron, SGDClassifier, SGDRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.utils import check_random_state

import arraycomm as ac
from arraycomm.adapters.sklearn._batches import Batch, learnt

AVERAGED: Final = (SGDClassifier, SGDRegressor, Perceptron, MLPClassifier, MLPRegressor)
_NETWORKS: Final = (MLPClassifier, MLPRegressor)

# The arrays that are averaged: of the estimator, and of its optimizer.
_ARRAYS: Final = (
    *("coef_", "intercept_", "_standard_coef", "_standard_intercept"),
    *("_average_coef", "_average_intercept", "coefs_", "intercepts_"),
)
_MOMENTS: Final = ("velocities", "ms", "vs")
# How much an estimator had learnt when it was averaged last.
_SINCE: Final = "_arraycomm_t"


class _Count:
    """How much an estimator has learnt since it began, and since it was averaged.

    `partial_fit` adds to it; `fit` begins with a number of its own. It is saved as a number.
    """

    __slots__ = ()

    def __add__(self, other: Any) -> Any:
        return _counted(_plain(self) + other)

    def __deepcopy__(self, memo: object) -> Any:
        return self

    def __reduce__(self) -> Any:
        number = _plain(self)
        return type(number), (number,)


class _FloatCount(_Count, float):
    __slots__ = ()


class _IntCount(_Count, int):
    __slots__ = ()


def _plain(count: Any) -> Any:
    return int(count) if isinstance(count, int) else float(count)


def _counted(number: Any) -> Any:
    """Return a count: networks have an integer, other estimators a float."""
    return _IntCount(number) if isinstance(number, int) else _FloatCount(number)


def fit_locally(
    estimator: Any, batch: Batch, classes: Any, leader: int, comm: ac.Communicator
) -> Any:
    """Return a copy of the estimator that has learnt from this rank's batch."""
    seed = _common_seed(estimator, leader, comm)
    with ac.raise_together(comm):
        fitted = copy.deepcopy(estimator)
        if batch.samples:
            if seed is not None:
                fitted.set_params(random_state=seed)
            further = {} if classes is None else {"classes": classes}
            fitted.partial_fit(batch.X, batch.y, **further)
    return fitted


def _common_seed(estimator: Any, leader: int, comm: ac.Communicator) -> int | None:
    """Return a seed of the leader's for the initial parameters of a network, if they need one."""
    drawn = isinstance(estimator, _NETWORKS) and not hasattr(estimator, "coefs_")
    if not drawn or isinstance(estimator.random_state, int | np.integer):
        return None
    seed = None
    with ac.raise_together(comm):
        if comm.rank == leader:
            seed = int(check_random_state(estimator.random_state).randint(2**31 - 1))
    found: int = comm.bcast_object(seed, root=leader)
    return found


def average_over_ranks(
    estimator: Any,
    fitted: Any,
    weights: Sequence[float],
    before: dict[str, Any],
    comm: ac.Communicator,
) -> None:
    """Give every rank's estimator the weighted mean of what the ranks' copies have learnt.

    Counters and learning rates are those of the rank with the largest weight. `before` is what all
    ranks had learnt alike.
    """
    leader = int(np.argmax(weights))
    state = comm.bcast_object(learnt(fitted) if comm.rank == leader else None, root=leader)
    share = weights[comm.rank] / sum(weights)
    own = _averaging_like(state, learnt(fitted), estimator) if share else {}
    losses = isinstance(estimator, _NETWORKS)
    common = list(_arrays(state))
    summands = [
        array * np.float64(share)
        for array in (_arrays(own) if share else map(np.zeros_like, common))
    ]
    summands.append(np.float64(share * own["loss_"] if share and losses else 0.0))
    with np.errstate(all="ignore"):
        *means, loss = ac.allreduce_tree(summands, "sum", comm=comm)
    for array, mean in zip(common, means, strict=True):
        array[...] = mean
    if losses:
        _agree_on_loss(state, float(loss), before, estimator.tol)
    state[_SINCE] = state["t_"] = _counted(state["t_"])
    vars(estimator).update(state)


def _averaging_like(state: dict[str, Any], own: dict[str, Any], estimator: Any) -> dict[str, Any]:
    """Return what a rank has learnt, with averages if the leader has begun them (`average=10`).

    In place of those that this rank has not begun are its coefficients.
    """
    first = getattr(estimator, "average", 0)
    begun, wanted = (first <= each["t_"] - 1 for each in (own, state))
    if not first or begun == wanted:
        return own
    pairs = (("_average_coef", "coef_"), ("_average_intercept", "intercept_"))
    return own | {name: own[of].reshape(own[name].shape) * wanted for name, of in pairs}


def _arrays(state: dict[str, Any]) -> Iterator[Any]:
    """Yield the arrays that are averaged; several names may be one array."""
    groups = [state.get(name) for name in _ARRAYS]
    optimizer = vars(state["_optimizer"]) if "_optimizer" in state else {}
    groups += [optimizer.get(name) for name in _MOMENTS]
    for group in groups:
        if isinstance(group, list):
            yield from group
        elif group is not None:
            yield group


def _agree_on_loss(state: dict[str, Any], loss: float, before: dict[str, Any], tol: float) -> None:
    """Replace the leader's loss by the mean over ranks, in all that follows from it."""
    best = before.get("best_loss_", np.inf)
    waited = before.get("_no_improvement_count", 0)
    state["loss_"] = loss
    state["loss_curve_"] = [*state["loss_curve_"][:-1], loss]
    state["best_loss_"] = min(best, loss)
    state["_no_improvement_count"] = waited + 1 if loss > best - tol else 0


def samples_since(estimator: Any) -> float:
    """Return how many samples an estimator has learnt from since it was averaged."""
    start = 0.0 if isinstance(estimator, _NETWORKS) else 1.0
    now, since = (getattr(estimator, name, start) for name in ("t_", _SINCE))
    # The estimator's own `fit` begins anew.
    goes_on = now >= since and isinstance(now, _Count) >= isinstance(since, _Count)
    return float(now) - float(since if goes_on else start)
