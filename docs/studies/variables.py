"""The variables of the environment that arraycomm reads or sets, in one table.

`python -m docs.studies.variables` writes it into docs/environment.md; a test compares it with the code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from arraycomm import _native
from arraycomm._cuda.links import gpu_aware
from arraycomm._launch import ADDRESS, NUMBER, RANK
from arraycomm._protocol.waits import still_waiting
from arraycomm._start import numbering
from arraycomm._trace import trace

PAGE: Final = Path(__file__).parents[1] / "environment.md"


class Variable(NamedTuple):
    """What holds if a variable is not set, and what it means; backticks mark code."""

    default: str
    meaning: str


VARIABLES: Final = {
    "ARRAYCOMM_TIMEOUT": Variable(
        "1800", "seconds that a call waits for other ranks, or `none`; as `init(timeout=…)`"
    ),
    still_waiting.VARIABLE: Variable(
        f"{still_waiting.DEFAULT:g}",
        "seconds after which a line on standard error says for whom a call waits, or `none`; as "
        "`init(report_after=…)`",
    ),
    "ARRAYCOMM_CHECK": Variable(
        "1", "0 leaves out the comparison of calls before large arrays; as `init(check=…)`"
    ),
    trace.VARIABLE: Variable(
        "–", "a file to which the calls of all ranks [are recorded](tracing.md)"
    ),
    "ARRAYCOMM_TRACEBACK": Variable(
        "–", "`full`: errors show the frames of the library as well; may differ between ranks"
    ),
    gpu_aware.VARIABLE: Variable(
        "MPI is asked",
        "1 or 0: whether the MPI reads [the memory of GPUs](devices.md). If it does not, 1 crashes it",
    ),
    _native.SETTING: Variable(
        "used if there",
        "0 leaves [the C part](install.md#the-part-in-c) out, in a build too; 1: it is an error if "
        "it is missing",
    ),
    ADDRESS: Variable(
        "–", "host and port of process 0, which listens there until all are connected"
    ),
    NUMBER: Variable("–", "how many processes there are"),
    RANK: Variable("–", "the number of this process, another on each: 0, 1 and so on"),
    numbering.SECRET: Variable("–", "any text; a process with another one, or none, is rejected"),
    numbering.LIMIT: Variable(
        f"{numbering.DEFAULT_LIMIT:g}", "seconds in which all processes have to connect"
    ),
    "ARRAYCOMM_RANK_PROCESS": Variable("–", "set by `init`: which process is the rank"),
    "ARRAYCOMM_PYTEST_JOB": Variable("–", "set by `pytest --mpiexec`: where its ranks report"),
}


def written(page: str) -> str:
    """Return the text of the page with the table of today."""
    rows = [
        f"| `{name}` | {default} | {meaning} |\n" for name, (default, meaning) in VARIABLES.items()
    ]
    table = "".join(["| variable | default | meaning |\n|---|---|---|\n", *rows])
    found = re.search(r"(?<=with the code\. -->\n\n).*?(?=\n## |\nThe five)", page, re.DOTALL)
    assert found is not None, PAGE
    return page[: found.start()] + table + page[found.end() :]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
