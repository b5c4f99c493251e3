"""Compression by objects: gradients that are sent in a form of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from tests.support.on_ranks import each_rank_of

FRAMEWORKS = ("numpy", "torch", "jax", "array_api_strict")
ON_RANKS = pytest.mark.parametrize(
    ("framework", "size"),
    [("numpy", 1), ("numpy", 4), ("torch", 1), ("torch", 3), ("jax", 3), ("array_api_strict", 2)],
)
SHAPES = ((3, 5), (4,))
Step = Callable[[Sequence[Any]], list[Any]]


# Programs of each framework: a step takes gradients (or None), and returns the reduced ones --------


class Taken:
    """An optimizer that keeps the gradients that it gets."""

    def update(self, params: Any, grads: Any) -> Any:
        return grads


def object_program(framework: str, comm: ac.Communicator, options: dict[str, Any]) -> Step:
    optimizer = ac.DistributedOptimizer(Taken(), comm=comm, **options)

    def step(gradients: Sequence[Any]) -> list[Any]:
        arrays = [None if g is None else ac.exchange(g, framework) for g in gradients]
        got = optimizer.update([None] * len(arrays), arrays)
        assert [type(g) for g in got] == [type(g) for g in arrays if g is not None] or None in got
        return [None if g is None else np.asarray(ac.exchange(g, "numpy")) for g in got]

    step.optimizer = optimizer
    return step


def torch_program(_: str, comm: ac.Communicator, options: dict[str, Any]) -> Step:
    torch = pytest.importorskip("torch")
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    options = {"bucket_bytes": 1, **options}
    optimizer = ac.DistributedOptimizer(torch.optim.SGD(parameters, 1.0), comm=comm, **options)

    def step(gradients: Sequence[Any]) -> list[Any]:
        optimizer.zero_grad()
        pairs = zip(parameters, gradients, strict=True)
        loss = sum((p * torch.tensor(g)).sum() for p, g in pairs if g is not None)
        if any(g is not None for g in gradients):
            loss.backward()
        optimizer.step()
        return [None if p.grad is None else p.grad.numpy().copy() for p in parameters]

    step.optimizer, step.parameters = optimizer, parameters
    return step


def jax_program(_: str, comm: ac.Communicator, options: dict[str, Any]) -> Step:
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    optimizer = ac.DistributedOptimizer(optax.identity(), comm=comm, **options)
    state = [optimizer.init([jax.numpy.zeros(shape) for shape in SHAPES])]

    def step(gradients: Sequence[Any]) -> list[Any]:
        arrays = [None if g is None else jax.numpy.asarray(g) for g in gradients]
        got, state[0] = optimizer.update(arrays, state[0])
        return [None if g is None else np.asarray(g) for g in got]

    step.state = state
    return step


def program(framework: str, comm: ac.Communicator, **options: Any) -> Step:
    pytest.importorskip(framework)
    special = {"torch": torch_program, "jax": jax_program}
    return special.get(framework, object_program)(framework, comm, options)


def gradients(rank: int, step: int) -> list[Any]:
    """Return gradients whose sums over ranks and steps are exact in float32, and not in 16 bits."""
    random = np.random.default_rng((rank, step))
    return [random.integers(-4000, 4000, shape).astype(np.float32) / 64 for shape in SHAPES]


def assert_equal(got: Sequence[Any], want: Sequence[Any]) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


class Scaled(ac.Compression):
    """Sends float16, times a number; fails as it is told to, on one rank."""

    def __init__(self, scale: float = 2.0, fault: str = "", rank: int = -1) -> None:
        self.scale, self.fault, self._rank = scale, fault, [rank]

    def _is_faulty(self, fault: str) -> bool:
        return self._rank[0] >= 0 and self.fault == fault

    def compress(self, gradient: Any) -> Any:
        if self._is_faulty("early"):
            raise KeyError("lost early")
        if self._is_faulty("nothing"):
            return None
        return np.asarray(ac.exchange(gradient, "numpy"), np.float16) * np.float16(self.scale)

    def decompress(self, reduced: Any, gradient: Any) -> Any:
        if self._is_faulty("late"):
            raise KeyError("lost late")
        if self._is_faulty("none"):
            return None
        wide = np.asarray(ac.exchange(reduced, "numpy"), np.float32) / np.float32(self.scale)
        return ac.exchange(wide[..., :1] if self._is_faulty("form") else wide, gradient)


@ON_RANKS
@each_rank_of("size")
def test_gradients_are_sent_in_a_form_of_ones_own(
    comm: ac.Communicator, framework: str, size: int
) -> None:
    step = program(framework, comm, op="sum", compression=Scaled())
    for number in range(2):
        everyone = [[g.astype(np.float16) for g in gradients(r, number)] for r in range(size)]
        for n, got in enumerate(step(gradients(comm.rank, number))):
            total = sum((rank[n] * 2).astype(np.float32) for rank in everyone)
            want = total.astype(np.float16).astype(np.float32) / 2
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@each_rank_of(2)
def test_means_of_accumulated_steps_are_compressed(comm: ac.Communicator, framework: str) -> None:
    step = program(framework, comm, op="sum", compression=Scaled(), accumulate=2)
    both = [step([np.full(shape, 2.0 * n, np.float32) for shape in SHAPES]) for n in (1, 2)]
    assert_equal(both[1], [np.full(shape, 6.0) for shape in SHAPES])


@each_rank_of(3)
def test_ranks_of_several_frameworks_compress_together(comm: ac.Communicator) -> None:
    frameworks = ("torch", "numpy", "jax")
    for framework in frameworks:
        pytest.importorskip(framework)
    options = {"op": "sum", "compression": Scaled(), "bucket_bytes": 64}
    step = program(frameworks[comm.rank], comm, **options)
    for number in range(3):
        given = [np.full(shape, number + comm.rank, np.float32) for shape in SHAPES]
        assert_equal(step(given), [np.full(shape, 3.0 * number + 3) for shape in SHAPES])


FAULTS = {
    "early": (KeyError, "lost early"),
    "nothing": (TypeError, r"Scaled.compress must return arrays; got .*NoneType for .*[01]"),
    "late": (KeyError, "lost late"),
    "none": (TypeError, r"Scaled.decompress must return .*got .*NoneType for .*[01]"),
    "form": (TypeError, r"Scaled.decompress must return arrays like .*got .* for .*[01]"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
@each_rank_of(3)
def test_an_error_of_one_ranks_object_raises_on_all(
    comm: ac.Communicator, framework: str, fault: str
) -> None:
    assert_an_error_raises_on_all(comm, framework, fault, 1)


def assert_an_error_raises_on_all(
    comm: ac.Communicator, framework: str, fault: str, rank: int
) -> None:
    kind, text = FAULTS[fault]
    hook, ones = Scaled(fault=fault), [np.ones(shape, np.float32) for shape in SHAPES]
    step = program(framework, comm, compression=hook)
    step(ones)
    faulty = comm.rank == rank
    if faulty:
        hook._rank[0] = rank

    def two_steps() -> None:
        """Make them: what fails after the reduction raises on the others in their next call."""
        step(ones)
        step(ones)

    with pytest.raises(kind if faulty else ac.PeerError, match=text) as caught:
        two_steps()
    assert faulty or caught.value.rank == rank
    hook._rank[0] = -1
    if fault in ("early", "nothing"):
        assert_equal(step(ones), ones)


@each_rank_of(2)
def test_a_gradient_that_is_missing_counts_as_zeros_in_torch_and_raises_elsewhere(
    comm: ac.Communicator,
) -> None:
    def mine(comm: ac.Communicator) -> list[Any]:
        return [None, None if comm.rank else np.ones(4, np.float32)]

    none, some = program("torch", comm, compression=Scaled())(mine(comm))
    assert none is None
    np.testing.assert_array_equal(some, np.full(4, 0.5))
    for framework in ("numpy", "jax"):
        step = program(framework, comm, compression=Scaled())
        with pytest.raises(ac.MismatchError, match=r"\[1\]"):
            step(mine(comm))
        step = program(framework, comm, compression=Scaled())
        none, some = step([None, np.ones(4, np.float32)])
        assert none is None
        np.testing.assert_array_equal(some, np.ones(4))


# Arguments --------------------------------------------------------------------------------------


class Other(ac.Compression):
    """Sends gradients as they are."""


@pytest.mark.parametrize(
    ("compressions", "said"),
    [
        (("bfloat16", Scaled()), ("bfloat16", "Scaled")),
        ((Scaled(2.0), Scaled(3.0)), ("scale=2.0", "scale=3.0")),
        ((Scaled(), Other()), ("Scaled", "Other")),
        ((None, Other()), ("None", "Other")),
    ],
)
@each_rank_of(2)
def test_ranks_with_other_compressions_raise(
    comm: ac.Communicator, compressions: Any, said: tuple[str, str]
) -> None:
    text = f"rank 0: DistributedOptimizer.*{said[0]}.*; rank 1: DistributedOptimizer.*{said[1]}"
    with pytest.raises(ac.MismatchError, match=text):
        ac.DistributedOptimizer(Taken(), comm=comm, compression=compressions[comm.rank])


@each_rank_of(2)
def test_objects_with_equal_settings_are_the_same(comm: ac.Communicator) -> None:
    class Slotted(ac.Compression):
        __slots__ = ("function", "names")

        def __init__(self) -> None:
            self.names, self.function = {"a", "b", "c"}, lambda: None

    ac.DistributedOptimizer(Taken(), comm=comm, compression=Slotted())


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (Scaled, TypeError, r"must be an object, not a class; got Scaled; pass Scaled\(...\)"),
        (object(), ValueError, "must be .*; an object must be an arraycomm.Compression"),
        ("int8", ValueError, "must be .*; got 'int8'"),
    ],
)
@each_rank_of(1)
def test_what_is_no_compression_is_refused(
    comm: ac.Communicator, wrong: Any, kind: type, text: str
) -> None:
    with pytest.raises(kind, match=f"DistributedOptimizer: compression {text}"):
        ac.DistributedOptimizer(Taken(), comm=comm, compression=wrong)


class Reducing(ac.Compression):
    """Of an earlier version: makes collectives of its own."""

    def reduce(self, gradients: Any, states: Any, op: str, comm: ac.Communicator) -> Any:
        return gradients, states


class Remembering(ac.Compression):
    """Of an earlier version: has a state."""

    def init(self, gradient: Any) -> Any:
        return 0 * gradient


class TakingState(ac.Compression):
    """Of an earlier version: is given a state."""

    def compress(self, gradient: Any, state: Any) -> Any:
        return gradient, state


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Reducing, r"Reducing\.reduce is not called, since collectives of .* were removed"),
        (Remembering, r"Remembering\.init is not called, since states of .* were removed"),
        (TakingState, r"TakingState\.compress must take the gradient alone .* were removed"),
    ],
)
@each_rank_of(2)
def test_what_was_removed_is_refused_by_name(comm: ac.Communicator, kind: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"{text}; see the recipe 'Error feedback'"):
        ac.DistributedOptimizer(Taken(), comm=comm, compression=kind())
    with pytest.raises(AttributeError, match="ErrorFeedback was removed; see 'Error feedback' in"):
        ac.ErrorFeedback  # noqa: B018


@pytest.mark.parametrize("wrong", ["int8", Scaled()])
@each_rank_of(1)
def test_calls_without_an_optimizer_take_a_known_name(comm: ac.Communicator, wrong: Any) -> None:
    said = "got 'int8'$" if wrong == "int8" else "only a DistributedOptimizer takes objects"
    with pytest.raises(ValueError, match=said):
        ac.allreduce_gradients([np.ones(1)], compression=wrong, comm=comm)


@each_rank_of(2)
def test_what_is_no_array_is_refused_by_its_path(comm: ac.Communicator) -> None:
    optimizer = ac.DistributedOptimizer(Taken(), comm=comm, compression=Scaled())
    wrong = comm.rank == 1
    with pytest.raises(
        TypeError if wrong else ac.PeerError, match=r"tree\['a'\] is builtins.float; pass an array"
    ):
        optimizer.update({}, {"a": 1.0 if wrong else np.ones((), np.float32)})
    assert optimizer.update({}, {"a": np.ones((), np.float32)})["a"] == 1


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@each_rank_of(2)
def test_inside_join_objects_are_refused_on_all_ranks(
    comm: ac.Communicator, framework: str
) -> None:
    step = program(framework, comm, compression=Scaled())

    def block() -> None:
        with ac.join(comm):
            if comm.rank:
                step(gradients(comm.rank, 0))

    said = "inside join gradients.* cannot be compressed by an object"
    with pytest.raises((ValueError, ac.PeerError), match=said):
        block()


# Compiled programs, and ranks that are processes ------------------------------------------------


@pytest.fixture
def world() -> Iterator[ac.Communicator]:
    """Return the world: one process, or those that mpiexec started."""
    yield ac.init()
    ac.finalize()


class Halved(ac.Compression):
    """Can be traced."""

    def compress(self, gradient: Any) -> Any:
        return (gradient / 2).astype("float16")

    def decompress(self, reduced: Any, gradient: Any) -> Any:
        return reduced.astype(gradient.dtype) * 2


class TestCompiled:
    """On as many ranks as there are processes; `test_jax_adapter` runs them on more."""

    def test_a_compiled_update_sends_the_form_of_an_object(self, world: ac.Communicator) -> None:
        jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
        optimizer = ac.DistributedOptimizer(
            optax.identity(), comm=world, op="sum", compression=Halved()
        )
        ones = [jax.numpy.ones(shape) for shape in SHAPES]
        for update in (jax.jit(optimizer.update), optimizer.update):
            state = optimizer.init(ones)
            for number in range(3):
                reduced, state = update([(1 + number + world.rank) * one for one in ones], state)
                want = sum(1 + number + rank for rank in range(world.size))
                assert_equal(reduced, [want * one for one in ones])

    @pytest.mark.parametrize("fault", ["early", "late"])
    def test_an_error_of_one_processs_object_raises_on_all(
        self, world: ac.Communicator, fault: str
    ) -> None:
        assert_an_error_raises_on_all(world, "jax", fault, world.size - 1)
