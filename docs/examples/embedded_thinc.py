"""A library with a classifier made of a thinc model, whose samples may be spread over ranks.

Run as a program, it learns the digits: `arraycomm run -n 2 embedded_thinc.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from thinc.api import Adam, Relu, Softmax_v2, chain

import arraycomm as ac


class Classifier:
    """Two layers, trained on whole batches.

    Parameters
    ----------
    width, classes, steps : int
        Of the hidden layer; of the labels, which are 0 to classes - 1; of the training.
    """

    def __init__(self, width: int = 32, classes: int = 10, steps: int = 60) -> None:
        self.classes, self.steps = classes, steps
        self.model = chain(Relu(width), Softmax_v2(classes))

    def fit(self, x: Any, y: Any, *, comm: Any = None) -> Classifier:
        """Learn from all ranks' samples; collective if `comm` has several ranks.

        Parameters
        ----------
        x : array, shape (samples, features), float32
            This rank's samples; there may be none.
        y : array, shape (samples,), int
            Their labels.
        comm : arraycomm.Communicator or mpi4py.MPI.Intracomm, optional
            As for `arraycomm.borrow`.
        """
        with ac.borrow(comm) as ranks:
            with ac.raise_together(ranks):
                if len(x) != len(y):
                    raise ValueError(f"x and y must have one length; got {len(x)} and {len(y)}")
                self.model.initialize(X=np.zeros((1, x.shape[1]), np.float32))
            # Layers draw their first parameters at random: every rank takes those of rank 0.
            ac.synchronize(self.model, comm=ranks)
            # The losses are divided by the number of all samples, so the gradients are added up.
            total = ranks.allreduce(len(x))
            optimizer = ac.DistributedOptimizer(Adam(0.01), comm=ranks, op="sum")
            wanted = np.eye(self.classes, dtype=np.float32)[y]
            for _ in range(self.steps):
                predicted, backprop = self.model.begin_update(x)
                backprop((predicted - wanted) / total)
                self.model.finish_update(optimizer)
        return self

    def predict(self, x: Any) -> Any:
        """Return the likeliest label of each sample; local."""
        return self.model.predict(x).argmax(axis=1)


if __name__ == "__main__":
    from sklearn.datasets import load_digits

    # The program calls init, not the library.
    comm = ac.init()
    images, digits = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    model = Classifier().fit(images[comm.rank :: comm.size], digits[comm.rank :: comm.size])
    ac.println(f"accuracy {(model.predict(images) == digits).mean():.3f}")
