"""scikit-learn: estimators that learn from data which is spread over ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import Pipeline

import arraycomm as ac
from arraycomm.adapters.sklearn._averages import (
    AVERAGED,
    average_over_ranks,
    fit_locally,
    samples_since,
)
from arraycomm.adapters.sklearn._batches import (
    Batch,
    Brought,
    brought,
    check_agreement,
    digest,
    labels_of,
    learnt,
    union,
)
from arraycomm.adapters.sklearn._merges import CountsMerge, GaussianMerge, RangeMerge, ScalerMerge

__all__ = ["average", "partial_fit"]

_MERGES: Final = (ScalerMerge(), RangeMerge(), GaussianMerge(), CountsMerge())
# Merged by earlier versions, by private functions of scikit-learn.
_REMOVED: Final = ("IncrementalPCA", "MiniBatchKMeans")
_PARTIAL_FIT, _AVERAGE = "partial_fit", "average"


def partial_fit(
    estimator: Any,
    X: Any,  # noqa: N803 - scikit-learn's name
    y: Any = None,
    *,
    classes: Any = None,
    comm: ac.Communicator | None = None,
) -> Any:
    """Let an estimator learn from the samples of all ranks, each rank's own; collective.

    Parameters
    ----------
    estimator : estimator of scikit-learn
        Of the same class, with the same parameters, and with the same that it has learnt so far, on
        every rank. Changed in place. Of a `Pipeline`, whose other steps must have been fitted, the
        last step learns.
    X : array-like, shape (n, features)
        This rank's samples, as the estimator takes them. n may differ between ranks, and be 0.
    y : array-like, shape (n,), optional
        Their targets.
    classes : array-like, optional
        For a classifier's first call: the classes that this rank knows of, by default those in y.
        The estimator has those of all ranks.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    estimator
        The one passed. What it has learnt is the same, in every bit, on all ranks.

    Raises
    ------
    TypeError
        Estimators of this class can neither be averaged nor merged.
    MismatchError
        Classes or parameters of the estimators, what they have learnt, features, or the dtypes of
        the labels differ between ranks. The communicator can still be used.
    ValueError
        No rank has a sample, or the estimator refuses this rank's. If one rank raises, the others
        raise `PeerError`, and no rank's estimator is changed.

    Notes
    -----
    `StandardScaler`, `MinMaxScaler`, `GaussianNB` and `MultinomialNB` learn what their own
    `partial_fit` would learn from one batch with the samples of all ranks, apart from rounding.

    `SGDClassifier`, `SGDRegressor`, `Perceptron`, `MLPClassifier` and `MLPRegressor` learn on each
    rank by themselves; their parameters, averaged coefficients and moments are then averaged, each
    rank weighted by its number of samples (Zinkevich et al., 2010). Counters, such as `t_`, are
    those of the rank with the most samples. A network begins with the same parameters on all ranks.

    A call costs a few small exchanges, and one reduction or broadcast of what is learnt.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.preprocessing import StandardScaler
    >>> from arraycomm.adapters.sklearn import partial_fit
    >>> from arraycomm.testing import run
    >>> def fit(comm):
    ...     samples = np.arange(6.0)[comm.rank :: comm.size, None]  # this rank's share
    ...     return partial_fit(StandardScaler(), samples, comm=comm).mean_.tolist()
    >>> run(2, fit)
    [[2.5], [2.5]]
    """
    comm = comm or ac.world()
    with ac.raise_together(comm):
        learner, batch = _learner_and_batch(estimator, X, y)
        labels = labels_of(learner, batch, classes)
        # Of a pipeline, the steps before count as well.
        before = digest(estimator.steps[:-1]) if isinstance(estimator, Pipeline) else ""
        mine = brought(learner, batch, labels, digest(learnt(learner)) + before)
    everyone = comm.allgather_object(mine)
    check_agreement(_PARTIAL_FIT, everyone)
    labels = getattr(learner, "classes_", None)
    if labels is None:
        labels = union(_PARTIAL_FIT, everyone)
    if isinstance(learner, AVERAGED):
        counts = [each.samples for each in everyone]
        fitted = fit_locally(learner, batch, labels, int(np.argmax(counts)), comm)
        average_over_ranks(learner, fitted, counts, vars(learner), comm)
    else:
        _merge(learner, batch, labels, everyone, comm)
    return estimator


def average(estimator: Any, *, comm: ac.Communicator | None = None) -> Any:
    """Average what the ranks' estimators have learnt by themselves; collective.

    For programs that call the estimator's own `partial_fit` several times between two averages.

    Parameters
    ----------
    estimator : SGDClassifier, SGDRegressor, Perceptron, MLPClassifier or MLPRegressor
        Of the same class and parameters on every rank, with the same features and classes; or a
        `Pipeline` whose last step is one. Changed in place. Each rank counts as much as the samples
        from which it has learnt since the last `average` or `partial_fit` of this module; one that
        has learnt from none counts nothing, and may be new.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    estimator
        The one passed, with the same bits on every rank.

    Raises
    ------
    TypeError
        Estimators of this class cannot be averaged.
    MismatchError
        The estimators differ in class, parameters, features or classes.
    ValueError
        No rank's estimator has learnt anything since the last average.
    """
    comm = comm or ac.world()
    with ac.raise_together(comm):
        learner = _last_step(estimator)
        if not isinstance(learner, AVERAGED):
            raise TypeError(
                f"only {_names(AVERAGED)} can be averaged; got {type(learner).__name__}"
            )
        samples = samples_since(learner)
        known = Batch(None, None, int(samples), getattr(learner, "n_features_in_", None), None)
        classes = getattr(learner, "classes_", None)
        state = "" if classes is None else str(np.asarray(classes).tolist())
        mine = brought(learner, known, None, state)
    everyone = comm.allgather_object(mine)
    # A new estimator has no classes yet.
    states = [each.state for each in everyone if each.state]
    everyone = [replace(each, state=each.state or (states or [""])[0]) for each in everyone]
    check_agreement(_AVERAGE, everyone)
    average_over_ranks(learner, learner, comm.allgather_object(samples), {}, comm)
    return estimator


def _learner_and_batch(estimator: Any, x: Any, y: Any) -> tuple[Any, Batch]:
    learner = _last_step(estimator)
    is_piped = isinstance(estimator, Pipeline) and len(estimator) > 1
    batch = Batch.of(x, y, raw=is_piped)
    if not isinstance(learner, (*AVERAGED, *(merge.kind for merge in _MERGES))):
        kinds = (*(merge.kind for merge in _MERGES), *AVERAGED)
        removed = [base.__name__ for base in type(learner).__mro__ if base.__name__ in _REMOVED]
        instead = f"; for {removed[0]} see docs/recipes.md" if removed else ""
        raise TypeError(
            f"{type(learner).__name__} can be neither averaged nor merged over ranks; "
            f"{_names(kinds)} can{instead}"
        )
    known = getattr(learner, "n_features_in_", None)
    if is_piped:
        if batch.samples:
            batch = Batch.of(_transformed(estimator[:-1], x), y)
        else:
            batch = replace(batch, features=None)
    if batch.features is not None and known not in (None, batch.features):
        raise ValueError(
            f"X must have the {known} features from which {type(learner).__name__} has learnt; got "
            f"{batch.features}"
        )
    return learner, batch


def _transformed(before: Pipeline, x: Any) -> Any:
    try:
        return before.transform(x)
    except NotFittedError:
        names = ", ".join(name for name, _ in before.steps)
        raise NotFittedError(
            "the steps of a pipeline before the last must be fitted, alike on all ranks: call "
            f"partial_fit of arraycomm.adapters.sklearn with each of them first ({names}), or pass "
            "them fitted by one rank through bcast_object"
        ) from None


def _last_step(estimator: Any) -> Any:
    learner = estimator.steps[-1][1] if isinstance(estimator, Pipeline) else estimator
    if not isinstance(learner, BaseEstimator):
        raise TypeError(f"estimator must be one of scikit-learn's; got {type(learner).__name__}")
    return learner


def _names(kinds: Sequence[type]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)


def _merge(
    estimator: Any, batch: Batch, classes: Any, everyone: Sequence[Brought], comm: ac.Communicator
) -> None:
    """Merge the ranks' increments on rank 0, and give every rank the result."""
    [merge] = [merge for merge in _MERGES if isinstance(estimator, merge.kind)]
    with ac.raise_together(comm):
        learner = copy.deepcopy(estimator)
        increment = merge.local(learner, batch, classes) if batch.samples else None
    increments = comm.gather_object(increment)
    with ac.raise_together(comm):
        if increments is not None:
            merge.merge(learner, [each for each in increments if each is not None])
            _name_features(learner, everyone)
    state = comm.bcast_object(learnt(learner) if comm.rank == 0 else None)
    vars(learner).update(state)
    vars(estimator).update(learnt(learner))


def _name_features(learner: Any, everyone: Sequence[Brought]) -> None:
    [names, *_] = [each.names for each in everyone if each.samples]
    [features, *_] = [each.features for each in everyone if each.samples]
    learner.n_features_in_ = features
    if names is not None:
        learner.feature_names_in_ = np.array(names, object)
