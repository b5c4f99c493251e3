"""The laws run on a copy with one fault, in a process of its own with a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tests.planted.copies import Copy
from tests.planted.fault import Fault
from tests.planted.recorder import HIDDEN, RECORD

# Examples of the laws that are named with a fault, few at first, and of all.
_NAMED: Final = (25, 150)
_ALL: Final = 15
# How long a run may take up to the first law that fails, and how long one of all laws, or of the tests of a room.
_SECONDS: Final = {"first": 300.0, "all": 900.0}
_RANKS: Final = 3
_SUITE: Final = "properties/test_laws.py"
# Laws of one rank alone, which those of several have in them.
_LEFT_OUT: Final = "not TestSelf"


@dataclass
class Catch:
    """What caught a fault: the laws that failed, and the error of each; none if it was not caught."""

    errors: dict[str, str] = field(default_factory=dict)
    # Whether the time limit ended it, which says nothing: neither that it is caught nor that it is not.
    hung: bool = False
    said: str = ""
    examples: int = 0

    def __bool__(self) -> bool:
        return bool(self.errors)


def catch(copy: Copy, fault: Fault) -> Catch:
    """Return the named laws that fail, or the first of all others; without those that fail without the fault as well."""
    with copy.planted(fault):
        seen = _catch_named(copy, fault)
    found, wrong = _beside_right(copy, fault, seen), set(seen.errors)
    while not found:
        with copy.planted(fault):
            seen = _run(copy, fault, (), _ALL, first=True, without=sorted(wrong))
        if seen.errors.keys() <= wrong:
            return replace(seen, errors={})
        wrong.update(seen.errors)
        found = _beside_right(copy, fault, seen)
    return found


# By what was run on a copy without a fault, the laws that failed there.
_wrong_there: dict[tuple[object, ...], set[str]] = {}


def _beside_right(copy: Copy, fault: Fault, found: Catch) -> Catch:
    """Return what was caught without the laws that fail on the same examples without the fault as well."""
    key = fault.run, fault.frameworks, fault.native, found.examples, *sorted(found.errors)
    if found and key not in _wrong_there:
        right = replace(
            fault, file="setup.py", before="setup(", after="setup(", compiled=fault.native
        )
        with copy.planted(right):
            again = _run(copy, right, tuple(found.errors), found.examples, first=False)
        _wrong_there[key] = set(found.errors) if again.hung else set(again.errors)
    wrong = _wrong_there.get(key, set())
    errors = {law: error for law, error in found.errors.items() if law not in wrong}
    said = f"without the fault as well: {', '.join(sorted(wrong))}" if wrong else found.said
    return replace(found, errors=errors, said=said)


def _catch_named(copy: Copy, fault: Fault) -> Catch:
    """Return the laws named with a fault that fail; those that pass at first get more examples."""
    found = Catch()
    for examples in _NAMED:
        left = [law for law in fault.laws if law not in found.errors]
        if left and not found.hung:
            again = _run(copy, fault, left, examples, first=False)
            found = replace(again, errors={**found.errors, **again.errors})
    return found


def _run(
    copy: Copy,
    fault: Fault,
    laws: Sequence[str],
    examples: int,
    *,
    first: bool,
    without: Sequence[str] = (),
) -> Catch:
    record = copy.folder / "record.jsonl"
    record.write_text("")
    left_out = " and ".join((_LEFT_OUT, *(f"not test_{law}" for law in without)))
    chosen = " or ".join(laws)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tests.planted.recorder", "--tb=line", *(["-x"] if first else [])]
    command += ["-k", f"({chosen}) and {left_out}" if chosen else left_out]
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy.folder),
        "EXAMPLES": str(examples),
        "OMP_NUM_THREADS": "1",
        # Nothing is compiled for a fault in Python.
        "ARRAYCOMM_NATIVE": str(int(fault.native)),
        RECORD: str(record),
    }
    is_room = fault.run.startswith("tests/")
    if not is_room:
        # Laws start quickly without what most need not.
        environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONWARNINGS": "ignore"}
        if not fault.frameworks:
            environment[HIDDEN] = "torch,jax,cupy,array_api_strict"
    elif fault.native:
        # Tests may need any framework or plugin, and a few leave the native part out.
        del environment["ARRAYCOMM_NATIVE"]
    if fault.run.startswith("mpi"):
        launcher = str(Path(sys.executable).with_name("mpiexec"))
        command = [launcher, "-n", str(_RANKS), *command, *(fault.run.split()[1:] or [_SUITE])]
    else:
        command += _files(copy, laws) if fault.run == "threads" else fault.run.split()
    seconds = _SECONDS["first" if first and not is_room else "all"]
    status, said = _wait(command, environment, copy.folder, seconds)
    lines = map(json.loads, record.read_text(encoding="utf-8").splitlines())
    errors = {_law(line["test"]): line["error"] for line in lines}
    if not errors and status is not None and status < 0:
        errors = {"a_process_goes_on": f"signal {-status}"}
    # A test that its own time limit ends, and the process with it, leaves no line.
    hung = status is None or (status == 1 and not errors)
    return Catch(errors, hung, said[-2000:], examples)


def _files(copy: Copy, laws: Sequence[str]) -> list[str]:
    """Return the files that have these laws, or all; those of the suite are inherited in its file."""
    if not laws:
        return ["properties"]
    texts = {
        path: path.read_text("utf-8") for path in (copy.folder / "properties").glob("test_*.py")
    }
    found = {str(path) for path, text in texts.items() for law in laws if f"test_{law}(" in text}
    return sorted(found) or [_SUITE]


def _wait(
    command: Sequence[str], environment: dict[str, str], folder: Path, seconds: float
) -> tuple[int | None, str]:
    """Return the status, or None after the time limit, and what was said."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=seconds)[0]
        return process.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def _law(node: str) -> str:
    """Return the name of a law without its file, class and parameters."""
    return node.rpartition("::")[2].partition("[")[0].removeprefix("test_")
