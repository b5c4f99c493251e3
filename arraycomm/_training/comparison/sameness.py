"""`raise_on_difference`: whether all ranks hold the same, and if not, what differs."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from arraycomm._arrays.dlpack import offered
from arraycomm._calls.operation import Context, Operation
from arraycomm._callsite import call_site
from arraycomm._communicator import Communicator, runner_of
from arraycomm._errors import MismatchError
from arraycomm._protocol.agreement import Agreement, UndeliveredError
from arraycomm._protocol.header import Signature, digest
from arraycomm._session import world
from arraycomm._training.comparison.differences import Item, array_item, find_difference
from arraycomm._transports.base import Steps
from arraycomm._trees.nodes import is_torch
from arraycomm._trees.pytrees import flatten
from arraycomm._trees.static import Describer, Static, UnknownValueError, name_of, texts_of
from arraycomm._trees.synchronize import state_of

_TEXTS: Final = (type(None), bool, int, float, complex, str, bytes, np.generic)
# Characters of a value that messages show.
_SHOWN: Final = 100


def raise_on_difference(tree: Any, *, comm: Communicator | None = None) -> Any:
    """Raise on every rank unless all ranks have the same; collective.

    For whatever has to be the same for a program to be right: the order of data, a configuration,
    the state of a random generator, a model.

    Parameters
    ----------
    tree : any object
        Arrays, which are compared bit by bit; numbers, text and bytes; containers of these, also
        torch modules, optimizers, schedules and scalers; random generators, by their states;
        functions and classes, by their names; enums too. Of any other object, what `pickle` takes
        of it is compared.
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    any
        `tree` itself.

    Raises
    ------
    MismatchError
        On every rank: the path of the first difference, the values there, and how many there are.
        The communicator can still be used.
    TypeError
        An object cannot be compared; the message names its path.

    Notes
    -----
    One small exchange of a digest; every rank reads its own arrays once, at about the speed of
    memory. Those on a device of torch are read there; others are copied to the host.
    `DistributedOptimizer` compares what its steps depend on by itself.

    Examples
    --------
    >>> order = ac.raise_on_difference(np.random.default_rng(7).permutation(len(data)))
    """
    return runner_of(comm or world()).call(RaiseOnDifference, tree)


class RaiseOnDifference(Operation):
    """See `raise_on_difference`."""

    name, code = "raise_on_difference", 61

    def __init__(self, context: Context, tree: Any) -> None:
        super().__init__(context)
        self._tree, self._site = tree, call_site()
        self._arrays: dict[str, Any] = {}
        self._items = list(self._look(tree, "tree"))
        self.signature = Signature(self.name)
        self.word = digest([item[:3] for item in self._items])

    def _look(self, tree: Any, name: str) -> Iterator[Item]:
        """Return what is compared of a tree."""
        flat = flatten(tree, name, rebuilds=False)
        for path, leaf in (*zip(flat.paths, flat.leaves, strict=True), *flat.stayed):
            yield from self._look_at(leaf, path)
        for extra in flat.extras:
            yield from self._look(extra.module.get_extra_state(), extra.path)
        for line in flat.structure.splitlines():
            path, _, kind = line.rpartition(": ")
            yield Item(f"the type of {path}", kind, 0, kind)
        for path, text in texts_of(flat.static, alone=self.group.size == 1):
            yield Item(path, "", digest(text), text)

    def _look_at(self, leaf: Any, path: str) -> Iterator[Item]:
        """Return what is compared of a leaf."""
        kind = type(leaf).__qualname__
        if isinstance(leaf, _TEXTS):
            yield Item(path, kind, digest(leaf), repr(leaf)[:_SHOWN])
        elif _is_array(leaf):
            self._arrays[path] = words = _words_of(leaf)
            try:
                yield array_item(path, words)
            except (TypeError, BufferError, ValueError, RuntimeError) as error:
                raise TypeError(f"{path}: {error}") from error
        elif (state := state_of(leaf, path)) is not None:
            yield from self._look(state.value, f"{path}.state_dict()")
        elif (found := _generator_state(leaf)) is not None:
            yield from self._look(found, f"{path}.state")
        elif name_of(leaf) is not None:
            [(_, called)] = texts_of([Static(None, [(path, leaf)])], alone=True)
            yield Item(path, kind, digest(called), called)
        else:
            described, text = _described(leaf, path), repr(leaf)[:_SHOWN]
            # What says where an object is says nothing about it.
            said = f"a {described}" if " at 0x" in text else text
            yield Item(path, kind, digest(described), said)

    def steps(self, agreement: Agreement) -> Steps:
        if len(set(agreement.free_words())) == 1:
            return
        control = self.group.control
        found = yield from find_difference(control, self._site, self._items, self._arrays)
        what = "arrays" if found.is_array else "other values"
        count = f"{found.differing} of {found.total} {what} differ"
        order = ". The ranks have the same values in another order" if found.reordered else ""
        raise UndeliveredError(
            MismatchError(
                f"{self.name}: {found.name} is not the same on all ranks: {found.said}; "
                f"{count}{order}"
            )
        )

    def result(self, agreement: Agreement) -> Any:
        return self._tree


def _described(leaf: Any, path: str) -> str:
    """Return a text that is the same for equal objects on all ranks."""
    try:
        return Describer(whole=True).shown(leaf)
    except UnknownValueError as error:
        said = f"{path} cannot be compared ({error}); pass parts that pickle takes"
        raise TypeError(said) from error


def _is_array(leaf: Any) -> bool:
    is_array = offered(leaf, "shape") and offered(leaf, "dtype")
    return is_array and getattr(leaf.dtype, "kind", "f") not in "OUSTMm"


def _words_of(array: Any) -> Any:
    """Return the words of JAX's random keys, and any other array as it is."""
    if str(array.dtype).startswith("key<"):
        return sys.modules["jax"].random.key_data(array)
    return array


def _generator_state(leaf: Any) -> Any:
    """Return the state of a random generator, or None for anything else."""
    if isinstance(leaf, np.random.Generator):
        return leaf.bit_generator.state
    if isinstance(leaf, np.random.BitGenerator):
        return leaf.state
    if isinstance(leaf, np.random.RandomState) or is_torch(leaf, "Generator"):
        return leaf.get_state()
    return leaf.getstate() if isinstance(leaf, random.Random) else None
