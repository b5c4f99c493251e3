"""The process group of torch.distributed whose collectives are those of a communicator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch.distributed import ProcessGroup, ReduceOp

import arraycomm as ac
from arraycomm._calls.custom_ops import Op
from arraycomm._communicator import runner_of
from arraycomm._dtypes import OpName
from arraycomm._entries import untraced
from arraycomm.adapters.torch_distributed._works import Call, Lane, Message

T = TypeVar("T")
Tensors = list[torch.Tensor]
# Typed with forms of each call that only C++ makes, and no two versions of torch have the same.
_Base: Any = ProcessGroup

_OPS: Final[dict[Any, OpName]] = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "and",
    ReduceOp.BOR: "or",
    ReduceOp.BXOR: "xor",
    ReduceOp.PREMUL_SUM: "sum",
}
# What torch asks of a process group or of its backend, and this one does not have.
_ABSENT: Final = (
    "_start_coalescing",
    "_end_coalescing",
    "_register_on_completion_hook",
    "merge_remote_group",
    "split_group",
)


@untraced
class ArrayCommProcessGroup(_Base):  # type: ignore[misc]
    """A process group over a communicator of its own, and over another one for its messages."""

    def __init__(
        self,
        name: str,
        store: Any,
        comm: ac.Communicator,
        messages: ac.Communicator,
        on_shutdown: Callable[[], None],
    ) -> None:
        super().__init__(comm.rank, comm.size)
        self._name, self._store = name, store
        self._description = "undefined"
        self.comm, self._messages = comm, messages
        self._on_shutdown: Callable[[], None] | None = on_shutdown
        self._lane = Lane("arraycomm-torch-distributed")
        self._message_turn = threading.Lock()
        self._timeout: float | None = None
        self._calls = 0

    # What torch asks of a group

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> ArrayCommProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"the arraycomm backend is for tensors on the CPU; it has none for {device}"
            )
        return self

    supports_coalescing = supports_splitting = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Tell that tensors need no memory of the backend's own."""
        return False

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name that `init_process_group` was given."""
        return "arraycomm"

    name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name that torch has given the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    group_name = property(getGroupName)

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_desc(self) -> str:
        """What the group is for, as its maker has said."""
        return self._description

    def get_group_store(self) -> Any:
        """Return the store of the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Let later calls wait so long for other ranks."""
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: collectives are counted from 0."""

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def shutdown(self) -> None:
        """Make the calls that are left, and give the communicators back."""
        self._lane.end()
        hook, self._on_shutdown = self._on_shutdown, None
        if hook is not None:
            hook()

    abort = shutdown

    def _do(self, call: Callable[[dict[str, Any]], None], tensors: Tensors, opts: Any) -> Call:
        """Make a collective; `call` gets its timeout as a keyword argument, if it has one."""
        timeout = _seconds(getattr(opts, "timeout", None)) or self._timeout
        limit = {} if timeout is None else {"timeout": timeout}
        work = Call(lambda: call(limit), tensors, self._lane)
        self._calls += 1
        self._lane.make(work, at_once=not getattr(opts, "asyncOp", True))
        return work

    def _ready(self, prepare: Callable[..., T], *arguments: Any) -> T:
        """Return what a call needs; if preparing it fails, the other ranks' calls raise too."""
        try:
            return prepare(*arguments)
        except Exception as error:
            runner_of(self.comm).fail("torch.distributed", error)
            raise

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Call:
        """Reduce each tensor in place."""

        def call(limit: dict[str, Any]) -> None:
            for tensor in tensors:
                op, x = self._ready(_reduction, opts, tensor)
                if tensor.layout == torch.sparse_coo:
                    _sum_sparse(self.comm, tensor, limit)
                else:
                    self.comm.allreduce(x, op, out=_plain(tensor), **limit)
                    self._finish(op, tensor)

        return self._do(call, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> Call:
        """Reduce a tensor into that of the root."""

        def call(limit: dict[str, Any]) -> None:
            for tensor in tensors:
                op, x = self._ready(_reduction, opts, tensor)
                out = _plain(tensor) if self.comm.rank == opts.rootRank else None
                self.comm.reduce(x, op, opts.rootRank, out=out, **limit)
                if out is not None:
                    self._finish(op, out)

        return self._do(call, tensors, opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Call:
        """Reduce lists of one tensor for each rank; each rank gets its own."""

        def call(limit: dict[str, Any]) -> None:
            for output, parts in self._ready(_pairs, outputs, inputs):
                op, x = self._ready(_reduction, opts, *parts)
                got = self.comm.reduce_scatter(x, op, counts=_lengths(parts), **limit)
                _fill(output, got)
                self._finish(op, output)

        return self._do(call, outputs, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Call:
        """Reduce tensors of one row for each rank; each rank gets its own rows."""

        def call(limit: dict[str, Any]) -> None:
            for output, given in self._ready(_pairs, outputs, inputs):
                op, x = self._ready(_reduction, opts, given)
                out = self._ready(_flat, output)
                self.comm.reduce_scatter(self._by_ranks(x), op, out=out, **limit)
                self._finish(op, out)
                _written(output, out)

        return self._do(call, outputs, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Call:
        """Reduce a tensor of one row for each rank; each rank gets its own row."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _reduce_scatter_base = reduce_scatter_single

    def _finish(self, op: OpName | Op, total: torch.Tensor) -> None:
        """Divide a sum that has to be a mean of integers."""
        if op is _INTEGER_MEAN:
            _divide(total, self.comm.size)

    # Movements

    def broadcast(self, tensors: Tensors, opts: Any) -> Call:
        """Give every rank the tensors of the root."""

        def call(limit: dict[str, Any]) -> None:
            for tensor in tensors:
                x = self._ready(_plain, tensor)
                self.comm.bcast(x, opts.rootRank, out=x, **limit)

        return self._do(call, tensors, opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Call:
        """Give every rank the list of all ranks' tensors."""

        def call(limit: dict[str, Any]) -> None:
            for parts, given in self._ready(_pairs, outputs, inputs):
                x = self._ready(_plain, given)
                _share_out(self.comm.allgather(x, **limit), parts)

        return self._do(call, [tensor for parts in outputs for tensor in parts], opts)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Call:
        """Give every rank the tensors of each, a list for each rank."""

        def call(limit: dict[str, Any]) -> None:
            for given, *parts in self._ready(_pairs, inputs, *outputs):
                x = self._ready(_plain, given)
                _share_out(self.comm.allgather(x, **limit), parts)

        return self._do(call, [tensor for parts in outputs for tensor in parts], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Call:
        """Give every rank all ranks' tensors, one after the other in one tensor."""

        def call(limit: dict[str, Any]) -> None:
            for output, given in self._ready(_pairs, outputs, inputs):
                x, out = self._ready(_flat, given), self._ready(_flat, output)
                self.comm.allgather(x, out=self._by_ranks(out), **limit)
                _written(output, out)

        return self._do(call, outputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = None
    ) -> Call:
        """Give every rank all ranks' tensors in one tensor."""
        return self.all_gather_single_coalesced([output], [given], opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _allgather_base = all_gather_single

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Call:
        """Give the root the list of all ranks' tensors."""

        def call(limit: dict[str, Any]) -> None:
            got = self.comm.gather(self._ready(_plain, inputs[0]), opts.rootRank, **limit)
            if got is not None:
                _share_out(got, outputs[0])

        return self._do(call, [tensor for parts in outputs for tensor in parts], opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Call:
        """Give each rank its tensor of the list of the root."""

        def call(limit: dict[str, Any]) -> None:
            x = self._ready(_stacked, inputs[0]) if inputs else None
            self.comm.scatter(x, opts.rootRank, out=self._ready(_plain, outputs[0]), **limit)

        return self._do(call, outputs, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Call:
        """Send tensor r to rank r, and get one from each."""

        def call(limit: dict[str, Any]) -> None:
            x = self._ready(_joined, *inputs)
            got, counts = self.comm.alltoallv(x, _lengths(inputs), return_counts=True, **limit)
            _check_lengths(counts, _lengths(outputs))
            for output, part in zip(outputs, got.split(counts), strict=True):
                _fill(output, part)

        return self._do(call, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Call:
        """Send each rank its rows of a tensor, and get rows from each."""

        def call(limit: dict[str, Any]) -> None:
            x = self._ready(_plain, given)
            splits = list(input_splits) or self._ready(self._even, given)
            got, counts = self.comm.alltoallv(x, splits, return_counts=True, **limit)
            _check_lengths(counts, list(output_splits) or self._even(output))
            _fill(output, got)

        return self._do(call, [output], opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Call:
        """Wait until every rank has called."""
        return self._do(lambda limit: self.comm.barrier(**limit), [], opts)

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until every rank has called; a timeout names all ranks that have not."""
        if isinstance(timeout, int | float):
            timeout = timedelta(seconds=timeout)
        # Not at all is as short as it can be, and not for ever.
        limit = self._timeout if timeout is None else max(timeout.total_seconds(), 1e-3)
        work = Call(lambda: self.comm.barrier(timeout=limit), [], self._lane)
        self._lane.make(work, at_once=True)
        work.wait()

    # Messages

    def send(self, tensors: Tensors, dest: int, tag: int) -> Message:
        """Send a tensor to a rank, which receives as many elements."""
        # What arraycomm refuses, it refuses at the receiver as well.
        x = tensors[0].detach().reshape(-1)
        with self._message_turn:
            request = self._messages.isend(x, dest, tag)
        return Message(request, self._message_turn, tensors)

    def recv(self, tensors: Tensors, source: Any, tag: int) -> Message:
        """Receive a tensor of as many elements from a rank."""
        out, status = _flat(tensors[0]), ac.Status()
        with self._message_turn:
            request = self._messages.irecv(source, tag, out=out, status=status)
        return Message(
            request, self._message_turn, tensors, lambda: _written(tensors[0], out), status
        )

    def recv_anysource(self, tensors: Tensors, tag: int) -> Message:
        """Receive a tensor of as many elements from any rank."""
        return self.recv(tensors, ac.ANY_SOURCE, tag)

    def _by_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """Return a view of one row for each rank, or the tensor itself if it has no such rows."""
        columns, rest = divmod(x.numel(), self.comm.size)
        return x if rest else x.reshape(self.comm.size, columns)

    def _even(self, x: torch.Tensor) -> list[int]:
        return [x.shape[0] // self.comm.size] * self.comm.size


def _absent(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name}: the arraycomm backend does not have it")

    return refuse


for _name in _ABSENT:
    setattr(ArrayCommProcessGroup, _name, _absent(_name))


def _seconds(timeout: timedelta | None) -> float | None:
    """Return a timeout in seconds; None if it is not set, for which torch has a negative one."""
    seconds = 0.0 if timeout is None else timeout.total_seconds()
    return seconds if seconds > 0 else None


def _pairs(*lists: Sequence[Any]) -> list[Any]:
    return list(zip(*lists, strict=True))


def _reduction(opts: Any, *parts: torch.Tensor) -> tuple[OpName | Op, torch.Tensor]:
    """Return a reduction and the tensor that goes into it, joined if there are several."""
    x = _plain(parts[0]) if len(parts) == 1 else _joined(*parts)
    op: Any = ReduceOp(ReduceOp.SUM) if opts is None else opts.reduceOp
    if x.layout == torch.sparse_coo and op.op != ReduceOp.SUM:
        raise TypeError(f"all_reduce: sparse tensors have only sums; got {op.op}")
    if op.op == ReduceOp.PREMUL_SUM:
        return "sum", _scaled(x, op.factor)
    if op.op == ReduceOp.AVG and not _is_inexact(x) and x.dtype != torch.bool:
        return _INTEGER_MEAN, x
    return _OPS[op.op], x


def _is_inexact(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _scaled(x: torch.Tensor, factor: Any) -> torch.Tensor:
    if not _is_inexact(x):
        raise TypeError(
            f"PREMUL_SUM: the tensor must have a floating or complex dtype; got {x.dtype}; "
            "multiply it, and use SUM"
        )
    scaled: torch.Tensor = x * factor
    return scaled


def integer_mean(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add what `_divide` then divides; torch itself adds only some integers."""
    total: torch.Tensor = torch.from_numpy(np.asarray(np.add(a.numpy(), b.numpy())))
    return total


# An operation of its own, so that ranks that ask for a sum do not agree with it.
_INTEGER_MEAN: Final = ac.op(integer_mean, elementwise=True)


def _divide(total: torch.Tensor, size: int) -> None:
    """Divide integers, towards zero as NCCL does; their dtype may be too narrow for the divisor."""
    x = np.from_dlpack(_plain(total))
    wide = x if x.itemsize == 8 else x.astype(np.int64)
    _fill(total, torch.from_numpy(np.asarray((wide - np.fmod(wide, size)) // size)))


def _sum_sparse(comm: ac.Communicator, tensor: torch.Tensor, limit: dict[str, Any]) -> None:
    """Sum a sparse tensor, as of embeddings' gradients, in place: all ranks get all elements."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        own = tensor.detach().coalesce()
        shapes = comm.allgather(torch.tensor(tensor.shape), **limit).tolist()
        if shapes != shapes[:1] * comm.size:
            raise ac.MismatchError(
                "all_reduce: a sparse tensor must have the same shape on every rank; got the "
                f"shapes {shapes} on ranks 0 to {comm.size - 1}"
            )
        where = comm.allgatherv(own.indices().T.contiguous(), **limit)
        values = comm.allgatherv(own.values(), **limit)
        tensor.copy_(torch.sparse_coo_tensor(where.T, values, tensor.shape).coalesce())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its history: what torch.distributed does is not differentiated."""
    if tensor.device.type != "cpu":
        raise TypeError(
            f"the arraycomm backend is for tensors on the CPU; got one on {tensor.device}; "
            "for others use the collectives of arraycomm itself"
        )
    return tensor.detach()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in one dimension: the tensor's own if it is contiguous, or others."""
    return _plain(tensor).reshape(-1)


def _written(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy what was written into `_flat` of a tensor, if that was not its own memory."""
    if tensor.numel() and flat.data_ptr() != tensor.data_ptr():
        _fill(tensor, flat)


def _fill(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    _plain(tensor).copy_(flat.reshape(tensor.shape))


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([_flat(part) for part in parts])


def _stacked(parts: Tensors) -> torch.Tensor:
    return torch.stack([_plain(part) for part in parts])


def _lengths(parts: Tensors) -> list[int]:
    return [part.numel() for part in parts]


def _check_lengths(got: Sequence[int], expected: Sequence[int]) -> None:
    if list(got) != list(expected):
        raise ValueError(
            "alltoall: the outputs must have the lengths that the ranks send; got "
            f"{list(expected)} for {list(got)}"
        )


def _share_out(rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    if len(rows) != len(parts):
        raise ValueError(
            f"gather: there must be one output for each of {len(rows)} ranks; got {len(parts)}"
        )
    for row, part in zip(rows, parts, strict=True):
        _fill(part, row)
