"""How the gradients of one optimizer are compressed: by a name, by error feedback, or by a hook."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

from arraycomm._communicator import Communicator
from arraycomm._training.compressed.compression import Compression, described
from arraycomm._training.compressed.feedback import ErrorFeedback
from arraycomm._training.compressed.states import States, check_states
from arraycomm._training.hooks import Hook, check_arrays
from arraycomm._training.rounds import Leaves
from arraycomm._trees.pytrees import flatten


class Compressor:
    """The compression of one optimizer, and what it remembers."""

    def __init__(self, compression: str | Compression | None, comm: Communicator, op: str) -> None:
        self.described = described(compression)
        # The `compression` of `allreduce_gradients`.
        self.dtype: str | None = None
        # What changes gradients before they are reduced, and what reduces them instead.
        self.feedback: ErrorFeedback | None = None
        self.hook: Hook | None = None
        # What either remembers of each parameter, unless the optimizer's own state has it.
        self.states: States | None = None
        if not isinstance(compression, Compression):
            self.dtype = compression
            return
        self.states = States(compression)
        # A subclass may reduce by itself.
        if type(compression) is ErrorFeedback:
            self.feedback, self.dtype = compression, compression.dtype
        else:
            self.hook = Hook(compression, comm, op, self.states)

    def copy(self) -> Self:
        """Return the compression of a copy of the optimizer."""
        made = copy.copy(self)
        if self.states is not None:
            made.states = self.states.copy()
            made.hook = self.hook and self.hook._replace(states=made.states)
        return made

    def check_outside_join(self) -> None:
        """Raise, inside `join`, if an object compresses gradients."""
        if self.states is not None:
            raise ValueError(
                "inside join gradients cannot be compressed by an object, since ranks without data "
                f"have nothing to remember; got an optimizer with compression={self.described}; "
                "pass a name "
                'such as "bfloat16"'
            )

    def settle(self) -> None:
        """Note that a reduction has succeeded: what it has changed is remembered."""
        if self.states is not None:
            self.states.settle()

    def forget(self) -> None:
        """Forget what a reduction that failed would have changed."""
        if self.states is not None:
            self.states.forget()

    # Error feedback: what is sent is computed inside the call that reduces

    def fed_back(self, leaves: Leaves) -> Leaves:
        """Return what is sent for gradients, by number: with error feedback, not quite the same."""
        if self.feedback is None:
            return leaves
        return {number: self._fed_back(number, leaf) for number, leaf in leaves.items()}

    def _fed_back(self, number: int, leaf: Any) -> Any:
        if leaf is None or self.feedback is None or self.states is None:
            return leaf
        sent, state = self.feedback.compress(leaf, self.states.of(number, leaf))
        self.states.note(number, leaf, state)
        return sent

    def fed_back_tree(self, tree: Any) -> Any:
        """Return what is sent for the gradients of a tree; see `fed_back`."""
        if self.feedback is None:
            return tree
        self.forget()
        flat = flatten(tree)
        check_arrays(self.feedback, flat)
        sent = self.fed_back(dict(enumerate(flat.leaves)))
        return flat.rebuild([sent[number] for number in range(len(sent))])

    def fed_back_with(self, leaves: Sequence[Any], states: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Return what is sent for each gradient, and its new state, given the states."""
        assert self.feedback is not None
        check_states(leaves, states)
        return [
            (None, state) if leaf is None else self.feedback.compress(leaf, state)
            for leaf, state in zip(leaves, states, strict=True)
        ]
