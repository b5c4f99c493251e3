"""Modules, optimizers and variables of flax.nnx."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class State(NamedTuple):
    """What a module or an optimizer holds, but for its random generators, as a dict of arrays."""

    arrays: dict[Any, Any]
    update: Callable[[Any], Any]


def is_variable(leaf: Any) -> bool:
    """Tell whether a leaf is a variable, which looks like the array that it holds."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(leaf, nnx.Variable)


def state_of(leaf: Any) -> State | None:
    """Return the state of a module or an optimizer, which is changed in place; None for anything else."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(leaf, (nnx.Module, nnx.Optimizer)):
        return None
    state = nnx.state(leaf, nnx.Not(nnx.RngState))

    def update(new: dict[Any, Any]) -> Any:
        nnx.replace_by_pure_dict(state, new)
        nnx.update(leaf, state)
        return leaf

    return State(nnx.to_pure_dict(state), update)
