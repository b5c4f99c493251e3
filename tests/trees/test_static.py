"""What containers hold besides leaves: compared in reductions, sent by `synchronize`, never an old one beside new leaves."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import random
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import optree
import pytest

import arraycomm as ac
from arraycomm import Communicator
from arraycomm._trees.static import Describer
from arraycomm.testing import run
from tests.support.on_ranks import each_rank_of
from tests.support.pairwise import pairwise

T = TypeVar("T")

# Kinds of nodes, each with a value `unit` that is no leaf. `of(unit, x)` makes one of them, with `x` as its leaf


class Kind(NamedTuple):
    of: Callable[[Any, Any], Any]
    unit: Callable[[Any], Any]
    leaf: Callable[[Any], Any]
    # How errors name the unit; None if it is a leaf for which text is refused.
    path: str
    # What `synchronize` does if ranks differ in it.
    is_sent: bool = True


@optree.register_pytree_node_class(namespace=optree.registry.__dict__["__GLOBAL_NAMESPACE"])
class OfOptree:
    def __init__(self, x: Any, unit: Any) -> None:
        self.x, self.unit = x, unit

    def tree_flatten(self) -> Any:
        return [self.x], self.unit

    @classmethod
    def tree_unflatten(cls, unit: Any, children: Any) -> Any:
        return cls(children[0], unit)


def _jax_class() -> Any:
    jax = pytest.importorskip("jax")
    return jax.tree_util.register_pytree_node_class(type("OfJAX", (OfOptree,), {}))


def _jax_dataclass() -> Any:
    jax = pytest.importorskip("jax")
    static = dataclasses.field(metadata={"static": True})
    made = dataclasses.make_dataclass("Length", [("x", Any), ("unit", Any, static)])
    return jax.tree_util.register_dataclass(made)


def _dataclass_of_optree() -> Any:
    static = optree.dataclasses.field(pytree_node=False)
    made = type("P", (), {"__annotations__": {"x": Any, "unit": Any}, "unit": static})
    return optree.dataclasses.dataclass(made, namespace="of a library")


def _of_flax() -> Any:
    struct = pytest.importorskip("flax.struct")
    static = struct.field(pytree_node=False)
    return struct.dataclass(
        type("F", (), {"__annotations__": {"x": Any, "unit": Any}, "unit": static})
    )


def _of_equinox() -> Any:
    equinox = pytest.importorskip("equinox")
    static = equinox.field(static=True)
    body = {"__annotations__": {"x": Any, "unit": Any}, "unit": static}
    return type(equinox.Module)("E", (equinox.Module,), body)


@functools.cache
def _class(make: Callable[[], Any]) -> Any:
    """Return a class, which is registered once."""
    return make()


def _registered(make: Callable[[], Any], path: str = "tree.unit") -> Kind:
    """Return the kind of a class that is made once its framework is asked for."""
    return Kind(
        lambda unit, x: _class(make)(x=x, unit=unit),
        operator.attrgetter("unit"),
        operator.attrgetter("x"),
        path,
    )


def _nnx(unit: Any, x: Any) -> Any:
    nnx = pytest.importorskip("flax.nnx")
    module = nnx.Module()
    module.inner = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    module.inner.unit, module.x = unit, nnx.Param(x)
    return module


def _default(unit: Any, x: Any) -> Any:
    return defaultdict(functools.partial(list, (unit,)), x=x)


def _unit_of_default(tree: Any) -> Any:
    return tree.default_factory.args[0][0]


KINDS = {
    "optree": Kind(
        lambda unit, x: OfOptree(x, unit),
        operator.attrgetter("unit"),
        operator.attrgetter("x"),
        "tree beside its leaves",
    ),
    "jax": _registered(_jax_class, "tree beside its leaves"),
    "jax dataclass": _registered(_jax_dataclass),
    "optree dataclass": _registered(_dataclass_of_optree),
    "flax.struct": _registered(_of_flax),
    "equinox": _registered(_of_equinox),
    "nnx": Kind(
        _nnx,
        lambda tree: tree.inner.unit,
        lambda tree: tree.x[...],
        "tree.inner.unit",
        is_sent=False,
    ),
    "defaultdict": Kind(
        _default, _unit_of_default, operator.itemgetter("x"), "tree", is_sent=False
    ),
    "defaultdict of mixed keys": Kind(
        lambda unit, x: defaultdict(functools.partial(list, (unit,)), {1: 0.0, "x": x}),
        _unit_of_default,
        operator.itemgetter("x"),
        "tree",
        is_sent=False,
    ),
    "deque": Kind(
        lambda unit, x: deque([x], maxlen=len(str(unit))),
        lambda tree: "m" * tree.maxlen,
        operator.itemgetter(0),
        "tree",
        is_sent=False,
    ),
}
# The unit of most ranks, and what another one has. A deque shows its length alone.
UNITS: dict[str, tuple[Any, Any]] = {
    "text": ("m", "km"),
    "number": (1, 10),
    "none": (None, "km"),
    "none of another": ("km", None),
    "array": (np.arange(3), np.arange(4)),
    "function": (max, functools.reduce),
    "dict": ({"a": {1, 2}}, {"a": {1, 3}}),
}


def _gradients_in_an_optimizer(tree: Any, comm: Communicator) -> Any:
    optimizer = ac.DistributedOptimizer(lambda params, grads: grads, comm=comm, op="sum")
    return optimizer(0.0, tree)


def _text(value: Any) -> str:
    return Describer().shown(value)


CALLS: dict[str, Callable[[Any, Communicator], Any]] = {
    "allreduce_tree": lambda tree, comm: ac.allreduce_tree(tree, "sum", comm=comm),
    "allreduce_gradients": lambda tree, comm: ac.allreduce_gradients(tree, "sum", comm=comm),
    "mean_metrics": lambda tree, comm: ac.mean_metrics(tree, 1.0, comm=comm),
    "plan": lambda tree, comm: comm.plan(tree, "sum")(tree),
    "synchronize": lambda tree, comm: ac.synchronize(tree, root=comm.size - 1, comm=comm),
    "raise_on_difference": lambda tree, comm: ac.raise_on_difference(tree, comm=comm),
    "optimizer": _gradients_in_an_optimizer,
}


# Arrays of theirs are leaves.
LEAVES = {("nnx", "array"), ("equinox", "array")}
CASES = pairwise(row for row in itertools.product(KINDS, UNITS, CALLS) if row[:2] not in LEAVES)


def _leaf(rank: int, call: str) -> Any:
    # Ranks may not differ where they are asked whether they do.
    return np.full(2, 1.0 if call == "raise_on_difference" else rank + 1.0)


def _expected(size: int, call: str) -> list[float]:
    total = size * (size + 1) / 2
    known = {"synchronize": float(size), "raise_on_difference": 1.0, "mean_metrics": total / size}
    return [known.get(call, total)] * 2


@pytest.mark.parametrize(("kind", "unit", "call"), CASES)
@each_rank_of((1, 2, 3))
def test_trees_that_are_alike_keep_what_they_hold(comm: Communicator, kind, unit, call) -> None:
    of, unit_of, leaf_of, *_ = KINDS[kind]
    common, _ = UNITS[unit]
    # Again: nothing that is kept of a tree is compared by an `==` that its contents may not have.
    for _ in range(2):
        got = CALLS[call](of(common, _leaf(comm.rank, call)), comm)
        assert np.asarray(leaf_of(got)).tolist() == _expected(comm.size, call)
        assert kind == "deque" or _text(unit_of(got)) == _text(common)


@pytest.mark.parametrize(("kind", "unit", "call"), CASES)
@each_rank_of((2, 3))
def test_what_differs_is_named_or_sent(comm: Communicator, kind, unit, call) -> None:
    of, unit_of, leaf_of, path, is_sent = KINDS[kind]
    common, other = UNITS[unit]
    if kind == "deque" and len(str(common)) == len(str(other)):
        pytest.skip("both are of one length")
    tree = of(other if comm.rank == comm.size - 1 else common, _leaf(comm.rank, call))
    if call == "synchronize" and is_sent:
        got = CALLS[call](tree, comm)
        assert _text(unit_of(got)) == _text(other)
        assert np.asarray(leaf_of(got)).tolist() == _expected(comm.size, call)
        return
    said = rf"(First difference: |raise_on_difference: (the type of )?){path} is "
    with pytest.raises(ac.MismatchError, match=said):
        CALLS[call](tree, comm)


@pytest.mark.parametrize("kind", ["jax", "jax dataclass", "flax.struct", "equinox"])
@each_rank_of((2,))
def test_parameters_of_optax_that_hold_something_else_are_named(comm: Communicator, kind) -> None:
    optax, jax = pytest.importorskip("optax"), pytest.importorskip("jax")
    of, unit_of, leaf_of, path, _ = KINDS[kind]
    for units in (("m", "m"), ("m", "km")):
        optimizer = ac.DistributedOptimizer(optax.sgd(1.0), comm=comm)
        params = of(units[comm.rank], jax.numpy.ones(2))
        slopes = of(units[comm.rank], jax.numpy.full(2, 1.0 * comm.rank))
        if units == ("m", "m"):
            updates, _ = optimizer.update(slopes, optimizer.init(params), params)
            assert (leaf_of(updates).tolist(), unit_of(updates)) == ([-0.5, -0.5], "m")
            continue
        with pytest.raises(ac.MismatchError, match=path.replace("tree", "params") + " is not"):
            optimizer.update(slopes, optimizer.init(params), params)


@each_rank_of((2,))
def test_a_plan_takes_no_tree_that_holds_something_else(comm: Communicator) -> None:
    plan = comm.plan(OfOptree(np.ones(2), "m"), "sum")
    if comm.rank == 0:
        with pytest.raises(ValueError, match="got tree beside its leaves: = 'km' in place of tree"):
            plan(OfOptree(np.ones(2), "km"))
    else:
        with pytest.raises(ac.PeerError):
            plan(OfOptree(np.ones(2), "m"))
    assert plan(OfOptree(np.ones(2), "m")).x.tolist() == [2.0, 2.0]


@each_rank_of((1, 2))
def test_what_cannot_be_compared_is_refused_by_path_on_several_ranks(comm: Communicator) -> None:
    tree = {"a": [OfOptree(np.ones(2), threading.Lock())]}
    if comm.size == 1:
        assert ac.allreduce_tree(tree, comm=comm)["a"][0].unit is tree["a"][0].unit
        return
    for call in CALLS.values():
        with pytest.raises(
            TypeError, match=r"tree.*\['a'\]\[0\] beside its leaves is _thread.lock, which"
        ):
            call(tree, comm)


@each_rank_of((2,))
def test_what_differs_and_cannot_be_sent_is_an_error_of_all(comm: Communicator) -> None:
    def local() -> None: ...

    error = TypeError if comm.rank == 0 else ac.PeerError
    with pytest.raises(
        error, match=r"besides the leaves .* cannot be pickled .*; make it the same"
    ):
        ac.synchronize(OfOptree(np.ones(2), local if comm.rank == 0 else "m"), comm=comm)
    assert ac.synchronize(OfOptree(comm.rank, "m"), comm=comm).x == 0


@pytest.mark.parametrize("kind", ["BCOO", "BCSR"])
@each_rank_of((1, 3))
def test_indices_are_not_added_up(comm: Communicator, kind) -> None:
    sparse = pytest.importorskip("jax.experimental.sparse")
    tree = {"m": getattr(sparse, kind).fromdense(np.eye(3))}
    moving = ("synchronize", "raise_on_difference")
    for name, call in CALLS.items():
        if name in moving:
            assert (call(tree, comm)["m"].todense() == np.eye(3)).all()
            continue
        with pytest.raises(
            TypeError, match=rf"\['m'\] is a sparse {kind}: .*; pass .*\.todense\(\)"
        ):
            call(tree, comm)


# Dataclasses -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Cached:
    x: Any

    @functools.cached_property
    def derived(self) -> Any:
        return self.x * 2


@dataclasses.dataclass
class Derived:
    x: Any

    def __post_init__(self) -> None:
        self.derived = self.x * 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    _: dataclasses.KW_ONLY
    scale: float = 2.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "derived", self.x * 2)


@dataclasses.dataclass
class Slots:
    __slots__ = ("derived", "x")
    x: Any

    def __post_init__(self) -> None:
        self.derived = self.x * 2


@dataclasses.dataclass
class Output(OrderedDict):
    """As libraries of models keep their outputs: the fields are items, too."""

    x: Any = None

    def __post_init__(self) -> None:
        self["x"] = self.x

    @property
    def derived(self) -> Any:
        return self["x"] * 2


DERIVING = {kind.__name__: kind for kind in (Cached, Derived, Frozen, Slots, Output)}


@pytest.mark.parametrize("kind", DERIVING)
@pytest.mark.parametrize("call", CALLS)
@each_rank_of((1, 3))
def test_what_is_derived_from_fields_is_that_of_the_new_ones(
    comm: Communicator, kind, call
) -> None:
    mine = DERIVING[kind](_leaf(comm.rank, call))
    assert (mine.derived == mine.x * 2).all()
    if call == "mean_metrics" and kind == "Frozen":
        pytest.skip("a number of it is a leaf")
    got = CALLS[call](mine, comm)
    assert got.x.tolist() == _expected(comm.size, call)
    assert got.derived.tolist() == [2 * x for x in got.x.tolist()]


@dataclasses.dataclass
class Items(list):
    x: Any = 1.0


@dataclasses.dataclass
class Extra:
    x: Any
    given: dataclasses.InitVar[float]

    def __post_init__(self, given: float) -> None:
        self.more = given


def _marked(tag: Any = 2.0) -> Any:
    made = Cached(1.0)
    made.tag = tag
    return made


def _with_items() -> Any:
    made = Items()
    made.append(2.0)
    return made


HOLDING = {
    "attribute": (_marked, "tag"),
    "items": (_with_items, "its items"),
    "given": (lambda: Extra(1.0, 2.0), "more"),
}


@pytest.mark.parametrize("kind", HOLDING)
@each_rank_of((1, 2))
def test_what_is_more_than_fields_is_refused_by_path(comm: Communicator, kind) -> None:
    make, named = HOLDING[kind]
    for call in CALLS.values():
        if call is CALLS["raise_on_difference"]:
            continue
        with pytest.raises(TypeError, match=rf"holds more than its fields \({named}\)"):
            call([make()], comm)
    tree = [make()]
    assert ac.raise_on_difference(tree, comm=comm) is tree


@each_rank_of((1, 2))
def test_what_no_number_follows_from_stays(comm: Communicator) -> None:
    for tag in ("m", None, len, np.random.default_rng(), threading.Lock()):
        got = ac.allreduce_tree(_marked(tag), "sum", comm=comm)
        assert (got.x, got.tag) == (comm.size, tag)


@each_rank_of((2,))
def test_differences_beside_fields_are_found(comm: Communicator) -> None:
    made = _marked(str(comm.rank))
    with pytest.raises(ac.MismatchError, match=r"tree\.tag is not the same on all ranks"):
        ac.raise_on_difference(made, comm=comm)


@each_rank_of((2,))
def test_attributes_of_nnx_that_are_a_ranks_own_stay(comm: Communicator) -> None:
    nnx, jax = pytest.importorskip("flax.nnx"), pytest.importorskip("jax")
    module = nnx.Module()
    module.x, module.key = (
        nnx.Param(np.full(1, 1.0 * comm.rank)),
        nnx.data(jax.random.key(comm.rank)),
    )
    module.lock, module.random, module._rank = (
        threading.Lock(),
        np.random.default_rng(comm.rank),
        comm.rank,
    )
    got = ac.synchronize(module, root=1, comm=comm)
    assert got is module
    assert (got.x[0], got._rank) == (1.0, comm.rank)
    assert (jax.random.key_data(got.key) == jax.random.key_data(jax.random.key(1))).all()


# Functions and modules -------------------------------------------------------------------------


@each_rank_of((2,))
def test_functions_are_compared_by_name(comm: Communicator) -> None:
    jax = pytest.importorskip("jax")
    functions = [
        jax.nn.relu,
        jax.jit(abs),
        lambda x: x,
        np.tanh,
        np.dot,
        jax.numpy.add,
        functools.lru_cache(abs),
    ]
    assert ac.raise_on_difference(functions, comm=comm) is functions
    with pytest.raises(ac.MismatchError, match=r"tree\[0\] is not .*relu, at .*gelu, at"):
        ac.raise_on_difference([(jax.nn.relu, jax.nn.gelu)[comm.rank]], comm=comm)


@each_rank_of((2,))
def test_whole_trees_with_functions_name_a_way_that_works(comm: Communicator) -> None:
    equinox = pytest.importorskip("equinox")
    import jax

    model = equinox.nn.MLP(2, 1, 4, 1, key=jax.random.key(comm.rank))
    error = TypeError if comm.rank == 0 else ac.PeerError
    with pytest.raises(
        error, match=r"pass the tree on all ranks, .*equinox\.filter\(tree, equinox\.is_array\)"
    ):
        ac.synchronize(model if comm.rank == 0 else None, comm=comm)
    whole = ac.synchronize(model, comm=comm)
    arrays = ac.synchronize(
        equinox.filter(model, equinox.is_array) if comm.rank == 0 else None, comm=comm
    )
    again = equinox.combine(arrays, equinox.filter(model, equinox.is_array, inverse=True))
    assert (again.layers[0].weight == whole.layers[0].weight).all()


@each_rank_of((2,))
def test_modules_of_torch_that_compute_something_else_differ(comm: Communicator) -> None:
    nn = pytest.importorskip("torch").nn
    kinds = [(nn.ReLU(), nn.Tanh()), (nn.Dropout(0.1), nn.Dropout(0.2)), (nn.ReLU(), nn.ReLU())]
    for pair, differs in zip(kinds, (True, True, False), strict=True):
        model = nn.Sequential(nn.BatchNorm1d(2), pair[comm.rank])
        if differs:
            with pytest.raises(ac.MismatchError, match=r"tree\.1 is not the same"):
                ac.raise_on_difference(model, comm=comm)
        else:
            ac.raise_on_difference(model, comm=comm)


# Descriptions ----------------------------------------------------------------------------------


class Words(frozenset):
    """A set of another class."""


class Table(dict):
    """A dict of another class."""


class Hashed:
    """Keeps its hash, which is another one in each process, and what it has computed."""

    def __init__(self, text: str) -> None:
        self.text, self._hash = text, random.random()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashed) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @functools.cached_property
    def length(self) -> int:
        return len(self.text)


class Unit:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def scaled(self, x: float) -> float:
        return x * self.factor


@dataclasses.dataclass
class Options:
    name: str
    quiet: Any = dataclasses.field(default=None, compare=False)
    late: Any = dataclasses.field(init=False)


def _shuffled(kind: Any) -> Any:
    words = random.sample("abcdef", 6)
    return kind(words) if kind is Words else kind(dict.fromkeys(words, 1))


def _read(text: str) -> Hashed:
    made = Hashed(text)
    if random.random() < 0.5:
        assert made.length == len(text)
    return made


def _tensor() -> Any:
    return pytest.importorskip("torch").ones(2, requires_grad=True)


def _transformation() -> Any:
    optax = pytest.importorskip("optax")
    return run(1, lambda comm: ac.DistributedOptimizer(optax.sgd(1.0), comm=comm))[0]


ALIKE: dict[str, Callable[[], Any]] = {
    "words": lambda: _shuffled(Words),
    "dict": lambda: _shuffled(dict),
    "dict of another class": lambda: _shuffled(Table),
    "defaultdict": lambda: _shuffled(functools.partial(defaultdict, list)),
    "hash": lambda: _read("text"),
    "tensor that is differentiated": _tensor,
    "generator": np.random.default_rng,
    "distributed transformation": _transformation,
    "communicator": lambda: run(1, lambda comm: comm)[0],
    "unset field": lambda: Options("a"),
    "lock that is not compared": lambda: Options("a", threading.Lock()),
    "method": lambda: Unit(1).scaled,
    "jitted": lambda: pytest.importorskip("jax").jit(functools.partial(Unit.scaled, x=1)),
}
UNLIKE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "method": lambda: (Unit(1).scaled, Unit(1000).scaled),
    "jitted": lambda: tuple(
        pytest.importorskip("jax").jit(functools.partial(Unit.scaled, x=n)) for n in (1, 1000)
    ),
    "vectorized": lambda: (np.vectorize(max), np.vectorize(min)),
    "alias": lambda: (list[int], list[str]),
    "field that is not compared": lambda: (Options("a", 1), Options("a", 2)),
    "called": lambda: tuple(functools.update_wrapper(Called(n), max) for n in (1, 2)),
    "numbers": lambda: (1, 1.0),
    "class": lambda: (Words("a"), frozenset("a")),
    "attributes of a dict": lambda: (Table(), _with_attribute()),
}


class Called:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self) -> int:
        return self.number


def _with_attribute() -> Table:
    made = Table()
    made.unit = "m"
    return made


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_the_same_on_all_ranks_has_one_description(name: str) -> None:
    assert len({_text(ALIKE[name]()) for _ in range(5)}) == 1


@pytest.mark.parametrize("name", UNLIKE)
def test_what_differs_has_other_descriptions(name: str) -> None:
    one, other = UNLIKE[name]()
    assert _text(one) != _text(other)


def test_what_comes_again_in_a_value_is_looked_at_once() -> None:
    nested: Any = [1]
    for _ in range(100):
        nested = [nested, nested]
    assert _text(nested) == _text(nested)
    nested.append(nested)
    assert _text(nested)


class Refusing:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@each_rank_of((2,))
def test_an_object_that_raises_when_it_is_looked_at_is_named(comm: Communicator) -> None:
    with pytest.raises(TypeError, match=r"tree beside its leaves is .*Refusing, which"):
        ac.allreduce_tree(OfOptree(1.0, Refusing()), comm=comm)


class Keyed(dict):
    """As many programs write one; what it lacks is a KeyError."""

    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("call", [ac.allreduce_tree, ac.synchronize, ac.raise_on_difference])
@each_rank_of((2,))
def test_a_leaf_whose_attributes_raise_is_told_on_every_rank(comm: Communicator, call) -> None:
    told = {Refusing: r"tree\[0\]\.requires_grad raised RuntimeError", Keyed: r"got .*\.Keyed;"}
    if call is ac.raise_on_difference:  # compares any object by what pickle takes of it
        told = {Refusing: r"tree\[0\] cannot be compared"}
    for kind, text in told.items():
        error = BufferError if "requires_grad" in text else TypeError
        with pytest.raises(error if comm.rank else ac.PeerError, match=text):
            call([kind() if comm.rank else 1.0], comm=comm)


# Registered dataclasses of which only what their class says is compared


def _node_class() -> Any:
    """A dataclass whose leaves have no names for JAX."""
    jax = pytest.importorskip("jax")
    methods = {
        "tree_flatten": lambda self: ((self.x,), None),
        "tree_unflatten": classmethod(lambda cls, _, children: cls(*children)),
    }
    made = dataclasses.dataclass(type("Node", (), {"__annotations__": {"x": Any}, **methods}))
    return jax.tree_util.register_pytree_node_class(made)


def _with_cache() -> Any:
    jax = pytest.importorskip("jax")
    made = dataclasses.make_dataclass("Dropping", [("x", Any), ("cache", Any, None)])
    options = {"data_fields": ["x"], "meta_fields": [], "drop_fields": ["cache"]}
    return jax.tree_util.register_dataclass(made, **options)


@dataclasses.dataclass
class OfType(Generic[T]):
    x: T


ONLY_LEAVES = {
    "node class": lambda x: _class(_node_class)(x=x),
    "dropped fields": lambda x: _class(_with_cache)(x, object()),
    "generic": OfType[float],
}


@pytest.mark.parametrize("kind", ONLY_LEAVES)
@pytest.mark.parametrize("call", CALLS)
@each_rank_of((1, 2))
def test_leaves_are_no_static_data(comm: Communicator, kind, call) -> None:
    for _ in range(2):
        got = CALLS[call](ONLY_LEAVES[kind](_leaf(comm.rank, call)), comm)
        assert got.x.tolist() == _expected(comm.size, call)


@each_rank_of((2,))
def test_a_class_of_optree_may_say_itself_what_is_in_it(comm: Communicator) -> None:
    class Says(OfOptree):
        def __arraycomm_tree__(self) -> Any:
            return [self.x], lambda leaves: Says(leaves[0], self.unit)

    optree.register_pytree_node_class(
        Says, namespace=optree.registry.__dict__["__GLOBAL_NAMESPACE"]
    )
    assert ac.allreduce_tree(Says(1.0, threading.Lock()), "sum", comm=comm).x == 2.0


@each_rank_of((2,))
def test_only_what_differs_is_sent(comm: Communicator) -> None:
    """What is the same need not be pickled."""
    tree = [OfOptree(1.0, lambda x: x), OfOptree(2.0, comm.rank)]
    assert [each.unit for each in ac.synchronize(tree, comm=comm)] == [tree[0].unit, 0]
