"""Sharded torch optimizers: each rank keeps the state of its parameters, and updates only these.

Torch's optimizers leave a parameter without a gradient alone. So in a step the gradients of the
other ranks' parameters are put aside; afterwards they come back, and the parameters' new values are
exchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, Final

import optree
import torch

import arraycomm as ac
from arraycomm.adapters.torch._parameters import Parameters
from arraycomm.adapters.torch._slots import Slot

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
    """Which rank owns each parameter of one optimizer."""

    def __init__(self, shards: Any, adopted: Parameters) -> None:
        self._shards, self._adopted = shards, adopted
        self._slots: Sequence[Slot] = ()
        # The owner of each parameter.
        self.owners: Sequence[int] = ()
        self._stepped: list[int] = []
        self._is_gathering = False
        # Before the first update most optimizers have no state: then this rank's is the whole.
        self._is_whole = True

    def adopt(self, optimizer: torch.optim.Optimizer, owners: Sequence[int] = ()) -> None:
        """Divide new parameters over the ranks; `owners` are theirs, if they have any."""
        slots = self._adopted.slots
        if list(map(id, slots)) == list(map(id, self._slots)):
            return
        self._is_whole = self._is_whole and not (optimizer.state or owners)
        known = self._known(slots) or dict(enumerate(owners))
        self.owners = self._shards.divide(map(_spec, self._parameters), known)
        self._slots = slots
        for number, parameter in enumerate(self._parameters):
            if not self._is_own(number):
                optimizer.state.pop(parameter, None)

    def _known(self, slots: Sequence[Slot]) -> dict[int, int]:
        """Return the owners of parameters that have one, or have taken the place of one that had.

        The program has moved the state of the old one to the new one, on its owner.
        """
        owners = dict(zip(map(id, self._slots), self.owners, strict=True))
        known = {n: owners[id(slot)] for n, slot in enumerate(slots) if id(slot) in owners}
        return {**dict(enumerate(self.owners)), **known} if len(slots) == len(owners) else known

    @property
    def _parameters(self) -> Sequence[torch.Tensor]:
        return self._adopted.tensors

    def _is_own(self, number: int) -> bool:
        return bool(self.owners[number] == self._shards.comm.rank)

    # Steps

    def begin(self, *, applies: bool) -> list[torch.Tensor]:
        """Return the parameters whose gradients this rank does not use in a step, if it applies."""
        self._is_whole = False
        used = [number for number, p in enumerate(self._parameters) if p.grad is not None]
        self._stepped = used if applies else []
        return [self._parameters[n] for n in used if not (applies and self._is_own(n))]

    @torch.no_grad()
    def end(self) -> None:
        """Exchange the updated parameters; collective, unless none had a gradient."""
        stepped, self._stepped = self._stepped, []
        parameters = self._parameters
        updated = [parameters[number] for number in stepped]
        shards = [
            (f"parameter {number}", self.owners[number], _spec(parameter), parameter.detach())
            for number, parameter in zip(stepped, updated, strict=True)
        ]
        for number, values in self._shards.exchange(shards):
            updated[number].copy_(values)

    # State dicts

    def refuse_state_dict(self, _: torch.optim.Optimizer) -> None:
        """Raise, since the optimizer's own state dict would not be whole: a hook of torch's."""
        if not (self._is_gathering or self._is_whole):
            raise RuntimeError(
                "state_dict: this optimizer is sharded, so no rank has its whole state; call "
                "arraycomm.adapters.torch.gather_state(optimizer) on all ranks for the whole state "
                "dict, which load_state_dict takes on every rank; synchronize has no use here. "
                "Accelerator.prepare asks for it unless device_placement is False for the optimizer"
            )

    def keep_own(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Return what a whole state dict has for this rank: a hook of torch's."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        places = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        pairs = zip(numbers, parameters, strict=False)
        other = {n for n, p in pairs if not self._is_own(places[id(p)])}
        state = {n: each for n, each in state_dict["state"].items() if n not in other}
        self._is_whole = self._is_whole and not state_dict["state"]
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
        """Return the state of parameters in host memory, and which of it belongs where they are."""

        def pack(number: Any, values: Any) -> tuple[Any, Any]:
            device = self._device_of(number)
            there = optree.tree_map(partial(_is_on, device), values)
            return optree.tree_map(_on_host, values), there

        return {number: pack(number, values) for number, values in state.items()}

    def _unpacked(self, state: dict[Any, Any]) -> dict[Any, Any]:
        def unpack(number: Any, values: Any, there: Any) -> Any:
            device = self._device_of(number)
            return optree.tree_map(lambda x, its: x.to(device) if its else x, values, there)

        return {number: unpack(number, *values) for number, values in state.items()}

    def _device_of(self, number: Any) -> torch.device:
        """Return the device of the parameter of this number; that of numbers is the host."""
        return self._parameters[number].device if isinstance(number, int) else torch.device("cpu")


def _is_on(device: torch.device, x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device == device


def _on_host(x: Any) -> Any:
    return x.cpu() if isinstance(x, torch.Tensor) else x


def _spec(parameter: torch.Tensor) -> tuple[Any, tuple[int, ...]]:
    return _dtype(parameter.dtype), tuple(parameter.shape)


@lru_cache
def _dtype(dtype: torch.dtype) -> Any:
    """Return NumPy's dtype for one of torch's."""
    return ac.exchange(torch.empty(0, dtype=dtype), "numpy").dtype
