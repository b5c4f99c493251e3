"""The demonstration on one rank: train, compare with one process, and report the outcome.

All runs share one job, since loading MPI, the frameworks and the data takes longer than training.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple, Protocol

import numpy as np

import arraycomm as ac
from arraycomm._launch.launchers import cores
from arraycomm.cli.demo import data, picture, verdict
from arraycomm.cli.demo.progress import Progress, make_progress

_FAILED: Final = 1
_MISUSED: Final = 2
_ROOT: Final = 0


class Run(NamedTuple):
    """The framework of each rank, and the one of the run in one process."""

    title: str
    by_rank: tuple[str, ...]
    reference: str


class Trainer(Protocol):
    """A model and its optimizer, in some framework."""

    def step(self, batch: data.Batch) -> float:
        """Learn from a batch; return the sum of its weighted losses."""

    def parameters(self) -> data.Linear:
        """Return the parameters as NumPy arrays."""


def plan_runs(frameworks: tuple[str, ...], size: int) -> list[Run]:
    """Return a run for each framework, and one in which frameworks differ between ranks."""
    runs = [Run(f"{name} on every rank", (name,) * size, name) for name in frameworks]
    by_rank = tuple(frameworks[rank % len(frameworks)] for rank in range(size))
    if len(set(by_rank)) > 1:
        ranks = ", ".join(f"{name} on rank {rank}" for rank, name in enumerate(by_rank))
        runs.append(Run(f"together, in lock step: {ranks}", by_rank, "numpy"))
    return runs


def take_part(
    frameworks: tuple[str, ...], ranks: int | None, epochs: int, how: str, drawn: Path
) -> int:
    """Make all runs with the other ranks; return the exit status, the same on every rank."""
    comm = ac.init()
    if ranks not in (None, comm.size):
        print(
            f"demo: {ranks} ranks were launched; got a world of {comm.size}; "
            "start it with the mpiexec of the MPI that mpi4py loads",
            file=sys.stderr,
        )
        return _MISUSED
    samples = data.load_digits()
    runs = plan_runs(frameworks, comm.size)
    say: Callable[[str], None] = (
        partial(print, flush=True) if comm.rank == _ROOT else lambda _: None
    )
    say(_heading(comm, samples, epochs))
    failures: list[str] = []
    outcomes: list[verdict.Outcome] = []
    for number, run in enumerate(runs, 1):
        say(f"\n[{number}/{len(runs)}] {run.title}")
        progress = make_progress(how, epochs, visible=comm.rank == _ROOT)
        outcome = perform(run, samples, epochs, comm, progress)
        say(_described(outcome))
        outcomes.append(outcome)
        failures += [f"{run.title}: {wrong}" for wrong in verdict.complaints(outcome)]
    if comm.rank == _ROOT:
        say(_picture(drawn, runs, outcomes, comm.size))
    say(_conclusion(len(runs), failures))
    return _FAILED if failures else 0


def perform(
    run: Run,
    samples: tuple[list[data.Sample], list[data.Sample]],
    epochs: int,
    comm: ac.Communicator,
    progress: Progress,
) -> verdict.Outcome:
    """Train on all ranks and then on one; return the outcome, with this rank's seconds."""
    train, test = samples
    _module(run.by_rank[comm.rank])  # loaded before the clock runs
    began, communicated = time.perf_counter(), _communicating(comm)
    # Ranks start from different parameters: only `synchronize` makes them start from the root's.
    trainer = _trainer(run.by_rank[comm.rank], comm.rank, comm)
    losses = fit(trainer, train, epochs, comm, progress)
    seconds = time.perf_counter() - began
    communicated = _communicating(comm) - communicated

    parameters = trainer.parameters()
    rows = comm.allgather(verdict.flat(parameters))
    accuracy = _accuracy(parameters, test, comm)
    reference, losses_alone = comm.bcast_object(_alone(run.reference, train, epochs, comm), _ROOT)
    return verdict.Outcome(
        accuracy,
        verdict.same_bits(rows),
        verdict.difference(parameters, reference),
        verdict.tolerance(reference, epochs * data.steps_per_epoch(len(train))),
        seconds,
        communicated,
        losses,
        losses_alone,
    )


def fit(
    trainer: Trainer,
    samples: list[data.Sample],
    epochs: int,
    comm: ac.Communicator,
    progress: Progress,
) -> list[float]:
    """Train on this rank's part of each global batch; return the mean loss in each epoch."""
    means = []
    container = data.distribute(samples, comm)
    for epoch in range(epochs):
        container.set_epoch(epoch)
        losses = [trainer.step(batch) for batch in data.batches(container, len(samples), comm)]
        means.append(comm.allreduce(sum(losses)) / len(losses))
        progress.epoch(epoch + 1, means[-1])
    progress.close()
    return means


def _trainer(framework: str, seed: int, comm: ac.Communicator | None) -> Trainer:
    start = data.initial_parameters(seed)
    trainer: Trainer = _module(framework).Trainer(start, verdict.LEARNING_RATE, comm)
    return trainer


def _module(framework: str) -> ModuleType:
    return importlib.import_module(f"arraycomm.cli.demo.{framework}")


def _alone(
    reference: str, samples: list[data.Sample], epochs: int, comm: ac.Communicator
) -> tuple[data.Linear, list[float]] | None:
    """Train again on the root alone; return the parameters and losses, None elsewhere.

    The same global batches, each in one piece, and the framework's own optimizer, not wrapped.
    """
    alone = comm.split(0 if comm.rank == _ROOT else None)
    if alone is None:
        return None
    trainer = _trainer(reference, _ROOT, None)
    with alone:
        losses = fit(trainer, samples, epochs, alone, Progress())
    return trainer.parameters(), losses


def _accuracy(parameters: data.Linear, samples: list[data.Sample], comm: ac.Communicator) -> float:
    """Return the share of samples that the model gets right; each rank checks its own samples."""
    right = sum(
        int(np.argmax(parameters.weight @ image + parameters.bias) == label)
        for image, label in ac.DistributedDataContainer(samples, comm=comm)
    )
    total: int = comm.allreduce(right)
    return total / len(samples)


def _communicating(comm: ac.Communicator) -> float:
    """Return the seconds spent on `comm` and on every communicator made from it."""
    return sum(numbers["seconds"] for numbers in comm.stats().values())


# The report
def _heading(
    comm: ac.Communicator, samples: tuple[list[data.Sample], list[data.Sample]], epochs: int
) -> str:
    train, test = map(len, samples)
    steps = data.steps_per_epoch(train)
    last = train - (steps - 1) * data.GLOBAL_BATCH
    ranks = "1 rank learns" if comm.size == 1 else f"{comm.size} ranks learn"
    shared = "" if comm.size == 1 else " shared out among them"
    return (
        f"{ranks} to read digits: {train} images{shared}, {test} more as a test.\n"
        f"Softmax regression, {epochs * steps} steps of SGD; a step takes {data.GLOBAL_BATCH} "
        f"images in all, an epoch's last {last}.\n"
        f"Each run is compared with one in a single process, without arraycomm.{_crowded(comm)}"
    )


def _crowded(comm: ac.Communicator) -> str:
    """Say where most of the time goes if ranks share cores; empty if each has one."""
    count = cores()
    if comm.local_size <= count:
        return ""
    shared = "one core" if count == 1 else f"{count} cores"
    return (
        f"\n{comm.local_size} ranks share {shared}: a rank that waits for a core keeps the others "
        f"waiting in communication.\nWith --ranks {count} each rank has a core of its own."
    )


def _described(outcome: verdict.Outcome) -> str:
    agree = "the same bits on every rank" if outcome.ranks_agree else "NOT THE SAME on every rank"
    distance = f"{outcome.difference:.1e} from the run in one process"
    waiting = "in communication, waiting for other ranks included"
    facts = (
        ("test accuracy", f"{outcome.accuracy:.3f}"),
        ("parameters", agree),
        ("", f"{distance} (tolerance {outcome.tolerance:.1e})"),
        ("seconds", f"{outcome.seconds:.2f} in all, {outcome.communicating:.2f} of it {waiting}"),
    )
    return "\n".join(f"      {name:<13} {value}" for name, value in facts)


def _picture(path: Path, runs: list[Run], outcomes: list[verdict.Outcome], size: int) -> str:
    """Draw the losses; return where they are, or why they could not be written."""
    drawn = picture.draw(
        f"{size} {'rank' if size == 1 else 'ranks'} over one process",
        picture.Losses("one process, without arraycomm", outcomes[0].losses_alone),
        [
            picture.Losses(_short(run), outcome.losses)
            for run, outcome in zip(runs, outcomes, strict=True)
        ],
    )
    try:
        path.write_text(drawn, encoding="utf-8")
    except OSError as error:
        return f"\nThe picture of the losses could not be written: {error}"
    return f"\nThe loss of each run, over that of one process: {path.resolve()}"


def _short(run: Run) -> str:
    frameworks = dict.fromkeys(run.by_rank)
    return run.title if len(frameworks) == 1 else f"{' + '.join(frameworks)}, one on each rank"


def _conclusion(runs: int, failures: list[str]) -> str:
    if failures:
        return "\n".join(["\nFAILED", *(f"  {failure}" for failure in failures)])
    return f"\nPassed: {runs} {'run' if runs == 1 else 'runs'} gave what one process gives."
