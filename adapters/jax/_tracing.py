"""Whether JAX traces a program, or computes; and trees in which some leaves are None."""

from __future__ import annotations

import sys
from typing import Any

import jax
from jax._src import core
from jax._src.api_util import InternalFloatingPointError

from arraycomm._trees.nodes import is_sparse


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, None among them, and its structure."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_ends)
    return leaves, structure


def _ends(node: Any) -> bool:
    """Return whether there is nothing inside; raise for what holds more than values."""
    if is_sparse(node):
        raise TypeError(
            f"DistributedOptimizer: the gradients hold a sparse {type(node).__name__}, whose "
            "indices would be added up as well; differentiate with respect to a dense array, such "
            "as its data"
        )
    return node is None


def is_eager() -> bool:
    """Return whether nothing is being traced around this call."""
    return bool(core.trace_ctx.is_top_level())


def holds_tracers(tree: Any) -> bool:
    """Return whether some leaf of a tree is being traced."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def is_traced(tree: Any) -> bool:
    """Return whether an update of a tree is being traced: a branch may have arrays that are not."""
    return not is_eager() or holds_tracers(tree)


def refuse_repetition(what: str) -> None:
    """Raise if JAX repeats a program to find the origin of a NaN: see `jax_debug_nans`."""
    error = sys.exception()
    while error is not None:
        if isinstance(error, InternalFloatingPointError):
            raise FloatingPointError(
                f"invalid value ({error.ty}) in the results of a compiled program: JAX has "
                f"repeated its operations one by one as far as {what}, which is not repeated, "
                "since other ranks take part; those before it have made no such value"
            )
        error = error.__context__
