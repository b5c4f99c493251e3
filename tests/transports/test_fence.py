"""What orders memory where processors reorder it, and where Python has no fence of its own."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from _thread import allocate_lock
from contextlib import nullcontext
from functools import partial
from tempfile import NamedTemporaryFile

import pytest

from arraycomm._transports import notes

# Taking and giving back a lock of Python 3.11 and 3.12, a semaphore of the C library, where the
# processor has instructions for it; and what orders memory in those that do without.
LOCKS = [
    ("MOV W6,#1; MOV W7,#0; CASA W6,W7,[X5]", "MOV W6,#0; MOV W7,#1; CASL W6,W7,[X5]"),
    ("LDAR W6,[X5]", "MOV W7,#1; STLR W7,[X5]"),
]


def ever_seen_early(between_stores: str, between_loads: str, free: int = 1) -> str:
    """Ask the model of ARM's memory whether a stamp can be seen before the data of its message."""
    writer = f"MOV W0,#1; STR W0,[X1]; {between_stores}; MOV W2,#1; STR W2,[X3]".split("; ")
    reader = f"LDR W0,[X3]; {between_loads}; LDR W2,[X1]".split("; ")
    rows = itertools.zip_longest(["P0", *writer], ["P1", *reader], fillvalue="")
    places = f"{{ l={free}; m={free}; 0:X1=x; 0:X3=y; 0:X5=l; 1:X1=x; 1:X3=y; 1:X5=m; }}"
    lines = ["AArch64 MP", places, *(f"{a} | {b} ;" for a, b in rows)]
    with NamedTemporaryFile("w", suffix=".litmus") as file:
        file.write("\n".join([*lines, r"exists (1:X0=1 /\ 1:X2=0)", ""]))
        file.flush()
        done = subprocess.run(["herd7", file.name], capture_output=True, text=True, check=True)
    return re.search(r"Observation MP (\w+)", done.stdout)[1]


@pytest.mark.skipif(shutil.which("herd7") is None, reason="needs herd7, of Debian's herdtools7")
@pytest.mark.parametrize(("take", "give"), LOCKS, ids=["atomic", "exclusive"])
def test_lock_taken_twice_orders_memory_on_arm_and_taken_once_does_not(
    take: str, give: str
) -> None:
    fence, once = "DMB SY", f"{take}; {give}"
    assert ever_seen_early(once, fence) == ever_seen_early(fence, once) == "Sometimes"
    # The inner half of twice: the model takes minutes for both halves, and the other only adds order.
    inner = f"{give}; {take}"
    for stores, loads in ((inner, fence), (fence, inner)):
        assert ever_seen_early(stores, loads, free=0) == "Never"


class Taken:
    """A lock behind whose taking an interrupt may come."""

    def __init__(self, done: list[str], *, interrupts: bool) -> None:
        self._done, self._lock, self._interrupts = done, allocate_lock(), interrupts

    def __enter__(self) -> None:
        assert self._lock.acquire(timeout=5)
        self._done.append("take")
        if self._interrupts:
            raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._done.append("give")


def test_fence_takes_a_lock_twice_where_memory_may_be_reordered(monkeypatch) -> None:
    """One that nobody waits for if an interrupt has left it taken."""
    done: list[str] = []
    monkeypatch.setattr(notes, "_STRONGLY_ORDERED", False)
    for interrupts in (True, False):
        made = partial(Taken, done, interrupts=interrupts)
        monkeypatch.setattr(notes.threading, "Lock", made)
        with pytest.raises(KeyboardInterrupt) if interrupts else nullcontext():
            notes.fence()
    assert done == ["take"] + ["take", "give"] * 2
