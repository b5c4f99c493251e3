"""Learn x → x² on several ranks with PyTorch.

    arraycomm run -n 3 quickstart_torch.py

Run with `python`, it is the same program on one rank.
"""

import hashlib
import time

import torch
from torch import nn

import arraycomm as ac


def main() -> None:
    began = time.perf_counter()

    # Start communication. Every rank runs this whole program; comm.rank tells the ranks apart.
    comm = ac.init()

    # Each rank has its own seed, and so its own data.
    torch.manual_seed(comm.rank)
    x = torch.rand(16, 1)
    y = x**2

    model = nn.Sequential(
        nn.Linear(1, 256),
        nn.Tanh(),
        nn.Linear(256, 512),
        nn.Tanh(),
        nn.Linear(512, 256),
        nn.Tanh(),
        nn.Linear(256, 1),
    )

    # The seeds also gave each rank different parameters: take rank 0's, and its buffers.
    ac.synchronize(model)

    # From now on, optimizer.step() first averages the gradients over all ranks.
    optimizer = ac.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-3))

    # Needed if rank 0 has loaded a checkpoint; here the state is empty on every rank.
    ac.synchronize(optimizer)

    for epoch in range(1, 101):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if epoch % 10 == 0:
            # Every rank's line, in the order of the ranks.
            ac.println(f"epoch {epoch}: loss {loss.item():.6f}")

    # Same start, same averages: the parameters are the same on every rank, to the bit.
    parameters = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    ac.println("parameters", hashlib.sha256(parameters).hexdigest()[:16])
    ac.println(f"{time.perf_counter() - began:.1f} seconds in all")


if __name__ == "__main__":
    main()
