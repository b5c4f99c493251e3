"""Plant faults in a copy of the library, one by one, and say which law catches each.

`python -m tests.planted` stops each run at the first law that fails, prints how many faults were
caught, and writes the table of docs/evidence/planted.md anew. A law counts only if it holds, on the same
examples, without the fault.
"""

from __future__ import annotations

import argparse
import queue
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.planted import page
from tests.planted.catalogue import FAULTS
from tests.planted.copies import ROOT, Copy
from tests.planted.fault import Fault, StaleFaultError
from tests.planted.runs import Catch, catch

# A fault, what caught it, and the seconds that took.
Result = tuple[Fault, Catch, float]


def main() -> int:
    """Run the command."""
    arguments = _parsed()
    faults = [fault for fault in FAULTS if not arguments.only or fault.name in arguments.only]
    try:
        for fault in faults:
            fault.applied(fault.source(ROOT).read_text(encoding="utf-8"))
    except StaleFaultError as error:
        print(error, file=sys.stderr)
        return 2
    with TemporaryDirectory(prefix="planted-") as folder:
        copies = [Copy(Path(folder) / str(number)) for number in range(arguments.jobs)]
        results = _run(faults, copies)
    caught = [fault for fault, found, _ in results if found]
    print(f"caught {len(caught)} of {len(faults)} planted faults")
    page.record({fault.name: found.errors for fault, found, _ in results})
    return int(len(caught) < len(faults))


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="plant only these faults")
    parser.add_argument("--jobs", type=int, default=1, help="how many copies are used at a time")
    return parser.parse_args()


def _run(faults: Sequence[Fault], copies: Sequence[Copy]) -> list[Result]:
    """Plant each fault in a copy that is free."""
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def run_one(fault: Fault) -> Result:
        copy, started = free.get(), time.perf_counter()
        try:
            found = catch(copy, fault)
        finally:
            free.put(copy)
        result = fault, found, time.perf_counter() - started
        _show(*result)
        return result

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(run_one, faults))


def _show(fault: Fault, found: Catch, seconds: float) -> None:
    by = ", ".join(f"{law} ({error})" for law, error in sorted(found.errors.items()))
    end = (
        f"by {by}"
        if by
        else "no verdict: the time limit"
        if found.hung
        else f"NOT CAUGHT\n{found.said[-600:]}"
    )
    print(f"{fault.name}: {end}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
