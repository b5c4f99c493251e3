"""Writes docs/interop.md: what shares memory and what is copied, as found by trying it.

Run as `python docs/interop.py` where NumPy, PyTorch, JAX and array-api-strict are installed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from arraycomm._arrays.exchange import exchange
from arraycomm._arrays.results import allocate, to_framework
from arraycomm._arrays.views import view
from arraycomm._dtypes import BY_NAME, TABLE

FRAMEWORKS = ("numpy", "torch", "jax", "array_api_strict")

HEAD = """\
<!-- Written by docs/interop.py; change that file, not this one. -->

# What shares memory and what is copied

`arraycomm.exchange(x, to)` turns an array of one framework into an array of another. It shares
memory where that is safe, and copies where it is not:

```python
import arraycomm as ac
import numpy as np
import torch

x = np.arange(6.0)
t = ac.exchange(x, "torch")
t[0] = 7  # the same memory
assert x[0] == 7
```

`copy=False` never copies: it raises a `BufferError` that says why a copy would be needed.
`copy=True` always copies. The collectives use the same door, so a copy that this page shows for
`exchange` towards NumPy is a copy that a collective makes when it reads `x`.
"""

PAIRS = """\
## Every pair of frameworks

For a fresh, writable, C-contiguous array whose memory is aligned to 64 bytes. "all" are the dtypes
that both frameworks have. JAX has its 64-bit mode on; with it off, int64, uint64, float64 and
complex128 are refused with a `TypeError` rather than cut to 32 bits.

| from | to | shares memory | copies | why |
|---|---|---|---|---|
"""

LAYOUTS = """\
## Other memory

For a float32 array in NumPy that is not the plain one above. The same holds for memory of any other
framework or protocol.

| memory | to NumPy | to torch | to JAX | to array_api_strict |
|---|---|---|---|---|
"""

RESULTS = """\
## Results

A collective writes its result into new memory, aligned to 64 bytes, and hands that memory to the
caller's framework. "hands over" means that the result is that memory; nobody else keeps it.

| framework | hands over | copies |
|---|---|---|
"""

TAIL = """\
## Rules behind the tables

- **Dtypes.** {missing}
  bfloat16 and float8 are those of `ml_dtypes` in NumPy, and move between NumPy, PyTorch and JAX
  without a copy.
- **Read-only.** A NumPy array over a JAX array, over `bytes`, or over any memory whose owner says so
  is read-only. PyTorch has no read-only tensors, so it gets a copy. DLPack capsules without a version
  cannot say whether they may be written, and count as read-only.
- **JAX trusts shared memory not to change.** After `exchange(x, "jax")` shared the memory of `x`, do
  not write to `x`; pass `copy=True` if you must.
- **Numbers** have no memory to share. Other byte orders, and the lazy conjugates and negatives of
  PyTorch, are converted on reading.
- **Devices.** Between frameworks on one device, memory is shared by DLPack, in the order of both
  frameworks' current streams. Between host and device there is one copy, to the host through pinned
  memory where CuPy makes it. What collectives do with them is on
  [a page of its own](devices.md).
- **MLX** is read in place, and copies what it is given.
- **Other frameworks** are read by `__dlpack__`, `__cuda_array_interface__`, `__array_interface__` or
  the buffer protocol, whichever works first, and in place if their memory is the host's. An array
  with an array API namespace gets results of that namespace, by its `from_dlpack`.
"""


def _sample(name: str) -> Any:
    array = allocate((4, 16), BY_NAME[name].dtype)
    array[...] = np.arange(64).reshape(4, 16) % 2
    return array


def _same_memory(x: Any, y: Any) -> bool:
    return np.shares_memory(view(x, "interop").array, view(y, "interop").array)


def _outcome(x: Any, to: Any) -> str | None:
    """Return "shares", the reason for a copy, or None where the framework lacks the dtype."""
    try:
        there = exchange(x, to, copy=False)
    except BufferError as error:
        assert not _same_memory(exchange(x, to), x)
        return str(error).removeprefix("exchange: copy=False, but ").partition(";")[0]
    except TypeError:
        return None
    assert _same_memory(there, x)
    return "shares"


def _names(found: list[str], total: int) -> str:
    return "–" if not found else "all" if len(found) == total else ", ".join(found)


def _make(framework: str, name: str) -> Any:
    try:
        return exchange(_sample(name), framework)
    except TypeError:
        return None


def _pair_row(source: str, target: str) -> str:
    outcomes = {}
    for name in BY_NAME:
        x = _make(source, name)
        outcome = None if x is None else _outcome(x, target)
        if outcome is not None:
            outcomes[name] = outcome
    shared = [name for name, outcome in outcomes.items() if outcome == "shares"]
    copied = [name for name, outcome in outcomes.items() if outcome != "shares"]
    reasons = sorted({outcomes[name] for name in copied})
    cells = (
        _names(shared, len(outcomes)),
        _names(copied, len(outcomes)),
        "; ".join(reasons) or "–",
    )
    return _row(source, target, *cells)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


MEMORY: dict[str, Callable[[Any], Any]] = {
    "every second column": lambda a: a[:, ::2],
    "transposed": lambda a: a.T,
    "one row, repeated": lambda a: np.lib.stride_tricks.as_strided(a, strides=(0, 4)),
    "reversed": lambda a: a[::-1],
    "read-only": _read_only,
    "contiguous, not aligned to 64 bytes": lambda a: a.reshape(-1)[1:],
    "big-endian": lambda a: a.astype(">f4"),
}


def _memory_row(label: str) -> str:
    make = MEMORY[label]
    outcomes = (_outcome(make(_sample("float32")), framework) for framework in FRAMEWORKS)
    return _row(label, *(_cell(outcome) for outcome in outcomes))


def _cell(outcome: str | None) -> str:
    return "shares" if outcome == "shares" else f"copies: {outcome}"


def _result_row(framework: str) -> str:
    handed: list[str] = []
    copied: list[str] = []
    for name in BY_NAME:
        x = _make(framework, name)
        if x is not None:
            array = _sample(name)
            same = _same_memory(to_framework(array, view(x, "interop")), array)
            (handed if same else copied).append(name)
    total = len(handed) + len(copied)
    return _row(framework, _names(handed, total), _names(copied, total))


def _missing() -> str:
    sentences = []
    for framework in FRAMEWORKS:
        lacking = [name for name in BY_NAME if _make(framework, name) is None]
        if lacking:
            sentences.append(f"{framework} lacks {', '.join(lacking)}; the others have all")
    return f"{'. '.join(sentences)} {len(TABLE)} dtypes."


def page() -> str:
    """Return the text of docs/interop.md, as this environment makes it."""
    with jax.enable_x64(True):
        pairs = [_pair_row(a, b) for a in FRAMEWORKS for b in FRAMEWORKS if a != b]
        memory = [_memory_row(label) for label in MEMORY]
        results = [_result_row(framework) for framework in FRAMEWORKS]
        tail = TAIL.format(missing=_missing())
    sections = (HEAD, PAIRS + "".join(pairs), LAYOUTS + "".join(memory))
    return "\n".join((*sections, RESULTS + "".join(results), tail))


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page(), encoding="utf-8")
