"""A result that the framework of one rank cannot have is an error on all, before data moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from tests.support.frameworks import need

Call = Callable[[Communicator, Any, Any], Any]


# Of a root that alone knows the dtype, with what the other ranks want.
CALLS: dict[str, Call] = {
    "bcast": lambda c, x, like: c.bcast(x, like=like),
    "scatter": lambda c, x, like: c.scatter(x, like=like),
    "scatterv": lambda c, x, like: c.scatterv(x, None if x is None else [1] * c.size, like=like),
}
LIKES: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "jax": (lambda: need("jax").numpy.ones(2), np.float64, "JAX would cut float64"),
    "strict": (
        lambda: need("array_api_strict").ones(2),
        np.float16,
        "array_api_strict has no dtype float16",
    ),
    "torch": (lambda: need("torch").ones(2), "M8[s]", "torch has no dtype datetime64"),
}


@pytest.mark.parametrize("length", [1, 10_000])
@pytest.mark.parametrize("kind", LIKES)
@pytest.mark.parametrize("call", CALLS)
def test_all_ranks_raise_and_go_on(on_ranks, several, call, kind, length) -> None:
    make, dtype, message = LIKES[kind]

    def check(comm: Communicator) -> None:
        like = make() if comm.rank == 1 else None
        x = None if comm.rank else np.zeros((comm.size, length), dtype)
        with pytest.raises(
            TypeError if comm.rank == 1 else ac.PeerError,
            match=rf"^{call}: .*{message}"
            if comm.rank == 1
            else rf"^{call}: .* rank 1 has no dtype",
        ):
            CALLS[call](comm, x, like)
        assert comm.allreduce(1) == comm.size
        ones = None if comm.rank else np.ones((comm.size, length), np.float32)
        if kind != "torch" or comm.rank != 1:
            assert np.asarray(CALLS[call](comm, ones, like)).flat[0] == 1
        else:
            assert CALLS[call](comm, ones, like).flatten()[0] == 1

    on_ranks(several, check)


def test_a_missing_gradient_that_cannot_be_made_here(on_ranks, several) -> None:
    jnp = need("jax").numpy

    def check(comm: Communicator) -> None:
        leaf = None if comm.rank == 1 else np.ones(3)
        tree = {"a": leaf, "b": jnp.ones(1)}
        with pytest.raises(
            TypeError if comm.rank == 1 else ac.PeerError,
            match=r"^allreduce_gradients: (JAX would cut|the framework of rank 1 has no dtype float64)",
        ):
            ac.allreduce_gradients(tree, comm=comm)
        got = ac.allreduce_gradients(
            {**tree, "b": None if comm.rank == 1 else jnp.ones(1)}, comm=comm
        )
        assert type(got["a"]) is np.ndarray
        assert comm.allreduce(1) == comm.size

    on_ranks(several, check)
