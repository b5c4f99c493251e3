"""Optimizers, estimators and models over MPI: `mpiexec -n 3 python -m tests.adapters.learners`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import arraycomm as ac
from tests.support.launched import checks_in, perform

RANKS: Final = 3
EXAMPLES: Final = Path(__file__).parents[2] / "docs" / "examples"


def _of(example: str, name: str) -> Any:
    return runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="example")[name]


def _assert_same(value: Any) -> None:
    """Fail unless all ranks have the same bits."""
    assert len(set(ac.world().allgather_object(value))) == 1


def borrow_refuses_to_compute_alone() -> None:
    assert not ac.is_initialized()
    with pytest.raises(ac.NotInitializedError, match="one of several"), ac.borrow():
        pass


def libraries_take_communicators_of_mpi() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    samples = np.random.default_rng(0).standard_normal((60, 2)) + np.arange(60)[:, None] % 3 * 9
    kmeans = _of("embedded_kmeans", "KMeans")
    found = kmeans(3).fit(samples[world.rank :: world.size], comm=world).centers_
    # In a list, since rank 0 is not special.
    assert len(set(world.allgather(found.tobytes()))) == 1
    alone = kmeans(3).fit(samples, comm=MPI.COMM_SELF).centers_
    np.testing.assert_allclose(found, alone, atol=60 * 30 * np.finfo(float).eps)
    assert not ac.is_initialized()


def libraries_take_the_world() -> None:
    comm = ac.init()
    with ac.borrow() as given:
        assert given is comm
    assert comm.allreduce(1) == RANKS


def estimators_learn_from_all_ranks() -> None:
    from sklearn.datasets import load_digits
    from sklearn.linear_model import SGDClassifier
    from sklearn.naive_bayes import GaussianNB
    from sklearn.preprocessing import StandardScaler

    from arraycomm.adapters.sklearn import partial_fit
    from arraycomm.adapters.sklearn._batches import digest, learnt

    comm = ac.world()
    x, y = load_digits(return_X_y=True)
    # The last rank has nothing.
    mine = slice(comm.rank, None, RANKS - 1) if comm.rank < RANKS - 1 else slice(0, 0)
    whole = StandardScaler().fit(x)
    scaler = partial_fit(StandardScaler(), x[mine])
    np.testing.assert_allclose(scaler.mean_, whole.mean_, atol=4 * 1797 * 16 * np.finfo(float).eps)
    for estimator in (scaler, GaussianNB(), SGDClassifier()):
        if estimator is not scaler:
            partial_fit(estimator, x[mine], y[mine])
        _assert_same(digest(learnt(estimator)))


def models_of_thinc_learn_together() -> None:
    # Thinc imports torch if it is there, which takes seconds, and which nothing here uses.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    comm = ac.world()
    x = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    model = _of("embedded_thinc", "Classifier")(8, 2).fit(
        x[comm.rank :: RANKS], y[comm.rank :: RANKS]
    )
    assert (model.predict(x) == y).mean() > 0.9
    _assert_same(b"".join(node.get_param(n).tobytes() for node in model.model.walk() for n in node.param_names))  # fmt: skip


CHECKS = checks_in(globals())

if __name__ == "__main__":
    perform(CHECKS)
