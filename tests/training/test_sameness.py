"""`raise_on_difference`, and the digests of arrays."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import pathlib
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from tests.support.on_ranks import SIZES

torch: Any = pytest.importorskip("torch")
jax: Any = pytest.importorskip("jax")


@dataclasses.dataclass
class Config:
    rate: float
    name: str


class Thing:
    def __init__(self, x: Any) -> None:
        self.x = x


def turned(*items: Any) -> Any:
    """Return the items in one order, then in the other: sets keep it where hashes are alike."""
    return items[:: 1 if next(_CALLS) % 2 else -1]


def padded(n: int) -> Any:
    """Return structures whose dtype is said in two ways, and that differ in bytes of no field."""
    inner = np.dtype([("a", "i1"), ("b", "f8")], align=True)
    plain = {"names": ["a", "b"], "formats": ["i1", "f8"], "offsets": [0, 8], "itemsize": 16}
    inner = (inner, np.dtype(plain))[next(_CALLS) // 2 % 2]
    made = np.frombuffer(bytes([next(_CALLS) % 256]) * 96, [("x", inner, 3)]).copy()
    made["x"]["a"], made["x"]["b"] = n, 2.0
    return made


def trained(rate: float) -> Any:
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(2.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


_CALLS = itertools.count()
# Makes a tree for a number, and what an error says of numbers that are not the same.
KINDS: dict[str, tuple[Callable[[int], Any], str]] = {
    "number": (lambda n: {"a": [1, n]}, r"tree\['a'\]\[1\] is not .*: 0, at .*: 1, at"),
    "text": (lambda n: f"{n}", "'0', at .*'1', at"),
    "array": (lambda n: np.arange(6).reshape(2, 3) * (n + 1), r"ranks? 0.*: 1 at \[0, 1\]"),
    "dtype": (lambda n: np.zeros(3, ["f4", "f8"][n]), r"float32 \(3,\).*float64 \(3,\)"),
    "tensor": (lambda n: torch.full((3,), float(n)).bfloat16(), r"ranks? 0.*: 0.0 at \[0\]"),
    "jax": (lambda n: jax.numpy.full(3, n), r"ranks? 0.*: 0 at \[0\]"),
    "key": (jax.random.key, r"ranks? 0.*: 0 at \[1\]"),
    "complex": (lambda n: np.full(2, 1j * n), r"0j at \[0\]"),
    "strings": (lambda n: np.array(["a", "b" * n]), "array"),
    "dataclass": (lambda n: Config(0.1, "x" * n), r"tree.name is not"),
    "set": (lambda n: {f"{n}", "q"}, "tree"),
    "sets": (lambda n: {frozenset(turned(0, 8)), frozenset([n])}, "tree"),
    "set in object": (lambda n: Thing({n, turned(0, 8)[0], 8, 0}), "a Thing with the digest"),
    "structures": (padded, "array"),
    "held generator": (lambda n: Thing(np.random.default_rng(n)), "a Thing with the digest"),
    "held structures": (lambda n: Thing(padded(n)), "a Thing with the digest"),
    "enum": (lambda n: [*enum.Enum("E", {"A": object(), "B": object()})][n], "a E.A.*a E.B"),
    "path": (lambda n: pathlib.Path("a" * (n + 1)), r"PosixPath\('a'\).*PosixPath\('aa'\)"),
    "object": (Thing, "a Thing with the digest"),
    "function": (lambda n: [print, len][n], r"builtins.print.*builtins.len"),
    "numpy generator": (np.random.default_rng, r"tree.state\['state'\]"),
    "old generator": (np.random.RandomState, r"tree.state\[1\]"),
    "python generator": (random.Random, r"tree.state\[1\]"),
    "torch generator": (lambda n: torch.Generator().manual_seed(n), r"tree.state is not"),
    "optimizer": (lambda n: trained(0.1 + n), r"tree\['model'\].weight is not .* at \[0, 0\]"),
    "containers": (lambda n: [(1, 2), [1, 2]][n], "the type of tree is not .*tuple.*list"),
    "missing": (lambda n: {"a": 1} if n else {"a": 1, "b": 2}, r"tree\['b'\].*missing"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_the_same_passes_and_a_difference_is_named_on_every_rank(on_ranks, kind) -> None:
    make, says = KINDS[kind]

    def compare(comm: ac.Communicator) -> str | None:
        tree = make(0)
        assert ac.raise_on_difference(tree, comm=comm) is tree
        if comm.size == 1:
            return None
        with pytest.raises(ac.MismatchError) as error:
            ac.raise_on_difference(make(int(comm.rank == comm.size - 1)), comm=comm)
        # The communicator can still be used.
        assert comm.allreduce(1, "sum") == comm.size
        return str(error.value)

    for size in SIZES:
        said = on_ranks(size, compare)
        assert len(set(said)) == 1
        assert said[0] is None or re.search(says, said[0], re.DOTALL), said[0]
