"""IncrementalPCA and MiniBatchKMeans of scikit-learn, merged over ranks from factors and sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import linalg, sparse
from sklearn.cluster import MiniBatchKMeans, kmeans_plusplus
from sklearn.decomposition import IncrementalPCA
from sklearn.metrics import pairwise_distances_argmin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.extmath import svd_flip

from arraycomm.adapters.sklearn._batches import Batch
from arraycomm.adapters.sklearn._merges import Moments

_FLOATS = [np.float64, np.float32]


class _Factor(NamedTuple):
    """A batch as PCA sees it: its moments, and a triangle with the same products of columns."""

    moments: Moments
    triangle: Any


class ComponentsMerge:
    """IncrementalPCA: the rows that a batch adds, condensed to a triangle by QR."""

    kind = IncrementalPCA

    def local(self, estimator: Any, batch: Batch, classes: Any) -> Any:
        """Return the factor of this rank's samples."""
        if sparse.issparse(batch.X):
            raise TypeError("IncrementalPCA does not take sparse X in partial_fit; got a sparse X")
        x = check_array(batch.X, dtype=_FLOATS)
        wanted = estimator.n_components
        if wanted is not None and wanted > x.shape[1]:
            raise ValueError(
                f"n_components={wanted} must be at most the features; got {x.shape[1]}"
            )
        mean = x.mean(axis=0, dtype=np.float64)
        centered = x - mean
        moments = Moments(len(x), mean, (centered**2).mean(axis=0))
        return _Factor(moments, linalg.qr(centered, mode="r", check_finite=False)[0]), x.dtype

    def merge(self, estimator: Any, increments: Sequence[Any]) -> None:
        """Decompose what the estimator knows together with all ranks' factors."""
        factors = [factor for factor, _ in increments]
        dtype = np.result_type(*(dtype for _, dtype in increments))
        batch = Moments.merged([factor.moments for factor in factors])
        kept = _components(estimator, batch.n, len(batch.mean))
        rows = [factor.triangle[: len(batch.mean)] for factor in factors]
        rows += [_shift(f.moments.n, f.moments.mean - batch.mean) for f in factors]
        total = batch
        if hasattr(estimator, "components_"):
            # As in one process: only the first decomposition has the samples' precision.
            dtype = np.dtype(np.float64)
            before = Moments(estimator.n_samples_seen_, estimator.mean_, estimator.var_)
            total = Moments.merged([before, batch])
            rows.insert(0, estimator.singular_values_[:, None] * estimator.components_)
            rows.append(_shift(before.n * batch.n / total.n, before.mean - batch.mean))
        _, singular, basis = linalg.svd(np.vstack(rows), full_matrices=False, check_finite=False)
        _, basis = svd_flip(None, basis, u_based_decision=False)
        _set_components(estimator, kept, total, batch.n, singular, basis, dtype)


def _shift(weight: Any, difference: Any) -> Any:
    return np.sqrt(weight) * difference[None]


def _components(estimator: Any, samples: int, features: int) -> int:
    known = getattr(estimator, "components_", None)
    if estimator.n_components is None:
        return min(samples, features) if known is None else len(known)
    if known is None and estimator.n_components > samples:
        raise ValueError(
            f"n_components={estimator.n_components} must be at most the samples of all ranks in "
            f"the first call; got {samples}"
        )
    return int(estimator.n_components)


def _set_components(
    estimator: Any, kept: int, total: Moments, samples: int, singular: Any, basis: Any, dtype: Any
) -> None:
    variance = singular**2 / (total.n - 1)
    whole = kept in (samples, len(total.mean))
    estimator.n_components_, estimator.n_samples_seen_ = kept, np.int64(total.n)
    estimator.mean_, estimator.var_ = total.mean, total.var
    estimator.components_ = basis[:kept].astype(dtype)
    estimator.singular_values_ = singular[:kept].astype(dtype)
    estimator.explained_variance_ = variance[:kept].astype(dtype)
    ratio = singular**2 / (total.var * total.n).sum()
    estimator.explained_variance_ratio_ = ratio[:kept].astype(dtype)
    estimator.noise_variance_ = 0.0 if whole else variance[kept:].mean()


class ClustersMerge:
    """MiniBatchKMeans: counts and sums of the samples next to each center."""

    kind = MiniBatchKMeans

    def local(self, estimator: Any, batch: Batch, classes: Any) -> Any:
        """Return the counts and sums of this rank's samples, by the centers before the step."""
        x = check_array(batch.X, accept_sparse="csr", dtype=_FLOATS)
        centers = centers_of(estimator)
        labels = pairwise_distances_argmin(x, centers)
        shape = len(centers), len(labels)
        nearest = sparse.csr_array((np.ones(len(labels)), (labels, np.arange(len(labels)))), shape)
        sums = nearest @ x.astype(np.float64)
        return np.bincount(labels, minlength=len(centers)), (
            sums.toarray() if sparse.issparse(sums) else sums
        )

    def merge(self, estimator: Any, increments: Sequence[Any]) -> None:
        """Let the estimator learn the mean of the samples next to each center, with their weight.

        A mean is next to the same center as its samples, since what is next to a center is convex.
        """
        centers = centers_of(estimator)
        counts = sum(count for count, _ in increments)
        means = sum(total for _, total in increments) / np.maximum(counts, 1)[:, None]
        rows = np.where(counts[:, None] > 0, means, centers).astype(centers.dtype)
        vars(estimator).pop("feature_names_in_", None)
        estimator.partial_fit(rows, sample_weight=counts.astype(centers.dtype))

    def finish(self, estimator: Any, batch: Batch) -> float:
        """Label this rank's samples by the new centers; return the sum of squared distances."""
        estimator.labels_ = np.empty(0, np.int32)
        if not batch.samples:
            return 0.0
        estimator.labels_ = estimator.predict(batch.X)
        return -float(estimator.score(batch.X))


def centers_of(estimator: Any) -> Any:
    """Return the centers, of an estimator that has learnt nothing those to begin with."""
    return getattr(estimator, "cluster_centers_", estimator.init)


def check_no_reassignment(estimator: Any) -> None:
    """Raise if centers were to be replaced by samples, which other ranks have."""
    if estimator.reassignment_ratio > 0:
        raise ValueError(
            "MiniBatchKMeans must not reassign centers, since the samples for them are spread over "
            f"the ranks; got reassignment_ratio={estimator.reassignment_ratio}; pass "
            "reassignment_ratio=0"
        )


def initial_centers(estimator: Any, batch: Batch) -> Any:
    """Return the centers to begin with: the estimator's `init`, or from this rank's samples."""
    init, clusters = estimator.init, estimator.n_clusters
    x = check_array(batch.X, accept_sparse="csr", dtype=_FLOATS)
    if not (isinstance(init, str) or callable(init)):
        return np.array(init, x.dtype)
    if batch.samples < clusters:
        raise ValueError(
            f"the rank with the most samples must have {clusters} in the first call, one for each "
            f"center; got {batch.samples}; pass init, an array of centers"
        )
    random = check_random_state(estimator.random_state)
    if callable(init):
        return np.array(init(x, clusters, random_state=random), x.dtype)
    if init == "k-means++":
        return kmeans_plusplus(x, clusters, random_state=random)[0]
    chosen = x[random.permutation(batch.samples)[:clusters]]
    return chosen.toarray() if sparse.issparse(chosen) else chosen
