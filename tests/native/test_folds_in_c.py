"""The native part's folds beside NumPy's: the same bits, with each of this machine's instruction sets."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from arraycomm._dtypes import BY_NAME
from arraycomm._folds import by_numpy
from arraycomm._folds.ieee import in_ieee_mode
from arraycomm._native import compiled
from tests.support.guarded import check_guard, guarded, placed, special, values
from tests.support.launcher import run_python
from tests.support.oracle import CASES, IDS, NARROW, same_result

if compiled is None:
    pytest.skip("the native part was not built, or is not to be used", allow_module_level=True)

from arraycomm._folds import in_c

Array = np.ndarray[Any, Any]


@pytest.fixture(params=compiled.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = compiled.use_level(compiled.levels().index(request.param))
    yield request.param
    compiled.use_level(before)


def _check(op: str, dtype: np.dtype[Any], rows: list[Array], offset: int = 0) -> None:
    """Fold, and fold all prefixes, into guarded memory."""
    empty = np.zeros(len(rows[0]), dtype)
    wanted = [empty.copy() for _ in rows]
    by_numpy.prefixes(op, dtype, rows, wanted)
    memory = [guarded(len(empty), dtype, offset) for _ in range(len(rows) + 1)]
    outs = [out for out, _ in memory]
    in_c.fold(op, dtype, rows, outs[0])
    in_c.prefixes(op, dtype, rows, outs[1:])
    for out, want in zip(outs, [wanted[-1], *wanted], strict=True):
        assert same_result(out.copy(), want, op)
    half = len(rows) // 2 if by_numpy.goes_on(op) else 0
    memory.append(guarded(len(empty), by_numpy.total_dtype(dtype), offset))
    total, _ = memory[-1]
    if half:
        in_c.fold_on(op, dtype, None, 0, rows[:half], total, more=True)
    in_c.fold_on(op, dtype, total if half else None, half, rows[half:], outs[0], more=False)
    assert same_result(outs[0].copy(), wanted[-1], op)
    for pair in memory:
        check_guard(*pair)


def _stored(array: Array) -> Array:
    """Return the elements as another library may store them: True is any byte but zero."""
    if array.dtype != np.bool_:
        return array
    return (array * np.resize(np.arange(1, 256, dtype=np.uint8), len(array))).view(bool)


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=IDS)
def test_folds_in_c_are_those_of_numpy(level, dtype, op) -> None:
    """Fewer elements than a vector, more than a block; aligned to bytes; more rows than have room."""
    for rows, count, offset in (
        (1, 70, 0),
        (2, 700, 1),
        (3, 0, 0),
        (3, 9001, 3),
        (4, 700, 1),
        (20, 33, 0),
    ):
        arrays = [placed(_stored(values(dtype, count, row)), offset) for row in range(rows)]
        _check(op, dtype, arrays, offset)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_pair_of_narrow_floats_is_rounded_as_ml_dtypes_does_it(level, dtype) -> None:
    """Every pair of 8 bits; of 16 bits every number with some, which are halfway between two as well."""
    every = np.arange(1 << (8 * dtype.itemsize)).astype(f"uint{8 * dtype.itemsize}").view(dtype)
    others = every if dtype.itemsize == 1 else np.append(special(dtype), values(dtype, 8, 1))
    pair = [row.reshape(-1) for row in np.meshgrid(every, others)]
    for op in ("sum", "prod", "min", "max"):
        wanted, got = (np.empty(pair[0].shape, dtype) for _ in range(2))
        by_numpy.fold(op, dtype, pair, wanted)
        in_c.fold(op, dtype, pair, got)
        assert same_result(got, wanted, op)


@pytest.fixture
def threads() -> Iterator[int]:
    before = compiled.use_threads(3)
    yield 3
    compiled.use_threads(before)


# Bytes of a row of which a few are folded in pieces, the last of them shorter.
_LARGE: Final = (2 << 20) + 700


@pytest.mark.parametrize(
    ("name", "op"),
    [("float32", "mean"), ("bfloat16", "mean"), ("complex64", "mean"), ("int8", "xor")],
)
def test_several_threads_give_the_same_bits(threads, name, op) -> None:
    dtype = BY_NAME[name].dtype
    _check(op, dtype, [values(dtype, _LARGE // dtype.itemsize, row) for row in range(3)])


def test_several_threads_take_part_in_a_large_fold(threads) -> None:
    """The thread that calls has not worked for as long as all threads of this process."""
    rows, out = [np.ones(8 << 20, np.float16)] * 8, np.empty(8 << 20, np.float16)
    in_c.fold("sum", out.dtype, rows, out)
    own, all_threads = time.thread_time(), time.process_time()
    in_c.fold("sum", out.dtype, rows, out)
    own, all_threads = time.thread_time() - own, time.process_time() - all_threads
    assert own < 0.9 * all_threads
    assert (out == 8).all()


_SHARED: Final = """
import os
import pathlib
import signal
import threading
import numpy as np
from arraycomm._folds import in_c
from arraycomm._native import compiled

compiled.use_threads(4)
rows = [np.full(2_000_000, k, np.float32) for k in range(4)]

def fold():
    for _ in range(5):
        out = np.empty_like(rows[0])
        in_c.fold("sum", out.dtype, rows, out)
        assert (out == 6).all()

def tasks():
    return set(pathlib.Path("/proc/self/task").iterdir())

before = tasks()
fold()
helpers = tasks() - before
assert len(helpers) == 3
# Signals go to the threads that Python knows.
for helper in helpers:
    status = (helper / "status").read_text()
    blocked = next(line for line in status.splitlines() if line.startswith("SigBlk"))
    assert int(blocked.split()[1], 16) >> (signal.SIGINT - 1) & 1
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
# Several callers at once, of whom one has the helpers.
callers = [threading.Thread(target=fold) for _ in range(3)]
for caller in callers:
    caller.start()
# A forked process has no helpers, and makes its own; here while they are at work.
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        fold()
        os._exit(len(tasks()) - 4)
    children.append(child)
for caller in callers:
    caller.join()
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0, 0]
print("done")
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at threads in /proc")
def test_helpers_are_shared_by_callers_and_left_behind_by_forks() -> None:
    # Python 3.12 and later warn of forks beside threads.
    quiet = ("-W", "ignore:This process:DeprecationWarning")
    job = run_python(*quiet, "-c", _SHARED, timeout=120)
    assert (job.stdout, job.stderr, job.returncode) == ("done\n", "", 0)


def test_folds_in_c_have_a_mode_of_their_own(level) -> None:
    """A thread that rounds upwards gets what is nearest all the same, and goes on rounding upwards."""
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    rows, out = [np.full(100, 1.0), np.full(100, 2.0**-60)], np.zeros(100)
    before = library.fegetround()
    library.fesetround(0x400000 if platform.machine() == "aarch64" else 0x800)
    try:
        in_c.fold("sum", out.dtype, rows, out)
        kept = not in_ieee_mode()
    finally:
        library.fesetround(before)
    assert kept
    assert (out == 1.0).all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the mode is a word of x86 processors")
@pytest.mark.parametrize("bits", [1 << 15, 1 << 6], ids=["results", "operands"])
def test_folds_in_c_keep_subnormal_numbers(level, bits) -> None:
    """A thread for which they are zero gets them all the same; glibc has the mode in the last word of eight."""
    library, mode = ctypes.CDLL(ctypes.util.find_library("m")), (ctypes.c_uint32 * 8)()
    rows, out = [np.full(100, 2.0**-1030), np.full(100, 2.0**-1040)], np.zeros(100)
    wanted = rows[0] + rows[1]
    library.fegetenv(mode)
    mode[7] |= bits
    library.fesetenv(mode)
    try:
        in_c.fold("sum", out.dtype, rows, out)
        library.fegetenv(mode)
    finally:
        kept, mode[7] = mode[7] & bits, mode[7] & ~bits
        library.fesetenv(mode)
    assert kept
    assert out.tobytes() == wanted.tobytes()


def test_what_does_not_fit_is_refused() -> None:
    row, out = np.zeros(4, np.float32), np.zeros(4, np.float32)
    locked = out.copy()
    locked.flags.writeable = False
    for error, message, rows, result in (
        (ValueError, "must have the same elements", [row, row[:3]], out),
        (ValueError, "must have the same elements", [row], out[:3]),
        (ValueError, "must have the same elements", [row.view(np.uint8)[:6]], out.view(np.uint8)[:6]),
        (ValueError, "must not overlap a row", [row, out], out),
        (ValueError, "there must be a row", [], out),
        (ValueError, "contiguous", [np.zeros(8, np.float32)[::2]], out),
        (ValueError, "each row must be contiguous", np.zeros((2, 8), np.float32)[:, ::2], out),
        (ValueError, "must have the same elements", np.zeros((2, 3), np.float32), out),
        (ValueError, "read-only", [row], locked),
        (TypeError, "bytes-like", [None], out),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            in_c.fold("sum", row.dtype, rows, result)
    with pytest.raises(ValueError, match="no fold has the number 10000"):
        compiled.fold(10_000, [row], out)
    with pytest.raises(ValueError, match="no fold 'and' of float32"):
        in_c.number_of("and", row.dtype)
    with pytest.raises(ValueError, match="as many results as rows"):
        in_c.prefixes("sum", row.dtype, [row, row], [out])
    half, totals = np.zeros(4, np.float16), np.zeros(4, np.float32)
    for total, rows, result, more in (
        (None, [half], half.copy(), True),
        (None, [half], totals, False),
        (half.copy(), [half], half.copy(), False),
        (None, [half, half[:3]], totals, True),
    ):
        with pytest.raises(ValueError, match="must have the same elements"):
            in_c.fold_on("sum", half.dtype, total, 1, rows, result, more=more)
    for total, result, more in ((None, half, False), (totals, totals, True)):
        with pytest.raises(ValueError, match="must not overlap"):
            in_c.fold_on("sum", half.dtype, total, 1, [half], result, more=more)
    with pytest.raises(ValueError, match="there must be a row"):
        in_c.fold_on("sum", half.dtype, None, 0, [], totals, more=True)
    with pytest.raises(ValueError, match="no level 9"):
        compiled.use_level(9)
    for limit in (0, 65):
        with pytest.raises(ValueError, match=f"there may be 1 to 64 threads, not {limit}"):
            compiled.use_threads(limit)
