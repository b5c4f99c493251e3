"""scikit-learn's estimators over ranks, against one process on all data."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import Communicator
from arraycomm.testing import run
from tests.support.on_ranks import each_rank_of

pytest.importorskip("sklearn")

from scipy import sparse
from sklearn.base import is_classifier
from sklearn.cluster import MiniBatchKMeans
from sklearn.datasets import load_diabetes, load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import Perceptron, SGDClassifier, SGDRegressor
from sklearn.naive_bayes import GaussianNB, MultinomialNB
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler

from arraycomm.adapters.sklearn import average, partial_fit
from arraycomm.adapters.sklearn._batches import digest, learnt

EPS = np.finfo(np.float64).eps
X, Y = load_digits(return_X_y=True)
# Two batches; of the second, the last of several ranks has nothing.
BATCHES = (slice(0, 901), slice(901, 1797))


def _share(batch: slice, rank: int, size: int) -> Any:
    sharing = max(size - 1, 1) if batch.start else size
    rows = np.arange(batch.start, batch.stop)
    return rows[rank::sharing] if rank < sharing else rows[:0]


def _fit(estimator: Any, x: Any = X, y: Any = Y) -> Callable[[Communicator], Any]:
    def fit(comm: Communicator) -> Any:
        mine = copy.deepcopy(estimator)
        for batch in BATCHES:
            rows = _share(batch, comm.rank, comm.size)
            assert partial_fit(mine, x[rows], y[rows], comm=comm) is mine
        return mine

    return fit


def _alone(estimator: Any, x: Any = X, y: Any = Y) -> Any:
    """Return what scikit-learn learns in one process; its batches have the ranks' order."""
    mine = copy.deepcopy(estimator)
    for batch in BATCHES:
        mine.partial_fit(x[batch], y[batch])
    return mine


def _assert_same(estimators: list[Any]) -> None:
    assert len({digest(learnt(estimator)) for estimator in estimators}) == 1


# Exact merges ----------------------------------------------------------------------------------

# Two orders of n terms below m differ by at most 2 n ε m in their sum, and m² takes the place of m in
# variances; a few such sums are combined.
MEAN = 4 * 1797 * EPS * 16
VAR = MEAN * 16
# The last is the square root of a variance of at least 1/1797.
SCALES = {"n_samples_seen_": 0, "mean_": MEAN, "var_": VAR, "scale_": VAR * np.sqrt(1797) / 2}


def _assert_close(got: Any, want: Any, bounds: dict[str, float]) -> None:
    for name, bound in bounds.items():
        one, other = getattr(got, name), getattr(want, name)
        assert (one is None) == (other is None)
        if other is not None:
            assert np.asarray(one).dtype == np.asarray(other).dtype
            np.testing.assert_allclose(one, other, rtol=0, atol=bound, err_msg=name)


def test_large_arrays_that_differ_anywhere_have_other_digests() -> None:
    array = np.random.default_rng(0).standard_normal((123, 321))
    found = {digest(array), digest(array[:-1]), digest(array.T.copy()), digest(array.reshape(-1))}
    for place in (0, 5_000, 39_482):
        other = array.copy()
        other.reshape(-1).view(np.uint64)[place] ^= np.uint64(1)
        found.add(digest(other))
        found.add(digest(np.roll(other, place + 2)))
    assert len(found) == 10
    assert len({digest(sparse.eye_array(3, k=k).tocsr()) for k in (-1, 1)}) == 2
    assert digest([{0, 8}, frozenset({8, 0})]) == digest([{8, 0}, frozenset({0, 8})])
    assert digest(array.copy()) == digest(array) in found


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("NaN", {}),
        ("sparse", {"with_mean": False}),
        ("sparse", {"with_mean": False, "with_std": False}),
        ("counts alone", {"with_mean": False, "with_std": False}),
    ],
)
def test_scalers_count_what_is_there(layout: str, options: dict[str, bool]) -> None:
    data = X.copy()
    if layout == "NaN":
        data[::7, 3] = data[1::5, 10] = np.nan
    x = sparse.csr_array(data) if layout == "sparse" else data
    estimator = StandardScaler(**options)
    results, alone = run(3, _fit(estimator, x)), _alone(estimator, x)
    _assert_same(results)
    _assert_close(results[0], alone, SCALES)


MERGED = (StandardScaler(), MinMaxScaler((-1, 2)), MultinomialNB(alpha=0.5))
MERGED += (GaussianNB(), GaussianNB(priors=[0.25, 0.75]))


@settings(max_examples=int(os.environ.get("EXAMPLES") or 25), deadline=None)
@given(data=st.data())
def test_it_does_not_matter_how_samples_are_split(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4), "ranks")
    batches = [
        data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size).filter(any), "samples")
        for _ in range(2)
    ]
    estimator = data.draw(st.sampled_from(MERGED))
    rows = np.cumsum([0, *itertools.chain(*batches)])
    x = np.random.default_rng(rows[-1]).integers(0, 5, (rows[-1], 3)).astype(float)
    y = np.arange(rows[-1]) % 2

    def fit(comm: Communicator) -> Any:
        mine = copy.deepcopy(estimator)
        for number in range(2):
            place = number * comm.size + comm.rank
            part = slice(rows[place], rows[place + 1])
            given = further if number == comm.rank == 0 else {}
            partial_fit(mine, x[part], y[part], comm=comm, **given)
        return mine

    alone = copy.deepcopy(estimator)
    further = {"classes": [0, 1]} if hasattr(alone, "predict") else {}
    for part in (slice(rows[0], rows[size]), slice(rows[size], rows[-1])):
        alone.partial_fit(x[part], y[part], **further)
    results = run(size, fit)
    _assert_same(results)
    # As above, of at most 32 samples below 5.
    for name, want in learnt(alone).items():
        got = getattr(results[0], name)
        np.testing.assert_allclose(got, want, rtol=8 * 32 * EPS, atol=4 * 32 * EPS * 25)


# Averages --------------------------------------------------------------------------------------

PIXELS = X / 16
DIABETES, PROGRESSION = load_diabetes(return_X_y=True)
PROGRESSION = (PROGRESSION - PROGRESSION.mean()) / PROGRESSION.std()
DISEASE = DIABETES * 20, PROGRESSION
# scikit-learn resets the process's warnings while it fits, and says this where another thread does so meanwhile.
pytestmark = pytest.mark.filterwarnings("ignore:`sklearn.utils.parallel.delayed`:UserWarning")

AVERAGED: dict[str, tuple[Any, tuple[Any, Any]]] = {
    "averaging": (SGDClassifier(average=10, random_state=0), (PIXELS, Y)),
    "two classes": (SGDClassifier(average=True, random_state=0), (PIXELS, Y % 2)),
    "Perceptron": (Perceptron(random_state=0), (PIXELS, Y)),
    "averaging regressor": (SGDRegressor(average=True, random_state=0), DISEASE),
    "network": (MLPClassifier(hidden_layer_sizes=(8,), random_state=0), (PIXELS, Y)),
    "momentum": (
        MLPRegressor(
            hidden_layer_sizes=(8,), solver="sgd", learning_rate="adaptive", random_state=0
        ),
        DISEASE,
    ),
}


@pytest.mark.parametrize("kind", AVERAGED)
def test_one_rank_learns_what_scikit_learn_does_and_several_learn_the_same(kind: str) -> None:
    estimator, (x, y) = AVERAGED[kind]

    def train(comm: Communicator) -> Any:
        mine = copy.deepcopy(estimator)
        for _ in range(2):
            partial_fit(mine, x[comm.rank :: comm.size], y[comm.rank :: comm.size], comm=comm)
        return mine

    alone = copy.deepcopy(estimator)
    further = {"classes": np.unique(y)} if is_classifier(alone) else {}
    for _ in range(2):
        alone.partial_fit(x, y, **further)
    [single] = run(1, train)
    vars(single).pop("_arraycomm_t")
    assert digest(learnt(single)) == digest(learnt(alone))
    _assert_same(run(3, train))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGDRegressor(random_state=0),
        lambda: SGDRegressor(random_state=0, average=40),  # begun on one rank alone
        lambda: MLPRegressor(hidden_layer_sizes=(4,), random_state=1, max_iter=1),
        lambda: MLPRegressor(hidden_layer_sizes=(4,), solver="sgd", random_state=1),
    ],
)
def test_parameters_are_the_mean_weighted_by_samples(make: Any) -> None:
    x, y = DISEASE
    # No two ranks have as many, and the first has none.
    shares = [slice(0), slice(10, 40), slice(40, 90)]

    def parameters(estimator: Any) -> list[Any]:
        if isinstance(estimator, SGDRegressor):
            return [estimator.coef_, estimator.intercept_]
        optimizer = vars(estimator._optimizer)
        moments = optimizer.get("ms", []) + optimizer.get("velocities", [])
        return [*estimator.coefs_, *estimator.intercepts_, *moments]

    locally = [make().partial_fit(x[share], y[share]) for share in shares if share.stop]
    counts = np.array([share.stop - share.start for share in shares if share.stop], float)

    def fit(comm: Communicator) -> Any:
        share = shares[comm.rank]
        return partial_fit(make(), x[share], y[share], comm=comm)

    results = run(3, fit)
    _assert_same(results)
    for number, got in enumerate(parameters(results[0])):
        parts = np.stack([parameters(each)[number] for each in locally])
        want = np.tensordot(counts / counts.sum(), parts, 1)
        np.testing.assert_allclose(got, want, rtol=0, atol=8 * EPS * np.abs(parts).max())
    assert results[0].t_ == max(each.t_ for each in locally)


@each_rank_of(3)
def test_networks_without_a_seed_begin_with_the_same_parameters(comm: Communicator) -> None:
    # A rate of 0 leaves what it begins with; means of equal numbers are off by their rounding.
    network = MLPRegressor(hidden_layer_sizes=(4,), learning_rate_init=1e-300, solver="sgd")
    x, y = DISEASE
    partial_fit(network, x[comm.rank : comm.rank + 5], y[comm.rank : comm.rank + 5], comm=comm)
    assert network.random_state is None
    _assert_same(comm.allgather_object(network))
    # If each had begun elsewhere, the means of uniform numbers would be smaller than the widest.
    assert np.abs(network.coefs_[0]).max() > 0.9 * np.sqrt(6 / 14)


@each_rank_of(4)
def test_more_ranks_than_samples(comm: Communicator) -> None:
    rows = slice(comm.rank, comm.rank + 1) if comm.rank in {1, 3} else slice(0, 0)
    for estimator in (
        StandardScaler(),
        SGDClassifier(random_state=0),
        MLPClassifier(hidden_layer_sizes=(3,), random_state=0),
        GaussianNB(),
    ):
        for _ in range(2):
            partial_fit(estimator, X[rows], Y[rows], comm=comm)
        _assert_same(comm.allgather_object(estimator))
        if isinstance(estimator, SGDClassifier):
            assert estimator.classes_.tolist() == sorted(Y[[1, 3]])


def test_average_counts_what_each_rank_has_learnt_since() -> None:
    x, y = DISEASE

    def learn(comm: Communicator) -> Any:
        estimator = SGDRegressor(random_state=0)
        if comm.rank == 0:
            # It may be new.
            average(estimator, comm=comm)
        else:
            average(estimator.partial_fit(x[: 10 * comm.rank], y[: 10 * comm.rank]), comm=comm)
        common = copy.deepcopy(estimator)
        if comm.rank:
            estimator.partial_fit(x[: 30 // comm.rank], y[: 30 // comm.rank])
        own = estimator.coef_.copy()
        average(estimator, comm=comm)
        with pytest.raises(ValueError, match="average: no rank has a sample"):
            average(estimator, comm=comm)
        counted = estimator.coef_
        for _ in range(2):
            # Begins anew, whatever was averaged before.
            estimator.set_params(tol=None, max_iter=3).fit(x[:10], y[:10] + comm.rank)
            of_this_rank = estimator.coef_.copy()
            average(estimator, comm=comm)
        mean = comm.allreduce(of_this_rank, "mean")
        np.testing.assert_allclose(estimator.coef_, mean, rtol=0, atol=8 * EPS)
        return common.coef_, own, counted

    common, own, averaged = (list(each) for each in zip(*run(3, learn), strict=True))
    first = [SGDRegressor(random_state=0).partial_fit(x[:n], y[:n]).coef_ for n in (10, 20)]
    for got in common:
        np.testing.assert_allclose(got, (first[0] + 2 * first[1]) / 3, rtol=0, atol=8 * EPS)
    for got in averaged:
        np.testing.assert_allclose(got, (30 * own[1] + 15 * own[2]) / 45, rtol=0, atol=8 * EPS)


# Classes, pipelines and errors -----------------------------------------------------------------


@each_rank_of(3)
def test_classes_are_those_of_all_ranks(comm: Communicator) -> None:
    names = np.array(["zero", "one", "two", "three"])
    # The rank that gives classes gives all that it has.
    found = []
    for estimator in (
        GaussianNB(),
        SGDClassifier(random_state=0),
        MLPClassifier(hidden_layer_sizes=(4,), random_state=0),
    ):
        rows = np.flatnonzero(comm.rank == Y)[:20]
        given = ["nine", "zero"] if comm.rank == 0 else None
        partial_fit(estimator, X[rows], names[Y[rows]], classes=given, comm=comm)
        found.append(estimator.classes_.tolist())
    assert found == [sorted(["nine", *names[:3]])] * 3


@each_rank_of(2)
def test_a_pipeline_whose_first_steps_have_learnt_nothing_says_what_to_do(
    comm: ac.Communicator,
) -> None:
    pipeline = make_pipeline(StandardScaler(), SGDClassifier(random_state=0))
    kind: Any = NotFittedError if comm.rank == 0 else (NotFittedError, ac.PeerError)
    with pytest.raises(kind, match=r"partial_fit of arraycomm\.adapters.* \(standardscaler\)"):
        partial_fit(pipeline, X[comm.rank :: 2], Y[comm.rank :: 2], comm=comm)
    partial_fit(pipeline[0], X[comm.rank :: 2], comm=comm)
    partial_fit(pipeline, X[comm.rank :: 2], Y[comm.rank :: 2], comm=comm)


@each_rank_of(3)
def test_the_last_step_of_a_pipeline_learns(comm: Communicator) -> None:
    scaler = partial_fit(StandardScaler(), X[comm.rank :: comm.size], comm=comm)
    pipeline = make_pipeline(scaler, SGDClassifier(random_state=0))
    for batch in BATCHES:
        rows = _share(batch, comm.rank, comm.size)
        partial_fit(pipeline, X[rows], Y[rows], comm=comm)
    other = make_pipeline(StandardScaler().fit(X[: comm.rank + 50]), SGDClassifier())
    with pytest.raises(ac.MismatchError, match="different states of the estimator"):
        partial_fit(other, X, Y, comm=comm)
    average(pipeline[-1].partial_fit(scaler.transform(X), Y) and pipeline, comm=comm)
    _assert_same(comm.allgather_object(pipeline[-1]))
    assert pipeline.score(X, Y) > 0.9


@each_rank_of(3)
def test_a_pipeline_may_get_texts(comm: Communicator) -> None:
    texts, labels = ["good nice", "bad awful", "nice day", "awful rain"], [1, 0, 1, 0]
    reader = TfidfVectorizer(stop_words=["the"]).fit(texts)  # remembers where this list is
    rows = slice(comm.rank, 4, 2) if comm.rank < 2 else slice(0)
    pipeline = make_pipeline(reader, MultinomialNB())
    partial_fit(pipeline, texts[rows], labels[rows], classes=[0, 1], comm=comm)
    alone = MultinomialNB().fit(reader.transform(texts), labels)
    np.testing.assert_allclose(pipeline[-1].feature_count_, alone.feature_count_)


def _calls(last: bool, comm: Communicator) -> list[tuple[type[Exception], str, Callable[[], Any]]]:
    """Return calls that are wrong on the last rank, after what they raise there and say."""

    def fit(estimator: Any, x: Any = X, y: Any = Y, **options: Any) -> Any:
        return lambda: partial_fit(estimator, x, y, comm=comm, **options)

    forest = RandomForestClassifier() if last else GaussianNB()
    said_of_forest = "RandomForestClassifier can be neither averaged nor merged over ranks; Stand"
    scaled = {"classes": [1] if last else None}
    return [
        (TypeError, said_of_forest, fit(forest)),
        (TypeError, "estimator must be one of scikit-learn's; got int", fit(3 if last else forest)),
        (
            ValueError,
            "X and y must have as many samples; got 1797 and 5",
            fit(GaussianNB(), y=Y[: 5 if last else len(Y)]),
        ),
        (
            ValueError,
            r"X must have shape \(samples, features\).* got \(64,\)",
            fit(StandardScaler(), X[0] if last else X, None),
        ),
        (ValueError, "GaussianNB needs y", fit(GaussianNB(), y=None if last else Y)),
        (
            ValueError,
            "classes are for classifiers; got them with StandardScaler",
            fit(StandardScaler(), y=None, **scaled),
        ),
        (ValueError, "Negative values in data", fit(MultinomialNB(), -X if last else X)),
        (ValueError, "Input X contains NaN", fit(SGDClassifier(), X * np.nan if last else X)),
        (
            TypeError,
            r"MiniBatchKMeans can be neither .* can; for MiniBatchKMeans see docs/recipes\.md",
            fit(MiniBatchKMeans() if last else GaussianNB()),
        ),
        (
            TypeError,
            "only SGDClassifier, .* can be averaged; got GaussianNB",
            lambda: average(GaussianNB() if last else SGDClassifier(), comm=comm),
        ),
    ]


@each_rank_of(3)
def test_a_wrong_argument_of_one_rank_is_an_error_on_all(comm: Communicator) -> None:
    last = comm.rank == comm.size - 1
    for kind, said, call in _calls(last, comm):
        with pytest.raises(kind if last else ac.PeerError, match=said):
            call()
    assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_ranks_that_bring_different_things_are_told_so(comm: Communicator) -> None:
    last = comm.rank == comm.size - 1
    learned = SGDClassifier()
    if last:
        learned.partial_fit(X[:50], Y[:50], classes=np.arange(10))
    weights = dict(sorted(enumerate(np.ones(10).tolist()), reverse=last))
    ordered = SGDClassifier(class_weight=weights, random_state=0)
    partial_fit(ordered, X[:50], Y[:50], classes=np.arange(10), comm=comm)
    priors = np.full(10, 0.1) if last else None
    letters = Y.astype("U1") if last else Y
    for said, estimator, x, y in (
        (r"estimators: .*GaussianNB; rank \d: M", MultinomialNB() if last else GaussianNB(), X, Y),
        ("hyperparameters: .*alpha=0.5", SGDClassifier(alpha=0.5 if last else 0.1), X, Y),
        ("hyperparameters: .*priors=array of", GaussianNB(priors=priors), X, Y),
        ("numbers of features: .*: 63", StandardScaler(), X[:, last:], Y),
        ("dtypes of classes: .*: <U1", GaussianNB(), X, letters),
        ("states of the estimator: .*; begin with new estimators", learned, X, Y),
    ):
        before, prefix = digest(learnt(estimator)), "partial_fit: the ranks have different"
        with pytest.raises(ac.MismatchError, match=f"{prefix} {said}"):
            partial_fit(estimator, x, y, comm=comm)
        assert digest(learnt(estimator)) == before
    assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_wrong_arguments_of_all_ranks_are_named(comm: Communicator) -> None:
    fitted = partial_fit(GaussianNB(), X[:30], Y[:30], comm=comm)
    for said, estimator, x, options in (
        ("partial_fit: no rank has a sample; at least one must", StandardScaler(), X[:0], {}),
        ("classes must be those of the first call", fitted, X, {"classes": [1, 2]}),
        ("X must have the 64 features", fitted, X[:, 1:], {}),
    ):
        with pytest.raises((ValueError, ac.PeerError), match=said):
            partial_fit(estimator, x, Y[: len(x)], comm=comm, **options)
    assert comm.allreduce(1) == comm.size
