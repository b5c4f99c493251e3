"""Tries every law on every library, and every disagreement; keeps what each example came to."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from docs.studies.peers.laws import ANY_LIBRARY, DISAGREEMENTS, OF_ARRAYCOMM

ROOT: Final = Path(__file__).resolve().parents[3]
RANKS: Final = 3
EXAMPLES: Final = 20
# Seconds after which laws that have not ended hang, and those of one disagreement.
_SECONDS: Final = 300.0
_BRIEF: Final = 60.0

# By law: how many examples came to each outcome, what was said first of each, and how the law ended.
Found = dict[str, dict[str, Any]]


def try_laws(library: str, examples: int = EXAMPLES, laws: Sequence[str] = ()) -> Found:
    """Try laws, by default all; what a law leaves behind, no other finds."""
    left, found = list(laws or (*ANY_LIBRARY, *OF_ARRAYCOMM)), dict[str, dict[str, Any]]()
    while left:
        with TemporaryDirectory() as folder:
            record = Path(folder, "record")
            ended = _launch(library, examples, record, left, _SECONDS)
            made = _read(record, ended)
        if not made:
            raise RuntimeError(f"{library}: no law began:\n{ended}")
        found |= made
        left = [law for law in left if law not in found]
    return found


def try_disagreements(library: str, kinds: Sequence[str] = tuple(DISAGREEMENTS)) -> dict[str, Any]:
    """Return for each kind of disagreement what each rank said."""
    return {kind: _disagree(library, kind) for kind in kinds}


def _disagree(library: str, kind: str) -> list[str]:
    with TemporaryDirectory() as folder:
        record = Path(folder, "record")
        _launch(library, 1, record, [f"if {kind}"], _BRIEF)
        ended = [record.with_name(f"record-{rank}") for rank in range(RANKS)]
        return [path.read_text(encoding="utf-8") if path.exists() else "died" for path in ended]


def _launch(library: str, examples: int, record: Path, laws: Sequence[str], seconds: float) -> str:
    """Run laws on ranks; return what they wrote, or that they did not end in time."""
    launcher = Path(sys.executable).with_name("mpiexec")
    program = [sys.executable, "-m", "docs.studies.peers.on_ranks", library, str(examples)]
    hosts = record.with_name("hosts.json")
    if library == "mlx":
        hosts.write_text(json.dumps([[f"127.0.0.1:{_free_port()}"] for _ in range(RANKS)]))
    # No pipe: a rank that outlives its launcher would keep it open.
    said = record.with_name("said")
    with said.open("w") as output:
        process = subprocess.Popen(
            [str(launcher), "-n", str(RANKS), *program, str(record), *laws],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
                ),
                **_SETTINGS,
                "MLX_HOSTFILE": str(hosts),
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return _HANG
    return said.read_text(errors="replace")


# Open MPI's launcher refuses root, and more ranks than cores, unless told otherwise.
_SETTINGS: Final = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


# What ranks say if one of them cannot be interrupted.
_HANG: Final = "cannot be interrupted outside Python"


def _read(record: Path, said: str) -> Found:
    """Return what a record says of laws; one that has begun and not ended has hung or crashed."""
    found: Found = {}
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    for line in map(json.loads, lines):
        if "law" in line:
            law = {"counts": {}, "said": {}, "ended": "hang" if _HANG in said else "crash"}
            found[line["law"]] = law
        elif "begun" in line:
            law["begun"] = line["begun"]
        elif "done" in line:
            law["ended"] = "well"
            law.pop("begun", None)
        else:
            law["counts"][line["outcome"]] = law["counts"].get(line["outcome"], 0) + 1
            law["said"].setdefault(line["outcome"], line.get("said", ""))
    if found and law["ended"] == "hang":
        _add_failure(law, record)
    return found


def _add_failure(law: dict[str, Any], record: Path) -> None:
    """Say what failed on a rank for which others wait."""
    for path in sorted(record.parent.glob(f"{record.name}-failed-*")):
        if text := path.read_text(encoding="utf-8"):  # else the rank ended before it wrote
            failure = json.loads(text)
            law["waited_for"] = failure["outcome"]
            law["said"].setdefault(failure["outcome"], failure["said"])
            return


def versions(library: str) -> dict[str, str]:
    """Return the versions of a library, and of the MPI that it uses or that starts its ranks."""
    from mpi4py import MPI

    text = MPI.Get_library_version().splitlines()[0].split(",")[0]
    known = {name: importlib.metadata.version(name) for name in _PACKAGES[library]}
    return {**known, "MPI": " ".join(text.replace("Version:", "").split())}


_PACKAGES: Final = {"arraycomm": (), "mpi4py": ("mpi4py",), "gloo": ("torch",), "mlx": ("mlx",)}
