"""The text and the tables of docs/interop.md, found by trying each pair of frameworks."""

from __future__ import annotations

from pathlib import Path

import jax

from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import view
from arraycomm._dtypes import BY_NAME, TABLE
from docs.studies.interop.sharing import FRAMEWORKS, MEMORY, make, outcome, same_memory, sample

PAGE = Path(__file__).resolve().parents[2] / "interop.md"

HEAD = """\
---
description: 'Arrays of NumPy, PyTorch and JAX as arrays of one another: which share memory, and which are copied'
---

<!-- Written by docs/studies/interop; change that program, not this page. -->

# Arrays between frameworks

`arraycomm.exchange(x, to)` turns an array of one framework into an array of another. It shares
memory if that is safe, and copies otherwise:

```python
import arraycomm as ac
import numpy as np
import torch

x = np.arange(6.0)
t = ac.exchange(x, "torch")
t[0] = 7  # the same memory
assert x[0] == 7
```

`copy=False` never copies: if a copy is needed, it raises a `BufferError` that gives the reason.
`copy=True` always copies. The collectives read arrays in the same manner: if this page shows a copy for
`exchange` to NumPy, a collective makes that copy when it reads `x`.
"""

PAIRS = """\
## Every pair of frameworks

This table is for a fresh, writable, C-contiguous array whose memory is aligned to 64 bytes. "all" means all dtypes
that both frameworks have. The 64-bit mode of JAX is on. If it is off, `exchange` refuses int64, uint64, float64 and
complex128 with a `TypeError`; it does not cut them to 32 bits.

| from | to | shares memory | copies | why |
|---|---|---|---|---|
"""

LAYOUTS = """\
Results are like the array that a rank passes. A rank that passes nothing to `bcast` gets an array of the root's framework, if that
is loaded there, has the dtype, and the root's array is on the host; else a NumPy array. The scatters and `recv` give NumPy arrays. `like` asks for another framework.

## Other memory

This table is for float32 arrays of NumPy with other layouts. The same holds for memory of any other
framework or protocol.

| memory | to NumPy | to torch | to JAX | to array_api_strict |
|---|---|---|---|---|
"""

RESULTS = """\
## Results

A collective writes its result into new memory, aligned to 64 bytes, and hands that memory to the
caller's framework. "hands over" means that the result is that very memory, and that nothing else refers to it.

| framework | hands over | copies |
|---|---|---|
"""

TAIL = """\
## Rules behind the tables

- **Dtypes.** {missing}
  In NumPy, bfloat16 and float8 are the dtypes of `ml_dtypes`. They move between NumPy, PyTorch and JAX
  without a copy.
- **Read-only.** A NumPy array over a JAX array, over `bytes`, or over any memory that its owner declares read-only
  is read-only. PyTorch has no read-only tensors, so it gets a copy. A DLPack capsule without a version
  cannot say whether its memory may be written to, and counts as read-only.
- **JAX trusts shared memory not to change.** After `exchange(x, "jax")` has shared the memory of `x`, do
  not write to `x`. If you have to, pass `copy=True`.
- **Conversions.** Python numbers have no memory to share. Other byte orders, and the lazy conjugates and negatives of
  PyTorch, are converted when they are read.
- **Devices.** Frameworks on one device share memory by DLPack, in the order of both
  frameworks' current streams. Between host and device there is one copy; a copy to the host goes through pinned
  memory if CuPy makes it. [Arrays on GPUs](devices.md) says what collectives do with them.
- **MLX.** MLX arrays are read in place. MLX copies what it is given.
- **Other frameworks.** Their arrays are read by `__dlpack__`, `__cuda_array_interface__`, `__array_interface__` or
  the buffer protocol, whichever works first, and in place if the memory is on the host. If an array
  has an array API namespace, the result is what the `from_dlpack` of that namespace returns, or its `asarray`. A namespace
  that can make no array of the result's dtype and shape raises a `TypeError` before data moves, and `PeerError` on the other ranks.
  If the shape depends on other ranks' arrays, as that of `allgatherv`, only this rank raises, after the data has moved; the ranks stay in step.
  An object without a namespace (Paddle, TensorFlow, Warp) comes back as a NumPy array.
- **Classes with arithmetic of their own.** Quantities with a unit (astropy, unyt, pint, quantities), masked arrays, `numpy.matrix` and other
  classes that override the arithmetic of NumPy's arrays, torch's tensors or Python's numbers mean more than their memory: they define
  operators such as `__add__`, or `__array_ufunc__`, `__array_function__`, `__array_wrap__` or `__torch_function__`. An object of another
  framework has operators in any case, so there only the last kind counts, without `__array_wrap__`. None as `__array_ufunc__` is
  no arithmetic. `exchange` and all collectives refuse such classes with a `TypeError` that names the class. Pass the plain array, in the same unit on all ranks.
- **Subclasses without arithmetic of their own** come back as the plain array or number, as their sums do: `numpy.memmap` as a NumPy array,
  an `IntEnum` as an int. Record arrays stay record arrays.
- **Gradients of other libraries.** An array with `requires_grad` (Warp), with `stop_gradient` off (Paddle), or recorded by TensorFlow's
  `GradientTape` or by Dr.Jit is refused with a `TypeError`, as a torch tensor that requires gradients is: its gradient would be lost. The message names what to pass, such as
  `x.detach()` or `tf.stop_gradient(x)`.
"""


def _names(found: list[str], total: int) -> str:
    return "–" if not found else "all" if len(found) == total else ", ".join(found)


def _pair_row(source: str, target: str) -> str:
    outcomes = {}
    for name in BY_NAME:
        x = make(source, name)
        found = None if x is None else outcome(x, target)
        if found is not None:
            outcomes[name] = found
    shared = [name for name, found in outcomes.items() if found == "shares"]
    copied = [name for name, found in outcomes.items() if found != "shares"]
    reasons = sorted({outcomes[name] for name in copied})
    cells = (
        _names(shared, len(outcomes)),
        _names(copied, len(outcomes)),
        "; ".join(reasons) or "–",
    )
    return _row(source, target, *cells)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _memory_row(label: str) -> str:
    layout = MEMORY[label]
    outcomes = (outcome(layout(sample("float32")), framework) for framework in FRAMEWORKS)
    return _row(label, *(_cell(found) for found in outcomes))


def _cell(found: str | None) -> str:
    return "shares" if found == "shares" else f"copies: {found}"


def _result_row(framework: str) -> str:
    handed: list[str] = []
    copied: list[str] = []
    for name in BY_NAME:
        x = make(framework, name)
        if x is not None:
            array = sample(name)
            same = same_memory(to_framework(array, view(x, "interop")), array)
            (handed if same else copied).append(name)
    total = len(handed) + len(copied)
    return _row(framework, _names(handed, total), _names(copied, total))


def _missing() -> str:
    sentences = []
    for framework in FRAMEWORKS:
        lacking = [name for name in BY_NAME if make(framework, name) is None]
        if lacking:
            sentences.append(f"{framework} lacks {', '.join(lacking)}; the others have all")
    return f"{'. '.join(sentences)} {len(TABLE)} dtypes."


def written() -> str:
    """Return the page, as this environment makes it."""
    with jax.enable_x64(True):
        pairs = [_pair_row(a, b) for a in FRAMEWORKS for b in FRAMEWORKS if a != b]
        memory = [_memory_row(label) for label in MEMORY]
        results = [_result_row(framework) for framework in FRAMEWORKS]
        tail = TAIL.format(missing=_missing())
    sections = (HEAD, PAIRS + "".join(pairs), LAYOUTS + "".join(memory))
    return "\n".join((*sections, RESULTS + "".join(results), tail))
