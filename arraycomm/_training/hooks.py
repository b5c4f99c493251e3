"""The call of a compression that reduces by itself, so that an error of one rank raises on all."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from array_api_compat import is_array_api_obj

from arraycomm._arrays.exchange import exchange
from arraycomm._communicator import Communicator, group_of
from arraycomm._errors import MismatchError
from arraycomm._protocol.mismatch import name_ranks
from arraycomm._together import raise_together
from arraycomm._training.compressed.compression import Compression, allreduce_together
from arraycomm._training.compressed.states import States, check_states
from arraycomm._trees.pytrees import Flat, flatten

# Bytes that are added up before they enter a digest.
_BLOCK: Final = 4096

# Returns the state of a gradient, given its number and itself.
_StateOf = Callable[[int, Any], Any]


class Hook(NamedTuple):
    """A compression that reduces by itself, for one optimizer."""

    compression: Compression
    comm: Communicator
    op: str
    # Of each parameter, unless they are in the optimizer's own state.
    states: States

    def reduce(self, gradients: dict[int, Any]) -> dict[int, Any]:
        """Reduce gradients, by their numbers, which all ranks have; collective."""
        with raise_together(self.comm):
            result = self._reduce(gradients, self.states.of)
        return self._remembered(gradients, result)

    def reduce_tree(self, make: Callable[[], Flat]) -> Any:
        """Reduce the tree that `make` returns; collective. Leaves may be None on all ranks."""
        flat, result = self._reduce_tree(make, self.states.of)
        reduced = self._remembered(dict(enumerate(flat.leaves)), result)
        return flat.rebuild([reduced.get(number) for number in range(len(flat.leaves))])

    def reduce_with(self, leaves: Sequence[Any], states: Sequence[Any]) -> tuple[Any, Any]:
        """Reduce gradients, given their states; return both anew; collective."""

        def make() -> Flat:
            check_states(leaves, states)
            return flatten(list(leaves))

        _, result = self._reduce_tree(make, lambda number, _: states[number])
        reduced = [result.reduced.get(number) for number in range(len(leaves))]
        return reduced, tuple(result.states.get(n, state) for n, state in enumerate(states))

    def _remembered(self, gradients: dict[int, Any], result: _Result) -> dict[int, Any]:
        for number, state in result.states.items():
            self.states.note(number, gradients[number], state)
        self.states.settle()
        return result.reduced

    def _reduce_tree(self, make: Callable[[], Flat], state_of: _StateOf) -> tuple[Flat, _Result]:
        with raise_together(self.comm):
            flat = make()
            check_arrays(self.compression, flat)
            self._check_missing(flat)
            gradients = {n: leaf for n, leaf in enumerate(flat.leaves) if leaf is not None}
            return flat, self._reduce(gradients, state_of)

    @property
    def _name(self) -> str:
        return type(self.compression).__name__

    def _reduce(self, gradients: dict[int, Any], state_of: _StateOf) -> _Result:
        if not gradients:
            return _Result({}, {})
        arrays = list(gradients.values())
        states = [state_of(number, gradient) for number, gradient in gradients.items()]
        given = self.compression.reduce(list(arrays), states, self.op, self.comm)
        reduced, states = self._checked(given, arrays)
        if group_of(self.comm).options.check:
            self._compare(reduced)
        return _Result(
            dict(zip(gradients, reduced, strict=True)), dict(zip(gradients, states, strict=True))
        )

    def _checked(self, given: Any, gradients: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return what the compression has returned; raise unless it is like the gradients."""
        try:
            reduced, states = map(list, given)
        except (TypeError, ValueError):
            raise TypeError(
                f"{self._name}.reduce must return two lists, the reduced gradients and the new "
                f"states; got {_said(given)}"
            ) from None
        if not len(reduced) == len(states) == len(gradients):
            raise ValueError(
                f"{self._name}.reduce must return a gradient and a state for each of the "
                f"{len(gradients)} gradients that it gets; got {len(reduced)} and {len(states)}"
            )
        for place, (got, gradient) in enumerate(zip(reduced, gradients, strict=True)):
            if _form(got) != _form(gradient):
                raise TypeError(
                    f"{self._name} must return gradients like those that it gets; got {_said(got)} "
                    f"for gradient {place}, {_said(gradient)}"
                )
        return reduced, states

    def _compare(self, reduced: Sequence[Any]) -> None:
        """Raise unless all ranks have the same gradients."""
        rows = self.comm.allgather(np.array([_digest(gradient) for gradient in reduced], np.int64))
        differing = (rows != rows[0]).any(axis=0)
        if differing.any():
            place = int(differing.argmax())
            ranks = [rank for rank, row in enumerate(rows) if row[place] != rows[0, place]]
            raise MismatchError(
                f"DistributedOptimizer: {self._name} must return the same gradients on all ranks; "
                f"gradient {place}, of shape {tuple(reduced[place].shape)}, on {name_ranks(ranks)} "
                "is not that on rank 0; compute it from results of collectives alone, by the same "
                "operations on every rank"
            )

    def _check_missing(self, flat: Flat) -> None:
        """Raise on all ranks if a gradient is None on some of them; compare the ranks' trees."""
        flags = flat.rebuild([np.float32(leaf is not None) for leaf in flat.leaves])
        counts = allreduce_together(flags, "sum", self.comm)
        for path, count in zip(flat.paths, flatten(counts).leaves, strict=True):
            if 0 < count < self.comm.size:
                raise MismatchError(
                    f"DistributedOptimizer: {self._name} takes gradients that all ranks have; "
                    f"{path} is None on some ranks and an array on others; pass zeros in place of "
                    "None"
                )


class _Result(NamedTuple):
    """Reduced gradients and new states, by their numbers."""

    reduced: dict[int, Any]
    states: dict[int, Any]


def check_arrays(compression: Compression, flat: Flat) -> None:
    """Raise unless the gradients of a tree are arrays that can be computed with."""
    for path, leaf in zip(flat.paths, flat.leaves, strict=True):
        if leaf is not None and not is_array_api_obj(leaf):
            raise TypeError(
                f"DistributedOptimizer: {type(compression).__name__} takes gradients that are "
                f"arrays; {path} "
                f'is {_said(leaf)}; pass an array, or compression="bfloat16"'
            )


def _form(x: Any) -> object:
    """Return what a result has to have in common with a gradient, or None for what is no array."""
    if not is_array_api_obj(x):
        return None
    return type(x).__module__.partition(".")[0], x.dtype, tuple(x.shape)


def _said(x: Any) -> str:
    framework = type(x).__module__.partition(".")[0]
    name = f"{framework}.{type(x).__qualname__}"
    return f"{name} of {x.dtype} {tuple(x.shape)}" if is_array_api_obj(x) else name


def _digest(x: Any) -> int:
    """Return a number for the elements of an array."""
    array = np.ascontiguousarray(exchange(x, "numpy")).reshape(-1).view(np.uint8)
    whole = len(array) // _BLOCK * _BLOCK
    sums = array[:whole].view(np.uint64).reshape(-1, _BLOCK // 8).sum(axis=1, dtype=np.uint64)
    return zlib.crc32(array[whole:].data, zlib.crc32(sums.data))
