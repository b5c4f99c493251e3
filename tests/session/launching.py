"""Programs of a few lines, as text, in processes of their own: what they print and how they end."""

from __future__ import annotations

import subprocess
import textwrap

import pytest

from tests.support.launcher import run_python

LIMIT = 60.0
HEAD = "import sys, time, numpy as np, arraycomm as ac\n"
MESSAGES = "from tests.support import internals; internals.refuse_shared_memory()\n"
CONTROLS = ["shared", pytest.param("messages", marks=pytest.mark.each_mpi)]


def launch(
    program: str, control: str = "shared", ranks: int = 2
) -> subprocess.CompletedProcess[str]:
    """Run a program on some ranks, with the control channel in shared memory or by messages.

    Three take twice the time of two: they run where one of those that wait hears of it from another.
    """
    head = HEAD + MESSAGES * (control == "messages")
    return run_python("-c", head + textwrap.dedent(program), ranks=ranks, timeout=LIMIT)
