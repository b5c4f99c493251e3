"""Run the training programs of the documents: `python trainings.py DIRECTORY`, alone or on ranks.

Each is run in one go; on ranks in two as well, with a break in the middle; alone with mixed precision as
well, and from the checkpoint on that ranks have left in the directory.
"""

from __future__ import annotations

import hashlib
import pickle
import runpy
import shutil
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import arraycomm as ac

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
EPOCHS = 2


def digest_of_numpy(checkpoint: Path) -> str:
    params, optimizer, _ = pickle.loads(checkpoint.read_bytes())
    arrays = [params, optimizer["first"], optimizer["second"]]
    return _digest(array for tree in arrays for array in tree.values())


def digest_of_torch(checkpoint: Path) -> str:
    import torch

    states = torch.load(checkpoint)
    moments = [state["exp_avg"] for state in states["optimizer"]["state"].values()]
    return _digest(tensor.numpy() for tensor in (*states["model"].values(), *moments))


def digest_of_jax(checkpoint: Path) -> str:
    with np.load(checkpoint) as arrays:
        return _digest(arrays[name] for name in sorted(arrays) if arrays[name].dtype.kind == "f")


def _digest(arrays: Any) -> str:
    return hashlib.sha256(b"".join(map(np.ndarray.tobytes, arrays))).hexdigest()


class Program(NamedTuple):
    """A program with its names of full and of mixed precision, and the digest of its checkpoint."""

    path: Path
    full: str
    mixed: str
    digest: Any


PROGRAMS = {
    "sklearn": Program(EXAMPLES / "train_numpy.py", "float64", "float16", digest_of_numpy),
    "torch": Program(EXAMPLES / "train_torch.py", "float32", "float16", digest_of_torch),
    "optax": Program(EXAMPLES / "train_jax.py", "float32", "bfloat16", digest_of_jax),
}


def run_all(program: Program, directory: Path) -> None:
    path, full, mixed, digest = program
    comm = ac.init()
    main = runpy.run_path(str(path))["main"]
    # What JAX compiles for an optimizer, it compiles for each anew.
    names = main.__globals__
    if "make_optimizer" in names:
        names["make_optimizer"] = cache(names["make_optimizer"])

    def checkpoint_of(run: str) -> Path:
        return directory / f"{path.stem}-{comm.size}-{run}"

    def train(run: str, *arguments: str) -> None:
        checkpoint = checkpoint_of(run.removesuffix(" resumed"))
        say(f"<{path.stem}: {run}>")
        main(["--epochs", str(EPOCHS), "--checkpoint", str(checkpoint), *arguments])
        comm.barrier()
        say(f"digest {digest(checkpoint)}")

    def say(line: str) -> None:
        if comm.rank == 0:
            print(line, flush=True)

    train("whole", "--precision", full)
    if comm.size == 1:
        shutil.copy(directory / f"{path.stem}-middle", checkpoint_of("other"))
        train("other resumed", "--precision", full)
        train("mixed", "--precision", mixed)
        return
    train("broken", "--precision", full, "--stop-after", "1")
    if comm.rank == 0:
        shutil.copy(checkpoint_of("broken"), directory / f"{path.stem}-middle")
    train("broken resumed", "--precision", full)


if __name__ == "__main__":
    for module, program in PROGRAMS.items():
        if find_spec(module):
            run_all(program, Path(sys.argv[1]))
