"""PyTorch: distributed optimizers, differentiable collectives, batch norm and a data loader."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

from arraycomm import DistributedOptimizer, synchronize
from arraycomm._calls.arguments import check_root
from arraycomm._entries import hide_from_torch, opaque
from arraycomm.adapters.torch._backward import calls_under_way
from arraycomm.adapters.torch._batchnorm import SyncBatchNorm, convert_sync_batchnorm
from arraycomm.adapters.torch._collectives import (
    allgather,
    allreduce,
    alltoall,
    bcast,
    reduce_scatter,
)
from arraycomm.adapters.torch._data import DataLoader
from arraycomm.adapters.torch._hooks import BackwardReducer, without_owner
from arraycomm.adapters.torch._inputs import Settings, StepInputs, align
from arraycomm.adapters.torch._modules import check_has_parameters, unwrapped
from arraycomm.adapters.torch._parameters import Parameters
from arraycomm.adapters.torch._rounds import Reducer
from arraycomm.adapters.torch._shards import Sharding, check_per_parameter

__all__ = [
    "DataLoader",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather",
    "allreduce",
    "alltoall",
    "bcast",
    "convert_sync_batchnorm",
    "gather_state",
    "no_sync",
    "reduce_scatter",
    "synchronize",
]

# If all ranks' adapters do, gradients are reduced during backward passes.
REDUCES_IN_BACKWARD: Final = True


def check(optimizer: Any) -> None:
    """Raise unless this is a torch optimizer that is not distributed already."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "DistributedOptimizer: optimizer must be a torch.optim.Optimizer; "
            f"got {type(optimizer).__name__}"
        )
    if optimizer in _distributed:
        raise ValueError("DistributedOptimizer: this optimizer is distributed already")
    _check_shapes(optimizer.param_groups)
    if hasattr(optimizer, "clip_and_accumulate"):
        raise TypeError(
            f"DistributedOptimizer: {type(optimizer).__name__} clips the gradients of single "
            "examples in its step, and so makes of this rank's examples what it applies; use "
            "opacus.optimizers.DistributedDPOptimizer "
            'over torch.distributed.init_process_group("arraycomm")'
        )


def _check_shapes(groups: Iterable[dict[str, Any]]) -> None:
    """Raise for a parameter of a lazy module that was not called yet."""
    parameters = (p for group in groups for p in group["params"])
    for number, parameter in enumerate(parameters):
        if torch.nn.parameter.is_lazy(parameter):
            raise TypeError(
                f"DistributedOptimizer: parameter {number} has no shape yet; call the lazy module "
                "once on every rank, and then arraycomm.synchronize, before"
            )


check_shard = check_per_parameter
check_module = check_has_parameters


def distribute(
    optimizer: torch.optim.Optimizer, gradients: Any, module: torch.nn.Module | None = None
) -> torch.optim.Optimizer:
    """Reduce gradients by hooks on the parameters, and the rest before each step; collective."""
    module = None if module is None else unwrapped(module)
    if gradients.rounds is not None and gradients.comm.size > 1:
        align(optimizer, gradients.comm, module)
    return _hooked(optimizer, gradients, module)


def _hooked(
    optimizer: torch.optim.Optimizer,
    gradients: Any,
    module: torch.nn.Module | None,
    owners: Sequence[int] = (),
) -> torch.optim.Optimizer:
    """Return an optimizer with its hooks; `owners` are those of a sharded copy's parameters."""
    steps = _Steps(optimizer, gradients, module, owners)
    # The optimizer alone keeps these alive, without a circle: when it is gone, so are the
    # reductions. It keeps the module, too.
    itself = weakref.ref(optimizer)
    vars(optimizer)["add_param_group"] = partial(_add_param_group, itself)
    zero_grad: Any = partial(_zero_grad, itself)
    # Libraries look for its arguments.
    zero_grad.__signature__ = inspect.signature(optimizer.zero_grad)
    vars(optimizer)["zero_grad"] = zero_grad
    vars(optimizer)["__reduce_ex__"] = partial(_reduced, itself, gradients, module)
    optimizer.register_step_pre_hook(gradients.entry(steps.before_step))
    optimizer.register_step_post_hook(gradients.entry(steps.after_step))
    if steps.sharding is not None:
        optimizer.register_state_dict_pre_hook(steps.sharding.refuse_state_dict)
        optimizer.register_load_state_dict_pre_hook(steps.sharding.keep_own)
    if gradients.virtual is not None:
        refuse_within = partial(_refuse_within_rounds, gradients)
        optimizer.register_state_dict_pre_hook(partial(refuse_within, "state_dict"))
        optimizer.register_load_state_dict_pre_hook(partial(refuse_within, "load_state_dict"))
    _distributed[optimizer] = steps
    return optimizer


@contextmanager
def no_sync(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let backward passes accumulate gradients on this rank alone: a context manager.

    The next backward pass outside of it reduces all that has been accumulated since `zero_grad()`.
    If there is none, `step()` does.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        A distributed one.

    Raises
    ------
    ValueError
        The optimizer is not distributed.

    Notes
    -----
    Local: the ranks may run different numbers of backward passes inside. `.grad` is meanwhile what
    this rank has accumulated, added to what had been reduced before.

    Examples
    --------
    >>> import torch
    >>> import arraycomm as ac
    >>> from arraycomm.adapters.torch import no_sync
    >>> from arraycomm.testing import run
    >>> def train(comm):
    ...     weight = torch.nn.Parameter(torch.zeros(1))
    ...     optimizer = ac.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), comm=comm)
    ...     with no_sync(optimizer):
    ...         (weight * comm.rank).sum().backward()
    ...     weight.sum().backward()
    ...     optimizer.step()
    ...     return weight.item()
    >>> run(3, train)
    [-2.0, -2.0, -2.0]
    """
    in_backward = _steps_of(optimizer, "no_sync", "").in_backward
    before, in_backward.syncing = in_backward.syncing, False
    try:
        yield
    finally:
        in_backward.syncing = before


def gather_state(optimizer: torch.optim.Optimizer, *, root: int = 0) -> dict[str, Any] | None:
    """Return the whole state dict of a sharded optimizer on one rank.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        A distributed one, sharded or not.
    root : int
        The rank that gets the state dict.

    Returns
    -------
    dict or None
        On `root` what `state_dict()` of the optimizer would return if it were not sharded; None on
        the other ranks. A plain optimizer can load it, and so can a sharded one on any number of
        ranks: pass it to `load_state_dict` on every rank, which keeps this rank's part.

    Raises
    ------
    ValueError
        The optimizer is not distributed.

    Notes
    -----
    Collective. Each rank sends its part through host memory. Parts of the state that are where
    their parameter is, such as on a GPU, are there in the result too.

    Examples
    --------
    >>> import torch
    >>> import arraycomm as ac
    >>> from arraycomm.adapters.torch import gather_state
    >>> from arraycomm.testing import run
    >>> def train(comm):
    ...     model = torch.nn.Linear(3, 2)
    ...     adam = torch.optim.Adam(model.parameters())
    ...     optimizer = ac.DistributedOptimizer(adam, comm=comm, shard=True)
    ...     model(torch.ones(3)).sum().backward()
    ...     optimizer.step()
    ...     state = gather_state(optimizer)
    ...     return len(optimizer.state), None if state is None else len(state["state"])
    >>> run(2, train)
    [(1, 2), (1, None)]
    """
    return _steps_of(optimizer, "gather_state", ", or call state_dict()").gather(optimizer, root)


def _steps_of(optimizer: Any, function: str, otherwise: str) -> _Steps:
    steps = _distributed.get(optimizer)
    if steps is None:
        raise ValueError(
            f"{function}: this optimizer is not distributed; pass one that DistributedOptimizer "
            f"returned{otherwise}"
        )
    return steps


class _Steps:
    """The hooks of one optimizer, called before and after each of its steps."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: Any,
        module: torch.nn.Module | None,
        owners: Sequence[int],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._gradients = gradients
        self.parameters = Parameters(gradients, partial(_groups_of, self._optimizer))
        self._reducer = Reducer(self.parameters)
        self.in_backward = BackwardReducer(self.parameters, self._reducer, without_owner(self.look))
        self.sharding: Sharding | None = None
        if gradients.shards is not None:
            self.sharding = Sharding(gradients.shards, self.parameters)
        self.adopt(optimizer, owners)
        self.parameters.rest()
        sharded = self.sharding is not None
        follow = without_owner(self.follow)
        self._inputs = StepInputs(optimizer, self.parameters, module, follow, is_sharded=sharded)
        gradients.steps = self._inputs
        self._following = self._evaluating = False
        # Whether a step has begun, and how many others inside it.
        self._stepping, self._nested = False, 0
        # The gradients that are put aside during a step.
        self._held: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def look(self) -> None:
        """Look after the parameters that the optimizer has now: the program may exchange them."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self.adopt(optimizer)

    def adopt(self, optimizer: torch.optim.Optimizer, owners: Sequence[int] = ()) -> None:
        """Look after all parameters of an optimizer from now on."""
        if self.parameters.adopt(self.in_backward):
            self._reducer.adopt()
        if self.sharding is not None:
            self.sharding.adopt(optimizer, owners)

    def gather(self, optimizer: torch.optim.Optimizer, root: int) -> dict[str, Any] | None:
        """Return the whole state dict on `root`, None elsewhere; collective."""
        if self.sharding is not None:
            self.look()
            return self.sharding.gather(optimizer, root)
        comm = self._gradients.comm
        return optimizer.state_dict() if comm.rank == check_root(root, comm.size) else None

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Reduce what no backward pass has, or wrap the closure."""
        if self._stepping and _is_nested(optimizer):
            self._nested += 1
            return None
        if self._stepping:
            # An exception has ended the last step, maybe on this rank alone.
            self._gradients.verification.hasten()
        self._stepping, self._nested = True, 0
        self.parameters.stepping = True
        if self._following:
            self._begin_update()
            return None
        self.adopt(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.in_backward.leave()
            self._begin_update(applies=self._reducer.reduce_for_step())
            return None
        if self._gradients.accumulate > 1:
            raise ValueError(
                "DistributedOptimizer: gradients are accumulated over "
                f"{self._gradients.accumulate} steps, which a closure, evaluated within one step, "
                "cannot be; call step() without one, or pass accumulate=1"
            )
        if self._gradients.virtual is not None:
            raise ValueError(
                "DistributedOptimizer: virtual ranks take several steps of the program to one of "
                "the optimizer, and a closure is evaluated within one; call step() without one, or "
                "pass virtual_ranks=None"
            )
        self._evaluating = True
        if self._gradients.is_counted:
            self._gradients.rounds.next_evaluation()
        evaluate = self._gradients.entry(lambda: self._evaluate(closure))
        return args[:1], {**kwargs, "closure": evaluate}

    def _begin_update(self, *, applies: bool = True) -> None:
        """Put aside what this rank does not update: torch's optimizers leave alone what is None."""
        self._inputs.has_updated = True
        # If an exception ended the last step, its gradients are of no use any more.
        self._held.clear()
        if applies and self.sharding is None:
            return
        tensors = self.parameters.tensors
        others = tensors if self.sharding is None else self.sharding.begin(applies=applies)
        for parameter in others:
            self._held.append((parameter, parameter.grad))
            parameter.grad = None

    def _give_back(self) -> None:
        """Give the parameters back the gradients that were put aside."""
        while self._held:
            parameter, gradient = self._held.pop()
            parameter.grad = gradient

    def after_step(self, *_: Any) -> None:
        """Exchange what was updated, or give back the gradients of a step that was none."""
        if self._nested:
            self._nested -= 1
            return
        self._stepping = False
        self._give_back()
        if self.sharding is not None:
            self.sharding.end()
        if self._evaluating:
            self._evaluating = False
            if self._gradients.is_counted:
                self.parameters.finish_step()
        self.parameters.stepping = False
        self.parameters.rest()

    def follow(self, reduced: Any, settings: Settings) -> None:
        """Take the step of ranks with data: their reduced gradients and their hyperparameters."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        self.look()
        self._inputs.adopt(settings)
        for tensor in self.parameters.tensors:
            tensor.grad = None
        self.parameters.settle(dict(enumerate(reduced)))
        self.parameters.forget_reduced()
        self._following = True
        try:
            optimizer.step()
        finally:
            self._following = False

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate a closure, and reduce its gradients and its loss."""
        self._give_back()
        with torch.enable_grad():
            loss = closure()
        self.in_backward.leave()
        self._reducer.reduce_evaluation()
        self._begin_update()
        if loss is None:
            return None
        # As the gradients are.
        return self._gradients.comm.allreduce(
            loss.detach() if isinstance(loss, torch.Tensor) else loss, self._gradients.op
        )


def _is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step runs inside a step, as `super().step()` in a class that overrides it.

    Torch calls the hooks for each of the two. A step that an exception ended is not running.
    """
    steps = calls_under_way(_HOOKED_STEP)
    return sum(step.f_locals.get("self") is optimizer for step in steps) > 1


def _refuse_within_rounds(gradients: Any, what: str, *_: Any) -> None:
    gradients.virtual.check_between_steps(what)


def _groups_of(itself: Any) -> Sequence[dict[str, Any]]:
    optimizer = itself()
    return () if optimizer is None else optimizer.param_groups


_HOOKED_STEP: Final = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
_distributed: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Steps] = weakref.WeakKeyDictionary()


def _add_param_group(itself: Any, param_group: dict[str, Any]) -> None:
    """Add parameters to a distributed optimizer, and reduce their gradients too."""
    optimizer = itself()
    type(optimizer).add_param_group(optimizer, param_group)
    _check_shapes(optimizer.param_groups)
    _distributed[optimizer].look()
    _distributed[optimizer].parameters.rest()


@opaque
def _zero_grad(itself: Any, *args: Any, **kwargs: Any) -> None:
    """Zero the gradients, and look at the parameters, which the next backward pass has to know."""
    optimizer = itself()
    steps = _distributed[optimizer]
    steps.in_backward.before_zeroing()
    type(optimizer).zero_grad(optimizer, *args, **kwargs)
    steps.look()
    parameters = steps.parameters
    # What backward passes have left is gone, and so is the step if all is zeroed.
    left = parameters.left.items()
    parameters.left = {n: why for n, why in left if not parameters.are_zeroed([n])}
    parameters.note_skipped()
    parameters.rest()


def _reduced(itself: Any, gradients: Any, module: Any, protocol: Any) -> tuple[Any, ...]:
    """Return what `copy` copies: torch leaves hooks out. `gradients` refuse to be pickled."""
    optimizer = itself()
    kind: Any = type(optimizer)
    reduced: tuple[Any, ...] = kind.__reduce_ex__(optimizer, protocol)
    steps = _distributed[optimizer]
    steps.look()
    steps.parameters.note_skipped()
    steps.parameters.rest()
    owners = () if steps.sharding is None else steps.sharding.owners
    return _copied, (gradients, module, owners, *reduced[:3])


def _copied(
    gradients: Any,
    module: torch.nn.Module | None,
    owners: Sequence[int],
    make: Callable[..., torch.optim.Optimizer],
    arguments: Any,
    state: Any,
) -> torch.optim.Optimizer:
    """Return a copy of a distributed optimizer, which is distributed as well."""
    optimizer = make(*arguments)
    optimizer.__setstate__(state)
    return _hooked(optimizer, gradients.copy(), module, owners)


# A communicator may have been made before.
hide_from_torch()
