"""The reductions of rows, in rank order: ((x0 ∘ x1) ∘ x2) ∘ …; narrow floats are rounded once.

By the native part if it is there, and else by NumPy, with the same bits.
"""

from __future__ import annotations

from arraycomm._folds import by_numpy, in_c, totals
from arraycomm._folds.totals import total_dtype as total_dtype

_way = in_c if in_c.AVAILABLE else by_numpy
_totals = in_c if in_c.AVAILABLE else totals

fold = _way.fold
fold_function = _way.fold_function
fold_on = _totals.fold_on
prefixes = _totals.prefixes
use_threads = _way.use_threads
