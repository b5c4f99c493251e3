"""`arraycomm run`: a program on several ranks."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from arraycomm._jobs.job import GRACE, Ended, Program, run_job
from arraycomm._jobs.output import say
from arraycomm._launch import claimed_by, launched
from arraycomm._launch.library import CHOSEN, MPIS, OPEN_MPI, path_of
from arraycomm._protocol.mismatch import name_ranks, ranks_of
from arraycomm.cli.launch import NO_LAUNCHER, launcher_for, positive

_USAGE_ERROR: Final = 2
# Options that are followed by a value.
_VALUED: Final = ("-n", "-np", "--threads", "--logs", "--mpi", "--trace", "--grace")
_INTERPRETED: Final = ("-m", "-c")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `arraycomm run`."""
    parser.usage = "arraycomm run -n N [options] program [argument …]"
    add = parser.add_argument
    add("-n", "-np", dest="ranks", type=positive, required=True, metavar="N", help="how many ranks")
    add("--prefix", action="store_true", help="begin each line with the rank that prints it")
    add("--logs", type=Path, metavar="DIR", help="also write what rank N prints to DIR/rank-N.log")
    add(
        "--threads",
        type=positive,
        metavar="T",
        help="OMP_NUM_THREADS of each rank; by default what is set, or the cores divided by N",
    )
    add("--mpi", choices=MPIS, help="which MPI, if there are several")
    add("--trace", type=Path, metavar="FILE", help="record all ranks' calls; see arraycomm trace")
    add(
        "--grace",
        type=_seconds,
        default=GRACE,
        metavar="S",
        help="seconds that ranks have to act on SIGTERM, SIGINT or SIGHUP; %(default)g by default",
    )
    add(
        "--fault-tolerant",
        action="store_true",
        help="let the other ranks live if one dies, for shrink(); needs Open MPI",
    )
    add(
        "program",
        nargs="+",
        metavar="program",
        help="a Python file, -m and a module, -c and a text, or another command; and its arguments",
    )


def _seconds(text: str) -> float:
    """Return the seconds that a text says."""
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) < float("inf"):
            return seconds
    raise argparse.ArgumentTypeError(f"must be a number of seconds; got {text!r}")


def arrange(words: Sequence[str]) -> list[str]:
    """Return the words with a mark where the program begins, so that its options stay its own."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in (*_INTERPRETED, "--"):
        at += 2 if words[at] in _VALUED else 1
    rest = words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:]
    return [*words[:at], "--", *rest] if rest else list(words)


def run(arguments: argparse.Namespace) -> int:
    """Run the program, and return the status of the first rank that failed, or 0."""
    try:
        program = Program(
            _command(arguments.program),
            prefix=arguments.prefix,
            logs=_directory(arguments.logs),
            fault_tolerant=arguments.fault_tolerant,
            stdin=True,
            grace=arguments.grace,
        )
        _refuse_in_job()
    except ValueError as error:
        return _refuse(str(error))
    environment = {**os.environ, **_settings(arguments)}
    mpi = arguments.mpi or ("openmpi" if arguments.fault_tolerant else "")
    launcher = launcher_for("run", arguments.ranks, environment, mpi=mpi)
    if launcher is None:
        return NO_LAUNCHER
    if arguments.mpi and launcher.family != MPIS[arguments.mpi][0]:
        return _refuse(
            f"--mpi must be an MPI that mpi4py can load; got {arguments.mpi}, and the mpi4py of "
            f"this Python loads {launcher.family} alone"
        )
    if arguments.fault_tolerant and launcher.family != OPEN_MPI:
        return _refuse(
            f"--fault-tolerant needs Open MPI; got {launcher.path} of "
            f"{launcher.family or 'another MPI'}, which ends all ranks if one dies"
        )
    try:
        ended = run_job(launcher, arguments.ranks, environment, program)
    except OSError as error:
        return _refuse(str(error))
    if ended.failed:
        say(f"run: {describe(ended)}")
    if ended.cut_off:
        say(
            f"run: {name_ranks(ended.cut_off)} had not ended when another rank left without MPI's "
            "end, as by os._exit; the launcher has ended all"
        )
    if ended.late:
        say(
            f"run: {name_ranks(ended.late)} had not ended {program.grace:g} s after "
            f"{signal.Signals(ended.told).name}; for more time pass --grace"
        )
    if ended.told == signal.SIGINT and ended.status:
        raise KeyboardInterrupt
    return ended.status


def describe(ended: Ended) -> str:
    """Say how the ranks ended that failed, those that ended alike together."""
    ways = ranks_of(ended.failed.items())
    return "; ".join(f"{name_ranks(sorted(own))} {_way(status)}" for status, own in ways.items())


def _way(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"died by {signal.Signals(-status).name} ({signal.strsignal(-status)})"


def _settings(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the variables that options set."""
    chosen = {
        "OMP_NUM_THREADS": arguments.threads,
        CHOSEN: arguments.mpi and path_of(arguments.mpi),
        "ARRAYCOMM_TRACE": arguments.trace and arguments.trace.absolute(),
    }
    return {name: str(value) for name, value in chosen.items() if value is not None}


def _refuse(reason: str) -> int:
    print(f"arraycomm run: {reason}", file=sys.stderr)
    return _USAGE_ERROR


def _command(words: Sequence[str]) -> list[str]:
    """Return the command of a program: Python files, modules and texts run in this Python."""
    first = words[0]
    if first in _INTERPRETED:
        if len(words) == 1:
            raise ValueError(
                f"{first} must be followed by {'a module' if first == '-m' else 'a text'}"
            )
        return [sys.executable, *words]
    if first.endswith(".py") and not os.path.isfile(first):
        raise ValueError(f"there is no file {first} in {os.getcwd()}")
    if first.endswith(".py") or _is_python(Path(first)):
        return [sys.executable, *words]
    if shutil.which(first) is None:
        raise ValueError(f"there is no file and no command {first}")
    return list(words)


def _is_python(path: Path) -> bool:
    """Return whether only Python can run a path: a file that is no command, or a directory."""
    if path.is_dir():
        return (path / "__main__.py").is_file()
    return path.is_file() and not os.access(path, os.X_OK)


def _directory(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--logs must be a directory; cannot make {path}: {error.strerror}"
        ) from None
    return str(path.resolve())


def _refuse_in_job() -> None:
    """Raise in a process that a launcher has started: each would start ranks of its own."""
    launch = launched(os.environ)
    if launch is not None and launch.size > 1 and not claimed_by(os.environ, os.getpid()):
        raise ValueError(
            f"{launch.launcher} has started this process as one of {launch.size}; start arraycomm "
            "run alone, without it"
        )
