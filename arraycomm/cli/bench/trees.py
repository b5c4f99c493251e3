"""Trees in the benchmark: the gradients of models, reduced as a whole or leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap
from math import prod
from typing import Any, Final

import numpy as np

import arraycomm
from arraycomm._arrays.buffer import Array
from arraycomm.cli.bench.contenders import Contender, Field, as_array, as_numpy, pattern

Shapes = tuple[tuple[int, ...], ...]

_FLOAT: Final = np.dtype(np.float32)


def nbytes_of(shapes: Shapes) -> int:
    """Return the bytes of a tree of float32 with these shapes."""
    return _FLOAT.itemsize * sum(map(prod, shapes))


def _resnet50() -> Shapes:
    """Parameters of ResNet-50 (He, Zhang, Ren, Sun, 2016), in torchvision's order."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outputs = 4 * width
            shapes += [(width, inputs, 1, 1), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            shapes += [(outputs, width, 1, 1), (outputs,), (outputs,)]
            if block == 0:
                shapes += [(outputs, inputs, 1, 1), (outputs,), (outputs,)]
            inputs = outputs
    return (*shapes, (1000, 2048), (1000,))


def _gpt2() -> Shapes:
    """Parameters of the small GPT-2 (Radford and others, 2019): 12 blocks of width 768."""
    width = 768
    shapes: list[tuple[int, ...]] = [(50257, width), (1024, width)]
    for _ in range(12):
        shapes += [(width,), (width,), (width, 3 * width), (3 * width,)]
        shapes += [(width, width), (width,), (width,), (width,)]
        shapes += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return (*shapes, (width,), (width,))


TREES: Final = {
    "ResNet-50": _resnet50(),
    "GPT-2": _gpt2(),
    "1,000 leaves": tuple((1000 + leaf,) for leaf in range(1000)),
}


class TreeCase:
    """One tree to sum, and memory for the results; all contenders use the same memory."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        shapes = TREES[name]
        self.dtype_name, self.nbytes = _FLOAT.name, nbytes_of(shapes)
        self.x = [_leaf(number, rank, shape) for number, shape in enumerate(shapes)]
        self.y = [np.zeros(shape, _FLOAT) for shape in shapes]
        self._size = size

    def verify(self, contender: Contender) -> str:
        """Return what is wrong with what a contender leaves in `y` on this rank, or nothing."""
        for leaf in self.y:
            leaf[...] = 0
        contender.answer()
        for number, leaf in enumerate(self.y):
            ranks = range(self._size)
            want = sum(_leaf(number, rank, leaf.shape) for rank in ranks)
            if not np.array_equal(leaf, want):
                return f"leaf {number} is wrong"
        return ""


def _leaf(number: int, rank: int, shape: tuple[int, ...]) -> Array:
    """Return small integers that differ between leaves and ranks, and whose sums are exact."""
    values: Array = (pattern(rank, prod(shape)) + np.uint8(number % 5)).astype(_FLOAT)
    return values.reshape(shape)


def keys_of_trees(framework: str) -> list[str]:
    """Return the keys of the contenders for trees of a framework's arrays."""
    keys = ["plan", "tree", *([] if framework == "jax" else ["mpi4py"])]
    return [*keys, "gloo"] if framework == "torch" else keys


def make_for_tree(key: str, framework: str, case: TreeCase, field: Field) -> Contender:
    """Return a contender, or raise `UnsupportedError`."""
    x, y = ([as_array(leaf, framework) for leaf in leaves] for leaves in (case.x, case.y))
    call: Callable[[], Any]
    if key == "gloo":
        return _gloo(x, case, field)
    if key == "mpi4py":
        return _leaf_by_leaf(framework, x, y, field)
    if key == "plan":
        plan = field.comm.plan(x, "sum")
        call = _keeping(lambda: plan(x))
    else:
        call = _keeping(lambda: arraycomm.allreduce_tree(x, "sum", comm=field.comm))
    return Contender(key, framework, call, lambda: _kept(case, call()))


def _keeping(reduce: Callable[[], Any]) -> Callable[[], Any]:
    """Keep each result until the next one is there, as a training loop does."""
    last: list[Any] = [None]

    def call() -> Any:
        last[0] = reduce()
        return last[0]

    return call


def _leaf_by_leaf(framework: str, x: list[Any], y: list[Any], field: Field) -> Contender:
    pairs = list(zip(x, y, strict=True))

    def call() -> None:
        for _ in starmap(field.mpi.Allreduce, pairs):
            pass

    return Contender("mpi4py", framework, call, call)


def _gloo(x: list[Any], case: TreeCase, field: Field) -> Contender:
    buffers = [as_array(np.zeros(leaf.shape, _FLOAT), "torch") for leaf in case.x]
    reduce = field.torch_distributed("gloo").all_reduce

    def call() -> None:
        for buffer in buffers:
            reduce(buffer)

    def answer() -> None:
        for buffer, leaf in zip(buffers, x, strict=True):
            buffer.copy_(leaf)
        call()
        _kept(case, buffers)
        # gloo sums in place: values other than zeros would grow from call to call.
        for buffer in buffers:
            buffer.zero_()

    return Contender("gloo", "torch", call, answer)


def _kept(case: TreeCase, results: Any) -> None:
    """Copy results to where `TreeCase.verify` looks for them."""
    for leaf, result in zip(case.y, results, strict=True):
        leaf[...] = as_numpy(result)
