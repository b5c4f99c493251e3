"""What is wrong with what the doctor has found, and what to do: a sentence for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from arraycomm._launch.library import OPEN_MPI

Findings = dict[str, Any]

_ENOUGH: Final = 64 << 20


def advice_for(found: Findings) -> list[str]:
    """Return the advice, the most important first."""
    return [
        *([] if _needs_no_mpi(found) else _about_mpi(found["mpi"])),
        *_about_pairs(found.get("pairs", [])),
        *_about_cores(found["ranks"]),
        *_about_machine(found["machine"]),
        *_about_frameworks(found["frameworks"]),
    ]


def is_well(found: Findings) -> bool:
    """Return whether several ranks can communicate here."""
    mpi = found["mpi"]
    can_start = "error" not in mpi and mpi.get("launcher", "") is not None
    failed = any("error" in pair for pair in found.get("pairs", []))
    return not failed and (can_start or _needs_no_mpi(found))


def _needs_no_mpi(found: Findings) -> bool:
    """Return whether the ranks that were examined communicate without MPI."""
    return found.get("backend") == "processes"


def _about_mpi(mpi: Findings) -> Iterator[str]:
    if "error" in mpi:
        yield (
            f"several ranks need an MPI: {mpi['error']}; install one with: pip install "
            "'arraycomm[mpich]'"
            + ("" if "library" in mpi else "; on one node arraycomm run works without an MPI")
        )
        return
    if mpi.get("launcher_error"):
        yield mpi["launcher_error"]
    if mpi["threads"] != "MPI_THREAD_MULTIPLE":
        yield (
            f"MPI was started with {mpi['threads']}: requests progress only while a rank calls; "
            "let mpi4py start MPI, or use an MPI with MPI_THREAD_MULTIPLE"
        )


def _about_pairs(pairs: list[Findings]) -> Iterator[str]:
    for pair in pairs:
        if "error" in pair:
            a, b = pair["ranks"]
            yield f"ranks {a} and {b} cannot communicate: {pair['error']}"


def _about_cores(ranks: list[Findings]) -> Iterator[str]:
    for node in dict.fromkeys(rank["node"] for rank in ranks):
        there = [rank for rank in ranks if rank["node"] == node]
        cores = {core for rank in there for core in rank["cores"]}
        threads = sum(_threads(rank) for rank in there)
        if len(there) > len(cores):
            yield (
                f"{len(there)} ranks share {_cores(len(cores))} of {node}, and wait for one "
                "another; start a rank for each core at most"
            )
        elif len(there) > 1 and threads > len(cores):
            yield (
                f"{threads} threads of {len(there)} ranks share {_cores(len(cores))} of {node}; "
                f"set OMP_NUM_THREADS={max(len(cores) // len(there), 1)}, or start with arraycomm "
                "run"
            )
        crowded = [rank for rank in there if _threads(rank) > len(rank["cores"])]
        if crowded and len(there) > 1 and threads <= len(cores):
            yield (
                f"ranks on {node} have more threads than the cores to which they are bound; "
                "start with arraycomm run, or let the launcher bind to none"
            )


def _threads(rank: Findings) -> int:
    wanted: str = rank["threads"].partition(",")[0]
    return int(wanted) if wanted.isdigit() else len(rank["cores"])


def _cores(count: int) -> str:
    return "one core" if count == 1 else f"{count} cores"


def _about_machine(machine: Findings) -> Iterator[str]:
    shared = machine["shared_memory"]
    if shared is not None and 0 < shared["bytes"] < _ENOUGH:
        yield (
            f"{shared['path']} has {shared['bytes'] >> 20} MiB, too little for many ranks; make it "
            "larger, for example with: docker run --shm-size=1g"
        )
    native = machine["native"]
    if not native["used"]:
        yield (
            f"calls are slower without the native part: {native['reason']}; "
            + (
                "unset it"
                if "ARRAYCOMM_NATIVE" in native["reason"]
                else "install arraycomm again with a C compiler on the PATH"
            )
        )


def _about_frameworks(frameworks: list[Findings]) -> Iterator[str]:
    for row in frameworks:
        if "error" in row:
            yield f"arrays of {row['framework']} cannot be used: {row['error']}"


def fault_tolerance(mpi: Findings) -> str:
    """Say whether the other ranks can go on if one dies."""
    if mpi["family"] == OPEN_MPI:
        return "with arraycomm run --fault-tolerant" if mpi["ulfm"] else "no: built without ULFM"
    return "no: its launcher ends all ranks"
