"""Train a network to read handwritten digits: a complete program with PyTorch, for any number of ranks.

    python train_torch.py                # one process; needs no MPI
    arraycomm run -n 3 train_torch.py    # three, which share the work

Both print the same numbers, but for rounding: the batches are the same, and so are the gradients. You may stop the program at
any time. Started again, it goes on with the epoch after that of its checkpoint, on any number of ranks. The digits come with
scikit-learn, the bar with tqdm.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset
from tqdm import tqdm

import arraycomm as ac
from arraycomm.adapters.torch import DataLoader


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--stop-after", type=int, metavar="EPOCH", help="end the program early")
    parser.add_argument("--batch", type=int, default=96, help="digits in a batch, over all ranks")
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--precision", choices=["float16", "float32"], default="float16")
    parser.add_argument("--checkpoint", type=Path, default=Path("digits.pt"))
    return parser.parse_args(arguments)


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the digits to train on, and those to validate with; every rank has all of them."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


class Parts(NamedTuple):
    """What changes while the network learns."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler


def make_parts(options: argparse.Namespace, steps: int, device: torch.device) -> Parts:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)

    # The rate rises during the first tenth of the steps, and then falls to zero.
    rising = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=steps // 10)
    falling = lr_scheduler.CosineAnnealingLR(optimizer, steps - steps // 10)
    schedule = lr_scheduler.SequentialLR(optimizer, [rising, falling], [steps // 10])

    # Small gradients are zero in float16, so the loss is scaled up, and the gradients down again.
    scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "float16")

    # From now on, backward() adds up the gradients of all ranks.
    return Parts(model, ac.DistributedOptimizer(optimizer, op="sum"), schedule, scaler)


class Sums:
    """The sums of losses, of right answers and of weights, over this rank's part of the batches."""

    def __init__(self) -> None:
        self.lost = self.right = self.weight = torch.zeros(())

    def add(self, lost: torch.Tensor, right: torch.Tensor, weight: torch.Tensor) -> None:
        self.lost, self.right = self.lost + lost.detach(), self.right + right
        self.weight = self.weight + weight

    def mean_over_ranks(self) -> Any:
        """Return the means over the digits of all ranks; a rank that has none does not count."""
        means = {"loss": self.lost / self.weight, "accuracy": self.right / self.weight}
        return ac.mean_metrics(means, weight=self.weight)


def evaluate(model: nn.Module, batch: Any, precision: str) -> tuple[torch.Tensor, ...]:
    """Return the sums of a batch: of its losses, its right answers and its weights."""
    (x, y), weights = batch
    device = next(model.parameters()).device
    x, y, weights = x.to(device), y.to(device), weights.to(device)
    with torch.autocast(device.type, torch.float16, enabled=precision == "float16"):
        logits = model(x)
    losses = nn.functional.cross_entropy(logits.float(), y, reduction="none")
    right = logits.argmax(dim=1) == y
    return (weights * losses).sum(), (weights * right).sum(), weights.sum()


def train(parts: Parts, loader: DataLoader, options: argparse.Namespace) -> Any:
    """Train for one epoch, and return its means."""
    model, optimizer, schedule, scaler = parts
    sums, comm = Sums(), ac.world()
    model.train()
    # The bar is on rank 0, if that writes to a terminal.
    for batch in tqdm(loader, leave=False, disable=None if comm.rank == 0 else True):
        lost, right, weight = evaluate(model, batch, options.precision)
        sums.add(lost, right, weight)

        # The last batch is shorter on some ranks, so each divides by the weight of the batch of all.
        optimizer.zero_grad()
        scaler.scale(lost / comm.allreduce(weight)).backward()

        # From here on gradients are those of all ranks, so every rank clips alike, and if they
        # overflow, every rank skips the step.
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    return sums.mean_over_ranks()


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader, options: argparse.Namespace) -> Any:
    sums = Sums()
    model.eval()
    for batch in loader:
        sums.add(*evaluate(model, batch, options.precision))
    return sums.mean_over_ranks()


def save(path: Path, parts: Parts, share: ac.DistributedDataContainer) -> None:
    """Write a checkpoint; if the program is stopped meanwhile, the one before is still there."""
    states = {name: part.state_dict() for name, part in parts._asdict().items()}
    unfinished = path.with_suffix(".unfinished")
    torch.save({"share": share.state_dict(), **states}, unfinished)
    os.replace(unfinished, path)


def load(path: Path, parts: Parts) -> Any:
    """Read a checkpoint, and return how much of the data the network has seen."""
    states = torch.load(path, map_location="cpu")
    for name, part in parts._asdict().items():
        part.load_state_dict(states[name])
    return states["share"]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)

    # Every rank runs this whole program. It is one of several under `arraycomm run`, and otherwise the only one.
    comm = ac.init()
    if options.batch % comm.size:
        raise SystemExit(f"--batch must be a multiple of the {comm.size} ranks")

    # Each epoch has a new order of the digits, of which each rank takes its share.
    digits, others = read_digits()
    share = ac.DistributedDataContainer(digits, shuffle=True, seed=1)
    loader = DataLoader(share, options.batch // comm.size)
    validation = DataLoader(ac.DistributedDataContainer(others), 100)

    torch.manual_seed(comm.rank)
    parts = make_parts(options, options.epochs * len(loader), torch.device(comm.device))

    # Rank 0 alone reads the checkpoint. Whether there is one or not, the ranks begin with its values.
    seen = share.state_dict()
    if comm.rank == 0 and options.checkpoint.exists():
        seen = load(options.checkpoint, parts)
    ac.synchronize(parts)
    share.load_state_dict(ac.synchronize(seen))

    for epoch in range(share.epoch, min(options.epochs, options.stop_after or options.epochs)):
        trained = train(parts, loader, options)
        validated = validate(parts.model, validation, options)
        ac.println(
            f"epoch {epoch + 1}: loss {trained['loss']:.6f}, rate "
            f"{parts.schedule.get_last_lr()[0]:.6f}, "
            f"validation loss {validated['loss']:.6f}, accuracy {validated['accuracy']:.4f}",
            ranks=0,
        )
        # The checkpoint says which epoch comes next. All ranks have the same, so one writes it.
        share.set_epoch(epoch + 1)
        if comm.rank == 0:
            save(options.checkpoint, parts, share)


if __name__ == "__main__":
    main()
