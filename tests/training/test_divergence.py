"""Ranks that train together stay together, or an error says why: ways to diverge.

Each way is a training loop with one mistake of a user's, or one habit of a framework's, on the last rank.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

import arraycomm as ac
from arraycomm.adapters.numpy import SGD, Adam, Momentum
from tests.support import pairwise
from tests.support.on_ranks import ALL_SIZES, LAUNCH, each_rank_of

torch: Any = pytest.importorskip("torch")
jax: Any = pytest.importorskip("jax")
optax: Any = pytest.importorskip("optax")
# It has no wheels for every version of Python.
thinc: Any = importlib.import_module("thinc.api") if find_spec("thinc") else None
jnp = jax.numpy

Comm = ac.Communicator
SIZE: Final = max(size for size in (2, 3) if size in ALL_SIZES)
EVERY: Final = 3


class Way(NamedTuple):
    """A way to diverge: `train(comm, wrong)`, with a mistake on the ranks where `wrong` is true."""

    name: str
    train: Callable[[Comm, bool], None]
    says: str


WAYS: list[Way] = []
COMPILED: list[Way] = []


def way(says: str, ways: list[Way] = WAYS) -> Any:
    """Add a function to the ways; its errors say this, a regular expression."""

    def add(function: Any) -> Any:
        ways.append(Way(function.__name__, function, says))
        return function

    return add


# torch ------------------------------------------------------------------------------------------------


def net(seed: int = 0) -> Any:
    layers = [(4, 3), (3, 3), (3, 1)]
    random = np.random.default_rng(seed)
    made = torch.nn.Sequential(*(torch.nn.Linear(*shape) for shape in layers))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.from_numpy(random.normal(size=tuple(parameter.shape))))
    return made


def distributed(comm: Comm, plain: Any, **options: Any) -> Any:
    return ac.DistributedOptimizer(plain, comm=comm, verify_every=EVERY, **options)


def steps(comm: Comm, model: Any, optimizer: Any, count: int = 2 * EVERY, then: Any = None) -> None:
    """Take steps; `then(step)` is called after each."""
    for step in range(count):
        optimizer.zero_grad()
        x = torch.full((2, 4), 1.0 + comm.rank + step)
        model(x).square().mean().backward()
        optimizer.step()
        if then:
            then(step)


@way(r"parameter 0 .*\[0, 0\].*6 of 6 arrays differ.*call arraycomm.synchronize")
def torch_synchronize_forgotten(comm: Comm, wrong: bool) -> None:
    model = net(wrong)
    steps(comm, model, distributed(comm, torch.optim.SGD(model.parameters(), lr=0.01)))


def torch_with(kind: str, right: dict[str, Any], other: dict[str, Any], **options: Any) -> Any:
    def train(comm: Comm, wrong: bool) -> None:
        model, chosen = net(), right | other if wrong else right
        plain = getattr(torch.optim, kind)(model.parameters(), **chosen)
        steps(comm, model, distributed(comm, plain, **options))

    return train


_LR: Final = ({"lr": 0.01}, {"lr": 0.1}, "lr of group 0")
for _name, _kind, _options, (_right, _other, _says) in (
    ("lr", "SGD", {}, ({"lr": 0.01}, {"lr": 0.02}, r"lr of group 0.*: 0.01, .*: 0.02, ")),
    ("betas", "Adam", {}, ({}, {"betas": (0.8, 0.9)}, r"betas of .*\(0.9, 0.999\).*\(0.8, 0.9\)")),
    ("accumulated_lr", "SGD", {"accumulate": 2}, _LR),
    ("compressed_lr", "SGD", {"compression": "bfloat16"}, _LR),
    ("sharded_lr", "Adam", {"shard": True}, _LR),
):
    WAYS.append(Way(f"torch_{_name}", torch_with(_kind, _right, _other, **_options), _says))


@way(r"the class of the optimizer.*SGD.*Adagrad")
def torch_class(comm: Comm, wrong: bool) -> None:
    model = net()
    kind = torch.optim.Adagrad if wrong else torch.optim.SGD
    steps(comm, model, distributed(comm, kind(model.parameters(), lr=0.01)))


@way(r"lr of group 0")
def torch_plateau_of_own_losses(comm: Comm, wrong: bool) -> None:
    model = net()
    optimizer = distributed(comm, torch.optim.SGD(model.parameters(), lr=0.01))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    steps(comm, model, optimizer, then=lambda n: schedule.step(1.0 if wrong else 1 - 0.1 * n))


@way(r"the number of parameters of group 0 .*: 2, .*: 1, ")
def torch_moved_to_another_group(comm: Comm, wrong: bool) -> None:
    model = net()
    groups = [{"params": [*layer.parameters()]} for layer in model]
    optimizer = distributed(comm, torch.optim.SGD(groups, lr=0.01))
    first, second = (group["params"] for group in optimizer.param_groups[:2])
    steps(comm, model, optimizer, 1)
    if wrong:
        second.insert(0, first.pop())
    steps(comm, model, optimizer)


@way(r"lr of group 0")
def torch_lr_assigned(comm: Comm, wrong: bool) -> None:
    model = net()
    optimizer = distributed(comm, torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01)))

    def then(step: int) -> None:
        optimizer.param_groups[0]["lr"].fill_(0.01 + wrong * 0.01 * step)

    steps(comm, model, optimizer, then=then)


def changed_later(
    comm: Comm, wrong: bool, change: Callable[[Any, Any], None], **options: Any
) -> None:
    model = net()
    optimizer = distributed(comm, torch.optim.Adam(model.parameters(), lr=0.01), **options)

    def then(step: int) -> None:
        if wrong and step == 1:
            change(model, optimizer)

    steps(comm, model, optimizer, then=then)


@way(r"parameter 3 is not .* at \[1\].*1 of 24 arrays differ.*adapter of each rank's own")
def torch_weight_changed_on_one_rank(comm: Comm, wrong: bool) -> None:
    def change(model: Any, _: Any) -> None:
        model[1].bias.data[1] += 1e-6

    changed_later(comm, wrong, change)


@way(r"the state of parameter 2, exp_avg is not .* at \[2, 1\].*1 of 24 arrays differ")
def torch_state_changed_on_one_rank(comm: Comm, wrong: bool) -> None:
    def change(model: Any, optimizer: Any) -> None:
        optimizer.state[model[1].weight]["exp_avg"][2, 1] = 0.25

    changed_later(comm, wrong, change)


@way(r"the step in the state.*: 3.0, .*: 1.0, ")
def torch_optimizer_loaded_on_one_rank(comm: Comm, wrong: bool) -> None:
    model = net()
    optimizer = distributed(comm, torch.optim.Adam(model.parameters(), lr=0.01))
    kept: list[Any] = []

    def then(step: int) -> None:
        kept.append(copy.deepcopy(optimizer.state_dict()))
        # Before a step in which no arrays are compared.
        if wrong and step == 2:
            optimizer.load_state_dict(kept[0])

    steps(comm, model, optimizer, then=then)


@way(r"_?scale of the GradScaler.*: 4.0, .*: 8.0, ")
def torch_scaler_of_another_scale(comm: Comm, wrong: bool) -> None:
    model = net()
    optimizer = distributed(comm, torch.optim.SGD(model.parameters(), lr=0.01))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 if wrong else 4.0)
    scaler.scale(model(torch.ones(2, 4)).mean()).backward()
    scaler.step(optimizer)


@way(r"parameter 0 is not .*float32 \(3, 4\).*float32 \(3,\).*the same parameters")
def torch_parameter_missing(comm: Comm, wrong: bool) -> None:
    model = net()
    plain = torch.optim.SGD(list(model.parameters())[wrong:], lr=0.01)
    steps(comm, model, distributed(comm, plain))


@way(r"2.weight is in different groups: .*group 0.*group 1")
def torch_parameter_in_another_group(comm: Comm, wrong: bool) -> None:
    model = net()
    *rest, weight, bias = model.parameters()
    groups = [[*rest, bias], [weight]] if wrong else [[*rest, weight], [bias]]
    plain = torch.optim.SGD([{"params": each} for each in groups], lr=0.01)
    distributed(comm, plain, module=model)


@way(r"the same parameters in another order")
def torch_other_order_without_a_proof(comm: Comm, wrong: bool) -> None:
    # Two of the values are the same, and no module is passed that knows names.
    free = [torch.nn.Parameter(torch.full((2,), value)) for value in (1.0, 1.0, 2.0)]
    optimizer = distributed(comm, torch.optim.SGD(free[::-1] if wrong else free, lr=0.01))
    sum(each.sum() for each in free).backward()
    optimizer.step()


@way(r"parameter 1 is not")
def torch_frozen_parameter_of_another_value(comm: Comm, wrong: bool) -> None:
    model = net()
    model[0].bias.requires_grad_(False)
    model[0].bias.data += wrong
    steps(comm, model, distributed(comm, torch.optim.SGD(model.parameters(), lr=0.01)))


@way(r"parameter 6 is not")
def torch_parameter_added_with_another_value(comm: Comm, wrong: bool) -> None:
    model, new = net(), torch.nn.Parameter(torch.ones(3))
    optimizer = distributed(comm, torch.optim.SGD(model.parameters(), lr=0.01))
    steps(comm, model, optimizer, 1)
    new.data[0] += wrong
    optimizer.add_param_group({"params": [new]})
    steps(comm, model, optimizer, 1)


@way(r"lr of group 0")
def torch_copy_with_another_lr(comm: Comm, wrong: bool) -> None:
    model = net()
    both = copy.deepcopy((model, distributed(comm, torch.optim.SGD(model.parameters(), lr=0.01))))
    both[1].param_groups[0]["lr"] *= 1 + wrong
    steps(comm, *both)


@way(r"history_size of group 0")
def torch_lbfgs(comm: Comm, wrong: bool) -> None:
    model = net()
    optimizer = distributed(comm, torch.optim.LBFGS(model.parameters(), history_size=5 + wrong))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@way(r"changed after backward\(\)")
def torch_gradient_changed_on_one_rank(comm: Comm, wrong: bool) -> None:
    model = net()
    optimizer = distributed(comm, torch.optim.SGD(model.parameters(), lr=0.01))
    model(torch.ones(2, 4)).mean().backward()
    if wrong:
        model[0].weight.grad.clamp_(max=0.01)
    optimizer.step()


# optax ------------------------------------------------------------------------------------------------


def params(seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    return {"w": jnp.asarray(random.normal(size=(3, 2))), "b": jnp.asarray(random.normal(size=2))}


def descend(
    comm: Comm,
    plain: Any,
    begin: Any = None,
    change: Any = lambda step, params, state: (params, state),
    compiled: bool = False,
    **options: Any,
) -> None:
    """Take steps of an optax transformation; `change(step, params, state)` comes after each."""
    optimizer = distributed(comm, plain, **options)
    now = params() if begin is None else begin
    state = optimizer.init(now)

    def update(grads: Any, state: Any, now: Any) -> Any:
        updates, state = optimizer.update(grads, state, now)
        return optax.apply_updates(now, updates), state

    if compiled:
        update = jax.jit(update)
    for step in range(2 * EVERY):
        grads = jax.tree.map(lambda leaf: leaf * (1.0 + comm.rank), now)
        now, state = jax.block_until_ready(update(grads, state, now))
        now, state = change(step, now, state)


def optax_ways(compiled: bool) -> None:
    ways, begin = (COMPILED, "compiled_") if compiled else (WAYS, "")
    go = partial(descend, compiled=compiled)

    def sgd(wrong: bool) -> Any:
        return optax.sgd(0.1 * (1 + wrong))

    table: dict[str, tuple[str, Callable[[Comm, bool], None]]] = {
        "synchronize_forgotten": (
            r"params\['b'\] is not .*\[0\].*call arraycomm.synchronize",
            lambda comm, wrong: go(comm, sgd(False), params(wrong)),
        ),
        "learning_rate": (
            r"step_size of scale.update_fn.*-0.1.*-0.2",
            lambda comm, wrong: go(comm, sgd(wrong)),
        ),
        "class": (
            "scale_by_adam",
            lambda comm, wrong: go(comm, optax.adam(0.1) if wrong else sgd(False)),
        ),
        "schedule": (
            r"decay_steps of .*schedule.*10.*20",
            lambda comm, wrong: go(
                comm, optax.sgd(optax.cosine_decay_schedule(0.1, 10 + 10 * wrong))
            ),
        ),
        "order_of_a_chain": (
            "is not the same on all ranks",
            lambda comm, wrong: go(
                comm, optax.chain(*[optax.clip(0.5), optax.scale(-0.1)][:: -1 if wrong else 1])
            ),
        ),
        "injected_rate": (
            r"state.hyperparams\['learning_rate'\]",
            lambda comm, wrong: go(
                comm, optax.inject_hyperparams(optax.sgd)(0.1), change=inject(wrong)
            ),
        ),
        "count": (
            r"state\[0\].count",
            lambda comm, wrong: go(comm, optax.adam(0.1), change=counted(wrong)),
        ),
        "moments_changed": (
            r"params\['b'\] is not .* at \[0\]",
            lambda comm, wrong: go(comm, optax.adam(0.1), change=at_one(wrong, moments)),
        ),
        "parameter_changed": (
            r"params\['w'\] is not .* at \[2, 1\].*1 of 2 arrays differ",
            lambda comm, wrong: go(comm, sgd(False), change=at_one(wrong, one_element)),
        ),
        "compressed_by_an_object": (
            "step_size of scale",
            lambda comm, wrong: go(comm, sgd(wrong), compression=ac.Compression()),
        ),
        "accumulated": (
            "step_size of scale",
            lambda comm, wrong: go(comm, sgd(wrong), accumulate=2),
        ),
        "vmap": ("step_size of scale", lambda comm, wrong: mapped(comm, wrong, compiled=compiled)),
        "second_tree": (
            r"params\['w'\] is not .* at \[2, 1\]",
            lambda comm, wrong: twins(comm, wrong, compiled=compiled),
        ),
        "sharded": (
            "step_size of scale",
            lambda comm, wrong: go(comm, optax.adam(0.1 * (1 + wrong)), shard=True),
        ),
    }
    ways += [Way(f"{begin}optax_{name}", train, says) for name, (says, train) in table.items()]


def mapped(comm: Comm, wrong: bool, *, compiled: bool) -> None:
    """Update rows of trees, each with a state of its own."""
    optimizer = distributed(comm, optax.adam(0.1 * (1 + wrong)))
    update = jax.vmap(optimizer.update)
    if compiled:
        update = jax.jit(update)
    now = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), params())
    state = jax.vmap(optimizer.init)(now)
    for _ in range(EVERY + 1):
        grads = jax.tree.map(lambda leaf: leaf * (1.0 + comm.rank), now)
        updates, state = jax.block_until_ready(update(grads, state, now))
        now = optax.apply_updates(now, updates)


def twins(comm: Comm, wrong: bool, *, compiled: bool) -> None:
    """Update two trees by one transformation, in one program if it is compiled."""
    optimizer = distributed(comm, optax.adam(0.1))

    def update(both: Any, states: Any) -> Any:
        made = []
        for now, state in zip(both, states, strict=True):
            grads = jax.tree.map(lambda leaf: leaf * (1.0 + comm.rank), now)
            updates, after = optimizer.update(grads, state, now)
            made.append((optax.apply_updates(now, updates), after))
        return zip(*made, strict=True)

    if compiled:
        eager = update
        update = jax.jit(lambda both, states: tuple(eager(both, states)))
    second = params(1)
    both: Any = (params(), one_element(second, None)[0] if wrong else second)
    states: Any = tuple(map(optimizer.init, both))
    for _ in range(2):
        both, states = jax.block_until_ready(tuple(update(both, states)))


def inject(wrong: bool) -> Any:
    def change(step: int, now: Any, state: Any) -> Any:
        state.hyperparams["learning_rate"] = jnp.asarray(0.1 + wrong * (step > 1))
        return now, state

    return change


def counted(wrong: bool) -> Any:
    def change(step: int, now: Any, state: Any) -> Any:
        first = state[0]
        skips = wrong and step == 1
        return now, (first._replace(count=first.count + 1) if skips else first, *state[1:])

    return change


def at_one(wrong: bool, change: Callable[[Any, Any], Any]) -> Any:
    return lambda step, now, state: change(now, state) if wrong and step == 1 else (now, state)


def moments(now: Any, state: Any) -> Any:
    return now, (state[0]._replace(mu=jax.tree.map(jnp.ones_like, state[0].mu)), *state[1:])


def one_element(now: Any, state: Any) -> Any:
    return {**now, "w": now["w"].at[2, 1].add(1e-6)}, state


optax_ways(compiled=False)
optax_ways(compiled=True)


# Objects and functions --------------------------------------------------------------------------------


def leaves(seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    return [random.normal(size=shape) for shape in ((3, 2), (2,))]


def objects(comm: Comm, plain: Any, begin: Any = None, change: Any = None, **options: Any) -> None:
    """Take steps of an object with `update`, or of a function."""
    optimizer = distributed(comm, plain, **options)
    now = leaves() if begin is None else begin
    update = getattr(optimizer, "update", optimizer)
    for step in range(2 * EVERY):
        now = update(now, [leaf * (1.0 + comm.rank) for leaf in now])
        if change and step == 1:
            change(optimizer, now)


def descent(rate: float) -> Any:
    return lambda params, grads: [p - rate * g for p, g in zip(params, grads, strict=True)]


class Stateful:
    """Takes its state as an argument."""

    def update(self, params: Any, grads: Any, state: Any) -> Any:
        count = state["count"] + 1
        return [p - 0.1 * g / count for p, g in zip(params, grads, strict=True)], {"count": count}


_RATES: Final = r"learning_rate is not .*: 0.1, .*: 0.2, "
_table: dict[str, tuple[str, Callable[[Comm, bool], None]]] = {
    "synchronize_forgotten": (
        r"params\[0\] is not .* at \[0, 0\].*call arraycomm.synchronize",
        lambda comm, wrong: objects(comm, SGD(0.1), leaves(wrong)),
    ),
    "learning_rate": (_RATES, lambda comm, wrong: objects(comm, SGD(0.2 if wrong else 0.1))),
    "sharded": (_RATES, lambda comm, wrong: objects(comm, Adam(0.2 if wrong else 0.1), shard=True)),
    "class": (
        "the class of the optimizer.*Momentum.*Adam",
        lambda comm, wrong: objects(comm, Adam(0.1) if wrong else Momentum(0.1)),
    ),
    "function": (
        r"rate of descent.<lambda> is not .*: 0.1, .*: 0.2, ",
        lambda comm, wrong: objects(comm, descent(0.2 if wrong else 0.1)),
    ),
}
WAYS += [Way(f"numpy_{name}", train, says) for name, (says, train) in _table.items()]


@way(r"params\[0\] is not .* at \[0, 0\]")
def numpy_state_changed(comm: Comm, wrong: bool) -> None:
    def change(optimizer: Any, _: Any) -> None:
        optimizer.state[0]["velocity"][0, 0] += wrong

    objects(comm, Momentum(0.1), change=change)


@way(r"state\['count'\] is not .*: 1, .*: 2, ")
def numpy_state_that_is_passed(comm: Comm, wrong: bool) -> None:
    optimizer, now, state = distributed(comm, Stateful()), leaves(), {"count": 1 + wrong}
    for _ in range(2):
        now, state = optimizer.update(now, now, state)


@way(r"the same parameters in another order")
def numpy_other_order(comm: Comm, wrong: bool) -> None:
    begin = [np.full(2, value) for value in (1.0, 2.0)]
    objects(comm, SGD(0.1), begin[::-1] if wrong else begin)


def in_turns(comm: Comm) -> Any:
    """Return an optimizer whose trees are compared after an even number of steps."""
    return ac.DistributedOptimizer(descent(0.1), comm=comm, verify_every=4)


@way(r"params\[1\] is not .* at \[0\].*1 of 2 arrays differ")
def numpy_second_of_two_trees(comm: Comm, wrong: bool) -> None:
    optimizer, trees = in_turns(comm), [leaves(), leaves(1)]
    trees[1][1][0] += wrong
    for _ in range(2):
        for number, tree in enumerate(trees):
            trees[number] = optimizer(tree, tree)


def numpy_trees_in_turns(comm: Comm, wrong: bool, changed: int) -> None:
    optimizer, trees = in_turns(comm), [leaves(), leaves(1)]
    for step in range(8):
        for number, tree in enumerate(trees):
            trees[number] = optimizer(tree, tree)
        trees[changed][1][0] += wrong and step == 2


for _number in range(2):
    _says = r"params\[1\] is not .* at \[0\].*1 of 2 arrays differ"
    _changed = partial(numpy_trees_in_turns, changed=_number)
    WAYS.append(Way(f"numpy_change_of_tree_{_number}_in_turns", _changed, _says))


@way(r"params\[0\] is not .*float64 \(3, 2\).*missing")
def numpy_no_parameters(comm: Comm, wrong: bool) -> None:
    optimizer = distributed(comm, descent(0.1))
    optimizer([] if wrong else leaves(), leaves())


# thinc ------------------------------------------------------------------------------------------------


def thinc_steps(comm: Comm, plain: Any, seed: int = 0, change: Any = None) -> None:
    model = thinc.chain(thinc.Linear(2, 3), thinc.Linear(1, 2)).initialize()
    random = np.random.default_rng(seed)
    for node in model.walk():
        for name in node.param_names:
            if node.has_param(name):
                node.set_param(name, random.normal(size=node.get_param(name).shape).astype("f4"))
    optimizer = distributed(comm, plain)
    for step in range(2 * EVERY):
        _, backprop = model.begin_update(np.full((2, 3), 1.0 + comm.rank, "f4"))
        backprop(np.ones((2, 1), "f4"))
        model.finish_update(optimizer)
        if change and step == 1:
            change(model, optimizer)


@way(r"call arraycomm.synchronize")
def thinc_synchronize_forgotten(comm: Comm, wrong: bool) -> None:
    thinc_steps(comm, thinc.SGD(0.01), seed=wrong)


@way(r"learn_rate is not .*0.0")
def thinc_learn_rate(comm: Comm, wrong: bool) -> None:
    thinc_steps(comm, thinc.SGD(0.02 if wrong else 0.01))


@way(r"linear.W is not|linear.b is not")
def thinc_weight_changed(comm: Comm, wrong: bool) -> None:
    def change(model: Any, _: Any) -> None:
        node = next(node for node in model.walk() if node.has_param("b"))
        node.set_param("b", node.get_param("b") + wrong)

    thinc_steps(comm, thinc.SGD(0.01), change=change)


if thinc is None:
    WAYS = [each for each in WAYS if not each.name.startswith("thinc")]
# Programs need a process a rank; what is compared does not depend on how it comes to the others.
SOME: Final = 1 if pairwise.EVERY else 3
CASES: Final = WAYS if LAUNCH is None else COMPILED[::SOME]

# The table --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
def test_a_way_to_diverge_is_an_error_on_every_rank(on_ranks, case: Way) -> None:
    def train(comm: Comm) -> str:
        with pytest.raises((ac.MismatchError, RuntimeError)) as error:
            case.train(comm, comm.rank == SIZE - 1)
        return str(error.value)

    said = on_ranks(SIZE, train)
    assert re.search(case.says, said[0], re.DOTALL), said[0]
    assert len(set(said)) == 1
    assert "rank 0" in said[0] or "ranks 0" in said[0]


# What is mended --------------------------------------------------------------------------------------


@each_rank_of(SIZE)
def test_ranks_without_data_take_steps_with_the_hyperparameters_of_the_others(comm: Comm) -> None:
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer = ac.DistributedOptimizer(plain, comm=comm)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for _ in range(2):
        with ac.join(comm) as joined:
            for step in range(2 + 2 * comm.rank):
                optimizer.zero_grad()
                optimizer.param_groups[0]["of a list"] = [0.5, float(step)]
                loss = model(torch.full((2, 4), 1.0 + step)).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
        joined.synchronize(schedule)
        # Not the tuple for which other ranks would take it.
        assert type(optimizer.param_groups[0]["of a list"]) is list
    trained = [p.detach().flatten().tolist() for p in model.parameters()]
    steps_taken = 2 * 2 * comm.size
    assert schedule.get_last_lr()[0] == pytest.approx(0.001 * 0.8**steps_taken)
    assert scaler.get_scale() == 256.0 * 2 ** (steps_taken // 2)
    found = (trained, schedule.get_last_lr()[0], scaler.get_scale())
    assert comm.allgather_object(found) == [found] * comm.size
