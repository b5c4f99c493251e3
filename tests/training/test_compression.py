"""Compression by objects: error feedback, forms of one's own, and hooks that make collectives."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import arraycomm as ac
from arraycomm.testing import run
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


def rounded(x: Any) -> Any:
    return x.astype(ml_dtypes.bfloat16).astype(x.dtype)


# Error feedback ---------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_what_is_sent_and_kept_back_has_the_bits_of_numpy(framework: str, name: str) -> None:
    """Laws state what these are."""
    pytest.importorskip(framework)
    feedback, gradient = ac.ErrorFeedback(name), gradients(0, 0)[0]
    found = {}
    for kind in ("numpy", framework):
        x = ac.exchange(gradient.copy(), kind)
        sent, residual = feedback.compress(x, feedback.init(x))
        again, kept = feedback.compress(x, residual)
        assert all(type(array) is type(x) for array in (sent, residual, again, kept))
        found[kind] = [ac.exchange(each, "numpy") for each in (x, sent, residual, again, kept)]
    assert_equal(found[framework], found["numpy"])
    assert_equal(found[framework][:1], [gradient])
    assert (found[framework][1] != gradient).any()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_residuals_of_values_that_are_not_finite_begin_anew(framework: str) -> None:
    pytest.importorskip(framework)
    feedback = ac.ErrorFeedback("float16")
    bad = np.array([np.inf, -np.inf, np.nan, 1e6, 1 + 2**-12], np.float32)
    x = ac.exchange(bad, framework)
    sent, residual = feedback.compress(x, feedback.init(x))
    np.testing.assert_array_equal(ac.exchange(sent, "numpy"), [np.inf, -np.inf, np.nan, np.inf, 1])
    np.testing.assert_array_equal(ac.exchange(residual, "numpy"), [0, 0, 0, 0, 2**-12])


def test_gradients_of_16_bits_are_sent_as_they_are() -> None:
    feedback, gradient, residual = ac.ErrorFeedback("bfloat16"), np.ones(2, "f2"), np.ones(2, "f4")
    assert feedback.init(gradient) is None
    for state in (None, residual):
        sent, after = feedback.compress(gradient, state)
        assert sent is gradient
        assert after is state


@pytest.mark.parametrize("dtype", ["bf16", None, np.float16, ["bfloat16"]])
def test_error_feedback_needs_the_name_of_a_dtype(dtype: Any) -> None:
    with pytest.raises(
        ValueError, match='ErrorFeedback: dtype must be "bfloat16" or "float16"; got'
    ):
        ac.ErrorFeedback(dtype)


def fed_back(size: int, steps: int, accumulate: int = 1) -> list[list[Any]]:
    """Return by hand what is reduced in each step with a sum over ranks and error feedback."""
    residuals = [[np.zeros(shape, np.float32) for shape in SHAPES] for _ in range(size)]
    found = []
    for step in range(0, steps, accumulate):
        totals = [np.zeros(shape, np.float32) for shape in SHAPES]
        for rank in range(size):
            for n in range(len(SHAPES)):
                parts = [gradients(rank, step + k)[n] for k in range(accumulate)]
                wanted = np.sum(parts, axis=0, dtype="f4") / accumulate + residuals[rank][n]
                residuals[rank][n] = wanted - rounded(wanted)
                totals[n] = totals[n] + rounded(wanted)
        found.append([rounded(total) for total in totals])
    return found


class Derived(ac.ErrorFeedback):
    """Is called as a hook, since it might override `reduce`."""


@pytest.mark.parametrize("kind", [ac.ErrorFeedback, Derived])
@ON_RANKS
@each_rank_of("size")
def test_optimizers_feed_back_what_rounding_loses(
    comm: ac.Communicator, framework: str, size: int, kind: type
) -> None:
    step = program(framework, comm, op="sum", compression=kind("bfloat16"))
    for number, want in enumerate(fed_back(size, 3)):
        assert_equal(step(gradients(comm.rank, number)), want)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@each_rank_of(2)
def test_means_of_accumulated_steps_are_fed_back(comm: ac.Communicator, framework: str) -> None:
    compression = ac.ErrorFeedback("bfloat16")
    step = program(framework, comm, op="sum", compression=compression, accumulate=2)
    seen = [step(gradients(comm.rank, number)) for number in range(6)]
    for got, want in zip(seen[1::2], fed_back(2, 6, 2), strict=True):
        assert_equal(got, want)


@pytest.mark.parametrize("compression", [ac.ErrorFeedback("bfloat16"), None])
@each_rank_of(3)
def test_ranks_of_several_frameworks_compress_together(comm: ac.Communicator, compression) -> None:
    frameworks = ("torch", "numpy", "jax")
    for framework in frameworks:
        pytest.importorskip(framework)
    hook = compression or Sending()
    step = program(frameworks[comm.rank], comm, op="sum", compression=hook, bucket_bytes=64)
    for number, fed in enumerate(fed_back(3, 3)):
        want = fed if compression else [g + number for g in gradients(0, number)]
        assert_equal(step(gradients(comm.rank, number)), want)


# Hooks ------------------------------------------------------------------------------------------


class Scaled(ac.Compression):
    """Sends float16, and counts its steps for each parameter."""

    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale

    def init(self, gradient: Any) -> Any:
        return [0 * gradient]

    def compress(self, gradient: Any, state: Any) -> Any:
        half = ac.exchange(np.asarray(ac.exchange(gradient, "numpy"), np.float16), "numpy")
        half = half * np.float16(self.scale)
        return half, [state[0] + 1]

    def decompress(self, reduced: Any, gradient: Any) -> Any:
        return ac.exchange(np.asarray(reduced, np.float32) / np.float32(self.scale), gradient)


class Sending(ac.Compression):
    """Makes collectives of its own: the gradients of rank 0 go to all, and the number of steps is added."""

    def __init__(self, fault: str = "", rank: int = 1) -> None:
        self.fault, self.rank = fault, rank

    def init(self, gradient: Any) -> Any:
        return np.zeros(())

    def reduce(self, gradients: Any, states: Any, op: str, comm: ac.Communicator) -> Any:
        faulty = comm.rank == self.rank and all(state == 1 for state in states)
        if faulty and self.fault == "early":
            raise KeyError("lost early")
        reduced = [comm.bcast(gradient, 0) for gradient in gradients]
        if faulty and self.fault == "late":
            raise KeyError("lost late")
        reduced = [g + float(state) for g, state in zip(reduced, states, strict=True)]
        if faulty and self.fault == "bits":
            reduced[-1] = reduced[-1] + 1
        if faulty and self.fault == "dtype":
            reduced[-1] = np.asarray(ac.exchange(reduced[-1], "numpy"), np.float64)
        if faulty and self.fault == "count":
            reduced.pop()
        if faulty and self.fault == "none":
            return None
        return reduced, [state + 1 for state in states]


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


@ON_RANKS
@each_rank_of("size")
def test_a_hook_makes_collectives_and_remembers(comm: ac.Communicator, framework: str) -> None:
    step = program(framework, comm, compression=Sending())
    for number in range(3):
        want = [gradient + number for gradient in gradients(0, number)]
        assert_equal(step(gradients(comm.rank, number)), want)


FAULTS = {
    "early": (KeyError, "lost early"),
    "late": (KeyError, "lost late"),
    "dtype": (
        TypeError,
        "Sending must return gradients like those that it gets; got numpy.ndarray of float64",
    ),
    "count": (
        ValueError,
        "a gradient and a state for each of the 2 gradients that it gets; got 1 and 2",
    ),
    "none": (TypeError, "Sending.reduce must return two lists"),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@each_rank_of(3)
def test_an_error_of_one_ranks_hook_raises_on_all(comm: ac.Communicator, framework: str) -> None:
    for fault, (kind, text) in FAULTS.items():
        assert_an_error_raises_on_all(comm, framework, Sending(fault), kind, text)


def assert_an_error_raises_on_all(
    comm: ac.Communicator, framework: str, hook: Sending, kind: type[Exception], text: str
) -> None:
    step = program(framework, comm, compression=hook)
    step(gradients(comm.rank, 0))
    faulty = comm.rank == hook.rank
    with pytest.raises(kind if faulty else ac.PeerError, match=text) as caught:
        step(gradients(comm.rank, 1))
    assert faulty or caught.value.rank == hook.rank
    # The state is that of one step, and the optimizer can go on.
    hook.fault = ""
    assert_equal(step(gradients(comm.rank, 2)), [g + 1 for g in gradients(0, 2)])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@each_rank_of(3)
def test_results_that_are_not_the_same_on_all_ranks_raise(
    comm: ac.Communicator, framework: str
) -> None:
    step = program(framework, comm, compression=Sending("bits"))
    step(gradients(comm.rank, 0))
    text = r"Sending must return the same gradients on all ranks; gradient 1, of shape \(4,\), on rank 1"
    with pytest.raises(ac.MismatchError, match=text):
        step(gradients(comm.rank, 1))


@each_rank_of(2)
def test_a_gradient_that_is_missing_counts_as_zeros_in_torch_and_raises_elsewhere(
    comm: ac.Communicator,
) -> None:
    text = r"Scaled takes gradients that all ranks have; tree\[1\] is None on some ranks"

    def mine(comm: ac.Communicator) -> list[Any]:
        return [None, None if comm.rank else np.ones(4, np.float32)]

    none, some = program("torch", comm, compression=Scaled())(mine(comm))
    assert none is None
    np.testing.assert_array_equal(some, np.full(4, 0.5))
    for framework in ("numpy", "jax"):
        step = program(framework, comm, compression=Scaled())
        with pytest.raises(ac.MismatchError, match=text):
            step(mine(comm))
        none, some = step([None, np.ones(4, np.float32)])
        assert none is None
        np.testing.assert_array_equal(some, np.ones(4))


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@each_rank_of(2)
def test_a_missing_gradient_leaves_its_residual(comm: ac.Communicator, framework: str) -> None:
    value = np.full(4, 1 + 2**-9, np.float32)
    step = program(framework, comm, op="sum", compression=ac.ErrorFeedback("bfloat16"))
    seen = [step([None, None if comm.rank and n == 1 else value])[1][0] for n in range(3)]
    # Residuals of 2⁻⁹ and 2⁻⁸ are rounded down to even, 3·2⁻⁹ is rounded up: rank 0 sends 1, 1 and
    # 1 + 2⁻⁷, rank 1 sends 1, nothing and 1.
    assert seen == [2.0, 1.0, 2.0]


@each_rank_of(2, "torch")
def test_hooks_get_what_no_sync_and_accumulate_have_added_up(comm: ac.Communicator, torch) -> None:
    from arraycomm.adapters.torch import no_sync

    step = program("torch", comm, compression=Sending())
    (weight, _), optimizer = step.parameters, step.optimizer
    with no_sync(optimizer):
        (weight * 2).sum().backward()
    (weight * 3).sum().backward()
    assert weight.grad.unique().tolist() == [5.0]
    # Another backward pass before the step: what it adds is reduced, and added.
    (weight * (1 + comm.rank)).sum().backward()
    assert weight.grad.unique().tolist() == [5.0 + 1 + 1]
    optimizer.step()

    optimizer.zero_grad()
    if comm.rank:
        # This rank takes part in the other's backward pass, with zeros.
        optimizer.step()
    else:
        (weight * 4).sum().backward()
        optimizer.step()
    assert weight.grad.unique().tolist() == [4.0 + 2]

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (weight * 0 + 1).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == weight.numel()
    assert weight.grad.unique().tolist() == [3.0]

    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = ac.DistributedOptimizer(
        torch.optim.SGD([weight], 1.0), comm=comm, compression=Sending(), accumulate=2
    )
    for factor in (2.0, 4.0):
        optimizer.zero_grad()
        (weight * factor).sum().backward()
        optimizer.step()
    assert weight.tolist() == [-3.0] * 2


# Arguments --------------------------------------------------------------------------------------


class Other(ac.Compression):
    """Does what `ErrorFeedback` does not."""


@pytest.mark.parametrize(
    ("compressions", "said"),
    [
        (("bfloat16", ac.ErrorFeedback("bfloat16")), ("bfloat16", "ErrorFeedback")),
        (tuple(map(ac.ErrorFeedback, ("bfloat16", "float16"))), ("'bfloat16'", "'float16'")),
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


@pytest.mark.parametrize("wrong", ["int8", ac.ErrorFeedback("bfloat16")])
@each_rank_of(1)
def test_calls_without_a_memory_take_a_known_name(comm: ac.Communicator, wrong: Any) -> None:
    said = "got 'int8'$" if wrong == "int8" else "only a DistributedOptimizer takes objects"
    with pytest.raises(ValueError, match=said):
        ac.allreduce_gradients([np.ones(1)], compression=wrong, comm=comm)


@pytest.mark.parametrize("compression", [ac.ErrorFeedback("bfloat16"), Scaled()])
@each_rank_of(2)
def test_what_is_no_array_is_refused_by_its_path(comm: ac.Communicator, compression: Any) -> None:
    optimizer = ac.DistributedOptimizer(Taken(), comm=comm, compression=compression)
    wrong = comm.rank == 1
    with pytest.raises(
        TypeError if wrong else ac.PeerError, match=r"tree\['a'\] is builtins.float; pass an array"
    ):
        optimizer.update({}, {"a": 1.0 if wrong else np.ones((), np.float32)})
    one = optimizer.update({}, {"a": np.ones((), np.float32)})["a"]
    assert isinstance(one, np.ndarray)
    assert one == 1


@pytest.mark.parametrize("compression", [ac.ErrorFeedback("bfloat16"), Scaled()])
@each_rank_of(2, "jax", "optax")
def test_a_state_of_optax_for_other_parameters_raises_on_all(
    comm: ac.Communicator, compression: Any, jax: Any, optax: Any
) -> None:
    optimizer = ac.DistributedOptimizer(optax.identity(), comm=comm, compression=compression)
    ones = [jax.numpy.ones(3), jax.numpy.ones(2)]
    wrong = comm.rank == 1
    state = optimizer.init(ones[: 2 - wrong])
    text = "the parameters that the state was made of, 1 leaves; got 2; make the state anew"
    with pytest.raises(ValueError if wrong else ac.PeerError, match=text):
        optimizer.update(ones, state)
    (one, _), _ = optimizer.update(ones, optimizer.init(ones))
    assert one.tolist() == [1.0] * 3


@pytest.mark.parametrize("compression", [ac.ErrorFeedback("bfloat16"), Scaled()])
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@each_rank_of(2)
def test_inside_join_objects_are_refused_on_all_ranks(
    comm: ac.Communicator, framework: str, compression: Any
) -> None:
    step = program(framework, comm, compression=compression)

    def block() -> None:
        with ac.join(comm):
            if comm.rank:
                step(gradients(comm.rank, 0))

    said = "inside join gradients.* cannot be compressed by an object"
    with pytest.raises((ValueError, ac.PeerError), match=said):
        block()


# What is remembered -----------------------------------------------------------------------------


def reference(compression: Any, framework: str, steps: int) -> list[list[Any]]:
    """Return what the steps of one optimizer give."""

    def train(comm: ac.Communicator) -> list[list[Any]]:
        step = program(framework, comm, op="sum", compression=compression)
        return [step(gradients(comm.rank, number)) for number in range(steps)]

    return run(2, train)[0]


def saved_and_loaded(step: Any, framework: str, comm: ac.Communicator, compression: Any) -> Any:
    """Save what is remembered, and make a program that goes on from it."""
    other = program(framework, comm, op="sum", compression=compression)
    if framework == "torch":
        torch = pytest.importorskip("torch")
        file = io.BytesIO()
        torch.save(step.optimizer.state_dict(), file)
        file.seek(0)
        other.optimizer.load_state_dict(
            torch.load(file, weights_only=not isinstance(compression, Sending))
        )
        # A plain optimizer takes the same file.
        plain = torch.optim.SGD(other.parameters, 1.0)
        plain.load_state_dict(step.optimizer.state_dict())
    elif framework == "jax":
        other.state[0] = pickle.loads(pickle.dumps(step.state[0]))
    else:
        saved = pickle.dumps(step.optimizer.compression_state())
        other.optimizer.load_compression_state(pickle.loads(saved))
    return other


def copied(step: Any, framework: str, comm: ac.Communicator, _: Any) -> Any:
    """Copy an optimizer, and take a step of the copy before the original's."""
    given = [100 * g for g in gradients(comm.rank, 9)]
    copy.deepcopy(step.optimizer).update([None] * len(given), given)
    return step


@pytest.mark.parametrize(
    ("framework", "change", "compression"),
    [
        *(
            (framework, change, compression)
            for framework, change in (
                *(("numpy", saved_and_loaded), ("torch", saved_and_loaded)),
                *(("jax", saved_and_loaded), ("numpy", copied)),
            )
            for compression in (ac.ErrorFeedback("bfloat16"), Sending())
        ),
        ("torch", saved_and_loaded, None),
    ],
)
@each_rank_of(2)
def test_what_is_remembered_survives(
    comm: ac.Communicator, framework: str, compression: Any, change: Any
) -> None:
    want = reference(compression, framework, 4)
    step = program(framework, comm, op="sum", compression=compression)
    seen = [step(gradients(comm.rank, number)) for number in range(2)]
    step = change(step, framework, comm, compression)
    seen += [step(gradients(comm.rank, number)) for number in (2, 3)]
    for got, expected in zip(seen, want, strict=True):
        assert_equal(got, expected)


@each_rank_of(2)
def test_a_gradient_of_another_shape_or_dtype_begins_anew(comm: ac.Communicator) -> None:
    value = 1 + 2**-9
    compression = ac.ErrorFeedback("bfloat16")
    optimizer = ac.DistributedOptimizer(Taken(), comm=comm, compression=compression)
    forms = [(4, "f4"), (2, "f4"), (2, "f8"), (2, "f8"), (3, "i4"), (2, "f8")]
    seen = [
        optimizer.update(None, np.full(shape, value, dtype)).tolist()[0] if dtype != "i4" else None
        for shape, dtype in forms
    ]
    assert seen == [1.0, 1.0, 1.0, 1.0, None, 1.0078125]


@each_rank_of(2, "torch")
def test_parameters_that_are_added_leave_the_others_what_they_have(
    comm: ac.Communicator, torch: Any
) -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = ac.DistributedOptimizer(
        torch.optim.SGD(weights[:1], 1.0), comm=comm, compression=Sending()
    )
    (weights[0] * 2).sum().backward()
    optimizer.add_param_group({"params": weights[1:]})
    optimizer.zero_grad()
    sum((weight * 2).sum() for weight in weights).backward()
    assert [weight.grad.item() for weight in weights] == [3.0, 2.0]
    # Their numbers change.
    optimizer.param_groups.reverse()
    optimizer.step()
    optimizer.zero_grad()
    sum((weight * 2).sum() for weight in weights).backward()
    assert [weight.grad.item() for weight in weights] == [4.0, 3.0]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@each_rank_of(2)
def test_a_call_that_has_failed_leaves_no_residual(comm: ac.Communicator, framework: str) -> None:
    value = np.full(4, 1 + 2**-9, np.float32)

    def change_gradient(parameter: Any) -> None:
        parameter.grad.add_(1)

    def fail(step: Any, comm: ac.Communicator) -> None:
        call, hooks = partial(step, [None, value]), []
        if comm.rank and framework == "torch":
            change = step.parameters[1].register_post_accumulate_grad_hook
            hooks.append(change(change_gradient))
        elif comm.rank:
            call = partial(step.optimizer.update, None, [None, 1.0])
        with pytest.raises(Exception, match=r"changed inside backward|pass an array") as caught:
            call()
        assert isinstance(caught.value, ac.PeerError) == (comm.rank == 0)
        for hook in hooks:
            hook.remove()

    step = program(framework, comm, op="sum", compression=ac.ErrorFeedback("bfloat16"))
    fail(step, comm)
    seen = [step([None, None if comm.rank == n == 0 else value])[1][0] for n in range(3)]
    # Two residuals of rank 0 are rounded down, as half of an even number.
    assert seen == [1.0, 2.0, 2.0]


@each_rank_of(2)
def test_a_state_that_is_synchronized_is_that_of_the_root(comm: ac.Communicator) -> None:
    step = program("torch", comm, compression=ac.ErrorFeedback("bfloat16"))
    step(gradients(comm.rank, 0))
    ac.synchronize(step.optimizer, comm=comm)
    residual = step.optimizer.state_dict()["compression"][0]["value"].numpy()
    everyone = comm.allgather(residual)
    assert residual.any()
    assert (everyone == everyone[0]).all()


# Compiled programs, and ranks that are processes ------------------------------------------------


@pytest.fixture
def world() -> Iterator[ac.Communicator]:
    """Return the world: one process, or those that mpiexec started."""
    yield ac.init()
    ac.finalize()


class TestCompiled:
    """On as many ranks as there are processes; `test_jax_adapter` runs them on more."""

    def test_a_compiled_update_feeds_back(self, world: ac.Communicator) -> None:
        jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
        compression = ac.ErrorFeedback("bfloat16")
        optimizer = ac.DistributedOptimizer(
            optax.identity(), comm=world, op="sum", compression=compression
        )
        state = optimizer.init([jax.numpy.zeros(shape) for shape in SHAPES])
        update = jax.jit(optimizer.update)
        for number, want in enumerate(fed_back(world.size, 5)):
            arrays = list(map(jax.numpy.asarray, gradients(world.rank, number)))
            reduced, state = update(arrays, state)
            assert_equal(reduced, want)

    def test_a_compiled_update_refuses_hooks(self, world: ac.Communicator) -> None:
        jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
        optimizer = ac.DistributedOptimizer(optax.identity(), comm=world, compression=Sending())
        state = optimizer.init(jax.numpy.zeros(2))
        with pytest.raises(
            TypeError, match=r"Sending\(.*\) makes collectives that JAX cannot compile"
        ):
            jax.jit(optimizer.update)(jax.numpy.zeros(2), state)

    def test_an_error_of_one_processs_hook_raises_on_all(self, world: ac.Communicator) -> None:
        hook = Sending("late", rank=world.size - 1)
        assert_an_error_raises_on_all(world, "jax", hook, *FAULTS["late"])


class TestTorchProcesses:
    """On as many ranks as there are processes; `test_torch_training` runs them on more."""

    def test_an_error_of_one_processs_hook_raises_on_all(self, world: ac.Communicator) -> None:
        hook = Sending("late", rank=world.size - 1)
        assert_an_error_raises_on_all(world, "torch", hook, *FAULTS["late"])

    def test_buckets_are_fed_back(self, world: ac.Communicator) -> None:
        step = program("torch", world, op="sum", compression=ac.ErrorFeedback("bfloat16"))
        for number, want in enumerate(fed_back(world.size, 3)):
            for got, expected in zip(step(gradients(world.rank, number)), want, strict=True):
                np.testing.assert_array_equal(got, expected)
