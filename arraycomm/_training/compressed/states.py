"""What a compression remembers of the parameters of one optimizer, from step to step."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from arraycomm._training.compressed.compression import Compression


class State(NamedTuple):
    """The state of one parameter, and the shape and dtype of the gradients that it is for."""

    shape: tuple[int, ...]
    dtype: str
    value: Any


class States:
    """The states of an optimizer's parameters, by their numbers.

    New states count once a reduction has succeeded.
    """

    def __init__(self, compression: Compression, kept: Mapping[int, State] | None = None) -> None:
        self.compression = compression
        self._kept = dict(kept or {})
        self._new: dict[int, State] = {}

    def of(self, number: int, gradient: Any) -> Any:
        """Return a parameter's state; a new one if its gradients have another shape or dtype."""
        kept = self._kept.get(number)
        if kept is None or kept[:2] != _spec(gradient):
            return self.compression.init(gradient)
        return kept.value

    def note(self, number: int, gradient: Any, value: Any) -> None:
        """Note the new state of a parameter, which counts from `settle` on."""
        self._new[number] = State(*_spec(gradient), value)

    def settle(self) -> None:
        """Take over the new states: the reduction has succeeded."""
        self._kept.update(self._new)
        self.forget()

    def forget(self) -> None:
        """Forget the new states that are not settled: the reduction has failed."""
        self._new = {}

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Keep the states of these parameters, given by their old numbers, under their new ones."""
        self._kept = {
            numbers[number]: state for number, state in self._kept.items() if number in numbers
        }

    def copy(self) -> Self:
        """Return the states of a copy of the optimizer."""
        return type(self)(self.compression, copy.deepcopy(self._kept))

    def saved(self) -> dict[int, dict[str, Any]]:
        """Return all states in plain containers, which can be saved."""
        return {
            number: {"shape": list(state.shape), "dtype": state.dtype, "value": state.value}
            for number, state in self._kept.items()
        }

    def load(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace all states by saved ones."""
        self._kept = {
            int(number): State(tuple(state["shape"]), state["dtype"], state["value"])
            for number, state in saved.items()
        }
        self.forget()


def check_states(leaves: Sequence[Any], states: Sequence[Any]) -> None:
    """Raise unless there is a state for each gradient."""
    if len(leaves) != len(states):
        raise ValueError(
            "DistributedOptimizer: gradients must have the structure of the parameters that the "
            f"state was made of, {len(states)} leaves; got {len(leaves)}; make the state anew, "
            "with init"
        )


def _spec(gradient: Any) -> tuple[tuple[int, ...], str]:
    return tuple(gradient.shape), str(gradient.dtype).rpartition(".")[2]
