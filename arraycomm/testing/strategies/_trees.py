"""Trees to draw."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy as Strategy

from arraycomm.testing.strategies._arrays import rank_arrays
from arraycomm.testing.strategies._ranks import per_rank


class Pair(NamedTuple):
    """A named tuple that drawn trees contain."""

    first: Any
    second: Any


@dataclass
class Layer:
    """A dataclass that drawn trees contain."""

    weight: Any
    bias: Any


def trees(leaves: Strategy[Any] | None = None, *, max_leaves: int = 8) -> Strategy[Any]:
    """Draw pytrees, of the same structure on every rank.

    Parameters
    ----------
    leaves : SearchStrategy, optional
        What leaves are drawn from; by default None, Python numbers and arrays; numbers and arrays
        are each rank's own.
    max_leaves : int
        The largest number of leaves, as `hypothesis.strategies.recursive` counts them.

    Returns
    -------
    SearchStrategy
        A leaf, or lists, tuples, dicts, ordered dicts, named tuples (`Pair`) and dataclasses
        (`Layer`) of trees, including empty ones; shrinks to a leaf.
    """
    return st.recursive(_leaves() if leaves is None else leaves, _containers, max_leaves=max_leaves)


def _leaves() -> Strategy[Any]:
    integers = st.integers(-(2**63), 2**63 - 1)
    return st.one_of(st.none(), per_rank(integers), per_rank(st.floats()), rank_arrays())


# Including keys that do not look like names in the path of a leaf.
_KEYS: Final = st.sampled_from(("weight", "bias", "layer.0", "it's", ""))


def _containers(children: Strategy[Any]) -> Strategy[Any]:
    several = st.lists(children, max_size=3)
    mapping = st.dictionaries(_KEYS, children, max_size=3)
    return st.one_of(
        several,
        several.map(tuple),
        mapping,
        st.dictionaries(st.integers(0, 3), children, max_size=3),
        mapping.map(collections.OrderedDict),
        st.builds(Pair, children, children),
        st.builds(Layer, children, children),
    )
