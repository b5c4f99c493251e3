"""SciPy and scikit-learn on several ranks: a fit whose loss is summed over ranks, and a search that hands out its tasks.

    python scientist.py                 # one process
    arraycomm run -n 3 scientist.py     # or: mpiexec -n 3 python scientist.py
    python scientist.py launch 3        # starts its own ranks, as from a notebook; needs cloudpickle, but no MPI

With three ranks, each prints

    minimize: 3 ranks, as LogisticRegression to 2e-06
    search: C=10, accuracy 0.9631, as on one process

It needs `pip install 'arraycomm[mpich,scipy,sklearn]' cloudpickle`.
"""

from __future__ import annotations

import sys

import numpy as np
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler

import arraycomm as ac
from arraycomm.adapters.joblib import run as run_over_ranks
from arraycomm.adapters.scipy import minimize
from arraycomm.testing import run as run_on_threads

# Of a DataFrame and a Series, take to_numpy(): arraycomm sends plain arrays.
samples, sick = load_breast_cancer(return_X_y=True)


def fit(comm: ac.Communicator) -> np.ndarray:
    """Return the weights and the offset of a logistic regression, learnt from each rank's rows."""
    x = StandardScaler().fit_transform(samples)[comm.rank :: comm.size]
    sign = 2 * sick[comm.rank :: comm.size] - 1

    def loss(p: np.ndarray) -> tuple[float, np.ndarray]:
        # This rank's part, and its gradient. minimize adds up the ranks' parts: do not reduce here.
        margin = sign * (x @ p[:-1] + p[-1])
        slope = -sign / (1 + np.exp(margin))
        penalty = p[:-1] @ p[:-1] / 2 / comm.size  # counted once by each rank, so divide it
        gradient = np.append(slope @ x + p[:-1] / comm.size, slope.sum())
        return np.logaddexp(0, -margin).sum() + penalty, gradient

    start = np.zeros(samples.shape[1] + 1)
    return minimize(loss, start, jac=True, method="L-BFGS-B", tol=1e-12, comm=comm).x


def search() -> GridSearchCV:
    """Return a fitted search: rank 0 calls this, so it is plain scikit-learn, and the data are whole."""
    columns = [("means", StandardScaler(), slice(10)), ("rest", MinMaxScaler(), slice(10, 30))]
    pipeline = make_pipeline(ColumnTransformer(columns), LogisticRegression(max_iter=1000))
    grid = {"logisticregression__C": [0.01, 0.1, 1, 10]}
    return GridSearchCV(pipeline, grid, cv=3).fit(samples, sick)


def main(comm: ac.Communicator) -> list[str]:
    """Return what there is to say; every rank gets the same."""
    learnt = fit(comm)
    whole = StandardScaler().fit_transform(samples)
    expected = LogisticRegression(tol=1e-10, max_iter=5000).fit(whole, sick)
    error = np.abs(learnt - [*expected.coef_[0], *expected.intercept_]).max()
    assert error < 1e-4

    found = run_over_ranks(search, comm=comm)  # every rank calls it; search is passed, not called
    alone = search()
    assert found.best_params_ == alone.best_params_
    # Tasks get copies of the data, whose sums may be rounded otherwise.
    assert np.isclose(found.best_score_, alone.best_score_, rtol=1e-12)

    best = f"C={found.best_params_['logisticregression__C']}, accuracy {found.best_score_:.4f}"
    return [
        f"minimize: {comm.size} ranks, as LogisticRegression to {error:.0e}",
        f"search: {best}, as on one process",
    ]


if __name__ == "__main__":
    # In a notebook: for a quick trial ranks that are threads, for work ranks that are processes.
    # On threads, comm has to be passed on to every call of arraycomm.
    assert run_on_threads(3, lambda comm: comm.allreduce(comm.rank)) == [3, 3, 3]
    if sys.argv[1:2] == ["launch"]:
        said = ac.launch(main, int(sys.argv[2]))[0]
        print(*said, sep="\n")
    else:
        world = ac.init()
        said = main(world)
        if world.rank == 0:
            print(*said, sep="\n")
