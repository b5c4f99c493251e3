"""Each rank ends in the way, or waits in the state, that its argument says; see `test_statuses.py`."""

from __future__ import annotations

import atexit
import os
import sys
import time
from sys import exit as early

import numpy as np

import arraycomm as ac


def print_short(kind: type, error: BaseException, trace: object) -> None:
    sys.stderr.write(f"{kind.__name__}: {error}\n")


def exit_from_hook(kind: type, error: BaseException, trace: object) -> None:
    sys.exit(5)


def fail_in_hook(kind: type, error: BaseException, trace: object) -> None:
    raise ArithmeticError


if "mpi4py first" in sys.argv:
    # It then ends MPI as well.
    from mpi4py import MPI  # noqa: F401
comm = ac.init()
role = sys.argv[1 + comm.rank]
comm.barrier()
match role:
    # States, while others leave.
    case "in a call":
        comm.allreduce(np.ones(3))
    case "handles it":
        try:
            comm.allreduce(np.ones(3))
        except ac.PeerError:
            raise SystemExit(3) from None
    case "in its own code":
        time.sleep(0.5)
    case "at the end":
        early(0)
time.sleep(0.2)
match role:
    # Ways to end.
    case "raise":
        raise SystemExit(7)
    case "exit":
        exit(8)
    case "early":
        early(9)
    case "os":
        sys.exit(os.EX_USAGE)
    case "text":
        sys.exit("a text")
    case "in atexit":
        atexit.register(sys.exit, 4)
    case "in a thread":
        import threading

        thread = threading.Thread(target=sys.exit, args=(6,))
        thread.start()
        thread.join()
    case "other hook":
        sys.excepthook = print_short
    case "hook exits":
        sys.excepthook = exit_from_hook
    case "hook fails":
        sys.excepthook = fail_in_hook
    case "chained hook":
        chained = sys.excepthook
        sys.excepthook = lambda *error: print_short(*error) or chained(*error)
    case "inspects":
        os.environ["PYTHONINSPECT"] = "1"
if "hook" in role or role in ("error", "inspects"):
    raise ValueError("on purpose")
