"""The collectives of JAX: what each does with memory, how it is batched, and its transpose."""

from __future__ import annotations

import abc
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import arraycomm as ac
from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import view
from arraycomm._training.programs import ProgramCalls, calls_of
from arraycomm.adapters.jax._primitive import Call, bind

Shape = tuple[int, ...]


class Collective(Call):
    """A collective of one array a rank."""

    @abc.abstractmethod
    def run(self, calls: ProgramCalls, x: Any, out: Any) -> Any:
        """Make the call; the result goes to `out` if that is not None, and is returned."""

    def shape(self, shape: Shape, size: int) -> Shape:
        """Return the shape of the result."""
        return shape

    def refuse(self, calls: ProgramCalls, error: Exception) -> NoReturn:
        """Raise what is wrong with this rank's argument, and tell the ranks that make the call."""
        calls.fail(self.name, error)
        raise error

    def transposed(self, cotangent: Any, comm: ac.Communicator) -> Any:
        """Apply the transpose, which takes a gradient of the result to that of the argument."""
        return call(self, cotangent, comm)

    def results(self, arrays: Sequence[Any], size: int) -> list[jax.ShapeDtypeStruct]:
        (x,) = arrays
        shape = self.shape(x.shape, size)
        return [jax.ShapeDtypeStruct(shape, x.dtype, weak_type=x.weak_type)]

    def over(self, comm: ac.Communicator) -> ProgramCalls:
        return calls_of(comm)

    def make(
        self, over: ProgramCalls, place: int, arrays: Sequence[Any], outs: Sequence[Any]
    ) -> list[Any]:
        with over.at(place):
            return [self.run(over, arrays[0], outs[0])]

    def pull_back(self, cotangents: Sequence[Any], comm: ac.Communicator) -> Sequence[Any]:
        return [self.transposed(cotangents[0], comm)]


def call(collective: Collective, x: Any, comm: ac.Communicator) -> Any:
    """Make a call, or stage it."""
    (y,) = bind(collective, [x], comm)
    return y


@dataclass(frozen=True)
class Allreduce(Collective):
    """`allreduce`."""

    op: Any
    name = "allreduce"
    in_place = True

    def run(self, calls: ProgramCalls, x: Any, out: Any) -> Any:
        return calls.comm.allreduce(x, self.op, out=out)

    def shape(self, shape: Shape, size: int) -> Shape:
        _check_named(self.name, self.op)
        return shape

    def check_differentiable(self) -> None:
        check_linear(self.name, self.op)


@dataclass(frozen=True)
class Allgather(Collective):
    """`allgather`."""

    name = "allgather"
    result_axis = 1

    def run(self, calls: ProgramCalls, x: Any, out: Any) -> Any:
        return calls.comm.allgather(x, out=out)

    def shape(self, shape: Shape, size: int) -> Shape:
        return (size, *shape)

    def transposed(self, cotangent: Any, comm: ac.Communicator) -> Any:
        return call(ReduceScatter("sum"), cotangent, comm)


@dataclass(frozen=True)
class ReduceScatter(Collective):
    """`reduce_scatter`."""

    op: Any
    name = "reduce_scatter"
    batched_axis = 1

    def run(self, calls: ProgramCalls, x: Any, out: Any) -> Any:
        return calls.comm.reduce_scatter(x, self.op, out=out)

    def shape(self, shape: Shape, size: int) -> Shape:
        _check_named(self.name, self.op)
        _check_rows(self.name, shape, size)
        return shape[1:]

    def transposed(self, cotangent: Any, comm: ac.Communicator) -> Any:
        rows = call(Allgather(), cotangent, comm)
        return rows / comm.size if self.op == "mean" else rows

    def check_differentiable(self) -> None:
        check_linear(self.name, self.op)


@dataclass(frozen=True)
class Alltoall(Collective):
    """`alltoall`."""

    name = "alltoall"
    batched_axis = 1
    result_axis = 1

    def run(self, calls: ProgramCalls, x: Any, out: Any) -> Any:
        return calls.comm.alltoall(x, out=out)

    def shape(self, shape: Shape, size: int) -> Shape:
        _check_rows(self.name, shape, size)
        return shape


@dataclass(frozen=True)
class Bcast(Collective):
    """`bcast`."""

    root: int
    name = "bcast"
    in_place = True

    def __post_init__(self) -> None:
        _fix(self, "root")

    def run(self, calls: ProgramCalls, x: Any, out: Any) -> Any:
        return calls.comm.bcast(x, self.root, out=out)

    def transposed(self, cotangent: Any, comm: ac.Communicator) -> Any:
        return call(_SumOnRoot(self.root), cotangent, comm)


@dataclass(frozen=True)
class _SumOnRoot(Collective):
    """The sum on `root`, and zeros on the other ranks."""

    root: int
    name = "bcast"
    in_place = True

    def run(self, calls: ProgramCalls, x: Any, out: Any) -> Any:
        is_root = calls.comm.rank == self.root
        total = calls.comm.reduce(x, "sum", self.root, out=out if is_root else None)
        if is_root:
            return total
        if out is None:
            return jnp.zeros_like(x)
        out[...] = 0
        return out

    def transposed(self, cotangent: Any, comm: ac.Communicator) -> Any:
        return call(Bcast(self.root), cotangent, comm)


@dataclass(frozen=True)
class Sendrecv(Collective):
    """`sendrecv`."""

    dest: int
    source: int
    tag: int
    name = "sendrecv"

    def __post_init__(self) -> None:
        _fix(self, "dest", "source", "tag")

    def over(self, comm: ac.Communicator) -> ProgramCalls:
        for which, rank in (("dest", self.dest), ("source", self.source)):
            if not 0 <= rank < comm.size:
                raise ValueError(
                    f"sendrecv: {which} must be a rank of the communicator, 0 to {comm.size - 1}; "
                    f"got {rank}"
                )
        if self.tag not in ProgramCalls.tags:
            raise ValueError(f"sendrecv: tag must be 0 to {ProgramCalls.tags[-1]}; got {self.tag}")
        return super().over(comm)

    def is_identity(self, comm: ac.Communicator) -> bool:
        return self.dest == self.source == comm.rank

    def run(self, calls: ProgramCalls, x: Any, out: Any) -> Any:
        if self.is_identity(calls.comm):
            return jnp.array(x) if out is None else np.asarray(x)
        try:
            like = view(x)
        except Exception as error:
            self.refuse(calls, error)
        array, status = like.array, ac.Status()
        try:
            received = calls.sendrecv(array, self.dest, self.source, self.tag, out, status)
        finally:
            # Also if `out` cannot take it, which is like the array that was sent.
            _check_received(array, status)
        return received if out is not None else to_framework(received, like)

    def refuse(self, calls: ProgramCalls, error: Exception) -> NoReturn:
        calls.refuse(error, self.dest, self.source, self.tag)
        raise error

    def transposed(self, cotangent: Any, comm: ac.Communicator) -> Any:
        return call(Sendrecv(self.source, self.dest, self.tag), cotangent, comm)


@dataclass(frozen=True)
class Pooled(Allreduce):
    """The reduction of a function's values, with arguments the same on all ranks: `replicated`."""

    def transposed(self, cotangent: Any, comm: ac.Communicator) -> Any:
        return replicated(cotangent, self.op, comm)


def _fix(call: Collective, *names: str) -> None:
    """Make attributes ints, since they are part of the program, or raise."""
    for name in names:
        given = getattr(call, name)
        try:
            object.__setattr__(call, name, operator.index(given))
        except TypeError:
            raise TypeError(
                f"{call.name}: {name} must be an int that is known when a program is traced; got "
                f"{given!r}. comm.rank and comm.size are ints, also inside"
            ) from None


def _check_received(array: Any, status: ac.Status) -> None:
    """Raise if the other rank has sent another kind of array."""
    if status.dtype is not None and (status.dtype, status.shape) != (array.dtype, array.shape):
        raise ac.MismatchError(
            f"sendrecv: ranks must send arrays of the shape and dtype that they receive; got "
            f"{status.dtype} {status.shape} from rank {status.source}, and sent {array.dtype} "
            f"{array.shape}"
        )


def check_linear(name: str, op: Any) -> None:
    """Raise unless a reduction by `op` has derivatives."""
    if not (isinstance(op, str) and op in ("sum", "mean")):
        raise TypeError(
            f'{name}: op must be "sum" or "mean" if x is differentiated, since no other op has a '
            f"gradient here; got {op!r}. Pass jax.lax.stop_gradient(x)"
        )


def _check_named(name: str, op: Any) -> None:
    if not isinstance(op, str):
        raise TypeError(
            f"{name}: op must be the name of a reduction inside a transformation of JAX, since a "
            f"function cannot be called from a compiled program; got {op!r}. Call it outside"
        )


def _check_rows(name: str, shape: Shape, size: int) -> None:
    if not shape or shape[0] != size:
        raise ValueError(f"{name}: x must have {size} rows, one for each rank; got shape {shape}")


# A function of arguments that are the same on all ranks, with another part of the data on each: its
# value is pooled, and so are its derivatives, since the arguments are replicated.


def replicated(x: Any, op: str, comm: ac.Communicator) -> Any:
    """Return `x`, which is the same on every rank; the ranks' gradients of it are reduced."""
    return _replicated_p.bind(x, op=op, comm=comm)


_replicated_p: Final = Primitive("arraycomm_replicated")
_replicated_p.def_impl(lambda x, **_: x)
_replicated_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(_replicated_p, lambda _, x, **__: [x])
ad.deflinear2(_replicated_p, lambda cotangent, _, *, op, comm: [call(Pooled(op), cotangent, comm)])
batching.defvectorized(_replicated_p)
