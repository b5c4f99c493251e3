"""Plans: trees of one kind, whose reduction is worked out once and repeated in every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from arraycomm._collectives.operation import Call, deliver
from arraycomm._collectives.placement import DevicePlacement
from arraycomm._dtypes import check_op
from arraycomm._protocol.header import Agreement, Signature, Steps, encode
from arraycomm._trees.fusion import Fusion, Spec
from arraycomm._trees.pytrees import flatten
from arraycomm._trees.reduce import (
    DEFAULT_BUCKET_BYTES,
    NONE,
    Leaves,
    Parts,
    describe,
    reduce_on_device,
    results,
    tree_placement,
)

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator


class Plan:
    """The reduction of trees of one structure, made by `Communicator.plan` and called in every step.

    Parameters
    ----------
    tree : pytree of arrays and Python numbers
        Like the tree that the plan was made of: the same paths, shapes and dtypes, None and tied
        leaves in the same places. Frameworks and layouts may change from call to call, and differ
        between ranks.

    Returns
    -------
    pytree
        What `allreduce_tree(tree, op)` returns, bit for bit: a new tree, each leaf like the one
        passed, sharing memory with no other array. A torch module is changed in place.

    Raises
    ------
    ValueError, TypeError
        The tree is not like the one that the plan was made of; the message names the path. Other
        ranks raise `PeerError`, and the plan goes on.
    MismatchError
        Other ranks called something else, or another plan.
    CommunicatorClosedError
        The communicator was freed, or an error has ended it.

    Notes
    -----
    Collective. A call compares one digest; trees of up to 32 KiB (128 bytes between nodes) are
    finished with that. On a node each byte is copied in once, to memory that the ranks share, and
    folded from there straight into the result; between nodes it is copied in once and reduced
    there, as `allreduce` does.

    DeviceMemory for results is kept, and used again once nothing refers to the results in it; while at
    most those of the step before are in use, a call allocates none. Plans of the same shapes on one
    communicator share it: twice the tree's bytes at most.

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

    def __init__(self, comm: Communicator, leaves: Leaves, op: str, fusion: Fusion) -> None:
        self._comm, self._op, self._fusion = comm, op, fusion
        self._paths, self._index = leaves.all_paths, leaves.index
        self._leaf_paths = leaves.paths
        self._specs = [None if leaf is None else (leaf.dtype, leaf.shape) for leaf in leaves.views]
        self._signature = _signature("Plan", op, leaves)
        self._beside: Fusion | None = None
        self._present = [index for index, spec in enumerate(self._specs) if spec is not None]
        # What headers show, by where the leaves are.
        self._prefixes: dict[int, bytes] = {}

    def __call__(self, tree: Any) -> Any:
        return self._comm._call("Plan", self._prepare, tree)

    def __repr__(self) -> str:
        return f"<Plan: {self._op} of {len(self._specs)} leaves, {self._fusion.nbytes} bytes>"

    def _prepare(self, comm: Communicator, tree: Any) -> Call:
        flat = flatten(tree)
        self._check_paths(flat.paths)
        placement = tree_placement(comm, flat)
        leaves = Leaves(flat, "Plan", placement)
        self._check_leaves(leaves)
        parts = (
            Parts(leaves.views, leaves.dtypes()) if isinstance(placement, DevicePlacement) else None
        )
        if parts is None or not parts.on_device:
            parts, fusion, present = None, self._fusion, self._present
            sources = [leaf for leaf in leaves.views if leaf is not None]
        else:
            fusion, present = self._fusion_beside_devices(parts.specs), parts.present
            sources = parts.sources
        packed = fusion.take()
        inline = fusion.nbytes <= comm._inline
        if inline:
            packed.pack(sources)

        def finish(agreement: Agreement | None) -> Steps:
            if not inline:
                yield from fusion.reduce(comm, packed, sources, self._op)
            elif agreement is not None:
                fusion.fold_payloads(comm, packed, agreement, self._op)
            reduced = yield from reduce_on_device(placement, parts, self._op, DEFAULT_BUCKET_BYTES)
            return deliver(
                lambda: leaves.rebuild(results(leaves.views, present, packed, given=reduced))
            )

        return Call(
            self._signature,
            finish,
            packed.block if inline else None,
            nbytes=fusion.nbytes + (0 if parts is None else parts.device_bytes),
            copies=len(sources) + (0 if parts is None else len(parts.on_device)),
            ahead=True,
            prefix=self._prefix(fusion.nbytes if inline else -1, placement.place),
            placement=placement,
        )

    def _fusion_beside_devices(self, specs: tuple[Spec, ...]) -> Fusion:
        """Return how the leaves on the host are fused where others are on devices."""
        if self._beside is None or self._beside.specs != specs:
            self._beside = Fusion(specs, DEFAULT_BUCKET_BYTES)
        return self._beside

    def _prefix(self, payload: int, place: int) -> bytes:
        prefix = self._prefixes.get(place)
        if prefix is None:
            prefix = self._prefixes[place] = encode(self._signature, payload, place=place)
        return prefix

    def _check_paths(self, paths: Sequence[str]) -> None:
        """Raise unless the tree has the plan's structure."""
        if paths == self._paths:
            return
        for path, planned in zip(paths, self._paths, strict=False):
            if path != planned:
                raise ValueError(
                    f"Plan: the tree must have the structure that the plan was made of; got {path} "
                    f"in place of {planned}; make another plan for other trees"
                )
        many, few = (paths, self._paths) if len(paths) > len(self._paths) else (self._paths, paths)
        raise ValueError(
            f"Plan: the tree must have the structure that the plan was made of, {len(self._paths)} "
            f"leaves; got {len(paths)}, and {many[len(few)]} is {'new' if many is paths else 'missing'}"
            "; make another plan for other trees"
        )

    def _check_leaves(self, leaves: Leaves) -> None:
        """Raise unless the leaves are those of the plan."""
        if leaves.index != self._index:
            place = next(
                at
                for at, (mine, planned) in enumerate(zip(leaves.index, self._index, strict=True))
                if mine != planned
            )
            raise ValueError(
                f"Plan: {self._paths[place]} must be one object with the same other leaves as when "
                "the plan was made; make another plan for leaves that are tied in another way"
            )
        for path, leaf, spec in zip(self._leaf_paths, leaves.views, self._specs, strict=True):
            # Without the view's own properties, which take time for a thousand leaves.
            seen = leaf if leaf is None or leaf.device_buffer is not None else leaf.array
            got = None if seen is None else (seen.dtype, seen.shape)
            if got != spec:
                # A wrong shape is a value of the right type.
                wrong_type = got is None or spec is None or got[0] != spec[0]
                raise (TypeError if wrong_type else ValueError)(
                    f"Plan: {path} must be {_said(spec)}, as when the plan was made; got "
                    f"{_said(got)}; make another plan for other trees"
                )


def prepare(comm: Communicator, tree: Any, op: str) -> Call:
    """See `Communicator.plan`."""
    check_op(op, "plan")
    leaves = Leaves(flatten(tree), "plan", comm._host_tree_placement)
    leaves.check_reducible(op, "plan")
    specs = tuple((leaf.dtype, leaf.shape) for leaf in leaves.views if leaf is not None)
    fusion = comm._fusions.get(specs) or Fusion(specs, DEFAULT_BUCKET_BYTES)
    plan = Plan(comm, leaves, op, fusion)

    def finish(agreement: Agreement) -> Steps:
        comm._fusions[specs] = fusion
        yield from fusion.prepare(comm)
        return plan

    return Call(_signature("plan", op, leaves), finish)


def _signature(operation: str, op: str, leaves: Leaves) -> Signature:
    return Signature(operation, op, leaves=leaves.described(), settings=leaves.ties())


def _said(spec: Spec | None) -> str:
    return NONE if spec is None else describe(*spec)
