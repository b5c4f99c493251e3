"""Sharded optax transformations: each rank keeps the state of its own leaves, and computes their updates.

The transformation is traced on the whole tree. From the trace follows which part of the state belongs
to which leaf, and whether any update depends on the gradient of another leaf. Each rank then updates the
whole tree with arrays of one element in place of the other ranks' leaves, and the updates are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.buffer_callback import buffer_callback
from jax.interpreters import partial_eval


class Elsewhere(NamedTuple):
    """Stands for a leaf that another rank keeps; to JAX it is a tree without leaves."""


@dataclass(frozen=True)
class Division:
    """Which rank owns each leaf of the parameters, and each leaf of the state.

    Attributes
    ----------
    shards : object
        Exchanges updates; see `arraycomm._training.shards`.
    params, state : treedef
        The structures of the parameters, and of the whole state.
    owners : tuple of int
        The rank that owns each leaf of the parameters.
    state_leaves : tuple of int or None
        To which of these each leaf of the state belongs; None for what every rank keeps.
    state_types : tuple
        The dtype and shape of each leaf of the whole state.
    """

    shards: Any
    params: Any
    state: Any
    owners: tuple[int, ...]
    state_leaves: tuple[int | None, ...]
    state_types: tuple[Any, ...]

    def __hash__(self) -> int:
        # JAX asks for it in every call of a compiled function.
        return hash((id(self.shards), self.owners))

    def __deepcopy__(self, memo: dict[int, Any]) -> Division:
        return self

    @property
    def kept_of_params(self) -> list[bool]:
        """Which leaves of the parameters this rank owns."""
        rank = self.shards.comm.rank
        return [owner == rank for owner in self.owners]

    @property
    def kept_of_state(self) -> list[bool]:
        """Which leaves of the state this rank keeps."""
        own = self.kept_of_params
        return [leaf is None or own[leaf] for leaf in self.state_leaves]

    @property
    def kept_of_results(self) -> list[bool]:
        """Which results of an update, updates and state, this rank computes."""
        return self.kept_of_params + self.kept_of_state

    def kept_of_inputs(self, types: _Types) -> list[bool]:
        """Which inputs of an update belong to this rank."""
        own = self.kept_of_params
        params = own if types.params else []
        return [*own, *self.kept_of_state, *params, *(True for _ in types.extra)]

    def params_like(self, types: _Types, shapes: Sequence[tuple[int, ...]]) -> Any:
        """Return parameters of these shapes, of which only these and the dtypes are known."""
        kinds = types.params or types.updates
        leaves = [
            jax.ShapeDtypeStruct(shape, kind.dtype)
            for shape, kind in zip(shapes, kinds, strict=True)
        ]
        return jax.tree.unflatten(self.params, leaves)

    def kept(self, leaves: Iterable[Any]) -> ShardedState:
        """Return a state with these leaves, those that this rank keeps."""
        whole = jax.tree.unflatten(self.state, _filled(leaves, self.kept_of_state))
        return ShardedState(whole, self)


@jax.tree_util.register_pytree_with_keys_class
class ShardedState:
    """The part of an optimizer's state that a rank keeps.

    Attributes
    ----------
    inner : pytree
        The state of the plain transformation, with `Elsewhere()` in place of every leaf that belongs
        to another rank.
    division : Division
        Which rank owns what; the same object in all states of a loop.
    """

    def __init__(self, inner: Any, division: Division) -> None:
        self.inner, self.division = inner, division

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        return ((jax.tree_util.GetAttrKey("inner"), self.inner),), self.division

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.inner,), self.division

    @classmethod
    def tree_unflatten(cls, division: Division, children: Any) -> ShardedState:
        return cls(children[0], division)

    def __copy__(self) -> ShardedState:
        return ShardedState(self.inner, self.division)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedState:
        return ShardedState(jax.tree.map(jnp.copy, self.inner), self.division)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "this state is sharded, so what this rank has of it is not whole; call "
            "arraycomm.adapters.jax.gather_state(state) on all ranks for the whole state, and give each "
            "rank its part of that with shard_state(whole, like)"
        )


def sharded(inner: Any, shards: Any) -> optax.GradientTransformationExtraArgs:
    """Return a transformation whose updates are those of `inner`, each computed by one rank."""
    sharding = _Sharding(inner, shards)
    return optax.GradientTransformationExtraArgs(sharding.init, sharding.update)


class _Sharding:
    """The two functions of a sharded transformation."""

    def __init__(self, inner: Any, shards: Any) -> None:
        self._inner, self._shards = inner, shards
        # What this rank computes, for the dtypes and shapes met so far.
        self._parts: dict[Any, _Part] = {}

    def init(self, params: Any) -> ShardedState:
        leaves, structure = jax.tree.flatten(params)
        types = tuple(map(_type_of, leaves))
        whole = jax.tree.unflatten(structure, types)
        traced, state = jax.make_jaxpr(self._inner.init, return_shape=True)(whole)
        owners = self._shards.divide(map(_spec, types))
        division = Division(
            self._shards,
            structure,
            jax.tree.structure(state),
            owners,
            (),
            tuple(map(_of_type, traced.out_avals)),
        )
        program = self._traced(division, _Types(types, division.state_types, types))
        division = replace(division, state_leaves=_leaves_of_state(program, division))
        compute, used = _needed(traced, division.kept_of_state)
        return division.kept(compute(*_used(leaves, used)))

    def update(
        self, updates: Any, state: ShardedState, params: Any = None, **extra: Any
    ) -> tuple[Any, ShardedState]:
        division = _division_of(state)
        leaves = _flatten_like(division.params, updates, "updates")
        params_leaves = [] if params is None else _flatten_like(division.params, params, "params")
        state_leaves = jax.tree.leaves(state.inner, is_leaf=_is_elsewhere)
        extra_leaves, extra_structure = jax.tree.flatten(extra)
        types = _Types(
            tuple(map(_type_of, leaves)),
            tuple(map(_type_unless_elsewhere, state_leaves, division.state_types)),
            tuple(map(_type_of, params_leaves)),
            tuple(map(_type_of, extra_leaves)),
            extra_structure,
        )
        part = self._part_of(division, types)
        inputs = [*leaves, *state_leaves, *params_leaves, *extra_leaves]
        filled = [
            own if other is None else other for own, other in zip(inputs, part.others, strict=True)
        ]
        updated, after = self._shards.guarded(lambda: self._updated(division, types, filled))
        changed = self._exchanged(division, part.types, leaves[:1], jax.tree.leaves(updated))
        kept = _used(jax.tree.leaves(after), division.kept_of_state)
        return jax.tree.unflatten(division.params, changed), division.kept(kept)

    def _part_of(self, division: Division, types: _Types) -> _Part:
        """Return how this rank computes its part of an update."""
        part = self._parts.get((division, types))
        if part is None:
            program = self._traced(division, types)
            if _leaves_of_state(program, division) != division.state_leaves:
                raise _refusal(
                    "which part of its state depends on gradients is not always the same"
                )
            count = len(division.owners)
            others = self._others(division, types)
            self._check_others(division, types, program, others)
            updates = tuple(map(_of_type, program.out_avals[:count]))
            part = self._parts[division, types] = _Part(others, updates)
        return part

    def _others(self, division: Division, types: _Types) -> list[Any]:
        """Return stand-ins for the inputs that belong to other ranks, arrays of one element.

        With them the transformation, and XLA, see as many leaves as without sharding. For XLA
        compiles the update of one leaf otherwise than that of several, and noise is drawn for all.
        """
        shapes = [
            kind.shape if is_own else (1,) * len(kind.shape)
            for kind, is_own in zip(types.updates, division.kept_of_params, strict=True)
        ]
        small = jax.eval_shape(self._inner.init, division.params_like(types, shapes))
        found, structure = jax.tree.flatten(small)
        if structure != division.state:
            raise _refusal("the structure of its state depends on the shapes of leaves")
        shapes += [kind.shape for kind in found]
        shapes += shapes[: len(types.params)]
        shapes += [kind.shape for kind in types.extra]
        kept = division.kept_of_inputs(types)
        with jax.ensure_compile_time_eval():
            return [
                None if is_kept else jnp.ones(shape, kind.dtype)
                for is_kept, shape, kind in zip(kept, shapes, types.all(), strict=True)
            ]

    def _check_others(
        self, division: Division, types: _Types, program: Any, others: Sequence[Any]
    ) -> None:
        """Raise if this rank's part of an update is another one with stand-ins for other leaves."""
        inputs = [
            kind if other is None else _type_of(other)
            for kind, other in zip(types.all(), others, strict=True)
        ]
        kept = division.kept_of_results, division.kept_of_inputs(types)
        if _text(self._trace(division, types, inputs), *kept) != _text(program, *kept):
            raise _refusal("its update of a leaf depends on the shapes of others")

    def _updated(self, division: Division, types: _Types, inputs: Sequence[Any]) -> tuple[Any, Any]:
        """Update with the leaves of all arguments."""
        parts = types.split(inputs)
        updates = jax.tree.unflatten(division.params, parts[0])
        state = jax.tree.unflatten(division.state, parts[1])
        params = jax.tree.unflatten(division.params, parts[2]) if types.params else None
        extra = {} if types.structure is None else jax.tree.unflatten(types.structure, parts[3])
        updated: tuple[Any, Any] = self._inner.update(updates, state, params, **extra)
        return updated

    def _trace(self, division: Division, types: _Types, inputs: Sequence[Any]) -> Any:
        """Trace an update of inputs of these dtypes and shapes."""
        update = partial(self._updated, division, types)
        traced, (changed, state) = jax.make_jaxpr(
            lambda *leaves: update(leaves), return_shape=True
        )(*inputs)
        for name, tree, wanted in (
            ("updates", changed, division.params),
            ("state", state, division.state),
        ):
            if jax.tree.structure(tree) != wanted:
                raise _refusal(f"an update gives its {name} another structure")
        return traced

    def _traced(self, division: Division, types: _Types) -> Any:
        """Trace an update of the whole tree."""
        return self._trace(division, types, types.all())

    def _exchanged(
        self,
        division: Division,
        types: Sequence[Any],
        reduced: Sequence[Any],
        updates: Sequence[Any],
    ) -> list[Any]:
        """Return the updates of all leaves, of which this rank has its own and stand-ins; collective."""
        shards = self._shards
        if shards.comm.size == 1 or not updates:
            return list(updates)
        exchange = partial(_exchange, shards, division.owners, types)
        if not _is_traced((*reduced, *updates)):
            return exchange(updates)

        def exchange_buffers(_: Any, results: Any, *buffers: Any) -> None:
            found = exchange([np.asarray(buffer) for buffer in buffers[1:]])
            for result, values in zip(results, found, strict=True):
                np.asarray(result)[...] = values

        # The first operand makes the exchange wait for the reduction of the gradients, also on a rank
        # that owns nothing. The stand-ins are operands so that XLA does not leave them out.
        call = buffer_callback(exchange_buffers, list(types), has_side_effect=True)
        changed: list[Any] = list(call(jnp.ravel(reduced[0])[:1], *updates))
        return changed


class _Types(NamedTuple):
    """The dtypes and shapes of an update's arguments, and the structure of the extra ones."""

    updates: tuple[Any, ...]
    state: tuple[Any, ...]
    params: tuple[Any, ...]
    extra: tuple[Any, ...] = ()
    structure: Any = None

    def all(self) -> tuple[Any, ...]:
        """Return the types of all inputs."""
        return (*self.updates, *self.state, *self.params, *self.extra)

    def split(self, inputs: Sequence[Any]) -> list[list[Any]]:
        """Return which inputs belong to each argument."""
        rest = iter(inputs)
        return [[next(rest) for _ in part] for part in self[:4]]


class _Part(NamedTuple):
    """How a rank computes its part of an update.

    Attributes
    ----------
    others : list of array or None
        Stand-ins for the inputs that belong to other ranks.
    types : tuple
        The dtype and shape of the update of each leaf, also of other ranks.
    """

    others: list[Any]
    types: tuple[Any, ...]


def _exchange(
    shards: Any, owners: Sequence[int], types: Sequence[Any], updates: Sequence[Any]
) -> list[Any]:
    """Exchange updates that are not traced; those of other ranks' leaves are only like the results."""
    parameters = [
        (f"update {number}", owner, _spec(kind), leaf)
        for number, (owner, kind, leaf) in enumerate(zip(owners, types, updates, strict=True))
    ]
    exchanged = list(updates)
    for number, found in shards.exchange(parameters):
        exchanged[number] = found
    return exchanged


# Traces ---------------------------------------------------------------------------------------------


def _needed(traced: Any, outputs: Sequence[bool]) -> tuple[Any, list[bool]]:
    """Return what computes some outputs of a traced program, and which inputs it takes."""
    jaxpr, used_consts, used = partial_eval.dce_jaxpr_consts(traced.jaxpr, list(outputs))
    return partial(jax.core.eval_jaxpr, jaxpr, _used(traced.consts, used_consts)), used


def _text(traced: Any, outputs: Sequence[bool], inputs: Sequence[bool]) -> Any:
    """Return what some outputs of a traced program are of some of its inputs, and perhaps of others."""
    jaxpr, consts, used = partial_eval.dce_jaxpr_consts(traced.jaxpr, list(outputs), list(inputs))
    return str(jaxpr), list(map(_value_of, _used(traced.consts, consts))), sum(used)


def _value_of(const: Any) -> Any:
    """Return what tells constants of traced programs apart."""
    # Random keys have a dtype of JAX's own.
    is_opaque = not isinstance(jax.typeof(const).dtype, np.dtype)
    return id(const) if is_opaque or _is_traced([const]) else np.asarray(const).tobytes()


def _filled(leaves: Iterable[Any], kept: Sequence[bool]) -> list[Any]:
    """Return the leaves that are kept, and a mark in place of each other one."""
    rest = iter(leaves)
    return [next(rest) if is_kept else Elsewhere() for is_kept in kept]


def _used(inputs: Sequence[Any], used: Sequence[bool]) -> list[Any]:
    return [x for x, is_used in zip(inputs, used, strict=True) if is_used]


def _leaves_of_state(traced: Any, division: Division) -> tuple[int | None, ...]:
    """Return to which parameter each leaf of the state belongs, if to any; raise if to several.

    It belongs to those on whose gradients, or values, its next value depends.
    """
    count, states = len(division.owners), len(division.state_types)
    flows = _flows(traced.jaxpr)
    words = [1 << number for number in range(count)]
    belongs = dict(enumerate(words)) | dict(enumerate(words, count + states))
    for number, leaf in enumerate(division.state_leaves):
        if leaf is not None:
            belongs[count + number] = words[leaf]
    found: dict[int, int] = {}
    while found != (found := _next_values(flows[count:], belongs | found, count)):
        pass
    belongs |= found
    for number in range(count):
        _check_single(_parameters_of(flows[number], belongs) | 1 << number, division)
    for word in found.values():
        _check_single(word, division)
    return tuple(word.bit_length() - 1 if word else None for word in found.values())


def _next_values(flows: Sequence[int], belongs: dict[int, int], first: int) -> dict[int, int]:
    """Return on which parameters the next value of each leaf of the state depends, and this one's."""
    return {
        first + number: _parameters_of(flow, belongs) | belongs.get(first + number, 0)
        for number, flow in enumerate(flows)
    }


def _parameters_of(inputs: int, belongs: dict[int, int]) -> int:
    """Return the parameters, as bits, to which some of a program's inputs belong."""
    return reduce(or_, (belongs.get(number, 0) for number in _bits(inputs)), 0)


def _bits(word: int) -> Iterator[int]:
    while word:
        lowest = word & -word
        yield lowest.bit_length() - 1
        word ^= lowest


def _check_single(parameters: int, division: Division) -> None:
    if parameters & (parameters - 1):
        marked = jax.tree.unflatten(division.params, range(len(division.owners)))
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(marked)]
        first, second, *_ = _bits(parameters)
        raise _refusal(f"its update of {paths[second]} depends on {paths[first]}")


def _refusal(why: str) -> TypeError:
    return TypeError(
        f"DistributedOptimizer: this transformation cannot be sharded: {why}, but every leaf must be updated "
        "from its own gradient and state; put what looks at all gradients before it, after a reduction: "
        "optax.chain(all_reduce(), optax.clip_by_global_norm(1.0), DistributedOptimizer(adam, shard=True)), "
        "or pass shard=False"
    )


def _flows(jaxpr: Any, inputs: Sequence[int] | None = None) -> list[int]:
    """Return on which inputs each output of a program depends, as bits."""
    words = [1 << n for n in range(len(jaxpr.invars))] if inputs is None else inputs
    known = dict(zip(jaxpr.invars, words, strict=True))

    def word(atom: Any) -> int:
        return 0 if hasattr(atom, "val") else known.get(atom, 0)

    for equation in jaxpr.eqns:
        flows = _flows_through(equation, [word(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, flows, strict=True))
    return [word(atom) for atom in jaxpr.outvars]


def _flows_through(equation: Any, words: Sequence[int]) -> list[int]:
    inner = equation.params.get("jaxpr")
    if equation.primitive.name in {"jit", "pjit", "closed_call"} and inner is not None:
        return _flows(inner.jaxpr, words)
    rule = partial_eval.dce_rules.get(equation.primitive)
    count = len(equation.outvars)
    if rule is None or count == 1:
        return [reduce(or_, words, 0)] * count
    flows = []
    for number in range(count):
        used, _ = rule([other == number for other in range(count)], equation)
        flows.append(reduce(or_, (w for w, is_used in zip(words, used, strict=True) if is_used), 0))
    return flows


# States ---------------------------------------------------------------------------------------------


def gather_state(state: Any, *, root: int = 0) -> Any:
    """Return the whole state of sharded transformations on one rank.

    Parameters
    ----------
    state : pytree
        The state of a transformation that `DistributedOptimizer` has sharded, or one in which there
        are such, for example of an `optax.chain`.
    root : int
        The rank that gets the whole state.

    Returns
    -------
    pytree or None
        On `root` what the state would be if nothing were sharded; None on the other ranks.

    Raises
    ------
    ValueError
        There is no sharded state in `state`.

    Notes
    -----
    Collective, and not for `jax.jit`.

    Examples
    --------
    >>> import jax, optax
    >>> import arraycomm as ac
    >>> from arraycomm.adapters.jax import gather_state, shard_state
    >>> from arraycomm.testing import run
    >>> params = {"a": jax.numpy.zeros(2), "b": jax.numpy.zeros(2)}
    >>> def train(comm):
    ...     optimizer = ac.DistributedOptimizer(optax.trace(0.9), comm=comm, shard=True)
    ...     state = optimizer.init(params)
    ...     _, state = optimizer.update(params, state)
    ...     whole = gather_state(state)
    ...     return len(jax.tree.leaves(state)), len(jax.tree.leaves(whole))
    >>> run(2, train)
    [(1, 2), (1, 0)]
    """
    found = [part for part in _parts(state) if isinstance(part, ShardedState)]
    if not found:
        raise ValueError(
            "gather_state: there is no sharded state in this tree; pass the state of a transformation "
            "that DistributedOptimizer(..., shard=True) returned"
        )
    gathered = iter([_gather(part, root) for part in found])
    whole = jax.tree.map(
        lambda part: next(gathered) if isinstance(part, ShardedState) else part,
        state,
        is_leaf=_is_sharded,
    )
    return whole if found[0].division.shards.comm.rank == root else None


def shard_state(whole: Any, like: Any) -> Any:
    """Return this rank's part of a whole state.

    Parameters
    ----------
    whole : pytree
        What `gather_state` returned, also in a job with another number of ranks.
    like : pytree
        A state of the sharded transformation, such as its `init(params)` returns.

    Returns
    -------
    pytree
        A state like `like` with the values of `whole`.

    Raises
    ------
    ValueError
        `whole` is not the state of the same transformation and parameters.

    Notes
    -----
    Local.

    Examples
    --------
    >>> import jax, optax
    >>> import arraycomm as ac
    >>> from arraycomm.adapters.jax import shard_state
    >>> from arraycomm.testing import run
    >>> params = {"a": jax.numpy.zeros(2), "b": jax.numpy.zeros(2)}
    >>> whole = optax.trace(0.9).init(params)
    >>> def resume(comm):
    ...     optimizer = ac.DistributedOptimizer(optax.trace(0.9), comm=comm, shard=True)
    ...     state = shard_state(whole, like=optimizer.init(params))
    ...     return len(jax.tree.leaves(state))
    >>> run(2, resume)
    [1, 1]
    """
    parts, structure = jax.tree.flatten(like, is_leaf=_is_sharded)
    found: Any = structure
    try:
        values = found.flatten_up_to(whole)
    except ValueError:
        raise _other_state(f"its structure is {jax.tree.structure(whole)}") from None
    return found.unflatten(list(map(_cut, parts, values)))


def _other_state(why: str) -> ValueError:
    return ValueError(
        "shard_state: whole must be the whole state of the transformation and parameters of `like`, as "
        f"gather_state returns it; {why}"
    )


def _cut(part: Any, value: Any) -> Any:
    if not isinstance(part, ShardedState):
        return value
    division = part.division
    leaves, structure = jax.tree.flatten(value)
    if structure != division.state:
        raise _other_state(f"it has {structure} in place of {division.state}")
    for leaf, kind in zip(leaves, division.state_types, strict=True):
        if np.shape(leaf) != kind.shape:
            raise _other_state(f"it has shape {np.shape(leaf)} in place of {kind.shape}")
    return division.kept(map(jnp.asarray, _used(leaves, division.kept_of_state)))


def _gather(part: ShardedState, root: int) -> Any:
    division = part.division
    comm, leaves = division.shards.comm, jax.tree.leaves(part.inner, is_leaf=_is_elsewhere)
    kept = zip(leaves, division.state_leaves, division.kept_of_state, strict=True)
    sent = {
        number: np.asarray(leaf)
        for number, (leaf, belongs, is_kept) in enumerate(kept)
        if is_kept and belongs is not None and comm.rank != root
    }
    parts = comm.gather_object(sent, root)
    if parts is None:
        return None
    for each in parts:
        for number, values in each.items():
            leaves[number] = jnp.asarray(values)
    return jax.tree.unflatten(division.state, leaves)


def _parts(state: Any) -> list[Any]:
    return list(jax.tree.leaves(state, is_leaf=_is_sharded))


def _is_sharded(part: Any) -> bool:
    return isinstance(part, ShardedState)


def _is_elsewhere(part: Any) -> bool:
    return isinstance(part, Elsewhere)


def _division_of(state: Any) -> Division:
    if not isinstance(state, ShardedState):
        raise TypeError(
            "DistributedOptimizer: the state of a sharded transformation must be what its init or update "
            f"returned; got {type(state).__name__}; give each rank its part of a whole state with "
            "shard_state(whole, like=optimizer.init(params))"
        )
    return state.division


def _flatten_like(structure: Any, tree: Any, name: str) -> list[Any]:
    leaves, found = jax.tree.flatten(tree)
    if found != structure:
        raise ValueError(f"{name} must have the structure {structure}; got {found}")
    return list(leaves)


def _is_traced(leaves: Iterable[Any]) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def _type_unless_elsewhere(leaf: Any, otherwise: Any) -> Any:
    return otherwise if _is_elsewhere(leaf) else _type_of(leaf)


def _type_of(leaf: Any) -> Any:
    return _of_type(jax.typeof(jnp.asarray(leaf) if not hasattr(leaf, "dtype") else leaf))


def _of_type(aval: Any) -> Any:
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)


def _spec(kind: Any) -> tuple[Any, tuple[int, ...]]:
    return np.dtype(kind.dtype), tuple(kind.shape)
