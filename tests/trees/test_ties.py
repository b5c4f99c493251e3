"""Which leaves are one object is each rank's own matter: what users' loops and restarts do with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from tests.support.on_ranks import each_rank_of

_KINDS: Final[dict[str, str]] = {"numpy": "numpy", "torch": "torch", "jax": "jax.numpy"}


def _maker(name: str) -> Callable[[float], Any]:
    module: Any = pytest.importorskip(_KINDS[name])
    make: Any = {"numpy": np.array, "torch": getattr(module, "tensor", None)}.get(name)
    return make or module.asarray


@pytest.mark.parametrize("framework", _KINDS)
@pytest.mark.parametrize("call", ["mean_metrics", "allreduce_tree", "allreduce_gradients", "plan"])
@each_rank_of("few")
def test_the_loss_may_be_the_best_one_on_a_rank(comm: Communicator, framework, call) -> None:
    """The metrics of a rank that has just improved have one array twice."""
    make = _maker(framework)
    losses = [3.0, 2.0, 1.0 if comm.rank == 0 else 4.0]
    calls = {
        "mean_metrics": lambda tree: ac.mean_metrics(tree, 1, comm=comm),
        "allreduce_tree": lambda tree: ac.allreduce_tree(tree, comm=comm),
        "allreduce_gradients": lambda tree: ac.allreduce_gradients(tree, comm=comm),
        "plan": comm.plan({"loss": make(0.0), "best": make(0.0)}),
    }
    best: Any = None
    for loss in map(make, losses):
        best = loss if best is None or loss < best else best
        got = calls[call]({"loss": loss, "best": best})
    others = comm.size - 1
    np.testing.assert_allclose(float(got["loss"]), (1 + 4 * others) / comm.size)
    np.testing.assert_allclose(float(got["best"]), (1 + 2 * others) / comm.size)


@each_rank_of(3, "torch")
def test_an_object_of_torch_that_a_tree_has_twice_is_one_on_all_ranks(
    comm: Communicator, torch
) -> None:
    """It is changed in place: two states of the root do not go into one object."""
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
    ac.synchronize([first, first], comm=comm)
    with pytest.raises(ac.MismatchError, match=r"objects=one at \[\(1, 0\)\] on rank 0"):
        ac.synchronize([first, second if comm.rank else first], comm=comm)
