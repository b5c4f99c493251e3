"""Plans: the reduction of trees of one structure, prepared once and repeated in every step."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, Final

from arraycomm._arrays.typing import TreeT
from arraycomm._calls.operation import Context, Operation
from arraycomm._calls.requests import ProcessBound
from arraycomm._calls.runner import Runner
from arraycomm._dtypes import check_op, name_of
from arraycomm._entries import entry
from arraycomm._prepared.small_trees import call_tree
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.header import Settings, Signature
from arraycomm._reduce.chunks import reserve
from arraycomm._transports.base import Bytes, Steps
from arraycomm._trees.buffers import Sources
from arraycomm._trees.fusion import Fusion, TreeMemory, recent_fusions
from arraycomm._trees.held import Held
from arraycomm._trees.layout import Spec
from arraycomm._trees.leaves import NONE, Leaves, Parts
from arraycomm._trees.pytrees import Flat, flatten
from arraycomm._trees.reduce import (
    DEFAULT_BUCKET_BYTES,
    ReduceOnto,
    TreeReduction,
    reduce_on_device,
    results,
)

# More leaves, or bytes, take longer by a fast path than in a full call with the plan's memory.
_FEW: Final = 64
_SMALL: Final = 64 << 10


class Plan(ProcessBound):
    """The reduction of trees of one structure, made by `Communicator.plan`, called in every step.

    Parameters
    ----------
    tree : pytree of arrays and Python numbers
        Like the tree that the plan was made of: the same paths, containers, shapes and dtypes,
        None in the same places. Frameworks and layouts may change from call to call, and differ
        between ranks.
    onto : pytree, optional
        A total to go on from, if the op is "sum"; see `allreduce_gradients`.
    timeout : float, optional
        Seconds that this call may wait for other ranks, in place of the communicator's timeout.

    Returns
    -------
    pytree
        What `allreduce_tree(tree, op)` returns, bit for bit: a new tree, each leaf like the one
        passed, sharing memory with no other array. A torch module is changed in place.

    Raises
    ------
    ValueError, TypeError
        The tree is not like the one that the plan was made of; the message names the path. Other
        ranks raise `PeerError`. The plan can still be used.
    MismatchError
        Other ranks called something else, or another plan.
    CommunicatorClosedError
        The communicator was freed, or an error has ended it.

    Notes
    -----
    Collective. A call compares one digest, and a tree of up to 1 MiB (less with more than 3 ranks;
    between nodes 1 MiB between two ranks, and 1 MiB / p between p) is sent with it. On one node,
    the bytes of a larger tree that other ranks fold are copied to shared memory, and the results
    from there. Between two ranks on different nodes, every leaf is copied once, chunk by chunk.
    Between more, large leaves (1 MiB or more, and 512 KiB for each rank) are reduced as `allreduce`
    reduces them, if they are contiguous. Others are copied once, into messages of several leaves.

    A plan keeps memory for results, and uses it again once nothing refers to the results in it. If
    no results but those of the last step are in use, a call allocates no memory, unless the tree
    has at most 64 leaves and 64 KiB. Plans of the same shapes on one communicator share this
    memory: twice the tree's bytes at most.

    Examples
    --------
    >>> import numpy as np
    >>> from arraycomm.testing import run
    >>> def step(comm):
    ...     plan = comm.plan({"w": np.zeros(2), "b": 0.0})
    ...     return plan({"w": np.full(2, 1.0 + comm.rank), "b": float(comm.rank)})["b"]
    >>> run(2, step)
    [0.5, 0.5]
    """

    _instead = "make one in each process, with Communicator.plan"

    def __init__(
        self, runner: Runner, memory: TreeMemory, leaves: Leaves, op: str, fusion: Fusion
    ) -> None:
        self._runner, self.memory, self.op, self.fusion = runner, memory, op, fusion
        self._paths, self._settings = tuple(leaves.paths), self._settings_of(leaves.flat)
        self._specs = [None if leaf is None else (leaf.dtype, leaf.shape) for leaf in leaves.views]
        self.signature = _signature("Plan", op, leaves, self._settings)
        # Returns the fusion of the leaves on the host if other leaves are on devices.
        self.fusion_beside_devices = recent_fusions()
        self.present = [index for index, spec in enumerate(self._specs) if spec is not None]
        # Whether every leaf is an array.
        self._plain = len(self.present) == len(self._specs)
        few = len(self._specs) <= _FEW and fusion.nbytes <= _SMALL
        there = all(map(runner.placements.on_device, leaves.flat.leaves))
        # By which the fast path of its calls is found, if they have one.
        self._place = object() if self._plain and (few or there) else None

    @entry
    def __call__(self, tree: TreeT, *, onto: Any = None, timeout: float | None = None) -> TreeT:
        if onto is not None:
            return self._runner.call_within(timeout, RunPlanOnto, self, tree, onto)
        if self._place is None:
            return self._runner.call_within(timeout, RunPlan, self, tree)
        return call_tree(self._runner, timeout, RunPlan, self, tree, place=self._place)

    def __repr__(self) -> str:
        return f"<Plan: {self.op} of {len(self._specs)} leaves, {self.fusion.nbytes} bytes>"

    def hold(self, leaves: list[Any]) -> Held | None:
        """Hold all leaves at once, if they are the plan's, NumPy's and contiguous; else None."""
        distinct = self._plain and len(set(map(id, leaves))) == len(leaves)
        return self.fusion.hold(leaves) if distinct else None

    def check_structure(self, flat: Flat) -> None:
        """Raise unless the tree has the plan's structure."""
        paths, settings = tuple(flat.paths), self._settings_of(flat)
        if paths == self._paths and settings == self._settings:
            return
        pairs: list[tuple[str | None, str | None]] = [*zip(paths, self._paths, strict=False)]
        if len(paths) == len(self._paths):
            pairs += zip_longest(_lines(settings), _lines(self._settings))
        for got, planned in pairs:
            if got != planned:
                raise ValueError(
                    "the tree must have the structure that the plan was made of; got "
                    f"{got or 'no container'} in place of {planned or 'none'}; make another plan "
                    "for other trees"
                )
        many, few = (paths, self._paths) if len(paths) > len(self._paths) else (self._paths, paths)
        difference = "new" if many is paths else "missing"
        raise ValueError(
            f"the tree must have the structure that the plan was made of, {len(self._paths)} "
            f"leaves; got {len(paths)}, and {many[len(few)]} is {difference}"
            "; make another plan for other trees"
        )

    def _settings_of(self, flat: Flat) -> Settings:
        return flat.settings(alone=self._runner.group.size == 1)

    def check_leaves(self, leaves: Leaves) -> None:
        """Raise unless the leaves are those of the plan."""
        for path, leaf, spec in zip(self._paths, leaves.views, self._specs, strict=True):
            # Not by the view's own properties, which are slow for a thousand leaves.
            seen = leaf if leaf is None or leaf.device_buffer is not None else leaf.array
            got = None if seen is None else (seen.dtype, seen.shape)
            if got != spec:
                # A wrong dtype is a wrong type; a wrong shape is a wrong value.
                wrong_type = got is None or spec is None or got[0] != spec[0]
                raise (TypeError if wrong_type else ValueError)(
                    f"{path} must be {_described(spec)}, as when the plan was made; got "
                    f"{_described(got)}; make another plan for other trees"
                )


class MakePlan(Operation):
    """See `Communicator.plan`."""

    name, code = "plan", 29

    def __init__(
        self, context: Context, runner: Runner, memory: TreeMemory, tree: Any, op: str
    ) -> None:
        super().__init__(context)
        check_op(op)
        leaves = Leaves(flatten(tree), context.host_tree.view)
        leaves.check_reducible(op)
        specs = tuple((leaf.dtype, leaf.shape) for leaf in leaves.views if leaf is not None)
        fusion = memory.plans.get(specs) or Fusion(specs, DEFAULT_BUCKET_BYTES)
        self._plan = Plan(runner, memory, leaves, op, fusion)
        containers = leaves.flat.settings(alone=self.group.size == 1)
        self.signature = _signature(self.name, op, leaves, containers)

    def steps(self, agreement: Agreement) -> Steps:
        plan = self._plan
        plan.memory.plans[plan.fusion.specs] = plan.fusion
        yield from plan.fusion.prepare(plan.memory, plan.op)

    def result(self, agreement: Agreement) -> Plan:
        return self._plan


class RunPlan(TreeReduction):
    """See `Plan.__call__`."""

    name, code = "Plan", 30
    independent_on_devices = True

    def __init__(self, context: Context, plan: Plan, tree: Any) -> None:
        flat = flatten(tree)
        plan.check_structure(flat)
        super().__init__(context, context.place_tree(flat.leaves))
        self._plan, self._flat, self.op = plan, flat, plan.op
        self.fusion, self._present = plan.fusion, plan.present
        self._parts: Parts | None = None
        self._leaves: Leaves | None = None
        on_host = self.placement.of_device is None
        self._held = plan.hold(flat.leaves) if on_host else None
        self._sources = self._held or self._views(on_host=on_host)
        self._packed = self.fusion.acquire()
        self.signature = plan.signature
        self.nbytes += self.fusion.nbytes
        self.copies += len(self.fusion.specs)

    def _views(self, *, on_host: bool) -> Sources:
        """Look at each leaf, and return those on the host."""
        plan, leaves = self._plan, Leaves(self._flat, self.placement.view)
        self._leaves, views = leaves, leaves.views
        plan.check_leaves(leaves)
        parts = None if on_host else Parts(views, leaves.dtypes())
        if parts is None or not parts.on_device:
            return [leaf for leaf in views if leaf is not None]
        self._parts, self._present = parts, parts.present
        self.fusion = plan.fusion_beside_devices(parts.specs, DEFAULT_BUCKET_BYTES)
        self.nbytes, self.copies = parts.device_bytes, len(parts.on_device)
        return parts.sources

    def view_leaves(self) -> Leaves:
        return self._leaves or Leaves(self._flat, self.placement.view)

    def pack(self, room: int) -> Bytes | None:
        if self.fusion.nbytes > room:
            reserve(self.group.transport, self.fusion.nbytes)
            return None
        self.fusion.pack(self._packed, self._sources)
        return self._packed.buffer

    def steps(self, agreement: Agreement) -> Steps:
        plan, fusion, packed = self._plan, self.fusion, self._packed
        if self.payload is None:
            yield from fusion.reduce(plan.memory, packed, self._sources, plan.op)
        elif fusion.nbytes:
            fusion.fold_payloads(self.group, packed, agreement, plan.op)
        self._reduced = yield from reduce_on_device(
            self.placement, self._parts, plan.op, DEFAULT_BUCKET_BYTES
        )

    def result(self, agreement: Agreement) -> Any:
        if self._leaves is None:
            return self._flat.rebuild(self._packed.leaves())
        made = results(self._leaves.views, self._present, self._packed, ready=self._reduced)
        return self._leaves.rebuild(made)


class RunPlanOnto(ReduceOnto):
    """See `Plan.__call__`, with `onto`."""

    name, code = RunPlan.name, RunPlan.code

    def __init__(self, context: Context, plan: Plan, tree: Any, total: Any) -> None:
        plan.check_structure(flatten(tree))
        self._plan = plan
        super().__init__(context, plan.memory, tree, plan.op, total, missing="error")
        plan.check_leaves(self.leaves)

    def fusion_of(self, specs: tuple[Spec, ...]) -> Fusion:
        # On the host, where a plan keeps those of leaves beside others on devices.
        return self._plan.fusion_beside_devices(specs, DEFAULT_BUCKET_BYTES)


def _signature(operation: str, op: str, leaves: Leaves, containers: Settings) -> Signature:
    return Signature(operation, op, leaves=leaves.described(), settings=containers)


def _lines(settings: Settings) -> list[str]:
    return [line for _, text in settings for line in str(text).splitlines()]


def _described(spec: Spec | None) -> str:
    return NONE if spec is None else f"{name_of(spec[0])} {spec[1]}"
