"""Batch norm over all ranks, against torch's own in one process with the whole batch."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from tests.support.on_ranks import each_rank_of

torch = pytest.importorskip("torch")
prune = pytest.importorskip("torch.nn.utils.prune")
adapter = pytest.importorskip("arraycomm.adapters.torch")

Tensor = Any
CHANNELS = 3
KINDS = {0: torch.nn.BatchNorm1d, 1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d}
KINDS[3] = torch.nn.BatchNorm3d
# How far sums of some hundred numbers in another order are apart, in units of the last place.
ULPS = 256


def draw(seed: int, *spatial: int, batch: int = 7) -> Tensor:
    """Return a batch whose channels have other means and variances."""
    generator = np.random.default_rng(seed)
    x = torch.from_numpy(generator.normal(size=(batch, CHANNELS, *spatial)))
    shape = (1, -1, *(1,) * len(spatial))
    return (1 + torch.arange(CHANNELS).view(shape)) * x + torch.arange(CHANNELS).view(shape)


def part_of(whole: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's part of a batch: of several ranks the first has none, the last one sample."""
    bounds = [0, 7] if size == 1 else [*[0, 0, 6, 7][:size], 7]
    return whole[bounds[rank] : bounds[rank + 1]]


def tolerance(dtype: Any) -> dict[str, float]:
    return {"rtol": 0, "atol": ULPS * torch.finfo(dtype).eps}


@pytest.mark.parametrize(
    ("dtype", "whole_module"), [("float16", True), ("bfloat16", False), ("float32", True)]
)
@each_rank_of("few")
def test_statistics_of_narrow_floats_are_of_32_bits(
    comm: ac.Communicator, few: int, dtype: str, whole_module: bool
) -> None:
    """In channels-last, which the result keeps."""

    narrow = getattr(torch, dtype)
    # Numbers that all have in every dtype, and a mean of which 16 bits keep next to nothing.
    whole = (draw(1, 2, 3).round() + 64).to(narrow)
    ours = adapter.SyncBatchNorm(CHANNELS, comm=comm).to(narrow if whole_module else None)
    own = part_of(whole, comm.rank, few).to(memory_format=torch.channels_last)
    own = own.clone().requires_grad_()
    y = ours(own)
    assert y.dtype == narrow
    assert y.is_contiguous(memory_format=torch.channels_last)
    y.backward(torch.ones_like(y) * y.detach())
    assert own.grad.dtype == narrow
    expected = torch.nn.BatchNorm2d(CHANNELS)(whole.float())
    # A rounding of y, of up to 4, beside the error in 32 bits.
    atol = 2 * torch.finfo(narrow).eps + 64 * ULPS * torch.finfo(torch.float32).eps
    torch.testing.assert_close(y.float(), part_of(expected, comm.rank, few), rtol=0, atol=atol)
    assert ours.running_mean.dtype == (narrow if whole_module else torch.float32)


@each_rank_of((1, 3))
def test_gradient_of_the_gradient_is_that_of_one_process(comm: ac.Communicator) -> None:
    def penalty(module: Any, x: Tensor, upstream: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad((module(x) * upstream).sum(), x, create_graph=True)
        return slope.square().sum()

    x, upstream = draw(1).requires_grad_(), draw(2)
    one = torch.nn.BatchNorm1d(CHANNELS).double()
    penalty(one, x, upstream).backward()
    own = part_of(x.detach(), comm.rank, comm.size).clone().requires_grad_()
    ours = adapter.SyncBatchNorm(CHANNELS, dtype=torch.float64, comm=comm)
    penalty(ours, own, part_of(upstream, comm.rank, comm.size)).backward()
    close = tolerance(x.dtype)
    torch.testing.assert_close(own.grad, part_of(x.grad, comm.rank, comm.size), **close)
    torch.testing.assert_close(comm.allreduce(ours.weight.grad), one.weight.grad, **close)


@each_rank_of(3)
def test_evaluation_does_not_communicate(comm: ac.Communicator) -> None:
    module = adapter.SyncBatchNorm(CHANNELS, comm=comm).eval()
    if comm.rank == 0:
        module(draw(0).float())
    assert comm.allreduce(1) == comm.size


@pytest.mark.parametrize("elements", [0, 1])
@each_rank_of((1, 3))
def test_fewer_than_two_elements_on_all_ranks_are_refused(
    comm: ac.Communicator, elements: int
) -> None:
    module = adapter.SyncBatchNorm(CHANNELS, comm=comm)
    own = torch.ones(elements if comm.rank == comm.size - 1 else 0, CHANNELS)
    with pytest.raises(ValueError, match=f"2 elements of each channel.*; got {elements}, "):
        module(own)
    assert module.num_batches_tracked == 0
    assert comm.allreduce(1) == comm.size


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (np.ones((2, CHANNELS)), TypeError, "must be a tensor of floats; got ndarray"),
        (torch.ones(2, CHANNELS).int(), TypeError, "must be a tensor of floats; got torch.int32"),
        (torch.ones(CHANNELS), ValueError, r"must have the shape \(N, 3, ...\); got \(3,\)"),
        (torch.ones(2, 4), ValueError, r"must have the shape \(N, 3, ...\); got \(2, 4\)"),
        (torch.ones(2, CHANNELS).to_sparse(), NotImplementedError, "SparseCPU"),
    ],
)
@each_rank_of(3)
def test_wrong_input_on_one_rank_is_an_error_on_every_rank(
    comm: ac.Communicator, wrong: Any, kind: type[Exception], message: str
) -> None:
    module = adapter.SyncBatchNorm(CHANNELS, comm=comm)
    with pytest.raises(kind if comm.rank == 1 else ac.PeerError, match=message):
        module(wrong if comm.rank == 1 else torch.ones(2, CHANNELS))
    assert comm.allreduce(1) == comm.size


class Tied(torch.nn.Module):  # type: ignore[misc]
    """A batch norm at the top, one within, and that one again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.BatchNorm3d(CHANNELS, dtype=torch.float64).eval()
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(CHANNELS, 0.25, None)
        )
        self.again = torch.nn.ModuleList([self.inner[1]])


class TestConversion:
    def test_everything_but_the_class_stays(self) -> None:
        module = Tied()
        expected, parameters = module.state_dict(), list(module.parameters())
        calls = []
        handle = module.inner[1].register_forward_hook(lambda *_: calls.append(1))
        converted = adapter.convert_sync_batchnorm(module)
        assert converted is module
        assert type(module.first) is type(module.inner[1]) is adapter.SyncBatchNorm
        assert module.again[0] is module.inner[1]
        assert [module.first.training, module.inner[1].training] == [False, True]
        assert (module.inner[1].eps, module.inner[1].momentum) == (0.25, None)
        assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
        torch.testing.assert_close(module.state_dict(), expected, rtol=0, atol=0)
        Tied().load_state_dict(module.state_dict())
        module.load_state_dict(Tied().state_dict())
        module.inner[1].eval()(torch.ones(2, CHANNELS))
        handle.remove()
        module.inner[1](torch.ones(2, CHANNELS))
        assert calls == [1]
        before = list(module.modules())
        assert adapter.convert_sync_batchnorm(module) is module
        assert list(module.modules()) == before

    def test_what_is_no_module_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"module must be a torch.nn.Module; got list"):
            adapter.convert_sync_batchnorm([torch.nn.BatchNorm1d(3)])

    def test_whoever_holds_a_batch_norm_goes_on_with_it(self) -> None:
        norm = torch.nn.BatchNorm1d(CHANNELS)
        held, seen = [norm], []
        norm.register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
        assert adapter.convert_sync_batchnorm(norm) is held[0]
        norm.load_state_dict(torch.nn.BatchNorm1d(CHANNELS).state_dict())
        assert seen == held


class WithActivation(torch.nn.BatchNorm2d):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Synchronized(adapter.SyncBatchNorm):  # type: ignore[misc, name-defined]
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class LikeTimm(torch.nn.BatchNorm2d):  # type: ignore[misc]
    """Has statistics that no call of super() computes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.nn.functional.batch_norm(x, None, None, training=True))


class Wider(torch.nn.BatchNorm2d):  # type: ignore[misc]
    def _check_input_dim(self, x: Tensor) -> None:
        """Take any shape."""


class WithAnAttribute(torch.nn.BatchNorm2d):  # type: ignore[misc]
    activation = torch.nn.ReLU()


class OnlyItsDefaults(torch.nn.BatchNorm2d):  # type: ignore[misc]
    """A class that computes what its base does."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3, momentum=0.01)


class OfTheBase(torch.nn.modules.batchnorm._BatchNorm):  # type: ignore[misc]
    def _check_input_dim(self, x: Tensor) -> None:
        """Take any shape."""


def parametrized(kind: Any) -> Any:
    softplus = torch.nn.Softplus()
    torch.nn.utils.parametrize.register_parametrization(norm := kind(CHANNELS), "weight", softplus)
    return norm


def patched(kind: Any) -> Any:
    norm = kind(CHANNELS)
    norm.forward = lambda x, forward=norm.forward: 2 * forward(x)
    return norm


def after_use(kind: Any) -> Any:
    (lazy := kind())(draw(0, 2, 3).float())
    return lazy


def hooked(kind: Any) -> Any:
    (norm := kind(CHANNELS)).register_forward_hook(lambda module, inputs, y: 2 * y)
    return norm


def pruned(kind: Any) -> Any:
    return prune.random_unstructured(kind(CHANNELS), "weight", 1)


def with_(**settings: Any) -> Any:
    return lambda kind: kind(CHANNELS, **settings)


def without_bias(kind: Any) -> Any:
    (norm := kind(CHANNELS)).bias = None
    return norm


def seeded(make: Any, kind: Any) -> Any:
    torch.manual_seed(0)
    return make(kind)


def not_tracking(kind: Any) -> Any:
    (norm := kind(CHANNELS)).track_running_stats = False
    return norm


BATCH_NORM = torch.nn.BatchNorm2d
# Beside what a law draws.
CONVERTED = {
    "float64": (BATCH_NORM, with_(dtype=torch.float64)),
    "no bias": (BATCH_NORM, without_bias),
    "statistics that stay": (BATCH_NORM, not_tracking),
    "lazy": (torch.nn.LazyBatchNorm2d, after_use),
    "hooked": (BATCH_NORM, hooked),
    "pruned": (BATCH_NORM, pruned),
    "defaults": (OnlyItsDefaults, lambda kind: kind(CHANNELS)),
}
LEFT_ALONE = {
    "of torch": (torch.nn.SyncBatchNorm, with_()),
    "instance": (torch.nn.InstanceNorm2d, with_()),
}
REFUSED = {
    "WithActivation": (WithActivation, with_()),
    "LikeTimm": (LikeTimm, with_()),
    "Wider": (Wider, with_()),
    "WithAnAttribute": (WithAnAttribute, with_()),
    "OfTheBase": (OfTheBase, with_()),
    "ParametrizedBatchNorm2d": (BATCH_NORM, parametrized),
    "forward": (BATCH_NORM, patched),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", [*CONVERTED, *LEFT_ALONE])
@each_rank_of(1)
def test_every_kind_computes_what_it_did_before(
    comm: ac.Communicator, case: str, training: bool
) -> None:
    kind, make = {**CONVERTED, **LEFT_ALONE}[case]
    one, ours = (torch.nn.Sequential(seeded(make, kind)).train(training) for _ in range(2))
    assert adapter.convert_sync_batchnorm(ours, comm=comm) is ours
    assert isinstance(ours[0], adapter.SyncBatchNorm) == (case in CONVERTED)
    for step in range(3):
        x = draw(step, 2, 3).to(next(one.buffers(), torch.ones(1)).dtype)
        close = tolerance(x.dtype) if training or not one[0].track_running_stats else None
        torch.testing.assert_close(ours(x), one(x), **(close or {"rtol": 0, "atol": 0}))
    torch.testing.assert_close(ours.state_dict(), one.state_dict(), **tolerance(x.dtype))


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_compute_the_same_is_refused_before_anything_changes(case: str) -> None:
    kind, make = REFUSED[case]
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(CHANNELS), norm := make(kind))
    with pytest.raises(TypeError, match=rf"^convert_sync_batchnorm: 1 (is a|has) .*{case}"):
        adapter.convert_sync_batchnorm(model)
    assert type(model[0]) is torch.nn.BatchNorm2d
    assert model[1] is norm


@each_rank_of((1, 3))
def test_what_the_refusals_advise_is_synchronized(comm: ac.Communicator) -> None:
    x = draw(comm.rank, 2, 3).float()
    whole = comm.allgather(x).flatten(0, 1)
    derived = Synchronized(CHANNELS, comm=comm)
    for ours, one in (
        (parametrized(lambda n: adapter.SyncBatchNorm(n, comm=comm)), parametrized(BATCH_NORM)),
        (adapter.convert_sync_batchnorm(derived, comm=comm), WithActivation(CHANNELS)),
        (unpatched(comm), BATCH_NORM(CHANNELS)),
    ):
        expected = one(whole)[len(x) * comm.rank :][: len(x)]
        torch.testing.assert_close(ours(x), expected, **tolerance(x.dtype))


def unpatched(comm: ac.Communicator) -> Any:
    norm = patched(BATCH_NORM)
    del norm.forward
    return adapter.convert_sync_batchnorm(norm, comm=comm)


@each_rank_of((1, 3))
def test_a_copy_has_the_same_communicator_and_parameters_of_its_own(comm: ac.Communicator) -> None:
    module = torch.nn.Sequential(adapter.SyncBatchNorm(CHANNELS, comm=comm))
    copied = copy.deepcopy(module)
    assert copied[0].comm is comm
    assert copied[0].weight is not module[0].weight
    x = draw(comm.rank).float()
    torch.testing.assert_close(copied(x), module(x), rtol=0, atol=0)
    said = r"^SyncBatchNorm: .*cannot be pickled; save its state_dict"
    with pytest.raises(TypeError, match=said):
        torch.save(module, io.BytesIO())


def test_a_module_of_the_world_can_be_pickled() -> None:
    file = io.BytesIO()
    torch.save(adapter.SyncBatchNorm(CHANNELS, eps=0.5), file)
    file.seek(0)
    assert torch.load(file, weights_only=False).eps == 0.5


@each_rank_of(1)
def test_compiled_modules_communicate_between_two_graphs(comm: ac.Communicator) -> None:
    module = adapter.SyncBatchNorm(CHANNELS, track_running_stats=False, comm=comm)
    x = draw(0, 2, 3).float()
    compiled = torch.compile(module, backend="eager")
    torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)
