"""Laws of ranks that train together: a difference is an error soon, and without one nothing is raised."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import _launch
from arraycomm.adapters.numpy import Adam
from arraycomm.testing import run
from properties.test_tree_laws import FEW

pytestmark = pytest.mark.skipif(
    _launch.detect(os.environ) is not None, reason="runs where pytest is alone"
)


class Loop(NamedTuple):
    """A training: its step, how to change one thing of it by hand, and more."""

    step: Callable[[], None]
    plant: dict[str, Callable[[int], None]]
    synchronize: Callable[[], None]
    parameters: Callable[[], Any]


def leaves() -> list[Any]:
    random = np.random.default_rng(0)
    return [random.normal(size=shape) for shape in ((3, 2), (2,))]


def torch_loop(comm: ac.Communicator, every: int) -> Loop:
    import torch

    model = torch.nn.ParameterList(map(torch.from_numpy, leaves()))
    parameters = list(model)
    model.register_buffer("average", torch.zeros(4))
    plain = torch.optim.Adam(parameters, lr=np.float32(0.01))
    optimizer = ac.DistributedOptimizer(plain, comm=comm, verify_every=every, module=model)

    def step() -> None:
        optimizer.zero_grad()
        sum((leaf * leaf * (1.0 + comm.rank)).sum() for leaf in parameters).backward()
        optimizer.step()

    def leaf(place: int) -> None:
        held = [*parameters, model.average]
        chosen = held[place % len(held)].data.view(-1)
        chosen[place % len(chosen)] += 0.5

    def count(place: int) -> None:
        optimizer.state[parameters[place % len(parameters)]]["step"] += 1

    def rate(_: int) -> None:
        optimizer.param_groups[0]["lr"] *= 1 + 2**-20

    return Loop(
        step,
        {"leaf": leaf, "rate": rate, "count": count},
        lambda: ac.synchronize((model, optimizer), comm=comm),
        lambda: [each.detach().numpy() for each in (*parameters, model.average)],
    )


def optax_loop(comm: ac.Communicator, every: int) -> Loop:
    import jax
    import optax

    plain = optax.inject_hyperparams(optax.adam)(0.01)
    optimizer = ac.DistributedOptimizer(plain, comm=comm, verify_every=every)
    w, b = map(jax.numpy.asarray, leaves())
    now: list[Any] = [{"w": w, "b": b}]
    state = [optimizer.init(now[0])]

    def step() -> None:
        grads = jax.tree.map(lambda leaf: leaf * (1.0 + comm.rank), now[0])
        updates, state[0] = optimizer.update(grads, state[0], now[0])
        now[0] = optax.apply_updates(now[0], updates)

    def leaf(place: int) -> None:
        index = np.unravel_index(place % 6, (3, 2))
        now[0]["w"] = now[0]["w"].at[index].add(0.5)

    def rate(_: int) -> None:
        state[0].hyperparams["learning_rate"] *= 1.01

    def count(_: int) -> None:
        first, *rest = state[0].inner_state
        inner = (first._replace(count=first.count + 1), *rest)
        state[0] = state[0]._replace(inner_state=inner)

    def synchronize() -> None:
        now[0], state[0] = ac.synchronize((now[0], state[0]), comm=comm)

    plant = {"leaf": leaf, "rate": rate, "count": count}
    return Loop(step, plant, synchronize, lambda: list(now[0].values()))


def numpy_loop(comm: ac.Communicator, every: int) -> Loop:
    optimizer = ac.DistributedOptimizer(Adam(0.01), comm=comm, verify_every=every)
    now = [leaves()]

    def step() -> None:
        now[0] = optimizer.update(now[0], [leaf * (1.0 + comm.rank) for leaf in now[0]])

    def leaf(place: int) -> None:
        chosen = now[0][place % 2].reshape(-1)
        chosen[place % len(chosen)] += 0.5

    def rate(_: int) -> None:
        optimizer.learning_rate *= 1 + 2**-20

    def count(place: int) -> None:
        optimizer.state[place % 2]["count"] += 1

    def synchronize() -> None:
        now[0], _ = ac.synchronize((now[0], optimizer), comm=comm)

    return Loop(step, {"leaf": leaf, "rate": rate, "count": count}, synchronize, lambda: now[0])


LOOPS = [numpy_loop]
LOOPS += [torch_loop] * (find_spec("torch") is not None)
LOOPS += [optax_loop] * (find_spec("jax") is not None and find_spec("optax") is not None)


WHATS = st.sampled_from(["leaf", "rate", "count"])


@FEW
@given(
    make=st.sampled_from(LOOPS),
    size=st.integers(2, 4),
    every=st.integers(1, 4),
    rank=st.integers(0, 3),
    after=st.integers(1, 5),
    what=WHATS,
    place=st.integers(0, 20),
)
def test_any_change_on_one_rank_is_caught_within_verify_every_steps(
    make, size, every, rank, after, what, place
) -> None:
    def train(comm: ac.Communicator) -> tuple[int, str]:
        loop = make(comm, every)
        for _ in range(after):
            loop.step()
        if comm.rank == rank % size:
            loop.plant[what](place)
        for step in range(every):
            try:
                loop.step()
            except ac.MismatchError as error:
                return step, str(error)
        raise AssertionError("nothing was raised")

    caught = run(size, train)
    assert len(set(caught)) == 1
    step, said = caught[0]
    assert "is not the same on all ranks" in said
    # What a step takes from the optimizer is compared with every step.
    assert step == 0 or what != "rate"


@FEW
@given(
    make=st.sampled_from(LOOPS),
    size=st.integers(1, 4),
    every=st.integers(1, 3),
    events=st.lists(st.tuples(WHATS, st.integers(0, 20), st.booleans()), max_size=5),
)
def test_no_correct_program_raises(make, size, every, events) -> None:
    """Between two steps something changes on all ranks, or on one that the others then take over."""

    def train(comm: ac.Communicator) -> bytes:
        loop = make(comm, every)
        loop.step()
        for what, place, on_all in events:
            if on_all or comm.rank == 0:
                loop.plant[what](place)
            if not on_all:
                loop.synchronize()
            loop.step()
        return b"".join(np.asarray(array).tobytes() for array in loop.parameters())

    assert len(set(run(size, train))) == 1
