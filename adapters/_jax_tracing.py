"""Whether JAX traces a program, or computes."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import core


def is_eager() -> bool:
    """Tell whether nothing is being traced around this call."""
    return bool(core.trace_ctx.is_top_level())


def holds_tracers(tree: Any) -> bool:
    """Tell whether some leaf of a tree is being traced."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def is_traced(tree: Any) -> bool:
    """Tell whether an update of a tree is being traced: a branch may have arrays that are not."""
    return not is_eager() or holds_tracers(tree)
