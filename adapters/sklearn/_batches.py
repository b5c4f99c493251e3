"""What each rank brings to a call for an estimator of scikit-learn, and whether the ranks agree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, is_classifier

import arraycomm as ac
from arraycomm._protocol.mismatch import by_ranks
from arraycomm._training.comparison.digests import block_sums

# Parameters that say nothing about what is learnt.
_LOCAL: Final = frozenset(("n_jobs", "verbose"))
# What is learnt, but of this rank's samples.
_OWN: Final = "labels_"
# A place in memory, which those that read text remember once they have been used.
_PLACE: Final = "_stop_words_id"
_GENERATORS: Final = (np.random.RandomState, np.random.Generator)


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one rank."""

    X: Any
    y: Any
    samples: int
    # None if there are no samples, and X does not say it.
    features: int | None
    # The columns of a data frame.
    names: tuple[str, ...] | None

    @classmethod
    def of(cls, X: Any, y: Any, *, raw: bool = False) -> Batch:  # noqa: N803 - scikit-learn's name
        """Return the batch; raise if X and y do not fit.

        If it is raw, as what a pipeline gets, a sample may be anything, such as a text.
        """
        if hasattr(X, "shape"):
            shape = tuple(X.shape)
        else:
            shape = (len(X),) if raw else np.shape(X)
        if not shape or (len(shape) != 2 and shape[0] and not raw):
            raise ValueError(
                f"X must have shape (samples, features), samples may be 0; got {shape}"
            )
        if y is not None and len(y) != shape[0]:
            raise ValueError(f"X and y must have as many samples; got {shape[0]} and {len(y)}")
        columns = list(getattr(X, "columns", ()))
        names = tuple(columns) if columns and all(isinstance(c, str) for c in columns) else None
        return cls(X, y, shape[0], shape[1] if len(shape) == 2 else None, names)


@dataclass(frozen=True, slots=True)
class Brought:
    """What a rank tells the others of its estimator and its batch."""

    kind: str
    params: dict[str, str]
    state: str
    samples: int
    features: int | None
    names: tuple[str, ...] | None
    classes: Any


def brought(estimator: BaseEstimator, batch: Batch, classes: Any, state: str) -> Brought:
    """Describe an estimator and a batch; `state` says of what was learnt what must be the same."""
    params = estimator.get_params(deep=False)
    return Brought(
        type(estimator).__name__,
        {name: _text(value) for name, value in params.items() if name not in _LOCAL},
        state,
        batch.samples,
        batch.features,
        batch.names,
        classes,
    )


def learnt(estimator: BaseEstimator) -> dict[str, Any]:
    """Return what an estimator has learnt, apart from its parameters and this rank's labels."""
    other = {*estimator.get_params(deep=False), _OWN}
    return {name: value for name, value in vars(estimator).items() if name not in other}


def labels_of(estimator: BaseEstimator, batch: Batch, classes: Any) -> Any:
    """Return the classes that a rank knows of, or None; raise if the estimator has none."""
    if not is_classifier(estimator):
        if classes is not None:
            raise ValueError(
                f"classes are for classifiers; got them with {type(estimator).__name__}"
            )
        return None
    if batch.y is None:
        raise ValueError(f"{type(estimator).__name__} needs y")
    known = getattr(estimator, "classes_", None)
    if classes is not None:
        labels = _plain(np.asarray(classes))
        if known is not None and not np.array_equal(np.unique(labels), known):
            raise ValueError(f"classes must be those of the first call, {known}; got {classes}")
        return labels
    if known is not None or batch.samples == 0:
        return None
    labels = np.asarray(batch.y)
    if labels.ndim != 1:
        raise ValueError("y of several labels a sample needs classes in the first call")
    return _plain(np.unique(labels))


def _plain(labels: Any) -> Any:
    """Return labels as strings, if they are objects that are."""
    if labels.dtype == object and all(isinstance(label, str) for label in labels):
        return labels.astype(np.str_)
    return labels


def check_agreement(name: str, everyone: Sequence[Brought]) -> None:
    """Raise the same `MismatchError` on all ranks if they have not brought the same."""
    _same(name, "estimators", [b.kind for b in everyone], "pass the same kind on every rank")
    for key in everyone[0].params:
        texts = [f"{key}={b.params.get(key)}" for b in everyone]
        _same(name, "hyperparameters", texts, "give every rank's estimator the same")
    _same(
        name,
        "states of the estimator",
        [b.state for b in everyone],
        "begin with new estimators, or with one that bcast_object gave to all ranks",
    )
    features = [b.features for b in everyone if b.features is not None]
    if len(set(features)) > 1:
        counted = ["any" if b.features is None else str(b.features) for b in everyone]
        _same(name, "numbers of features", counted, "X must have the same columns on every rank")
    named = [b.names for b in everyone if b.samples]
    if len(set(named)) > 1:
        _same(
            name,
            "columns",
            [str(b.names) for b in everyone],
            "X must have the same columns on every rank",
        )
    if not any(b.samples for b in everyone):
        raise ValueError(f"{name}: no rank has a sample; at least one must")


def union(name: str, everyone: Sequence[Brought]) -> Any:
    """Return all ranks' classes in order, or None; raise if their dtypes are of different kinds."""
    known = [b.classes for b in everyone if b.classes is not None]
    if not known:
        return None
    if len({_kind(labels) for labels in known}) > 1:
        texts = ["none" if b.classes is None else str(b.classes.dtype) for b in everyone]
        _same(name, "dtypes of classes", texts, "label samples in the same way on every rank")
    return np.unique(np.concatenate(known))


def _kind(labels: Any) -> str:
    kind: str = labels.dtype.kind
    return "i" if kind == "u" else kind


def _same(name: str, what: str, texts: Sequence[str], remedy: str) -> None:
    if len(set(texts)) > 1:
        said = by_ranks(texts)
        raise ac.MismatchError(f"{name}: the ranks have different {what}: {said}; {remedy}")


def _text(value: Any) -> str:
    """Return a parameter as text that is the same in every process."""
    if isinstance(value, np.ndarray):
        return f"array of {value.dtype} {value.shape}, digest {digest(value)}"
    if isinstance(value, BaseEstimator):
        params = value.get_params(deep=False).items()
        return f"{type(value).__name__}({', '.join(f'{key}={_text(v)}' for key, v in params)})"
    if isinstance(value, _GENERATORS):
        return type(value).__name__
    if isinstance(value, Mapping):
        return str({key: _text(value[key]) for key in sorted(value, key=repr)})
    if isinstance(value, list | tuple):
        return str([_text(v) for v in value])
    return str(getattr(value, "__qualname__", value)) if callable(value) else repr(value)


def digest(value: Any) -> str:
    """Return a digest of the values in an object, whatever their place in memory."""
    found = hashlib.blake2b(digest_size=8)
    for part in _parts(value):
        found.update(part)
        found.update(b"\0")
    return found.hexdigest()


def _parts(value: Any) -> Iterable[bytes]:
    if isinstance(value, _GENERATORS) or (callable(value) and hasattr(value, "__qualname__")):
        return
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype.str}{value.shape}".encode()
        yield block_sums(np.ascontiguousarray(value).reshape(-1).view(np.uint8)).tobytes()
    elif sparse.issparse(value):
        found = value.tocoo()
        yield from _parts([value.format, value.shape, *found.coords, found.data])
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, list | tuple | np.ndarray):
        yield str(len(value)).encode()
        for item in value:
            yield from _parts(item)
    elif isinstance(value, set | frozenset):
        # Each process has them in an order of its own.
        yield from _parts(sorted(value, key=repr))
    elif hasattr(value, "__dict__"):
        yield type(value).__name__.encode()
        yield from _parts({name: x for name, x in vars(value).items() if name != _PLACE})
    else:
        text = repr(value)
        # What shows its place in memory is not the same on all ranks.
        yield b"" if " at 0x" in text else text.encode()
