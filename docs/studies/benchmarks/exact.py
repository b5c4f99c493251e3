"""What exact sums cost beside sums: `mpiexec -n 2 python exact.py`.

Both take turns, call by call, so that they meet the same machine. Figures are medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import arraycomm as ac

comm = ac.init()
SIZES = (8, 64 << 10, 16 << 20)
ROWS = 10_000_000


def seconds(call: Callable[[], Any]) -> float:
    comm.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(what: str, plain: Callable[[], Any], exact: Callable[[], Any], times: int) -> None:
    for call in (plain, exact) * 3:
        call()
    taken = [(seconds(plain), seconds(exact)) for _ in range(times)]
    usual, longer = np.median(taken, axis=0) * 1e6
    ac.println(
        f"{what}: {usual:.1f} us, exactly {longer:.1f} us, ratio {longer / usual:.2f}", ranks=0
    )


def main() -> None:
    rng = np.random.default_rng(comm.rank)
    for dtype in ("float64", "float32"):
        for size in SIZES:
            x = rng.standard_normal(size // np.dtype(dtype).itemsize).astype(dtype)
            plain, exact = (partial(comm.allreduce, x, op) for op in ("sum", "fsum"))
            compare(
                f"allreduce of {size} bytes of {dtype}", plain, exact, 20 if size > 1 << 20 else 200
            )
    x = rng.standard_normal(ROWS)
    compare("np.sum, and fsum of as many rows a rank", partial(np.sum, x), partial(ac.fsum, x), 10)
    wide = np.ldexp(x, rng.integers(-300, 300, ROWS))
    compare("the same with 600 powers of two", partial(np.sum, wide), partial(ac.fsum, wide), 10)


main()
