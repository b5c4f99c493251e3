"""What the demonstration requires of a run, and why no more and no less."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm.cli.demo.data import GLOBAL_BATCH, Linear

# It is a power of two: learning rate × gradient is then exact, so that parameter − learning rate ×
# gradient is rounded once, whether a framework computes it in two operations or as one fused
# multiply-add. Since arraycomm gives all ranks the same bits of the reduced gradients, the
# parameters have to be the same bits on all ranks even if their frameworks differ. It is below 2 /
# L, where L ≤ max(‖image‖² + 1) / 2 ≈ 12 bounds the curvature of the loss (for a softmax the
# Hessian's largest eigenvalue is at most half that of the inputs).
LEARNING_RATE: Final = 0.125
LEAST_ACCURACY: Final = 0.9


class Outcome(NamedTuple):
    """The outcome of one run."""

    accuracy: float
    ranks_agree: bool
    difference: float
    tolerance: float
    seconds: float
    communicating: float
    losses: list[float]
    losses_alone: list[float]


def tolerance(parameters: Linear, steps: int) -> float:
    """Return how far the parameters of two correct runs, which sum in different orders, can differ.

    In each step rounding alone moves two runs apart:

    - An entry of the gradient is the mean over the global batch of products of at most 1 in size.
      Two orders of such a sum of B terms differ by about √B · eps, since rounding errors are as
      often up as down (the worst case, B · eps, does not occur; Higham and Mary, "A new approach
      to probabilistic rounding error analysis", 2019). The sums in the forward pass are shorter.
      A parameter changes by this difference times the learning rate.
    - The new parameter is rounded by half an eps of its size, in each of the two runs.

    A step does not enlarge the distance of two runs, since the loss is convex and the learning rate
    below 2 / L. So the contributions of all steps add up to at most `steps` times the above.
    """
    eps = float(np.finfo(parameters.weight.dtype).eps)
    scale = float(np.max(np.abs(flat(parameters))))
    return steps * eps * (LEARNING_RATE * math.sqrt(GLOBAL_BATCH) + scale)


def difference(one: Linear, other: Linear) -> float:
    """Return the largest absolute difference of two sets of parameters; NaN if one has a NaN."""
    return float(np.max(np.abs(flat(one).astype(np.float64) - flat(other))))


def flat(parameters: Linear) -> np.ndarray[Any, Any]:
    """Return all parameters in one vector."""
    return np.concatenate([np.ravel(leaf) for leaf in parameters])


def same_bits(rows: np.ndarray[Any, Any]) -> bool:
    """Return whether all rows of an array, one for each rank, are the same to the bit."""
    return all(row.tobytes() == rows[0].tobytes() for row in rows)


def complaints(outcome: Outcome) -> list[str]:
    """Return a sentence for each thing that is wrong with an outcome."""
    wrong = []
    if not outcome.ranks_agree:
        wrong.append("the ranks ended with different parameters; they must be the same to the bit")
    # Negated, so that NaN counts as wrong.
    if not outcome.difference <= outcome.tolerance:
        wrong.append(
            f"parameters differ by {outcome.difference:.1e} from the run in one process; "
            f"rounding explains at most {outcome.tolerance:.1e}"
        )
    if not outcome.accuracy >= LEAST_ACCURACY:
        wrong.append(
            f"test accuracy is {outcome.accuracy:.3f}, under {LEAST_ACCURACY}; "
            "with few epochs, try more"
        )
    return wrong
