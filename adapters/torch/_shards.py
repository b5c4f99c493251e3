"""Sharded torch optimizers: each rank keeps the state of its parameters, and updates only these.

Torch's optimizers leave a parameter without a gradient alone. So in a step the gradients of the
other ranks' parameters are put aside; afterwards they come back, and the parameters' new values are
exchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

import arraycomm as ac

# Those that update each parameter from its own gradient and state.
_PER_PARAMETER: Final = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)


def check_per_parameter(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless an optimizer treats each parameter by itself."""
    declared = getattr(type(optimizer), "per_parameter", None)
    if declared is None and _is_known(type(optimizer)):
        return
    if declared is not True:
        raise TypeError(
            f"DistributedOptimizer: {_name(type(optimizer))} cannot be sharded: "
            f"{_why(optimizer, declared)}; pass shard=False"
        )


def _why(optimizer: torch.optim.Optimizer, declared: object) -> str:
    if declared is not None:
        return f"its class says per_parameter = {declared!r}"
    if isinstance(optimizer, torch.optim.LBFGS):
        return "its updates depend on the gradients of all parameters together"
    if isinstance(optimizer, torch.optim.SparseAdam):
        return "it takes sparse gradients, which are not reduced"
    return (
        "only optimizers that update each parameter from its own gradient and state can be, and it "
        "is not known to; if it does, set per_parameter = True in its class"
    )


def _name(kind: type) -> str:
    return f"{kind.__module__.partition('.')[0]}'s {kind.__qualname__}"


def _is_known(kind: type) -> bool:
    """Return whether this is one of torch's classes, or does what one of them does."""
    for number, base in enumerate(kind.__mro__):
        if base.__name__ in _PER_PARAMETER and base is getattr(torch.optim, base.__name__, None):
            return not any(_overrides(each, base) for each in kind.__mro__[:number])
    return False


def _overrides(kind: type, base: type) -> bool:
    """Return whether a class replaces a method of torch's; torch itself wraps `step` in each."""
    return any(
        inspect.unwrap(value) is not inspect.unwrap(getattr(base, name))
        for name, value in vars(kind).items()
        if callable(value) and hasattr(base, name) and not name.startswith("__")
    )


class Sharding:
    """Which rank owns each parameter of one optimizer, and what is put aside during its steps."""

    def __init__(self, shards: Any) -> None:
        self._shards = shards
        self._owners: Any = WeakTensorKeyDictionary()
        self._parameters: Sequence[torch.Tensor] = ()
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._stepped: list[int] = []
        self._is_gathering = False

    def adopt(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], owners: Any = ()
    ) -> None:
        """Divide new parameters over the ranks; `owners` are theirs, if they have any."""
        if list(map(id, parameters)) == list(map(id, self._parameters)):
            return
        self._parameters = list(parameters)
        known = {n: self._owners[p] for n, p in enumerate(parameters) if p in self._owners}
        specs = [_spec(parameter) for parameter in parameters]
        divided = self._shards.divide(specs, known or dict(enumerate(owners)))
        for parameter, owner in zip(parameters, divided, strict=True):
            self._owners[parameter] = owner
        for parameter in parameters:
            if not self._is_own(parameter):
                optimizer.state.pop(parameter, None)

    @property
    def owners(self) -> list[int]:
        """The owner of each parameter."""
        return [self._owners[parameter] for parameter in self._parameters]

    def _is_own(self, parameter: torch.Tensor) -> bool:
        return bool(self._owners[parameter] == self._shards.comm.rank)

    # Steps

    def begin(self) -> None:
        """Put the gradients of other ranks' parameters aside."""
        # If an exception ended the last step, its gradients are of no use any more.
        self._held.clear()
        self._stepped = [n for n, p in enumerate(self._parameters) if p.grad is not None]
        for parameter in self._parameters:
            if parameter.grad is not None and not self._is_own(parameter):
                self._held.append((parameter, parameter.grad))
                parameter.grad = None

    def give_back(self) -> None:
        """Give the parameters back the gradients that were put aside."""
        while self._held:
            parameter, gradient = self._held.pop()
            parameter.grad = gradient

    @torch.no_grad()
    def end(self) -> None:
        """Exchange the updated parameters; collective, unless none had a gradient."""
        self.give_back()
        stepped, self._stepped = self._stepped, []
        updated = [self._parameters[number] for number in stepped]
        shards = [
            (f"parameter {number}", self._owners[parameter], _spec(parameter), parameter.detach())
            for number, parameter in zip(stepped, updated, strict=True)
        ]
        for number, values in self._shards.exchange(shards):
            updated[number].copy_(values)

    # State dicts

    def refuse_state_dict(self, _: torch.optim.Optimizer) -> None:
        """Raise, since the optimizer's own state dict would not be whole: a hook of torch's."""
        if not self._is_gathering:
            raise RuntimeError(
                "state_dict: this optimizer is sharded, so no rank has its whole state; call "
                "arraycomm.adapters.torch.gather_state(optimizer) on all ranks for the whole state "
                "dict, which load_state_dict takes on every rank; synchronize has no use here"
            )

    def keep_own(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Return what a whole state dict has for this rank: a hook of torch's."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        other = {n for n, p in zip(numbers, parameters, strict=False) if not self._is_own(p)}
        state = {n: each for n, each in state_dict["state"].items() if n not in other}
        return {**state_dict, "state": state}

    def gather(self, optimizer: torch.optim.Optimizer, root: int) -> dict[str, Any] | None:
        """Return the whole state dict on `root`, None elsewhere; collective."""
        self._is_gathering = True
        try:
            mine = optimizer.state_dict()
        finally:
            self._is_gathering = False
        comm = self._shards.comm
        sent = None if comm.rank == root else self._packed(mine["state"])
        parts = comm.gather_object(sent, root)
        if parts is None:
            return None
        state = dict(mine["state"])
        for part in parts:
            state.update(self._unpacked(part or {}))
        # In torch's order; after the parameters' numbers any other keys.
        numbers = sorted(key for key in state if isinstance(key, int))
        return {**mine, "state": {key: state[key] for key in (*numbers, *state)}}

    def _packed(self, state: dict[Any, Any]) -> dict[Any, Any]:
        """Return the state of parameters in a form that another rank can load."""

        def pack(x: torch.Tensor, device: torch.device) -> _Sent:
            return _Sent(x.cpu(), x.device == device)

        return {n: _each(pack, values, self._device_of(n)) for n, values in state.items()}

    def _unpacked(self, state: dict[Any, Any]) -> dict[Any, Any]:
        def unpack(x: _Sent, device: torch.device) -> torch.Tensor:
            return x.tensor.to(device) if x.there else x.tensor

        return {n: _each(unpack, values, self._device_of(n), _Sent) for n, values in state.items()}

    def _device_of(self, number: Any) -> torch.device:
        """Return the device of the parameter of this number; that of numbers is the host."""
        return self._parameters[number].device if isinstance(number, int) else torch.device("cpu")


class _Sent(NamedTuple):
    """A tensor of the state in host memory, and whether it belongs where its parameter is."""

    tensor: torch.Tensor
    there: bool


def _each(change: Any, values: Any, device: torch.device, kind: type = torch.Tensor) -> Any:
    """Return the state of a parameter with all tensors in it changed."""
    if isinstance(values, kind):
        return change(values, device)
    if isinstance(values, dict):
        return {key: _each(change, value, device, kind) for key, value in values.items()}
    if isinstance(values, (list, tuple)) and not hasattr(values, "_fields"):
        return type(values)(_each(change, value, device, kind) for value in values)
    return values


def _spec(parameter: torch.Tensor) -> tuple[Any, tuple[int, ...]]:
    return _dtype(parameter.dtype), tuple(parameter.shape)


@lru_cache
def _dtype(dtype: torch.dtype) -> Any:
    """Return NumPy's dtype for one of torch's."""
    return ac.exchange(torch.empty(0, dtype=dtype), "numpy").dtype
