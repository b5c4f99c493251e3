"""Weights: how much a rank's values count."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def check_weight(weight: Any, operation: str) -> float:
    """Return a weight as a float; raise unless it is a number, finite and not negative."""
    try:
        if isinstance(weight, str | bytes) or np.ndim(weight):
            raise TypeError(f"a {type(weight).__name__} is no number")
        number = float(weight)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"{operation}: weight must be a number, such as how many samples this rank has; "
            f"got {weight!r}"
        ) from error
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(
            f"{operation}: weight must be finite and not negative; got {number}; a rank that has "
            "nothing passes 0"
        )
    return number
