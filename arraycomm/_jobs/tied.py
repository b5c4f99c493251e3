"""Becomes another program, which the kernel ends together with the process that started this.

A program of its own, with the standard library alone. Its arguments are that process, and the
command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: str, *command: str) -> None:
    """Replace this process by the command."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == int(parent):
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
