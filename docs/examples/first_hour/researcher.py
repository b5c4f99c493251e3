"""Two training loops on the same digits, one in PyTorch and one in JAX, each on any number of ranks.

    arraycomm run -n 3 researcher.py     # or: mpiexec -n 3 python researcher.py; python researcher.py is one process

Each loop is run on all ranks, and once more on one rank alone with batches as large as those of all ranks together.
The losses have to be the same, but for rounding. With three ranks it prints

    [0/3] torch: 19 batches, losses [2.0562 1.0224 0.5208], rate 0.5
    [0/3] jax: 19 batches, losses [1.8282 0.6752 0.3145]

It needs `pip install 'arraycomm[mpich,torch,jax]' scikit-learn`.
"""

import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import arraycomm as ac
from arraycomm.adapters import jax as acj

EPOCHS, BATCH = 3, 96  # the digits in a batch, over all ranks
pixels, labels = load_digits(return_X_y=True)
pixels = (pixels / 16).astype(np.float32)


def train_torch(comm: ac.Communicator, batch: int) -> tuple[list[float], str]:
    """Return the mean loss of each epoch; `batch` is the number of digits of one rank."""
    torch.manual_seed(comm.rank)  # parameters differ, until synchronize
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    ac.synchronize(model, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = ac.DistributedOptimizer(optimizer, comm=comm, op="sum")
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    data = torch.tensor(pixels), torch.tensor(labels)
    share = ac.DistributedDataContainer(data, comm=comm, shuffle=True)
    losses = []
    for epoch in range(EPOCHS):
        share.set_epoch(epoch)
        batches = share.batches(batch, pad=True)  # for one loop
        lost = seen = 0.0
        for (x, y), weights in batches:
            w = torch.as_tensor(weights)  # 0 for what fills up the last batch
            loss = (w * cross_entropy(model(x), y, reduction="none")).sum()
            optimizer.zero_grad()
            (loss / comm.allreduce(w.sum())).backward()  # the sum over the ranks is the mean
            optimizer.step()
            lost, seen = lost + loss.item(), seen + float(w.sum())
        mean = ac.mean_metrics({"loss": lost / seen}, weight=seen, comm=comm)["loss"]
        schedule.step(mean)  # the same on all ranks; with this rank's own loss, rates would differ
        losses.append(mean)
    return (
        losses,
        f"{len(batches)} batches, losses {np.round(losses, 4)}, rate {schedule.get_last_lr()[0]}",
    )


def train_jax(comm: ac.Communicator, batch: int) -> tuple[list[float], str]:
    """Do the same in one compiled step, with Adam."""
    first = jax.random.normal(jax.random.key(comm.rank), (64, 32)) / 8
    params = ac.synchronize({"in": first, "out": jnp.zeros((32, 10))}, comm=comm)
    optimizer = ac.DistributedOptimizer(optax.adam(1e-2), comm=comm, op="sum")
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, x, y, weights):
        total = acj.allreduce(weights.sum(), comm=comm)

        def loss_of(params):
            logits = jax.nn.relu(x @ params["in"]) @ params["out"]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return (weights * losses).sum() / total

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, acj.allreduce(loss, comm=comm)

    share = ac.DistributedDataContainer((pixels, labels), comm=comm, shuffle=True)
    losses = []
    for epoch in range(EPOCHS):
        share.set_epoch(epoch)
        means = []
        for (x, y), weights in share.batches(batch, pad=True):  # all of one shape: compiled once
            params, state, mean = step(params, state, x, y, weights)
            means.append(mean)  # not float(mean), which would wait for the step
        losses.append(float(np.mean(means)))
    return losses, f"{len(means)} batches, losses {np.round(losses, 4)}"


if __name__ == "__main__":
    comm = ac.init()
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(lambda _: comm.rank == 0)  # rank 0's records alone
    handler.setFormatter(logging.Formatter(f"[{comm.rank}/{comm.size}] %(message)s"))
    log = logging.getLogger("researcher")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    for name, train in {"torch": train_torch, "jax": train_jax}.items():
        got, line = train(comm, BATCH // comm.size)
        want, _ = train(comm.split(comm.rank), BATCH // comm.size * comm.size)
        log.info("%s: %s", name, line)
        if comm.rank == 0:  # alone, the other ranks have begun with other parameters
            np.testing.assert_allclose(got, want, rtol=1e-3)
