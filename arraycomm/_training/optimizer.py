"""`DistributedOptimizer`, made by the adapter of the optimizer's framework."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Literal

from arraycomm._arrays.typing import T
from arraycomm._calls.operation import Context
from arraycomm._checks import MOST_RANKS, check_at_least, check_bool
from arraycomm._collectives.groups import Dup, dup, hide
from arraycomm._communicator import Communicator, runner_of
from arraycomm._entries import entry
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.group import Options
from arraycomm._protocol.header import digest
from arraycomm._session import world
from arraycomm._training.comparison.verification import DEFAULT_STEPS, Verification
from arraycomm._training.compression import Compression, check_argument, described
from arraycomm._training.gradients import Gradients
from arraycomm._training.join import PrivateGuard
from arraycomm._training.shards import Shards
from arraycomm._training.virtual import VirtualRanks
from arraycomm._trees.reduce import DEFAULT_BUCKET_BYTES

_ADAPTERS: Final = {
    "torch": "arraycomm.adapters.torch",
    "jax": "arraycomm.adapters.jax",
    "optax": "arraycomm.adapters.jax",
    "thinc": "arraycomm.adapters.thinc",
    "keras": "arraycomm.adapters.keras",
    "mlx": "arraycomm.adapters.mlx",
}
_DEFAULT_ADAPTER: Final = "arraycomm.adapters.numpy"


@entry
def DistributedOptimizer(  # noqa: N802
    optimizer: T,
    *,
    comm: Communicator | None = None,
    op: Literal["mean", "sum"] = "mean",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    accumulate: int = 1,
    compression: str | Compression | None = None,
    shard: bool = False,
    verify_every: int = DEFAULT_STEPS,
    virtual_ranks: int | None = None,
    module: Any = None,
) -> T:
    """Make an optimizer reduce the gradients over all ranks before it uses them.

    Parameters
    ----------
    optimizer : optimizer of torch, optax, Keras, MLX or thinc, or object
        A torch optimizer is changed in place and returned. An optax transformation gives a new
        one, which works eagerly and under `jax.jit`. An optimizer of thinc gives one that reduces
        all gradients of a model in `model.finish_update(optimizer)`. One of Keras is changed in
        place, and reduces in `fit` as well; one of MLX is wrapped. Any other object with a method
        `update(params, grads)`, `update(params, grads, state)` or `step(params, grads)`, and any
        function of these, is wrapped.
    comm : Communicator, optional
        `world()` by default.
    op : str
        "mean" or "sum" of the ranks' gradients.
    bucket_bytes : int
        Gradients are fused into messages of about this many bytes. With torch, each is sent as soon
        as its gradients are computed.
    accumulate : int
        Gradients are averaged over this many steps on each rank before they are reduced. Parameters
        and the optimizer's state change only in the last of these steps. The loop stays as it is,
        with the gradients of one step at a time. They are added up on their own device, those of
        float16 and bfloat16 in float32.
    compression : str or Compression, optional
        "bfloat16" or "float16": float32 and float64 gradients are sent rounded to these 16 bits,
        accumulated in float32, and returned in their own dtype. In float16, values beyond 65504
        become infinite. An object of a subclass of `Compression` sends them in its own form.
    shard : bool
        Whether each rank keeps the state of, and updates, only its own part of the parameters,
        about 1/size of their bytes (ZeRO stage 1). Gradients are reduced as without it. After each
        update the ranks exchange what they have updated, so that parameters are the same bits as
        without it. Not every optimizer can be sharded; see Notes.
    verify_every : int
        Steps after which the ranks compare digests of their parameters and of the optimizer's state
        again; 0 compares nothing. See Notes.
    virtual_ranks : int, optional
        Train as this number of ranks would, with the same bits, on any smaller number: rank r of p
        plays the virtual ranks r, r + p, r + 2p, … in turn. A step of the program is then a round,
        in which each rank plays one. Parameters and the optimizer's state change in the last round
        of a step alone. `DistributedDataContainer` with the same `virtual_ranks` gives the batches.
        See Notes.
    module : torch.nn.Module, optional
        With torch, the module whose parameters the optimizer updates. It gives them names, and its
        buffers, such as running statistics and masks, are compared as parameters are. Buffers whose
        names are in its attribute `_ddp_params_and_buffers_to_ignore` are left out, as by DDP.

    Returns
    -------
    optimizer
        Of the same kind. With torch, `.grad` of its parameters is reduced when `backward()`
        returns, and a closure's loss after each of its evaluations; learning-rate schedulers and
        state dicts work as before, apart from `state_dict()` of an optimizer that is sharded: call
        `gather_state` of its adapter.

    Raises
    ------
    ValueError
        The optimizer is distributed already, an argument is out of range, or `module` has none of
        its parameters; there are fewer virtual ranks than ranks, or they are combined with
        `accumulate`, `compression` or `shard`. In a step: a closure was passed although gradients
        are accumulated, or there are virtual ranks.
    MismatchError
        The arguments differ between ranks. In a step, before it changes anything: what it depends
        on is not the same on all ranks, see Notes. With torch, in a backward pass or a step: some
        ranks have skipped a step that others took, or made another number of backward passes. With
        optax, in an update: some ranks have skipped one that others made. With a wrapped object, in
        a step: on some ranks alone it has raised in a step before.
    TypeError
        `optimizer` is none of these, or cannot be sharded, or is not torch's and `module` is
        passed; a number or a bool is none. With torch, in a backward pass: a
        gradient is sparse, or has a history. With optax, in an update: an argument is a function
        that cannot be reduced.

    Notes
    -----
    Collective: every rank makes its optimizer, which may be of another framework, and takes every
    step. If all are torch's, every backward pass that reaches one of the parameters is collective,
    apart from `arraycomm.adapters.torch.no_sync`; a rank that has none in a step takes part in the
    others' by its `step()`. The optimizer works on a duplicate of `comm`, so the order between its
    calls and other calls is free. If a parameter has no gradient on some ranks, it counts as zeros
    there. Gradients that are accumulated but not yet reduced are not in a torch optimizer's state
    dict; with optax they are in the state.

    A reduction makes gradients the same, and nothing else. So the ranks compare what else a step
    depends on, by digests in the header of the reduction: with every step the class of the
    optimizer, its hyperparameters and its step count; with the first step and every `verify_every`
    steps each parameter, and each array of the state unless that is sharded; so they do after a
    torch step has raised on a rank. The error names the first one that differs, with its values and
    the line of the program on each rank. Arrays that are of another framework on another rank are
    compared in the first step only, since frameworks round differently. Parameters that are meant
    to differ, such as an adapter of each rank's own, belong to another optimizer, which is not
    distributed. With torch, parameters that a rank lists in another order are put in that of rank
    0, if their names or their values prove which is which.

    With `shard=True` an optimizer must treat each parameter by itself: its update may depend on its
    own gradient and state, and on values that are the same for all, such as a learning rate. Those
    of torch.optim do, apart from LBFGS and SparseAdam. Any other torch optimizer, and an object
    with `update`, says so by an attribute `per_parameter = True` of its class. Such an object is
    then given lists of the parameters and gradients that its rank owns. An optax transformation is
    traced to find out; clip by the norm of all gradients before it, after a reduction:
    `optax.chain(all_reduce(), optax.clip_by_global_norm(1.0), DistributedOptimizer(...))`. All
    ranks' optimizers must then be of one adapter.

    With `virtual_ranks`, the gradients of a round are added to the total of the rounds before, in
    rank order: ((g₀ + g₁) + g₂) + … for every number of ranks, as on k ranks, in float32 for
    floats of 16 and 8 bits. The mean is taken, and rounded, once. What a rank passes in a round
    without a virtual rank of its own does not count. With torch, `.grad` is None after
    `backward()`, apart from the last round, where it is the mean; take what belongs to a step, such
    as that of a `GradScaler` or a scheduler, where `completes_step` of the container is True. In a
    round there is one backward pass outside of `no_sync`; the last virtual rank has to have one if
    any other has, also of an empty batch, since what the program makes of its `.grad` is what is
    applied. With optax, the total is in the state.

    A copy, also one by `copy.deepcopy`, is distributed over the same ranks; every rank steps the
    original and its copies in the same order. It cannot be pickled: save its state instead.
    """
    shared = comm or world()
    given = _Arguments(
        optimizer,
        op,
        bucket_bytes,
        accumulate,
        compression,
        shard,
        verify_every,
        virtual_ranks,
        module,
    )
    private = dup(runner_of(shared), {}, MakeOptimizer, given)
    private.set_guard(PrivateGuard(shared))
    own = Communicator(private)
    hide(runner_of(shared), private, own)
    adapter = _adapter_of(optimizer)
    virtual = None
    if given.virtual_ranks is not None:
        if not given.are_alike:
            raise TypeError(
                "DistributedOptimizer: with virtual_ranks all ranks' optimizers must be of one "
                "adapter, since each framework goes on with a total in its own way"
            )
        virtual = VirtualRanks(given.virtual_ranks, op, own.rank, own.size)
    gradients = Gradients(
        own,
        op,
        given.bucket_bytes,
        given.accumulate,
        compression,
        shared,
        verification=Verification(
            given.verify_every if own.size > 1 else 0, adapter.__name__, alike=given.are_alike
        ),
        overlapping=given.are_alike and hasattr(adapter, "REDUCES_IN_BACKWARD"),
        shards=Shards(own, given.bucket_bytes) if given.shard else None,
        virtual=virtual,
    )
    return adapter.distribute(optimizer, gradients, *(() if module is None else (module,)))


@dataclass
class _Arguments:
    """The arguments of an optimizer, and the adapters of all ranks, each as a number."""

    optimizer: Any
    op: Any
    bucket_bytes: Any
    accumulate: Any
    compression: Any
    shard: Any
    verify_every: Any
    virtual_ranks: Any
    module: Any
    adapters: Sequence[int] = ()

    @property
    def are_alike(self) -> bool:
        """Whether all ranks' optimizers are of one framework."""
        return len(set(self.adapters)) == 1

    def check(self, ranks: int) -> str:
        """Raise if an argument is wrong for `ranks` ranks; return what these compare.

        Numbers are Python's own afterwards.
        """
        if self.op not in ("mean", "sum"):
            raise ValueError(f'op must be "mean" or "sum"; got {self.op!r}')
        for name, least in {"bucket_bytes": 1, "accumulate": 1, "verify_every": 0}.items():
            setattr(self, name, check_at_least(getattr(self, name), least, name))
        check_argument(self.compression)
        self.shard = check_bool(self.shard, "shard")
        adapter = _adapter_of(self.optimizer)
        adapter.check(self.optimizer)
        return (
            f", {self.op} {self.bucket_bytes} {self.accumulate} {described(self.compression)}"
            f" {self.verify_every}{self._check_sharding(adapter)}{self._check_module(adapter)}"
            f"{self._check_virtual_ranks(ranks)}"
        )

    def _check_virtual_ranks(self, ranks: int) -> str:
        """Raise if `virtual_ranks` is wrong; return what ranks compare of it."""
        if self.virtual_ranks is None:
            return ""
        self.virtual_ranks = check_at_least(self.virtual_ranks, ranks, "virtual_ranks", MOST_RANKS)
        others = {"accumulate": 1, "compression": None, "shard": False}
        for name, default in others.items():
            if (got := getattr(self, name)) != default:
                raise ValueError(f"with virtual_ranks {name} must be {default}; got {got!r}")
        return f" {self.virtual_ranks} virtual ranks"

    def _check_sharding(self, adapter: ModuleType) -> str:
        """Raise if the optimizer cannot be sharded; return what ranks compare of that."""
        if not self.shard:
            return ""
        name = adapter.__name__.rpartition(".")[2]
        if not hasattr(adapter, "check_shard"):
            raise TypeError(f"optimizers of {name} cannot be sharded; pass shard=False")
        adapter.check_shard(self.optimizer)
        # What is exchanged are parameters in one adapter, and their changes in another.
        return f" shard=True ({name})"

    def _check_module(self, adapter: ModuleType) -> str:
        """Raise if the module is wrong; return what ranks compare of it."""
        if self.module is None:
            return ""
        if not hasattr(adapter, "check_module"):
            name = adapter.__name__.rpartition(".")[2]
            raise TypeError(f"module must be None for optimizers of {name}; only torch's take one")
        adapter.check_module(self.optimizer, self.module)
        return " with module"


class MakeOptimizer(Dup):
    """The duplicate on which an optimizer works."""

    name, code = "DistributedOptimizer", 38

    def __init__(
        self,
        context: Context,
        options: dict[str, Any],
        chosen: list[Options],
        arguments: _Arguments,
    ) -> None:
        checked = arguments.check(context.group.size)
        super().__init__(context, options, chosen, checked)
        self._arguments = arguments
        self.word = digest(_adapter_of(arguments.optimizer).__name__)

    def result(self, agreement: Agreement) -> Any:
        self._arguments.adapters = agreement.free_words()
        return super().result(agreement)


def _adapter_of(optimizer: Any) -> ModuleType:
    """Return the adapter for an optimizer by the modules of its classes, imported on first use."""
    for kind in type(optimizer).__mro__:
        name = _ADAPTERS.get(kind.__module__.partition(".")[0])
        if name is not None:
            return importlib.import_module(name)
    return importlib.import_module(_DEFAULT_ADAPTER)
