"""The reductions of rows, in rank order: ((x0 ∘ x1) ∘ x2) ∘ …; narrow floats are rounded once.

By the native part if it is there, and else by NumPy, with the same bits.
"""

from __future__ import annotations

from arraycomm._folds import by_numpy, in_c
from arraycomm._folds.by_numpy import divide as divide
from arraycomm._folds.by_numpy import total_dtype as total_dtype
from arraycomm._native import compiled

_way = by_numpy if compiled is None else in_c

fold = _way.fold
fold_on = _way.fold_on
prefixes = _way.prefixes
use_threads = _way.use_threads
