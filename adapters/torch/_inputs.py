"""The inputs of a torch optimizer's step: the same parameters, in one order, with equal values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

import arraycomm as ac
from arraycomm._protocol.mismatch import by_ranks
from arraycomm._training.comparison.differences import array_item
from arraycomm._training.comparison.verification import Inputs, is_private, plain, scalar
from arraycomm.adapters.torch._backward import scaler_of_step
from arraycomm.adapters.torch._modules import buffers_of, names_of
from arraycomm.adapters.torch._parameters import Parameters

Settings = list[tuple[str, Any]]
# A name, a value, and how to set it.
Setting = tuple[str, Any, Callable[[Any], None]]


class StepInputs:
    """What the steps of one optimizer depend on; see `arraycomm._training.gradients.TakesSteps`.

    `parameters` has them in the order that all ranks have. If the optimizer is sharded,
    each rank has only a part of the state. A module, if there is one, lives as long as the
    optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Parameters,
        module: torch.nn.Module | None,
        follow: Callable[[Any, Settings], None],
        *,
        is_sharded: bool,
    ) -> None:
        self._follow = follow
        self._optimizer, self._adopted = weakref.ref(optimizer), weakref.ref(parameters)
        self._module = None if module is None else weakref.ref(module)
        self._is_sharded = is_sharded
        # Before the first update the state may be memory that was not written yet.
        self.has_updated = False
        kind = type(optimizer)
        self._constants = (
            ("the class of the optimizer", f"{kind.__module__}.{kind.__qualname__}"),
        )
        # What the groups held when the hyperparameters were read.
        self._held: list[Any] = []
        self._hyperparameters: Settings = []
        # Of the last step, if a scaler took it.
        self._scaler: Callable[[], GradScaler | None] = lambda: None

    def inputs(self) -> Inputs:
        """Return them for the step that is being taken."""
        optimizer, adopted = self._optimizer(), self._adopted()
        if adopted is not None and adopted.stepping:
            scaler = scaler_of_step()
            self._scaler = (lambda: None) if scaler is None else weakref.ref(scaler)
        groups = () if optimizer is None else optimizer.param_groups
        values = [
            len(value) if key == "params" else value
            for group in groups
            for key, value in group.items()
        ]
        held = [value for value in values if plain(value)]
        # Tensors and lists may change and be the same object; numbers of NumPy are not held.
        may_change = any(isinstance(value, list) or hasattr(value, "item") for value in values)
        if may_change or self._held != held:
            self._held, self._hyperparameters = held, list(_values(_hyperparameters(optimizer)))
        counts = list(_values(self._counts()))
        return Inputs(self._hyperparameters, self._parameters, self._state, self._constants, counts)

    def adopt(self, settings: Settings) -> None:
        """Set the hyperparameters and the scaler to those of another rank."""
        given = dict(settings)
        for name, value, put in (*_hyperparameters(self._optimizer()), *self._counts()):
            if name in given and given[name] != value:
                put(given[name])

    def follow(self, reduced: Any, settings: Settings) -> None:
        """Take the step of ranks with data: their gradients, with their hyperparameters."""
        self._follow(reduced, settings)

    def _counts(self) -> Iterator[Setting]:
        """Return what changes with every step, and how to set it."""
        optimizer, adopted = self._optimizer(), self._adopted()
        if optimizer is not None and adopted is not None and not self._is_sharded:
            # Of the first parameter that has a state: that is in the order in which they came.
            # Torch hashes a parameter in Python.
            # Some keep what is of no parameter there, under a name, or one tensor of each.
            counted = {
                id(key): each["step"]
                for key, each in optimizer.state.items()
                if isinstance(each, dict) and "step" in each
            }
            steps = (counted[id(p)] for p in adopted.tensors if id(p) in counted)
            if isinstance(step := scalar(next(steps, None)), int | float):
                yield "the step in the state", step, _leave
        if (scaler := self._scaler()) is not None:
            for key, value in scaler.state_dict().items():
                yield f"{key} of the GradScaler", value, _loader(scaler, key)

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        adopted = self._adopted()
        assert adopted is not None
        module = self._module_now()
        names = {} if module is None else names_of(module)
        for number, parameter in enumerate(adopted.tensors):
            if _is_dense(parameter):
                name = names.get(id(parameter))
                yield f"parameter {number}" + (f" ({name})" if name else ""), parameter

    def _module_now(self) -> torch.nn.Module | None:
        return None if self._module is None else self._module()

    def _state(self) -> Iterator[tuple[str, Any]]:
        """Return what else the step depends on: the module's buffers, and the optimizer's state."""
        if (module := self._module_now()) is not None:
            yield from buffers_of(module)
        optimizer = self._optimizer()
        if optimizer is None or self._is_sharded:
            return
        for name, parameter in self._parameters():
            for key, tensor in _tensors(optimizer.state.get(parameter, {}), f"the state of {name}"):
                yield key, tensor if self.has_updated else _blank(tensor)


def _values(settings: Iterable[Setting]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value, _ in settings)


def _hyperparameters(optimizer: torch.optim.Optimizer | None) -> Iterator[Setting]:
    """Yield each number, text and None in the groups of parameters, and its setter."""
    for number, group in enumerate(() if optimizer is None else optimizer.param_groups):
        yield f"the number of parameters of group {number}", len(group["params"]), _leave
        for key in sorted(group):
            value = scalar(group[key])
            is_of_group = key in ("params", "param_names") or is_private(key)
            if plain(value) and not is_of_group:
                yield f"{key} of group {number}", value, _putter(group, key)


def _leave(_: Any) -> None:
    """Do nothing: what cannot be set from outside is compared in the next step."""


def _putter(group: dict[str, Any], key: str) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        if isinstance(group[key], torch.Tensor):
            group[key].fill_(value)
        else:
            # What comes as JSON has no tuples.
            was_tuple = isinstance(value, list) and isinstance(group[key], tuple)
            group[key] = tuple(value) if was_tuple else value

    return put


def _loader(scaler: GradScaler, key: str) -> Callable[[Any], None]:
    return lambda value: scaler.load_state_dict({**scaler.state_dict(), key: value})


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements, each in a place of its own."""
    return tensor.layout is torch.strided and not tensor.is_meta


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros of the dtype and shape of a tensor."""
    return tensor.new_zeros(()).expand(tensor.shape)


def _tensors(values: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Return the tensors in the state of a parameter, with their names."""
    if isinstance(values, torch.Tensor):
        if _is_dense(values):
            yield name, values
    elif isinstance(values, dict):
        for key in sorted((key for key in values if not is_private(key)), key=str):
            yield from _tensors(values[key], f"{name}, {key}")
    elif isinstance(values, (list, tuple)):
        for place, value in enumerate(values):
            yield from _tensors(value, f"{name}[{place}]")


# The order of parameters ------------------------------------------------------------------------


def align(optimizer: torch.optim.Optimizer, comm: ac.Communicator, module: Any) -> None:
    """Put the parameters in the order of rank 0, if names or values prove it; collective.

    Python orders a set of names differently in each process. Parameters of one shape in another
    order would be reduced with one another.
    """
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    groups = [n for n, group in enumerate(optimizer.param_groups) for _ in group["params"]]
    names = _names_of(optimizer, tensors, module)
    values = [array_item("", p)[1:3] if _is_dense(p) else None for p in tensors]
    shown: list[Any] = comm.allgather_object((names, values, groups))
    for column in range(2):
        lists = [row[column] for row in shown]
        first = lists[0]
        proved = None not in first and len(set(first)) == len(first)
        if proved and all(set(each) == set(first) for each in lists):
            _reorder(optimizer, tensors, [lists[comm.rank].index(each) for each in first])
            ranks = [[row[2][row[column].index(each)] for each in first] for row in shown]
            _check_groups(ranks, shown[0][0])
            return


def _reorder(
    optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor], order: Sequence[int]
) -> None:
    """Order the parameters of each group as in this order of all parameters."""
    place = {id(tensors[number]): place for place, number in enumerate(order)}
    for group in optimizer.param_groups:
        pairs = list(zip(group["params"], group.get("param_names", group["params"]), strict=True))
        pairs.sort(key=lambda pair: place[id(pair[0])])
        # In place: some optimizers keep the list.
        group["params"][:] = [parameter for parameter, _ in pairs]
        if "param_names" in group:
            group["param_names"][:] = [name for _, name in pairs]


def _check_groups(groups: Sequence[Sequence[int]], names: Sequence[str | None]) -> None:
    """Raise on all ranks if a parameter is in different groups."""
    for number, ranks in enumerate(zip(*groups, strict=True)):
        if len(set(ranks)) > 1:
            called = names[number] or f"parameter {number}"
            raise ac.MismatchError(
                f"DistributedOptimizer: {called} is in different groups: "
                f"{by_ranks([f'group {group}' for group in ranks])}; make the same groups on every "
                "rank"
            )


def _names_of(
    optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor], module: Any
) -> list[str | None]:
    """Return the parameters' names: those in the groups, else those in the module."""
    carried = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    if len(carried) == len(tensors):
        return carried
    names = {} if module is None else names_of(module)
    return [names.get(id(parameter)) for parameter in tensors]
