"""The reductions of rows, in rank order: ((x0 ∘ x1) ∘ x2) ∘ …; narrow floats are rounded once.

By the native part if it is there, and else by NumPy, with the same bits.
"""

from __future__ import annotations

from arraycomm._folds import by_numpy, exact, in_c
from arraycomm._folds.by_numpy import divide as divide
from arraycomm._folds.by_numpy import goes_on as goes_on
from arraycomm._folds.by_numpy import total_dtype as total_dtype
from arraycomm._folds.exact import words_of as words_of
from arraycomm._native import compiled

_way = by_numpy if compiled is None else in_c
_exact_way = exact if compiled is None else in_c

add_rows = _exact_way.add_rows
fold = _way.fold
fold_on = _way.fold_on
prefixes = _way.prefixes
round_words = _exact_way.round_words
use_threads = _way.use_threads
