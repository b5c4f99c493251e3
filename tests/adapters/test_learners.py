"""Optimizers, estimators and models over MPI, and the libraries of docs/examples over threads."""

from __future__ import annotations

import itertools
import runpy
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from arraycomm.testing import run
from tests.adapters import learners
from tests.support.frameworks import INSTALLED, content, make
from tests.support.launched import Report
from tests.support.launcher import LAUNCHED, needs_mpiexec, run_python
from tests.support.on_ranks import each_rank_of

pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")

FRAMEWORKS = [framework for framework in INSTALLED if framework != "mlx"]


@lru_cache
def _report() -> Report:
    arguments = ("-m", "tests.adapters.learners")
    return Report(run_python(*arguments, ranks=learners.RANKS, timeout=120), learners.RANKS)


@needs_mpiexec
@pytest.mark.skipif(not (find_spec("thinc") and find_spec("sklearn")), reason="needs both")
@pytest.mark.parametrize("check", [check.__name__ for check in learners.CHECKS])
def test_over_mpi(check: str) -> None:
    _report().assert_passed(check)


def _example(name: str) -> Any:
    return runpy.run_path(str(learners.EXAMPLES / f"{name}.py"), run_name="example")


def _blobs() -> Any:
    random = np.random.default_rng(1)
    return random.standard_normal((90, 2)) + 12 * random.permutation(np.arange(90) % 5)[:, None]


@pytest.mark.parametrize(
    # JAX compiles for each number of samples.
    ("framework", "size"),
    [("numpy", 1), *((each, 2 + (each != "jax")) for each in FRAMEWORKS)],
)
def test_one_kmeans_runs_on_every_framework(framework: str, size: int) -> None:
    kmeans, blobs = _example("embedded_kmeans")["KMeans"], _blobs().astype(np.float32)
    whole = kmeans(5, iterations=4).fit(blobs)
    # The first of several ranks has one sample, the others have the rest.
    bounds = [0, 1, *np.linspace(1, 90, size, dtype=int)[1:]] if size > 1 else [0, 90]
    parts = [make(framework, blobs[a:b].copy()) for a, b in itertools.pairwise(bounds)]

    def fit(comm: Communicator) -> Any:
        model = kmeans(5, iterations=4).fit(parts[comm.rank], comm=comm)
        assert type(model.centers_) is type(parts[comm.rank])
        return model

    models = run(size, fit)
    assert len({content(model.centers_) for model in models}) == 1
    _, _, data = content(models[0].centers_)
    got = np.frombuffer(data, np.float32).reshape(5, 2)
    # Sums of at most 90 samples below 64.
    bound = 90 * 64 * np.finfo(np.float32).eps
    np.testing.assert_allclose(_sorted(got), _sorted(whole.centers_), rtol=0, atol=bound)
    assert models[0].inertia_ == pytest.approx(whole.inertia_, rel=90 * 1e-6)


def _sorted(centers: Any) -> Any:
    return centers[np.argsort(centers[:, 0])]


@pytest.mark.parametrize("size", [1, 3])
@each_rank_of("size")
def test_ranks_without_samples_take_part(comm: Communicator) -> None:
    kmeans, blobs = _example("embedded_kmeans")["KMeans"], _blobs()
    centers = kmeans(5).fit(blobs if comm.rank == comm.size - 1 else blobs[:0], comm=comm).centers_
    assert np.array_equal(centers, kmeans(5).fit(blobs).centers_)


@each_rank_of(2)
def test_a_wrong_argument_of_one_rank_is_an_error_of_the_library_on_all(comm: Communicator) -> None:
    kmeans, blobs = _example("embedded_kmeans")["KMeans"], _blobs()
    with pytest.raises(ac.PeerError if comm.rank else ValueError, match="two dimensions; got 1"):
        kmeans(5).fit(blobs if comm.rank else blobs[0], comm=comm)
    assert comm.allreduce(1) == comm.size


@pytest.mark.parametrize("frameworks", [["numpy"], FRAMEWORKS], ids=str)
def test_one_program_trains_every_framework(frameworks: list[str]) -> None:
    train = _example("train_any_framework")["train"]
    # Imported in no thread, whose others would see a part of a framework.
    kinds = [type(make(framework, np.ones(1, np.float32))) for framework in frameworks]

    def learn(comm: Communicator) -> Any:
        return train(frameworks[comm.rank], comm, steps=30)

    for kind, params in zip(kinds, run(len(frameworks), learn), strict=True):
        assert type(params["slope"]) is kind
        slope, start = (
            np.frombuffer(content(params[n])[2], np.float32)[0] for n in ("slope", "start")
        )
        # Nearer than it began.
        assert (slope - 3) ** 2 + (start + 1) ** 2 < 1


def test_a_library_with_a_thinc_model_learns_on_threads() -> None:
    pytest.importorskip("thinc")
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    images = (images[:400] / 16).astype(np.float32)
    make_model = _example("embedded_thinc")["Classifier"]
    models = [make_model(16, steps=40) for _ in range(2)]

    def fit(comm: Communicator) -> Any:
        rows = slice(comm.rank, 400, 2)
        return models[comm.rank].fit(images[rows], digits[rows], comm=comm).predict(images)

    first, second = run(2, fit)
    assert np.array_equal(first, second)
    assert (first == digits[:400]).mean() > 0.9


@each_rank_of(2)
def test_borrow_gives_back_what_it_got(comm: Communicator) -> None:
    with ac.borrow(comm) as given:
        assert given is comm
    assert comm.allreduce(1) == comm.size
    with ac.borrow() as alone:
        assert (alone.size, alone.allreduce(3)) == (1, 3)
    with pytest.raises(ac.CommunicatorClosedError):
        alone.allreduce(3)
    with pytest.raises(TypeError, match=r"borrow: comm must be .*; got int"), ac.borrow(3):
        pass
