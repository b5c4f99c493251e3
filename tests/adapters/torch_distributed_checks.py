"""What torch.distributed does over arraycomm, beside what it does over gloo; run by test_torch_distributed.py.

Under mpiexec, or with the argument `fork` on forked ranks that have the environment of torchrun.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import arraycomm as ac
import arraycomm.adapters.torch_distributed
from arraycomm.adapters.torch_distributed._works import Call, Lane
from tests.support.launched import checks_in, perform

FORKED_RANKS: Final = 2
Group = Any
Run = Callable[[Group], Any]


class _Groups:
    """The default group, and one of gloo of the same ranks."""

    arraycomm: Group
    gloo: Group


def _rank() -> int:
    return dist.get_rank()


def _size() -> int:
    return dist.get_world_size()


def _values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return whole numbers that differ between ranks: sums of them are exact in any order."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + 3 * _rank()) % 11 + 1).reshape(shape).to(dtype)


# What a program over gloo may differ by: nothing for sums of whole numbers, or the roundings of another order
# of the ranks.
_EXACT: Final = {"rtol": 0.0, "atol": 0.0}
_ORDER: Final = {"rtol": 1e-9, "atol": 1e-9}


def _same(run: Run, tolerance: dict[str, float] = _EXACT) -> None:
    """Check that a program gives over arraycomm what it gives over gloo."""
    ours, gloo = run(_Groups.arraycomm), run(_Groups.gloo)
    torch.testing.assert_close(ours, gloo, **tolerance)


# Collectives ---------------------------------------------------------------------------------------


def all_reductions() -> None:
    ops, kinds = dist.ReduceOp, (torch.float32, torch.float64, torch.int64, torch.bfloat16)
    cases = [(ops.SUM, kind) for kind in kinds]
    cases += zip((ops.PRODUCT, ops.MIN, ops.MAX, ops.MIN), kinds, strict=True)
    cases += [(op, torch.uint8) for op in (ops.MAX, ops.BAND, ops.BOR, ops.BXOR)]
    for op, dtype in cases:

        def run(group: Group, op: Any = op, dtype: torch.dtype = dtype) -> Any:
            everywhere, at_root = _values(3, 4, dtype=dtype), _values(5, dtype=dtype)
            dist.all_reduce(everywhere, op, group)
            dist.reduce(at_root, 1, op, group)
            rows, own = _values(2 * _size(), dtype=dtype), torch.empty(2, dtype=dtype)
            dist.reduce_scatter(own, list(rows.chunk(_size())), op, group)
            return everywhere, at_root if _rank() == 1 else None, own

        _same(run)
    _same(_of_large_tensors)


def _of_large_tensors(group: Group) -> Any:
    """Return what does not fit one step of the control channel, nor a ring."""
    x, gathered = _values(700_000), torch.empty(_size(), 200_001)
    dist.all_gather_into_tensor(gathered, _values(1, 200_001), group)
    sent = _values(500_003)
    dist.broadcast(sent, _size() - 1, group)
    dist.all_reduce(x, group=group)
    return x, gathered, sent


def averages_and_scaled_sums() -> None:
    x = _values(6)
    total = x.clone()
    dist.all_reduce(total)
    mean, scaled = x.clone(), x.clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    dist.all_reduce(scaled, dist.ReduceOp.PREMUL_SUM(0.5))
    assert torch.equal(mean, total / _size())
    assert torch.equal(scaled, total / 2)


def _mean(values: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return what NCCL gives: a sum that wraps, divided towards zero."""
    span = torch.iinfo(dtype).max - torch.iinfo(dtype).min + 1
    total = sum(values) % span
    if total > torch.iinfo(dtype).max:
        total -= span
    return abs(total) // len(values) * (1 if total > 0 else -1)


def _integers(rank: int, dtype: torch.dtype) -> list[int]:
    limits = torch.iinfo(dtype)
    small = [5 + rank, 9 - 2 * rank, 11 * rank, 1, 2, 3 * rank, 7]
    return [*small, limits.max, limits.max - rank, limits.max // 3, limits.min, limits.min + rank]


def means_of_integers() -> None:
    average, own = dist.ReduceOp.AVG, 12 // _size()
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        dtype = getattr(torch, name)
        every = [_integers(rank, dtype) for rank in range(_size())]
        means = [_mean(values, dtype) for values in zip(*every, strict=True)]

        def x(dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.tensor(_integers(_rank(), dtype), dtype=dtype)

        for later in (False, True):
            with torch.inference_mode(later):
                wait = dist.Work.wait if later else id
                plain, turned, number, at_root = x(), x().reshape(3, 4).T, x()[0], x()
                for y in (plain, turned, number):
                    wait(dist.all_reduce(y, average, async_op=later))
                wait(dist.reduce(at_root, 1, average, async_op=later))
                parts, rows = torch.empty(own, dtype=dtype), torch.empty(own, 2, dtype=dtype)[:, 0]
                listed = list(x().split(own))
                wait(dist.reduce_scatter(parts, listed, average, async_op=later))
                wait(dist.reduce_scatter_tensor(rows, x(), average, async_op=later))
            assert plain.tolist() == turned.T.reshape(-1).tolist() == means
            assert number.item() == means[0]
            assert at_root.tolist() == (means if _rank() == 1 else every[_rank()])
            first = own * _rank()
            assert parts.tolist() == rows.tolist() == means[first : first + own]
        large = x().repeat(9000)
        dist.all_reduce(large, average)
        assert large.tolist() == means * 9000
        large.resize_(large.numel() + 1)


def movements() -> None:
    def run(group: Group) -> Any:
        x, n, rank = _values(2, 3), _size(), _rank()
        sent = x.clone()
        dist.broadcast(sent, 1, group)
        gathered = [torch.empty(2, 3) for _ in range(n)]
        dist.all_gather(gathered, x, group)
        joined = torch.empty(n * 2, 3)
        dist.all_gather_into_tensor(joined, x, group)
        at_root = [torch.empty(2, 3) for _ in range(n)] if rank == 0 else None
        dist.gather(x, at_root, 0, group)
        part = torch.empty(2, 3)
        dist.scatter(part, gathered if rank == 1 else None, 1, group)
        own = torch.empty(3)
        dist.reduce_scatter_tensor(own, _values(n * 3), group=group)
        dist.all_gather_into_tensor(torch.empty(0), torch.empty(0), group)
        dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0), group=group)
        even = torch.empty(n * 2)
        dist.all_to_all_single(even, _values(n * 2), group=group)
        return sent, gathered, joined, at_root, part, own, even

    _same(run)


def uneven_exchanges() -> None:
    # gloo has no all_to_all of lists.
    n, rank = _size(), _rank()
    lists = [torch.empty(rank + 1) for _ in range(n)]
    dist.all_to_all(lists, [_values(r + 1) + 100 * r for r in range(n)])
    for source, got in enumerate(lists):
        expected = (torch.arange(rank + 1) * 7 + 3 * source) % 11 + 1.0 + 100 * rank
        assert torch.equal(got, expected)

    def rows(group: Group) -> Any:
        to, of = [1 + r for r in range(n)], [1 + rank] * n
        got = torch.empty(sum(of), 2)
        dist.all_to_all_single(got, _values(sum(to), 2), of, to, group)
        return got

    _same(rows)


def any_layout() -> None:
    for x in (_values(4, 6).T, _values(4, 6)[:, ::2], _values(1).expand(3, 3).clone().T):
        expected = x.contiguous()
        dist.all_reduce(expected)
        dist.all_reduce(x)
        assert torch.equal(x, expected)
    into = torch.zeros(2, 2 * _size())[:, ::2].T
    dist.all_gather_into_tensor(into, _values(1, 2))
    parts = [torch.empty(1, 2) for _ in range(_size())]
    dist.all_gather(parts, _values(1, 2))
    assert torch.equal(into, torch.cat(parts))
    column = torch.zeros(4, 2)[:, 0]
    receiving = dist.irecv(column, (_rank() - 1) % _size())
    dist.send(torch.full((2, 2), 5.0), (_rank() + 1) % _size())
    receiving.wait()
    assert column.tolist() == [5.0] * 4
    with_gradient = torch.nn.Parameter(torch.ones(3))
    dist.all_reduce(with_gradient)
    assert torch.equal(with_gradient.data, torch.full((3,), float(_size())))


def coalesced_calls() -> None:
    def run(group: Group) -> Any:
        summed = [_values(3), _values(2, 2)]
        dist.all_reduce_coalesced(summed, group=group)
        return summed

    _same(run)
    lists = [[torch.empty(3), torch.empty(2, 2)] for _ in range(_size())]
    dist.all_gather_coalesced(lists, [_values(3), _values(2, 2)])
    parts = [torch.empty(2, 2) for _ in range(_size())]
    dist.all_gather(parts, _values(2, 2))
    assert all(torch.equal(lists[r][1], parts[r]) for r in range(_size()))


def sparse_sums() -> None:
    def run(group: Group) -> Any:
        where = torch.tensor([[0, _rank(), 3], [1, 1, _rank()]])
        x = torch.sparse_coo_tensor(where, _values(3, 2), (4, 3, 2))
        dist.all_reduce(x, group=group)
        return x.to_dense()

    _same(run)
    # Elements of a longer one would be out of range, or at another place.
    longer = torch.sparse_coo_tensor([[0]], [1.0], (4 + _rank(),))
    text = _raised(ac.MismatchError, lambda: dist.all_reduce(longer, group=dist.new_group()))
    assert (
        "a sparse tensor must have the same shape on every rank; got the shapes [[4], [5]" in text
    )


def objects() -> None:
    def run(group: Group) -> Any:
        n, rank = _size(), _rank()
        everywhere: list[Any] = [None] * n
        dist.all_gather_object(everywhere, {"rank": rank, "text": "x" * 50 * rank}, group)
        sent = [f"from {rank}", rank]
        dist.broadcast_object_list(sent, 1, group)
        at_root: list[Any] | None = [None] * n if rank == 0 else None
        dist.gather_object((rank,), at_root, 0, group)
        own: list[Any] = [None]
        dist.scatter_object_list(own, list("abc"[:n]) if rank == 0 else None, 0, group)
        return repr((everywhere, sent, at_root, own))

    assert run(_Groups.arraycomm) == run(_Groups.gloo)


def messages() -> None:
    def run(group: Group) -> Any:
        n, rank = _size(), _rank()
        right, left = (rank + 1) % n, (rank - 1) % n
        into = torch.empty(3, 2)
        receiving = dist.irecv(into, left, group, tag=5)
        dist.isend(_values(3, 2), right, group, tag=5).wait()
        receiving.wait()
        batch = torch.empty(2, 2)
        operations = [
            dist.P2POp(dist.isend, _values(2, 2), right, group),
            dist.P2POp(dist.irecv, batch, left, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        seen = []
        if rank == 0:
            for _ in range(n - 1):
                number = torch.empty(1)
                seen.append((dist.recv(number, None, group), int(number)))
        else:
            dist.send(torch.tensor([10.0 * rank]), 0, group)
        large = torch.empty(300_000)
        receiving = dist.irecv(large, left, group, tag=7)
        dist.isend(torch.full((300_000,), float(rank)), right, group, tag=7).wait()
        receiving.wait()
        return into, batch, sorted(seen), large

    _same(run)


def messages_beside_collectives() -> None:
    """A message waits for no collective: that of rank 1 begins only after it."""
    number = torch.zeros(1)
    if _rank() == 0:
        summing = dist.all_reduce(number, async_op=True)
        dist.send(torch.tensor([4.0]), 1)
        summing.wait()
    else:
        if _rank() == 1:
            dist.recv(number, 0)
        dist.all_reduce(number)
    assert number.item() == 4


# Groups, work, names -------------------------------------------------------------------------------


def groups() -> None:
    last = _size() - 1
    some, alone = dist.new_group([0, last]), dist.new_group([1])
    if _rank() in (0, last):
        assert dist.get_backend(some) == dist.get_backend() == "arraycomm"
        x = torch.tensor([1.0 + _rank()])
        dist.all_reduce(x, group=some)
        assert x.item() == 2 + last
        dist.broadcast(x, last, some)
        assert dist.get_group_rank(some, last) == dist.get_world_size(some) - 1
        dist.destroy_process_group(some)
    if _rank() == 1:
        dist.all_reduce(x := torch.ones(1), group=alone)
        assert x.item() == 1
    dist.barrier()
    again = dist.new_group([0, last])
    if _rank() in (0, last):
        dist.monitored_barrier(again, timeout=timedelta(seconds=20))


def many_groups() -> None:
    """What a destroyed group leaves is freed when its ranks make another one."""
    before = None
    for _ in range(5):
        group = dist.new_group()
        assert before is None or "closed" in repr(before.comm)
        dist.all_reduce(x := torch.ones(1), group=group)
        assert x.item() == _size()
        dist.destroy_process_group(group)
        assert "closed" not in repr(group.comm)
        before = group


def work_under_way() -> None:
    x = _values(4)
    expected = x.clone()
    dist.all_reduce(expected)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y := torch.ones(2), async_op=True)]
    future = works[1].get_future().then(lambda done: done.value()[0] * 2)
    assert torch.equal(future.wait(), torch.full((2,), 2.0 * _size()))
    assert works[1].is_completed()
    assert works[1].is_success()
    assert works[1].result()[0] is y
    works[0].wait(timedelta(seconds=30))
    assert torch.equal(x, expected)
    assert dist.barrier(async_op=True).wait()
    assert dist.group.WORLD._get_sequence_number_for_group() > 0


def an_interrupt_of_a_call_before() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    lane = Lane("interrupted")
    before, call = Call(interrupt, [], lane), Call(lambda: None, [], lane)
    lane._waiting.append(before)
    for work in (lambda: lane.make(call, at_once=True), before.wait):
        try:
            work()
        except KeyboardInterrupt:
            continue
        raise AssertionError("the interrupt is lost")
    assert call.wait()


# Training ------------------------------------------------------------------------------------------


def _in_double(check: Callable[[], None]) -> Callable[[], None]:
    """Return a check whose roundings are far below what it allows."""

    @functools.wraps(check)
    def run() -> None:
        torch.set_default_dtype(torch.float64)
        try:
            check()
        finally:
            torch.set_default_dtype(torch.float32)

    return run


class _Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(_rank())
        self.first, self.second = torch.nn.Linear(5, 40), torch.nn.Linear(40, 2)
        self.unused = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).relu())


def _batch(step: int, rows: int = 8) -> torch.Tensor:
    torch.manual_seed(100 * step + _rank())
    return torch.randn(rows, 5)


def _parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def _train(model: Any, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(_batch(step)).square().sum().backward()
        optimizer.step()


@_in_double
def data_parallel() -> None:
    def run(group: Group) -> Any:
        found = []
        for options in (
            {"find_unused_parameters": True},
            {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005},
        ):
            model = DistributedDataParallel(_Network(), process_group=group, **options)
            _train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), 3)
            found += [*_parameters(model), *model.module.buffers()]
        return found

    _same(run, _ORDER)


@_in_double
def uneven_batches() -> None:
    """With an optimizer whose state is sharded."""

    def run(group: Group) -> Any:
        torch.manual_seed(1)
        model = DistributedDataParallel(torch.nn.Linear(5, 3), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, process_group=group, lr=0.1
        )
        with Join([model, optimizer]):
            _train(model, optimizer, 2 + _rank())
        optimizer.consolidate_state_dict(to=0)
        state = optimizer.state_dict()["state"] if _rank() == 0 else {}
        return _parameters(model), [moments["exp_avg"] for moments in state.values()]

    _same(run, _ORDER)


@_in_double
def fully_sharded() -> None:
    def run(group: Group) -> Any:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 2))
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        _train(model, torch.optim.Adam(model.parameters(), 0.1), 2)
        return [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]

    _same(run, _ORDER)


# Compiled functions --------------------------------------------------------------------------------


def _all_compiled(calls: list[Callable[[torch.Tensor], Any]]) -> None:
    """Check that compiled functions give, twice, what they give uncompiled."""
    for call in calls:
        expected = call(torch.ones(2) * (_rank() + 1))
        torch.compiler.reset()
        compiled = torch.compile(call, backend="eager")
        for _ in range(2):
            found = compiled(torch.ones(2) * (_rank() + 1))
            torch.testing.assert_close(found, expected, **_EXACT)


def compiled_collectives() -> None:
    n, group = _size(), dist.new_group()

    def moved(x: torch.Tensor) -> Any:
        y, parts, own = x * 2, [torch.empty(2) for _ in range(n)], torch.empty(2)
        dist.broadcast(y, 1)
        dist.barrier(group)
        dist.all_gather(parts, x)
        dist.scatter(own, [y * r for r in range(n)] if _rank() == 0 else None, 0)
        into = torch.empty(2 * n)
        dist.all_gather_into_tensor(into, x)
        dist.all_to_all(parts, [part + own for part in parts])
        dist.gather(y, parts if _rank() == 0 else None, 0, group)
        return y + 1, parts, own, into

    def reduced(x: torch.Tensor) -> Any:
        y, own, part = x * 2, torch.empty(2), torch.empty(2)
        dist.all_reduce(y)
        dist.all_reduce(y, dist.ReduceOp.AVG, group)
        dist.reduce_scatter(own, [x * r for r in range(n)])
        dist.reduce_scatter_tensor(part, torch.cat([x] * n), group=group)
        dist.all_reduce_coalesced([own, part])
        return y + 1, own, part

    def later(x: torch.Tensor) -> Any:
        y, z = x * 2, x * 3
        works = [dist.all_reduce(y, async_op=True), dist.broadcast(z, 0, async_op=True)]
        while not works[0].is_completed():
            pass
        future = works[1].get_future().then(lambda done: done.value()[0] + 1)
        works[0].wait()
        return y + 1, future.wait() * 2

    def functionally(x: torch.Tensor) -> Any:
        gathered = functional.all_gather_tensor(x * 2, 0, group)
        scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
        return functional.all_reduce(x * 2, "sum", group) + 1, functional.broadcast(
            scattered, 1, group
        )

    _all_compiled([moved, reduced, later, functionally])


def compiled_messages_objects_and_names() -> None:
    n, group, mesh = _size(), dist.new_group(), init_device_mesh("cpu", (_size(),))

    def messages(x: torch.Tensor) -> Any:
        y, into = x * 2, torch.zeros(2)
        if _rank() == 0:
            dist.send(y, 1)
        elif _rank() == 1:
            dist.recv(y, 0)
        operations = [
            dist.P2POp(dist.isend, x, (_rank() + 1) % n),
            dist.P2POp(dist.irecv, into, (_rank() - 1) % n),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return y + 1, into

    def objects(x: torch.Tensor) -> Any:
        every: list[Any] = [None] * n
        dist.all_gather_object(every, _rank())
        sent, own = [_rank()], [None]
        dist.broadcast_object_list(sent, 1)
        dist.scatter_object_list(own, every, 0)
        dist.gather_object(_rank(), every if _rank() == 0 else None, 0)
        dist.monitored_barrier(group)
        return x + 1, every, sent, own

    def names(x: torch.Tensor) -> Any:
        assert dist.get_backend(group) == "arraycomm"
        ranks = [dist.get_rank(), dist.get_rank(group), dist.get_world_size(), *mesh.shape]
        return x + dist.get_rank(), ranks, dist.get_process_group_ranks(group)

    def spread(x: torch.Tensor) -> Any:
        rows = DTensor.from_local(x * 2, mesh, [Shard(0)])
        return (rows + 1).redistribute(mesh, [Replicate()]).to_local()

    _all_compiled([messages, objects, names, spread])
    torch.compiler.reset()
    whole = torch.compile(objects, backend="eager", fullgraph=True)
    assert "communication is no part of a graph" in _raised(Exception, lambda: whole(torch.ones(2)))


@_in_double
def compiled_training() -> None:
    compiled = functools.partial(torch.compile, backend="eager")

    def run(group: Group) -> Any:
        found = []
        for wrap in (
            lambda model, **options: compiled(DistributedDataParallel(model, **options)),
            lambda model, **options: DistributedDataParallel(compiled(model), **options),
        ):
            torch.compiler.reset()
            model = wrap(_Network(), process_group=group, find_unused_parameters=True)
            _train(model, torch.optim.SGD(model.parameters(), 0.1), 2)
            found += _parameters(model)
        torch.manual_seed(3)
        layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 2))
        mesh = DeviceMesh.from_group(group, "cpu")
        sharded = fully_shard(layers, mesh=mesh)
        _train(compiled(sharded), torch.optim.SGD(sharded.parameters(), 0.1), 2)
        return found, [p.full_tensor() for p in sharded.parameters() if isinstance(p, DTensor)]

    _same(run, _ORDER)


# Errors --------------------------------------------------------------------------------------------


def _raised(kind: type[Exception], call: Callable[[], Any]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def mismatches() -> None:
    """Ranks that disagree raise arraycomm's error, whether they wait at once or later."""
    for later in (False, True):
        group = dist.new_group()
        x = torch.ones(2 + (_rank() == 1))

        def call(group: Group = group, x: torch.Tensor = x, later: bool = later) -> None:
            work = dist.all_reduce(x, group=group, async_op=later)
            if later:
                work.wait()

        text = _raised(ac.MismatchError, call)
        assert "(2,)" in text
        assert "(3,)" in text
        assert "communicator is closed" in _raised(ac.CommunicatorClosedError, call)


def error_in_a_backward_pass() -> None:
    """The reducer is C++: its error has the text of arraycomm's."""
    model = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=dist.new_group())
    if _rank() == 1:
        dist.all_reduce(torch.ones(1), group=model.process_group, async_op=True)
    text = _raised(RuntimeError, lambda: model(torch.ones(1, 3)).sum().backward())
    assert "MismatchError" in text


def timeouts() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if _rank() == 0:
        text = _raised(ac.CommTimeoutError, lambda: dist.monitored_barrier(group))
        assert "rank 1 is missing" in text
        assert "timeout 1 s" in text
    other = dist.new_group()
    if _rank() == 0:
        work = dist.all_reduce(x := torch.ones(1), group=other, async_op=True)
        text = _raised(ac.CommTimeoutError, lambda: work.wait(timedelta(milliseconds=50)))
        assert "0.05 seconds" in text
    dist.barrier()
    if _rank() == 0:
        assert work.wait()
        assert x.item() == _size()
    else:
        dist.all_reduce(torch.ones(1), group=other)


def groups_can_be_made_again_after_a_timeout_on_some_ranks() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if _rank() != 1:
        # As an unchanged program handles it.
        _raised(RuntimeError, lambda: dist.barrier(group))
    dist.barrier()
    dist.destroy_process_group(group)
    again = dist.new_group(timeout=timedelta(seconds=60))
    dist.all_reduce(x := torch.ones(1), group=again)
    assert x.item() == _size()


def wrong_arguments_of_one_rank() -> None:
    """The others hear of them, and the group goes on."""
    group = dist.new_group()
    good, bad = torch.ones(2), torch.ones(2, device="meta")
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda x: dist.all_reduce(x, group=group),
        lambda x: dist.broadcast(x, 0, group),
        lambda x: dist.all_gather_into_tensor(torch.empty(2 * _size()), x, group),
        lambda x: dist.reduce_scatter(torch.empty(2), [x] * _size(), group=group),
        lambda x: dist.all_to_all([torch.empty(2) for _ in range(_size())], [x] * _size(), group),
    ]
    for call in calls:
        if _rank() == 1:
            assert "CPU" in _raised(TypeError, functools.partial(call, bad))
        else:
            assert "rank 1" in _raised(ac.PeerError, functools.partial(call, good))
    dist.all_reduce(good, group=group)
    assert good.tolist() == [_size()] * 2


def what_is_not_there() -> None:
    group = dist.group.WORLD
    for name in ("_start_coalescing", "split_group", "merge_remote_group"):
        assert name in _raised(NotImplementedError, getattr(group, name))
    assert "CPU" in _raised(TypeError, lambda: dist.all_reduce(torch.ones(2, device="meta")))
    assert "bool" in _raised(TypeError, lambda: dist.all_reduce(torch.ones(2) > 0))
    ops, whole = dist.ReduceOp, torch.ones(2, dtype=torch.int64)
    assert "bool" in _raised(TypeError, lambda: dist.all_reduce(whole > 0, ops.AVG))
    text = _raised(TypeError, lambda: dist.all_reduce(whole, ops.PREMUL_SUM(0.5)))
    assert "floating or complex dtype; got torch.int64; multiply it, and use SUM" in text
    sparse = torch.eye(2).to_sparse()
    assert "only sums" in _raised(TypeError, lambda: dist.all_reduce(sparse, ops.AVG))


def mean_of_integers_is_not_taken_for_their_sum() -> None:
    group, ops = dist.new_group(), dist.ReduceOp
    op = ops.AVG if _rank() == 1 else ops.SUM
    _raised(ac.MismatchError, lambda: dist.all_reduce(torch.tensor(3), op, group))


def ignite_knows_the_name() -> None:
    """It wraps a model if the backend is one of three that its module names, MPI among them."""
    native = types.ModuleType("ignite.distributed.comp_models.native")
    native.MPI = "mpi"
    sys.modules[native.__name__] = native
    try:
        assert dist.get_backend(_Groups.gloo) != native.MPI
        assert native.MPI == "mpi"
        assert dist.get_backend() == native.MPI
    finally:
        del sys.modules[native.__name__]


FORKED_CHECKS: Final = [
    all_reductions,
    means_of_integers,
    movements,
    messages,
    messages_beside_collectives,
    groups,
    mismatches,
    timeouts,
]


def _main(checks: list[Callable[[], None]]) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("arraycomm")
    _Groups.arraycomm, _Groups.gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    perform(checks)
    dist.destroy_process_group()


def _fork(rank: int, port: int) -> int:
    """Fork a rank with the environment of torchrun."""
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(FORKED_RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="none",
    )
    status = 1
    try:
        _main(FORKED_CHECKS)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _on_forked_ranks() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [_fork(rank, port) for rank in range(FORKED_RANKS)]
    assert [os.waitpid(pid, 0)[1] for pid in ranks] == [0] * FORKED_RANKS


if __name__ == "__main__":
    if "fork" in sys.argv:
        _on_forked_ranks()
    else:
        compiled = "compiled" in sys.argv
        _main([c for c in checks_in(globals()) if c.__name__.startswith("compiled_") is compiled])
