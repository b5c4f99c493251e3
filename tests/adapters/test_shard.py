"""Sharded optimizers: the bits of unsharded ones, with a part of the state on each rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import optree
import pytest

import arraycomm as ac
from arraycomm.adapters import numpy as plain_adapter
from arraycomm.testing import run
from tests.support.on_ranks import each_rank_of

# Few that differ: JAX compiles for each.
SHAPES = [(5, 3), (2, 2), (5, 3), (5, 3), (5, 3)]
STEPS = 3

Train = Callable[..., Any]


def arrays(seed: Any, shapes: list[Any] = SHAPES) -> list[Any]:
    random = np.random.default_rng(seed)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def bits(tree: Any) -> list[Any]:
    """Return the leaves of a tree in a form in which equal means equal in every bit."""
    found = []
    for leaf in optree.tree_leaves(tree, none_is_leaf=True):
        x = leaf.detach().numpy() if hasattr(leaf, "detach") else leaf
        if str(getattr(x, "dtype", "")).startswith("key"):
            x = pytest.importorskip("jax").random.key_data(x)
        found.append(
            (str(x.dtype), np.shape(x), np.asarray(x).tobytes()) if hasattr(x, "dtype") else x
        )
    return found


def nbytes(tree: Any) -> int:
    return sum(getattr(leaf, "nbytes", 0) for leaf in optree.tree_leaves(tree))


def assert_same_sharded(size: int, train: Train) -> tuple[list[int], int]:
    """Compare what `train(comm, shard)` returns, except how much of the state there is: return that.

    Of all ranks if it is sharded, and of one if it is not.
    """
    unsharded, sharded = run(size, train, False), run(size, train, True)
    for got, wanted in zip(sharded, unsharded, strict=True):
        assert bits(got[:-1]) == bits(wanted[:-1])
    return [kept for *_, kept in sharded], unsharded[0][-1]


# Torch ----------------------------------------------------------------------------------------------


def parameters(torch: Any, seed: Any = 0) -> list[Any]:
    return [torch.nn.Parameter(torch.from_numpy(array)) for array in arrays(seed)]


def backward(torch: Any, params: list[Any], seed: Any, scale: float = 1.0) -> Any:
    factors = map(torch.from_numpy, arrays(seed, [tuple(p.shape) for p in params]))
    loss = sum(((p * f).sin() * scale).sum() for p, f in zip(params, factors, strict=True))
    loss.backward()
    return loss.detach()


def train_torch(torch: Any, comm: Any, kind: Any, steps: Any = range(STEPS), **options: Any) -> Any:
    """Return the parameters, and on rank 0 the whole state."""
    from arraycomm.adapters.torch import gather_state

    params, start = parameters(torch), options.pop("start", None)
    optimizer = ac.DistributedOptimizer(kind(params, lr=0.01), comm=comm, **options)
    if start is not None:
        with torch.no_grad():
            for param, value in zip(params, start[0], strict=True):
                param.copy_(value)
        optimizer.load_state_dict(start[1])
    for step in steps:
        optimizer.zero_grad()
        backward(torch, params, (step, comm.rank))
        optimizer.step()
    return params, gather_state(optimizer), nbytes(dict(enumerate(optimizer.state.values())))


def torch_classes() -> list[str]:
    if find_spec("torch") is None:
        return []
    import torch

    return [
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and name != "Optimizer"
    ]


@pytest.mark.parametrize("name", torch_classes())
def test_every_optimizer_of_torch_is_the_same_sharded_or_refused(torch: Any, name: str) -> None:
    kind = getattr(torch.optim, name)
    if name in {"LBFGS", "SparseAdam"}:
        said = f"DistributedOptimizer: torch's {name} cannot be sharded"
        with pytest.raises(TypeError, match=said):
            run(1, lambda comm: train_torch(torch, comm, kind, shard=True))
        return
    # Messages so small that there are several. Ranks find no difference in any state.
    options = {"steps": range(3), "bucket_bytes": 100, "verify_every": 1}
    assert_same_sharded(
        2, lambda comm, shard: train_torch(torch, comm, kind, shard=shard, **options)
    )


def test_parameters_of_any_dtype_and_layout_are_exchanged(torch: Any) -> None:
    def on_rank(comm: Any, shard: bool) -> Any:
        image = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
        tensors = [torch.ones(3, 4).T, image, torch.ones(()), torch.ones(0, 3), torch.ones(1 << 16)]
        kinds = [torch.bfloat16, torch.float32, torch.complex64, torch.float16, torch.float64]
        params = [torch.nn.Parameter(t.to(k)) for t, k in zip(tensors, kinds, strict=True)]
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        ac.DistributedOptimizer(optimizer, comm=comm, shard=shard)
        for step in range(2):
            for number, param in enumerate(params):
                param.grad = torch.full_like(param, number + step + comm.rank)
            optimizer.step()
        assert params[1].is_contiguous(memory_format=torch.channels_last)
        return [*(p.detach().resolve_conj().to(torch.complex128) for p in params), 0]

    assert_same_sharded(3, on_rank)


def tiny(torch: Any, params: list[Any], comm: Any, **options: Any) -> Any:
    adam = torch.optim.Adam(params, lr=0.01, weight_decay=0.1)
    return ac.DistributedOptimizer(adam, comm=comm, **options)


def take(torch: Any, optimizer: Any, params: list[Any], comm: Any, *steps: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(torch, params, (step, comm.rank))
        optimizer.step()


def wrapped_with_state(torch: Any, comm: Any, **options: Any) -> Any:
    params = parameters(torch)
    optimizer = torch.optim.Adam(params)
    backward(torch, params, 0)
    optimizer.step()
    ac.DistributedOptimizer(optimizer, comm=comm, **options)
    take(torch, optimizer, params, comm, 1)
    return params, optimizer


def test_an_optimizer_that_has_a_state_is_the_same_sharded(torch: Any) -> None:
    from arraycomm.adapters.torch import gather_state

    def on_rank(comm: Any, shard: bool) -> Any:
        params, optimizer = wrapped_with_state(torch, comm, shard=shard)
        kept = sum(map(bool, optimizer.state.values()))
        return params, [p.grad for p in params], gather_state(optimizer), kept

    kept, whole = assert_same_sharded(3, on_rank)
    assert sum(kept) == whole


@each_rank_of(2)
def test_state_that_is_not_whole_is_refused(comm: Any, torch: Any) -> None:
    from arraycomm.adapters.torch import gather_state

    params = parameters(torch)
    optimizer = tiny(torch, params, comm, shard=True)
    take(torch, optimizer, params, comm, 0)
    for each in (optimizer, copy.deepcopy(optimizer)):
        with pytest.raises(RuntimeError, match=r"call .*gather_state\(optimizer\) on all ranks"):
            each.state_dict()
    with pytest.raises(RuntimeError, match="takes on every rank; synchronize has no use"):
        ac.synchronize(optimizer, comm=comm)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(optimizer)
    with pytest.raises(ValueError, match="gather_state: this optimizer is not distributed"):
        gather_state(torch.optim.SGD(parameters(torch)))
    plain = ac.DistributedOptimizer(plain_adapter.SGD(0.1), comm=comm)
    whole = tiny(torch, parameters(torch), comm)
    gathers = [
        (gather_state, optimizer),
        (gather_state, whole),
        (plain_adapter.gather_state, plain),
    ]
    for gather, each in gathers:
        with pytest.raises(ValueError, match="root must be a rank of the communicator"):
            gather(each, root=2)


@each_rank_of(2)
def test_a_state_dict_is_whole_before_there_is_a_state(comm: Any, torch: Any) -> None:
    """Accelerator.prepare asks for it, moves it to a device, and loads it."""
    trained = []
    for prepares in (False, True):
        params = parameters(torch)
        optimizer = tiny(torch, params, comm, shard=True)
        if prepares:
            optimizer.load_state_dict(optimizer.state_dict())
        take(torch, optimizer, params, comm, 0, 1)
        trained.append([p.tolist() for p in params])
    assert trained[0] == trained[1]
    with_state = [tiny(torch, parameters(torch), comm, shard=True), torch.optim.Adagrad(params)]
    with_state[0].load_state_dict(broadcast_state(torch, optimizer, comm))
    with_state[1] = ac.DistributedOptimizer(with_state[1], comm=comm, shard=True)
    for each in with_state:
        with pytest.raises(
            RuntimeError, match="unless device_placement is False for the optimizer"
        ):
            each.state_dict()


def broadcast_state(torch: Any, optimizer: Any, comm: Any) -> Any:
    from arraycomm.adapters.torch import gather_state

    return comm.bcast_object(gather_state(optimizer))


@pytest.mark.parametrize("placed", [True, False])
@each_rank_of(1)
def test_a_sharded_optimizer_is_prepared_by_accelerate(comm: Any, torch: Any, placed: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    params = parameters(torch)
    optimizer = tiny(torch, params, comm, shard=True)
    if not placed:
        take(torch, optimizer, params, comm, 0)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(optimizer, device_placement=[placed])
    take(torch, prepared, params, comm, 1)
    assert optimizer.state


@each_rank_of(2)
def test_torch_optimizers_of_unknown_classes_say_that_they_can_be_sharded(comm, torch) -> None:
    class Named(torch.optim.SGD):  # type: ignore[misc]
        """Only its name is its own."""

    class Coupled(Named):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class Declared(Coupled):
        per_parameter = True

    class Denied(torch.optim.SGD):  # type: ignore[misc]
        per_parameter = False

    unsharded = train_torch(torch, comm, torch.optim.SGD)[0]
    for kind in (Named, Declared):
        assert bits(train_torch(torch, comm, kind, shard=True)[0]) == bits(unsharded)
    with pytest.raises(TypeError, match="set per_parameter = True in its class"):
        train_torch(torch, comm, Coupled, shard=True)
    with pytest.raises(TypeError, match="per_parameter = False"):
        train_torch(torch, comm, Denied, shard=True)


@each_rank_of(2)
def test_ranks_that_divide_other_parameters_raise(comm: Any, torch: Any) -> None:
    # The second has no gradient, so that only its part in the division tells.
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (10, 100 * comm.rank)]
    optimizer = tiny(torch, params, comm, shard=True, verify_every=0)
    backward(torch, params[:1], comm.rank)
    with pytest.raises(
        ac.MismatchError, match=r"exchange_shards.*owners=0 on rank 0, owners=1 on rank 1"
    ):
        optimizer.step()


# Objects with update --------------------------------------------------------------------------------


class Adam:
    """Keeps its moments as trees like the parameters, as far as it was given them."""

    per_parameter = True

    def __init__(self) -> None:
        self.steps, self.first, self.second = 0, None, None
        self.decays = [0.9, 0.99]

    def update(self, params: Any, grads: Any) -> Any:
        tree: Any = optree.tree_map
        if self.first is None:
            self.first = self.second = tree(np.zeros_like, params)
        self.steps += 1
        a, b = map(np.float32, self.decays)
        self.first = tree(lambda m, g: a * m + (1 - a) * g, self.first, grads)
        self.second = tree(lambda v, g: b * v + (1 - b) * g * g, self.second, grads)
        rate, small = np.float32(0.1 / self.steps), np.float32(1e-3)
        return tree(
            lambda p, m, v: p - rate * m / (np.sqrt(v) + small), params, self.first, self.second
        )


def as_tree(leaves: list[Any]) -> Any:
    return {"x": leaves[:2], "y": {"z": leaves[2]}, "a": tuple(leaves[3:])}


@each_rank_of(3)
def test_errors_of_one_ranks_update_reach_all(comm: Any) -> None:
    class Odd(Adam):
        def update(self, params: Any, grads: Any) -> Any:
            if any(p.shape == (2, 2) for p in params):
                return self.fail(params)
            return params

        def fail(self, params: Any) -> Any:
            raise KeyError("mine")

    class Widening(Odd):
        def fail(self, params: Any) -> Any:
            return [p.astype(np.float64) for p in params]

    class Losing(Odd):
        def fail(self, params: Any) -> Any:
            return params[1:]

    for kind, said in (
        (Odd, "mine"),
        (Widening, r"must keep its dtype and shape, float32 \(2, 2\)"),
        (Losing, "as a list"),
    ):
        optimizer = ac.DistributedOptimizer(kind(), comm=comm, shard=True)
        with pytest.raises((KeyError, TypeError, ac.PeerError), match=said):
            optimizer.update(arrays(0), arrays(comm.rank))


@each_rank_of(2)
def test_parameters_that_differ_in_their_dtype_alone_raise(comm: Any) -> None:
    same = type("Same", (Adam,), {"update": lambda self, params, grads: params})
    optimizer = ac.DistributedOptimizer(same(), comm=comm, shard=True, verify_every=0)
    params = [np.zeros(2, dtype) for dtype in ("f4", "i4" if comm.rank else "f4")]
    with pytest.raises(ac.MismatchError, match=r"exchange_shards.*float32.*int32"):
        optimizer.update(params, [np.ones(2, np.float32)] * 2)


@each_rank_of(3)
def test_states_that_cannot_be_put_together_are_refused(comm: Any) -> None:
    class Counting(Adam):
        def update(self, params: Any, grads: Any) -> Any:
            self.counts = len(params)
            return super().update(params, grads)

    optimizer = ac.DistributedOptimizer(Counting(), comm=comm, shard=True)
    optimizer.update(arrays(0), arrays(comm.rank))
    if comm.rank:
        assert plain_adapter.gather_state(optimizer) is None
    else:
        with pytest.raises(TypeError, match=r"state\['counts'\] is not the same on all ranks"):
            plain_adapter.gather_state(optimizer)


@each_rank_of(2)
def test_a_state_that_only_the_root_has_is_refused(comm: Any) -> None:
    optimizer = ac.DistributedOptimizer(Adam(), comm=comm, shard=True)
    after = optimizer.update(arrays(0), arrays(1))
    whole = plain_adapter.gather_state(optimizer)
    if comm.rank:
        with pytest.raises(TypeError, match=r"state is None, .* for example by comm\.bcast_object"):
            plain_adapter.load_state(optimizer, whole, after)


@each_rank_of(2)
def test_what_cannot_be_done_with_sharded_objects_is_refused(comm: Any) -> None:
    class Plain:
        def update(self, params: Any, grads: Any) -> Any:
            return params

    class Stateful:
        per_parameter = True

        def update(self, params: Any, grads: Any, state: Any) -> Any:
            return params, state

    sharded = ac.DistributedOptimizer(plain_adapter.Adam(), comm=comm, shard=True)
    with pytest.raises(TypeError, match="this optimizer is sharded, so no rank has the state"):
        ac.synchronize(sharded, comm=comm)
    stateful = ac.DistributedOptimizer(Stateful(), comm=comm, shard=True)
    with pytest.raises(TypeError, match=r"Stateful.update takes the state as an argument"):
        stateful.update(arrays(0), arrays(0), None)
    with pytest.raises(TypeError, match=r"Plain cannot be sharded: .*set per_parameter = True"):
        ac.DistributedOptimizer(Plain(), comm=comm, shard=True)
    with pytest.raises(ac.MismatchError, match="shard=True"):
        ac.DistributedOptimizer(Adam(), comm=comm, shard=comm.rank == 1)


@each_rank_of(2)
def test_parameters_that_change_and_joined_steps_are_refused(comm: Any) -> None:
    optimizer = ac.DistributedOptimizer(Adam(), comm=comm, shard=True)
    optimizer.update(arrays(0), arrays(comm.rank))
    with pytest.raises(ValueError, match="must be the same in every step"):
        optimizer.update(arrays(0)[1:], arrays(comm.rank)[1:])
    other = ac.DistributedOptimizer(Adam(), comm=comm, shard=True)
    with (
        pytest.raises((ValueError, ac.PeerError), match="only torch optimizers can be sharded"),
        ac.join(comm),
    ):
        other.update(arrays(0), arrays(comm.rank))


# Optax ----------------------------------------------------------------------------------------------


def transformations() -> dict[str, Callable[[], Any]]:
    optax: Any = pytest.importorskip("optax")
    return {
        "adam": lambda: optax.adam(0.1),
        "masked": lambda: optax.adamw(
            0.1, mask=lambda params: optree.tree_map(lambda p: p.shape[0] > 4, params)
        ),
        "injected": lambda: optax.inject_hyperparams(optax.sgd)(
            learning_rate=optax.exponential_decay(0.1, 1, 0.5), momentum=0.9
        ),
        # Its noise depends on how many leaves there are.
        "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
        # Every rank has a copy of the first parameters, which makes larger states of small ones.
        "cocob": optax.contrib.cocob,
        "multi": lambda: optax.multi_transform(
            {"a": optax.sgd(0.1, 0.9), "b": optax.lion(0.1)}, as_tree(list("ababa"))
        ),
    }


def train_optax(comm: Any, make: Callable[[], Any], shard: bool, **options: Any) -> Any:
    jax: Any = pytest.importorskip("jax")
    optax: Any = pytest.importorskip("optax")
    from arraycomm.adapters.jax import gather_state, shard_state

    start, wrap = options.pop("start", None), options.pop("wrap", lambda update: update)
    optimizer = ac.DistributedOptimizer(make(), comm=comm, shard=shard, **options)
    params = jax.tree.map(jax.numpy.asarray, as_tree(arrays(0)))
    state, update = optimizer.init(params), wrap(optimizer.update)
    first = jax.eval_shape(optimizer.init, params)
    if start is not None:
        params, state = start[0], shard_state(start[1], like=first) if shard else start[1]
    for step in range(STEPS):
        if step == 2:
            state = copy.deepcopy(state)
        grads = jax.tree.map(jax.numpy.asarray, as_tree(arrays((step, comm.rank))))
        changes, state = update(grads, state, params)
        params = optax.apply_updates(params, changes)
    shapes = [list(map(np.shape, jax.tree.leaves(each))) for each in (state, first)]
    assert shapes[0] == shapes[1]
    whole = gather_state(state) if shard else state
    return params, whole if comm.rank == 0 else None, nbytes(jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("name", "size"), [("adam", 3), ("masked", 7), ("noise", 2), ("multi", 3), ("cocob", 2)]
)
def test_optax_is_the_same_sharded(name: str, size: int) -> None:
    make = transformations()[name]
    kept, whole = assert_same_sharded(
        size, lambda comm, shard: train_optax(comm, make, shard, bucket_bytes=100)
    )
    # A third of the moments, an element of each other one, and the counters.
    assert name != "adam" or max(kept) < 0.6 * whole


def test_a_whole_state_of_optax_is_loaded_on_any_number_of_ranks() -> None:
    make = transformations()["injected"]
    start = run(3, train_optax, make, True)[0][:2]
    assert_same_sharded(2, lambda comm, shard: train_optax(comm, make, shard, start=start))


def test_optax_that_looks_at_all_gradients_is_sharded_behind_a_reduction(optax: Any) -> None:
    adapter = pytest.importorskip("arraycomm.adapters.jax")

    def chained(comm: Any, shard: bool) -> Any:
        inner = ac.DistributedOptimizer(optax.adam(0.1), comm=comm, shard=shard)
        clip = optax.clip_by_global_norm(0.5)
        optimizer = optax.chain(adapter.all_reduce(comm=comm), clip, inner)
        params = as_tree(arrays(0))
        state = optimizer.init(params)
        for step in range(STEPS):
            grads = as_tree(arrays((step, comm.rank)))
            changes, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, changes)
        # Only rank 0 has the whole of it.
        whole = adapter.gather_state(state) if shard else state
        return params, None if comm.rank else whole, 0

    assert_same_sharded(2, chained)

    def refused(comm: Any) -> None:
        for couple in (optax.clip_by_global_norm(0.5), optax.apply_if_finite(optax.identity(), 2)):
            coupled = optax.chain(couple, optax.sgd(0.1))
            optimizer = ac.DistributedOptimizer(coupled, comm=comm, shard=True)
            message = r"cannot be sharded: its update of \['.*'\]\S* depends on .*all_reduce\(\)"
            with pytest.raises(TypeError, match=message):
                optimizer.init(as_tree(arrays(0)))

    run(2, refused)


@each_rank_of(2)
def test_transformations_that_depend_on_the_shapes_of_other_leaves_are_refused(
    comm: Any, jax: Any, optax: Any
) -> None:
    def by_count(updates: Any, params: Any = None) -> Any:
        count = sum(leaf.size for leaf in jax.tree.leaves(updates))
        return jax.tree.map(lambda u: u / count, updates)

    by_shape = optax.masked(optax.trace(0.9), lambda tree: jax.tree.map(lambda p: p.size > 4, tree))
    params = as_tree(arrays(0))
    for inner in (optax.stateless(by_count), by_shape):
        optimizer = ac.DistributedOptimizer(inner, comm=comm, shard=True)
        with pytest.raises(TypeError, match=r"cannot be sharded: .*depends on the shapes of"):
            optimizer.update(params, optimizer.init(params), params)


@each_rank_of(2)
def test_a_refusal_that_one_rank_alone_sees_raises_on_all(comm: Any, optax: Any) -> None:
    optimizer = ac.DistributedOptimizer(optax.adafactor(0.1, 2), comm=comm, shard=True)
    shapes = {"b": 2, "t": 2, "w": (3, 2)}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises((TypeError, ac.PeerError), match="cannot be sharded"):
        optimizer.update(params, optimizer.init(params), params)
    assert comm.allreduce(1) == comm.size


@each_rank_of(2)
def test_states_that_depend_on_gradients_only_at_times_are_refused(comm, jax, optax) -> None:
    def update(updates: Any, state: Any, _: Any = None, *, peek: Any = None, scale: Any = 1) -> Any:
        seen = 0 if peek is None else peek * jax.tree.leaves(updates)[0][0, 0]
        return jax.tree.map(lambda u: u * scale, updates), state + seen

    inner = optax.GradientTransformationExtraArgs(lambda params: jax.numpy.zeros(()), update)
    optimizer = ac.DistributedOptimizer(inner, comm=comm, shard=True)
    params = as_tree(arrays(0))
    _, state = optimizer.update(params, optimizer.init(params), scale=2.0)
    with pytest.raises(TypeError, match="depends on gradients is not always the same"):
        optimizer.update(params, state, params, peek=1.0)


@each_rank_of(2)
def test_leaves_without_dimensions_are_updated_and_refused_as_others_are(comm, jax, optax) -> None:
    # JAX takes the dtype of the gradient with one that it has chosen itself.
    params = jax.tree_util.Partial(max, *map(jax.numpy.asarray, (1.0, 2.0)))
    grads = jax.tree.map(lambda p: p.astype("bfloat16"), params)
    decay = ac.DistributedOptimizer(optax.add_decayed_weights(0.1), comm=comm, shard=True)
    changes, _ = decay.update(grads, decay.init(params), params)
    assert [leaf.dtype.name for leaf in jax.tree.leaves(changes)] == ["bfloat16"] * 2
    optimizer = ac.DistributedOptimizer(optax.trace(0.9), comm=comm, shard=True)
    state = optimizer.init(params)
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.init(params))
    _, after = optimizer.update(params, state)
    jax.tree.map(lambda leaf: leaf.delete(), state)
    optimizer.update(params, after)
    with pytest.raises(TypeError):
        optimizer.update(params, after, jax.tree_util.Partial(max, params.args[0], object()))
    assert comm.allreduce(1) == comm.size
    with pytest.raises(ac.MismatchError, match="synchronize"):
        ac.synchronize(after, comm=comm)


@each_rank_of(2)
def test_states_of_optax_that_are_not_whole_are_refused(comm: Any, optax: Any) -> None:
    from arraycomm.adapters import jax as adapter

    optimizer = ac.DistributedOptimizer(optax.adam(0.1), comm=comm, shard=True)
    params = as_tree(arrays(0))
    state = optimizer.init(params)
    with pytest.raises(TypeError, match=r"call arraycomm.adapters.jax.gather_state\(state\)"):
        pickle.dumps(state)
    plain = optax.adam(0.1).init(params)
    wrong = pytest.raises(
        (TypeError, ac.PeerError), match="must be what its init or update returned"
    )
    with wrong:
        optimizer.update(params, state if comm.rank else plain, params)
    # The ranks are in step.
    optimizer.update(params, state, params)
    with pytest.raises(ValueError, match="gather_state: there is no sharded state"):
        adapter.gather_state(plain)
    with pytest.raises(ValueError, match="shard_state: whole must be the whole state"):
        adapter.shard_state(optax.sgd(0.1).init(params), like=state)


# Processes ------------------------------------------------------------------------------------------


class TestOnProcesses:
    """On as many ranks as there are processes; `test_processes.py` runs them on more."""

    def test_torch(self, torch: Any, world: ac.Communicator) -> None:
        kind = torch.optim.Adam
        unsharded = train_torch(torch, world, kind)
        sharded = train_torch(torch, world, kind, shard=True, bucket_bytes=100)
        assert bits(sharded[:2]) == bits(unsharded[:2])

    def test_a_compiled_update_on_ranks_without_a_leaf(
        self, world: ac.Communicator, jax: Any, optax: Any
    ) -> None:
        optimizer = ac.DistributedOptimizer(optax.sgd(1.0), comm=world, op="sum", shard=True)
        params = {"a": jax.numpy.zeros(2)}
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for step in range(5):
            grads = {"a": params["a"] + world.rank + step}
            changes, state = update(grads, state)
            total = sum(float(np.float32(rank + step)) for rank in range(world.size))
            np.testing.assert_array_equal(changes["a"], np.full(2, -total, np.float32))

    def test_compiled_optax(self, world: ac.Communicator, jax: Any) -> None:
        make = transformations()["adam"]
        options = {"wrap": jax.jit, "accumulate": 2}
        sharded, unsharded = (train_optax(world, make, n, **options) for n in (True, False))
        assert bits(sharded[:2]) == bits(unsharded[:2])
