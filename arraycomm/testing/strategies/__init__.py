"""Inputs of collectives to draw: arrays of any dtype, shape, layout and framework, trees, ops.

These are Hypothesis strategies, and combine with all others. Those that draw one value for each
rank belong in the decorator of `arraycomm.testing.given`, which knows the number of ranks.
"""

from arraycomm.testing import _extra  # noqa: F401
from arraycomm.testing._arrays.array_case import ArrayCase
from arraycomm.testing._arrays.frameworks import installed_frameworks
from arraycomm.testing._arrays.rank_values import RankValues
from arraycomm.testing.strategies._arrays import arrays, frameworks, layouts, rank_arrays
from arraycomm.testing.strategies._dtypes import dtypes, ops, reductions
from arraycomm.testing.strategies._elements import elements, shapes
from arraycomm.testing.strategies._ranks import per_rank, roots
from arraycomm.testing.strategies._trees import Layer, Pair, trees

__all__ = [
    "ArrayCase",
    "Layer",
    "Pair",
    "RankValues",
    "arrays",
    "dtypes",
    "elements",
    "frameworks",
    "installed_frameworks",
    "layouts",
    "ops",
    "per_rank",
    "rank_arrays",
    "reductions",
    "roots",
    "shapes",
    "trees",
]
