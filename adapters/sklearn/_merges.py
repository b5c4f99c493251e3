"""Estimators of scikit-learn that learn counts, sums and moments, merged exactly over ranks.

Each rank condenses its batch to an increment. Rank 0 merges the increments of all ranks, in rank
order, into what the estimator knows already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from sklearn.base import clone
from sklearn.naive_bayes import GaussianNB, MultinomialNB
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.preprocessing._data import _handle_zeros_in_scale, _is_constant_feature

from arraycomm.adapters.sklearn._batches import Batch


class Moments(NamedTuple):
    """Counts, means and variances of groups of samples, in double precision."""

    n: Any
    mean: Any
    var: Any

    @classmethod
    def merged(cls, parts: Sequence[Moments]) -> Moments:
        """Return the moments of all samples together (Chan, Golub and LeVeque, 1983)."""
        with np.errstate(invalid="ignore", divide="ignore"):
            n = sum(part.n for part in parts)
            mean = sum(_nothing_if(part.n, part.n * part.mean) for part in parts) / n
            spread = sum(
                _nothing_if(part.n, part.n * (part.var + (part.mean - mean) ** 2)) for part in parts
            )
            return cls(n, mean, spread / n)


def _nothing_if(n: Any, value: Any) -> Any:
    """Return 0 for groups without samples, whose moments are not numbers."""
    return np.where(np.asarray(n) > 0, value, 0.0)


def _wide(x: Any) -> Any:
    return np.asarray(x, np.float64)


class ScalerMerge:
    """StandardScaler: moments of each feature, of the values that are not NaN."""

    kind = StandardScaler

    def local(self, estimator: Any, batch: Batch, classes: Any) -> Any:
        """Return a scaler of this rank's samples."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return clone(estimator).partial_fit(batch.X)

    def merge(self, estimator: Any, increments: Sequence[Any]) -> None:
        """Merge the scalers of all ranks into the estimator."""
        parts = [*([estimator] if hasattr(estimator, "n_samples_seen_") else []), *increments]
        features = increments[0].n_features_in_
        counts = [np.broadcast_to(part.n_samples_seen_, features) for part in parts]
        n = np.sum(counts, axis=0)
        if increments[0].mean_ is None:
            estimator.mean_ = estimator.var_ = estimator.scale_ = None
        else:
            self._merge_moments(estimator, counts, parts)
        estimator.n_samples_seen_ = n[0] if n.max() == n.min() else n

    @staticmethod
    def _merge_moments(estimator: Any, counts: Sequence[Any], parts: Sequence[Any]) -> None:
        zeros = np.zeros(len(counts[0]))
        merged = Moments.merged(
            [
                Moments(count, _wide(part.mean_), zeros if part.var_ is None else _wide(part.var_))
                for count, part in zip(counts, parts, strict=True)
            ]
        )
        estimator.mean_, estimator.var_, estimator.scale_ = merged.mean, None, None
        if estimator.with_std:
            estimator.var_ = merged.var
            constant = _is_constant_feature(merged.var, merged.mean, merged.n)
            root = np.sqrt(merged.var)
            estimator.scale_ = _handle_zeros_in_scale(root, copy=False, constant_mask=constant)


class RangeMerge:
    """MinMaxScaler: the least and the largest value of each feature."""

    kind = MinMaxScaler

    def local(self, estimator: Any, batch: Batch, classes: Any) -> Any:
        """Return the count, and the extrema of each feature as two rows."""
        fitted = clone(estimator).partial_fit(batch.X)
        return batch.samples, np.stack([fitted.data_min_, fitted.data_max_])

    def merge(self, estimator: Any, increments: Sequence[Any]) -> None:
        """Let the estimator learn from the extrema, which are all that it needs of the samples."""
        seen = getattr(estimator, "n_samples_seen_", 0)
        # The rows have no names; they are given back later.
        vars(estimator).pop("feature_names_in_", None)
        estimator.partial_fit(np.concatenate([rows for _, rows in increments]))
        estimator.n_samples_seen_ = seen + sum(samples for samples, _ in increments)


class CountsMerge:
    """MultinomialNB: counts of each class and feature."""

    kind = MultinomialNB

    def local(self, estimator: Any, batch: Batch, classes: Any) -> Any:
        """Return a model of this rank's samples."""
        return clone(estimator).partial_fit(batch.X, batch.y, classes=classes)

    def merge(self, estimator: Any, increments: Sequence[Any]) -> None:
        """Add up the counts, and let the estimator work out the probabilities."""
        parts = list(increments)
        if not hasattr(estimator, "class_count_"):
            vars(estimator).update(vars(parts.pop(0)))
        for part in parts:
            estimator.class_count_ += part.class_count_
            estimator.feature_count_ += part.feature_count_
        # The probabilities follow from the counts in its own call, here of a sample without
        # features.
        most = int(np.argmax(estimator.class_count_))
        estimator.class_count_[most] -= 1
        nothing = np.zeros((1, estimator.feature_count_.shape[1]))
        vars(estimator).pop("feature_names_in_", None)
        estimator.partial_fit(nothing, estimator.classes_[[most]])


class GaussianMerge:
    """GaussianNB: moments of each class and feature."""

    kind = GaussianNB

    def local(self, estimator: Any, batch: Batch, classes: Any) -> Any:
        """Return a model of this rank's samples that is not smoothed, and their moments."""
        # The parameters as they are, so that the estimator itself checks them.
        clone(estimator).partial_fit(batch.X, batch.y, classes=classes)
        plain = clone(estimator).set_params(var_smoothing=0.0)
        plain.partial_fit(batch.X, batch.y, classes=classes)
        return plain

    def merge(self, estimator: Any, increments: Sequence[Any]) -> None:
        """Merge the moments; the smoothing follows from the variance of the whole batch."""
        first, dtype = increments[0], increments[0].theta_.dtype
        parts = [_class_moments(part, 0.0) for part in increments]
        epsilon = estimator.var_smoothing * Moments.merged(_over_classes(parts)).var.max()
        if hasattr(estimator, "theta_"):
            parts.insert(0, _class_moments(estimator, epsilon))
        else:
            vars(estimator).update(
                {name: value for name, value in vars(first).items() if name.endswith("_")}
            )
        merged = Moments.merged(parts)
        absent = merged.n == 0
        estimator.epsilon_ = dtype.type(epsilon)
        estimator.class_count_ = merged.n[:, 0].astype(dtype)
        estimator.theta_ = np.where(absent, 0.0, merged.mean).astype(dtype)
        estimator.var_ = (np.where(absent, 0.0, merged.var) + epsilon).astype(dtype)
        if estimator.priors is None:
            estimator.class_prior_ = estimator.class_count_ / estimator.class_count_.sum()


def _class_moments(model: Any, epsilon: float) -> Moments:
    return Moments(
        _wide(model.class_count_)[:, None], _wide(model.theta_), _wide(model.var_) - epsilon
    )


def _over_classes(parts: Sequence[Moments]) -> list[Moments]:
    return [Moments(*group) for part in parts for group in zip(*part, strict=True)]
