"""A library of k-means for arrays of any framework, whose samples may be spread over ranks.

Run as a program, it clusters the digits: `arraycomm run -n 2 embedded_kmeans.py`.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

import arraycomm as ac


class KMeans:
    """Lloyd's algorithm, beginning with samples that are far from one another.

    Parameters
    ----------
    n_clusters, iterations : int
        How many centers there are, and how often they move.

    Attributes
    ----------
    centers_ : array, shape (n_clusters, features)
        Of the samples' kind, with the same bits on every rank.
    inertia_ : float
        The sum of the squared distances of all samples to the center next to them, before it moved
        for the last time.
    """

    def __init__(self, n_clusters: int, iterations: int = 20) -> None:
        self.n_clusters, self.iterations = n_clusters, iterations

    def fit(self, x: Any, *, comm: Any = None) -> KMeans:
        """Find the centers of all ranks' samples; collective if `comm` has several ranks.

        Parameters
        ----------
        x : array, shape (samples, features)
            This rank's samples; there may be none.
        comm : arraycomm.Communicator or mpi4py.MPI.Intracomm, optional
            As for `arraycomm.borrow`.
        """
        with ac.borrow(comm) as ranks:
            with ac.raise_together(ranks):
                if x.ndim != 2:
                    raise ValueError(f"x must have two dimensions; got {x.ndim}")
            centers = self._begin(x, ranks)
            for _ in range(self.iterations):
                centers = self._move(x, centers, ranks)
            self.centers_ = centers
        return self

    def predict(self, x: Any) -> Any:
        """Return the number of the center next to each sample; local."""
        return array_namespace(x).argmin(_distances(x, self.centers_), axis=1)

    def _begin(self, x: Any, comm: ac.Communicator) -> Any:
        """Begin with the sample that is farthest from the mean, then from the centers so far."""
        xp = array_namespace(x)
        total, count = ac.allreduce_tree((xp.sum(x, axis=0), x.shape[0]), "sum", comm=comm)
        centers = xp.reshape(total / count, (1, -1))
        for number in range(self.n_clusters):
            farthest = self._farthest(x, centers, comm)
            centers = farthest if number == 0 else xp.concat([centers, farthest])
        return centers

    def _farthest(self, x: Any, centers: Any, comm: ac.Communicator) -> Any:
        xp = array_namespace(x)
        distance, place = -1.0, 0
        if x.shape[0]:
            nearest = xp.min(_distances(x, centers), axis=1)
            place = int(xp.argmax(nearest))
            distance = float(nearest[place])
        largest = comm.allreduce(distance, "max")
        # Of several ranks, the first.
        owner = comm.allreduce(comm.rank if distance == largest else comm.size, "min")
        own = x[place : place + 1, :] if comm.rank == owner else None
        return comm.bcast(own, root=owner, like=x)

    def _move(self, x: Any, centers: Any, comm: ac.Communicator) -> Any:
        """Return the means of the samples next to each center."""
        xp = array_namespace(x)
        distances = _distances(x, centers)
        numbers = xp.arange(self.n_clusters)
        near = xp.astype(xp.argmin(distances, axis=1)[:, None] == numbers[None, :], x.dtype)
        inertia = float(xp.sum(xp.min(distances, axis=1))) if x.shape[0] else 0.0
        # One message for all of it.
        sums, counts, self.inertia_ = ac.allreduce_tree(
            (xp.matrix_transpose(near) @ x, xp.sum(near, axis=0), inertia), "sum", comm=comm
        )
        means = sums / xp.where(counts > 0, counts, xp.ones_like(counts))[:, None]
        return xp.where(counts[:, None] > 0, means, centers)


def _distances(x: Any, centers: Any) -> Any:
    xp = array_namespace(x)
    return xp.sum((x[:, None, :] - centers[None, :, :]) ** 2, axis=2)


if __name__ == "__main__":
    from sklearn.datasets import load_digits

    # The program calls init, not the library.
    comm = ac.init()
    digits = load_digits().data[comm.rank :: comm.size]
    model = KMeans(10).fit(digits)
    ac.println(f"inertia {model.inertia_:.1f}")
