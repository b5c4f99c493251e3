"""The variables of the environment that arraycomm reads or sets, in one table."""

from __future__ import annotations

from typing import Final, NamedTuple

from arraycomm import _native
from arraycomm._cuda import gpu_aware
from arraycomm._launch import ADDRESS, NUMBER, RANK, joining
from arraycomm._protocol.waits import still_waiting
from arraycomm._trace import environment


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
    environment.VARIABLE: Variable("–", "a file to which the calls of all ranks are recorded"),
    "ARRAYCOMM_TRACEBACK": Variable("–", "`full`: errors show the frames of the library as well"),
    gpu_aware.VARIABLE: Variable(
        "MPI is asked", "1 or 0: whether the MPI reads the memory of GPUs; if not, 1 crashes it"
    ),
    _native.SETTING: Variable(
        "used if there",
        "0 leaves the C part out, in a build too; 1: it is an error if it is missing",
    ),
    ADDRESS: Variable(
        "–", "host and port of process 0, which listens there until all are connected"
    ),
    NUMBER: Variable("–", "how many processes there are"),
    RANK: Variable("–", "the number of this process: 0, 1 and so on"),
    joining.SECRET: Variable("–", "any text; a process with another one, or none, is rejected"),
    joining.LIMIT: Variable(
        f"{joining.DEFAULT_LIMIT:g}", "seconds in which all processes have to connect"
    ),
    "ARRAYCOMM_RANK_PROCESS": Variable("–", "set by `init`: the process that is the rank"),
    "ARRAYCOMM_PYTEST_JOB": Variable("–", "set by `pytest --mpiexec`: where its ranks report"),
}
