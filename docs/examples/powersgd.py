"""Compress gradients to low rank with PowerSGD, and train on handwritten digits with PyTorch.

    arraycomm run -n 2 powersgd.py

`PowerSGD` works on arrays of any framework. It is that of Vogels, Karimireddy and Jaggi, "PowerSGD:
practical low-rank gradient compression for distributed optimization" (NeurIPS 2019): one step of power
iteration on each gradient, from the last step's result, with error feedback. It is written around
`allreduce_gradients`, and the optimizer is a plain one.
"""

import math

import numpy as np
import torch
from array_api_compat import array_namespace
from sklearn.datasets import load_digits
from torch import nn

import arraycomm as ac


class PowerSGD:
    """Send each gradient as two factors of low rank: (m + n)·rank elements for m·n.

    Gradients of more than two dimensions are taken as matrices with a row for each index of the first.
    Others than matrices of real floats are sent as they are.

    Parameters
    ----------
    rank : int
        Columns of the factors; at most min(m, n) are used.
    seed : int
        Of the factors of the first step.
    """

    def __init__(self, rank=2, seed=0):
        self.rank, self.seed = rank, seed

    def init(self, gradient):
        """Return the second factor, the same on all ranks, and the residual, which is this rank's own."""
        if not is_compressed(gradient):
            return None
        xp = array_namespace(gradient)
        wide = as_matrix(gradient)
        return self._first_factor(wide), xp.zeros_like(wide)

    def _first_factor(self, matrix):
        m, n = matrix.shape
        factor = np.random.default_rng((self.seed, m, n)).standard_normal((n, min(self.rank, m, n)))
        return like(factor, matrix)

    def reduce(self, gradients, states, op, comm):
        """Return reduced gradients and new states, by two messages: P = M·Q with all that is not
        compressed, then Q = Mᵀ·P.
        """
        matrices = {
            place: as_matrix(gradients[place]) + state[1]
            for place, state in enumerate(states)
            if state is not None
        }
        sent = [
            matrices[place] @ states[place][0] if place in matrices else gradient
            for place, gradient in enumerate(gradients)
        ]
        reduced = ac.allreduce_gradients(sent, op, comm=comm)

        bases = {place: orthogonalized(reduced[place]) for place in matrices}
        own = {place: transposed(matrix) @ bases[place] for place, matrix in matrices.items()}
        factors = ac.allreduce_gradients(own, op, comm=comm)

        states = list(states)
        for place, matrix in matrices.items():
            gradient, basis, factor = gradients[place], bases[place], factors[place]
            xp = array_namespace(matrix)
            reduced[place] = xp.reshape(
                xp.astype(basis @ transposed(factor), gradient.dtype), tuple(gradient.shape)
            )
            lost = matrix - basis @ transposed(own[place])
            # After an overflow on any rank, all begin anew.
            healthy = bool(xp.all(xp.isfinite(factor)))
            states[place] = (
                factor if healthy else self._first_factor(matrix),
                xp.where(xp.isfinite(lost), lost, xp.zeros_like(lost)),
            )
        return reduced, states


def is_compressed(gradient):
    real = array_namespace(gradient).isdtype(gradient.dtype, "real floating")
    return real and gradient.ndim > 1 and 0 not in gradient.shape


def as_matrix(gradient):
    """Return a gradient as a matrix, in at least 32 bits."""
    xp = array_namespace(gradient)
    dtype = xp.float64 if gradient.dtype == xp.float64 else xp.float32
    rows = gradient.shape[0]
    return xp.reshape(xp.astype(gradient, dtype), (rows, math.prod(gradient.shape[1:])))


def transposed(matrix):
    return array_namespace(matrix).matrix_transpose(matrix)


def like(values, array):
    """Return NumPy's values as an array of the framework, dtype and device of another."""
    dtype = str(array.dtype).rpartition(".")[2]
    return ac.exchange(np.ascontiguousarray(values, dtype), array)


def orthogonalized(p):
    """Return an orthonormal basis for the columns of `p`.

    On the host, by sums in a fixed order: all ranks get the same bits, whatever else differs between them.
    """
    columns = np.asarray(ac.exchange(p, "numpy"), np.float64)
    if not np.isfinite(columns).all():
        return like(np.full(columns.shape, np.nan), p)
    basis = np.zeros(columns.shape)
    for number, column in enumerate(columns.T):
        # If a column depends on those before it, any other direction serves.
        candidates = (column, *np.eye(len(column)))
        basis[:, number] = next(
            unit
            for candidate in candidates
            if (unit := beside(candidate, basis[:, :number])) is not None
        )
    return like(basis, p)


def beside(column, basis):
    """Return the direction of a vector's part that is orthogonal to a basis, or None if that is only rounding."""
    length = np.sqrt((column * column).sum())
    rest = column
    # Once more, since the first time rounds.
    for _ in range(2):
        rest = rest - (basis * (basis * rest[:, None]).sum(axis=0)).sum(axis=1)
    left = np.sqrt((rest * rest).sum())
    return rest / left if left > 1e-6 * length else None


def train(comm, compression, epochs):
    """Train on this rank's part of the digits; return the accuracy on those left out.

    What the compression remembers is `states`, which is this rank's own and belongs into its checkpoint.
    """
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    training = ac.DistributedDataContainer(
        (images[:1500], labels[:1500]), comm=comm, shuffle=True, uneven="drop"
    )
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    ac.synchronize(model, comm=comm)
    parameters = list(model.parameters())
    states = [compression.init(parameter.detach()) for parameter in parameters]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        training.set_epoch(epoch)
        for (x, y), _ in training.batches(60 // comm.size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            gradients = [parameter.grad for parameter in parameters]
            reduced, states = compression.reduce(gradients, states, "mean", comm)
            for parameter, gradient in zip(parameters, reduced, strict=True):
                parameter.grad = gradient
            optimizer.step()
    with torch.no_grad():
        return (model(images[1500:]).argmax(1) == labels[1500:]).double().mean().item()


def main(epochs=15):
    comm = ac.init()
    full, low = (train(comm, PowerSGD(rank=rank), epochs) for rank in (64, 2))
    ac.println(f"accuracy {full:.3f} with full rank, {low:.3f} with rank 2")


if __name__ == "__main__":
    main()
