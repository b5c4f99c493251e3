from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hypothesis")

import hypothesis
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from arraycomm._arrays.views import view
from arraycomm._dtypes import OPS, TABLE, check_reducible
from arraycomm.testing import strategies as ranked
from arraycomm.testing._arrays import frameworks as _frameworks
from arraycomm.testing._arrays.dtypes import MOVABLE, dtype_of
from arraycomm.testing._arrays.elements import as_array, specials
from arraycomm.testing._arrays.frameworks import FRAMEWORKS, DLPackOnly
from arraycomm.testing._arrays.layouts import LAYOUTS
from arraycomm.testing._arrays.rank_values import rank_count, set_rank_count
from arraycomm.testing._ranks.transfer import dump, load
from arraycomm.testing.strategies import ArrayCase, Layer, Pair, RankValues

HERE = ranked.installed_frameworks()
MORE = ("V3", "i4,(2,)f8", "[('x', 'i2'), ('y', [('z', 'S2')])]")
NAMES = [row.name for row in TABLE]
# One of each kind of dtype.
SOME = ["bool", "int8", "uint64", "float16", "float64", "bfloat16", "float8_e4m3fn", "complex64"]
SHAPES = [(3, 4, 5), (), (2, 0, 3), (1, 4), (3, 4, 5)]
FAST = hypothesis.settings(deadline=None, database=None, max_examples=60, derandomize=True)
LONG = hypothesis.settings(FAST, max_examples=100)
RANKS = 3


@pytest.fixture(autouse=True)
def _ranks() -> Any:
    set_rank_count(RANKS)
    yield
    set_rank_count(None)


def minimal(strategy: Any, condition: Any = lambda _: True) -> Any:
    settings = hypothesis.settings(
        deadline=None,
        database=None,
        max_examples=2_000,
        # Nobody reads what would be explained.
        phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
    )
    return hypothesis.find(strategy, condition, settings=settings, random=Random(0))


def bits(value: Any, dtype: Any) -> bytes:
    return as_array([value], dtype).tobytes()


# Descriptions of arrays -------------------------------------------------------------------------


def _described(framework: str) -> Iterator[tuple[int, str, np.dtype[Any], str]]:
    """Every dtype and layout that arrays of a framework have, with a running number."""
    dtypes = {name: dtype_of(name) for name in (*NAMES, *MOVABLE, *MORE)}
    number = itertools.count()
    for name, dtype in dtypes.items():
        if FRAMEWORKS[framework].has(dtype):
            for layout in _frameworks.layouts_in_principle(framework, dtype):
                yield next(number), name, dtype, layout


@pytest.mark.parametrize("framework", HERE)
def test_every_array_has_the_elements_of_its_description(framework) -> None:
    for number, name, dtype, layout in _described(framework):
        shape, seed = SHAPES[number % len(SHAPES)], 7 * (number % 2)
        case = ArrayCase(name, shape, layout, framework, False, specials(dtype)[:8], seed)
        expected = case.numpy()
        assert (expected.dtype, expected.shape) == (dtype, shape)
        assert expected.dtype.isnative
        assert expected.flags.c_contiguous
        found = view(case.build())
        assert (found.dtype, found.shape) == (dtype, shape), case
        assert found.array.tobytes() == expected.tobytes(), case


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (ArrayCase("int32", (2, 4), "fortran", elements=(1, 2, 3)), [[1, 2, 3, 1], [2, 3, 1, 2]]),
        (ArrayCase("int8", (3, 2), "broadcast", elements=(1, 2, 3)), [[1, 2]] * 3),
        (ArrayCase("float64", (2,)), [0.0, 0.0]),
        (ArrayCase("U2", (2,)), ["", ""]),
    ],
    ids=["in C order", "constant along the first axis", "zeros", "empty texts"],
)
def test_elements_are_repeated_and_none_are_zeros(case, expected) -> None:
    assert case.numpy().tolist() == case.build().tolist() == expected


def test_specials_are_what_is_known_to_go_wrong() -> None:
    def of(name: str) -> list[str]:
        return [repr(element) for element in specials(dtype_of(name))]

    assert of("bool") == ["False", "True"]
    assert of("int8") == ["0", "1", "-1", "127", "-128"]
    assert of("uint64") == ["0", "1", "18446744073709551615"]
    ordinary = ["0.0", "-0.0", "1.0", "-1.0", "nan"]
    assert of("float8_e4m3fn")[:5] == ordinary
    assert {"448.0", "-448.0", "0.015625", "0.001953125"} <= set(of("float8_e4m3fn"))
    assert "inf" not in of("float8_e4m3fn")
    assert {*ordinary, "inf", "-inf", "57344.0", "1.52587890625e-05"} <= set(of("float8_e5m2"))
    assert {*ordinary, "inf", "-inf", "65504.0", "-5.960464477539063e-08"} <= set(of("float16"))
    assert {"3.4028234663852886e+38", "1.401298464324817e-45"} <= set(of("float32"))
    assert {"1.7976931348623157e+308", "5e-324", "-inf"} <= set(of("float64"))
    assert {"9.183549615799121e-41", "1.0078125"} <= set(of("bfloat16"))
    assert {"0j", "(nan+0j)", "(inf+0j)", "(-inf+0j)"} <= set(of("complex64"))
    assert "-9223372036854775808" in of("datetime64[s]")  # NaT


@pytest.mark.parametrize("name", SOME)
def test_seeds_fill_arrays_after_the_elements_with_specials_among_others(name) -> None:
    dtype = dtype_of(name)
    first = specials(dtype)[-1]
    array = ArrayCase(name, (50, 60), elements=(first,), seed=5).numpy()
    assert array[0, 0].tobytes() == bits(first, dtype)
    found = {element.tobytes() for element in array.reshape(-1)}
    assert {bits(special, dtype) for special in specials(dtype)} <= found
    assert len(found) > (1 if name == "bool" else 100)
    again = ArrayCase(name, (50, 60), elements=(first,), seed=5).numpy()
    other = ArrayCase(name, (50, 60), elements=(first,), seed=6).numpy()
    assert array.tobytes() == again.tobytes() != other.tobytes()


PROMISES = {
    "contiguous": lambda a: a.flags.c_contiguous,
    "fortran": lambda a: a.flags.f_contiguous and not a.flags.c_contiguous,
    "transposed": lambda a: a.transpose(1, 2, 0).flags.c_contiguous,
    "sliced": lambda a: a.strides == tuple(a.itemsize * n for n in (160, 20, 2)),
    "offset": lambda a: a.strides == tuple(a.itemsize * n for n in (42, 7, 1)),
    "negative": lambda a: a[::-1, ::-1, ::-1].flags.c_contiguous,
    "broadcast": lambda a: a.strides[0] == 0 and a[0].flags.c_contiguous,
    "unaligned": lambda a: address(a) % a.itemsize and not a.flags.aligned,
    "swapped": lambda a: not a.dtype.isnative,
}


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _memory(framework: str, x: Any) -> Any:
    """Return the array's own memory as NumPy's array, before anything is converted."""
    if framework in {"dlpack", "array_api_strict"}:
        return np.from_dlpack(x)
    return view(x).array if framework == "torch" else np.asarray(x)


@pytest.mark.parametrize("framework", [name for name in HERE if name not in {"jax", "cupy", "mlx"}])
def test_every_layout_is_what_it_is_called(framework) -> None:
    assert PROMISES.keys() == LAYOUTS.keys()
    for _, name, _, layout in _described(framework):
        case = ArrayCase(name, (3, 4, 5), layout, framework)
        array = _memory(framework, case.build())
        assert array.shape == (3, 4, 5)
        assert PROMISES[layout](array), case
        assert array.flags.aligned == (layout != "unaligned"), case


@pytest.mark.parametrize("framework", [name for name in HERE if FRAMEWORKS[name].readonly])
def test_read_only_arrays_cannot_be_written(framework) -> None:
    for layout in ("contiguous", "sliced", "negative"):
        for readonly in (False, True):
            found = view(ArrayCase("int32", (3,), layout, framework, readonly).build())
            assert found.readonly is readonly


KINDS = {
    "numpy": "numpy.ndarray",
    "buffer": "builtins.memoryview",
    "dlpack": "arraycomm.testing._arrays.frameworks.DLPackOnly",
    "torch": "torch.Tensor",
    "jax": "jaxlib._jax.ArrayImpl",
    "array_api_strict": "array_api_strict._array_object.Array",
    "cupy": "cupy.ndarray",
    "mlx": "mlx.core.array",
}


def test_objects_with_dlpack_have_nothing_else() -> None:
    x = ArrayCase("float32", (2,), framework="dlpack").build()
    assert isinstance(x, DLPackOnly)
    assert not any(hasattr(x, name) for name in ("__array__", "__array_interface__", "shape"))
    with pytest.raises(TypeError):
        memoryview(x)


def test_every_build_is_an_array_of_its_own() -> None:
    case = ArrayCase("int64", (2,), elements=(1,))
    first = case.build()
    first[...] = 5
    assert case.build().tolist() == case.numpy().tolist() == [1, 1]


def test_jax_keeps_64_bits_in_every_thread() -> None:
    pytest.importorskip("jax")
    built: list[Any] = []
    case = ArrayCase("float64", (2,), framework="jax", elements=(1 / 3,))
    thread = threading.Thread(target=lambda: built.append(case.build()))
    thread.start()
    thread.join()
    assert np.asarray(built[0]).tobytes() == case.numpy().tobytes()


@FAST
@hypothesis.given(ranked.arrays(ranked.dtypes(movable=True)))
def test_what_is_printed_describes_the_same_array(case) -> None:
    names = {"ArrayCase": ArrayCase, "nan": math.nan, "inf": math.inf}
    again = eval(repr(case), names)
    assert repr(again) == repr(case) == hypothesis.vendor.pretty.pretty(case)
    assert again.numpy().tobytes() == case.numpy().tobytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("float33", ()), "'float33' is not the name of a dtype"),
        (("float32", (), "scattered"), "layout must be one of contiguous, .*; got 'scattered'"),
        (("float32", (), "contiguous", "tensorflow"), "framework must be one of numpy, .*"),
        (("float32", (2,), "negative", "torch"), "no array of torch of dtype float32 with"),
        (("float32", (2,), "unaligned", "dlpack"), "no array of dlpack"),
        (("uint8", (2,), "unaligned"), "no array of numpy of dtype uint8"),
        (("int8", (2,), "swapped"), "no array of numpy of dtype int8"),
        (("bfloat16", (2,), "contiguous", "array_api_strict"), "no array of array_api_strict"),
        (("float32", (2,), "contiguous", "torch", True), "torch have no read-only flag"),
    ],
)
def test_descriptions_of_what_does_not_exist_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        ArrayCase(*arguments)


def test_frameworks_are_imported_by_the_first_build_alone() -> None:
    script = """
import sys
from arraycomm.testing import strategies
from arraycomm.testing._arrays.frameworks import FRAMEWORKS
from arraycomm.testing._arrays.rank_values import set_rank_count
from arraycomm.testing.strategies import ArrayCase
import hypothesis
set_rank_count(2)
cases = []
@hypothesis.settings(max_examples=40, database=None, deadline=None, derandomize=True)
@hypothesis.given(strategies.rank_arrays())
def draw(drawn):
    cases.extend(drawn)
draw()
assert len({case.framework for case in cases}) >= 3
modules = [module for framework in FRAMEWORKS.values() for module in framework.modules]
assert not [module for module in modules if module in sys.modules], modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# One value for each rank ------------------------------------------------------------------------


def test_number_of_ranks_is_unknown_outside_of_examples() -> None:
    set_rank_count(None)
    with pytest.raises(RuntimeError, match=r"only while arraycomm\.testing\.given draws"):
        rank_count()


# The way to a rank ------------------------------------------------------------------------------


def trip(value: Any, rank: int = 0) -> Any:
    return load(dump(value), rank)


def _locked(array: Any) -> Any:
    array.flags.writeable = False
    return array


def _base() -> Any:
    return np.arange(1.0, 121.0).reshape(4, 5, 6)


ARRAYS = {
    "contiguous": _base(),
    "fortran": np.asfortranarray(_base()),
    "transposed": _base().transpose(2, 0, 1),
    "sliced": _base()[1:, ::3, ::2],
    "negative": _base()[::-1, 1:, ::-2],
    "broadcast": np.broadcast_to(np.arange(3.0)[:, None], (4, 3, 5)),
    "windows": np.lib.stride_tricks.sliding_window_view(np.arange(9), 3),
    "read-only": _locked(_base()),
    "unaligned": np.ndarray((3,), "f8", np.arange(33, dtype=np.uint8), 3),
    "0-d": _base()[1, 2, 3, ...],
    "empty": _base()[:, 2:2, ::-1],
    "swapped": _base().astype(">f4"),
    "bfloat16": _base().astype(dtype_of("bfloat16"))[::-1],
    "structured": np.array([(1, 2.5), (3, 4.5)], "i4,f8")[::-1],
    "text": np.array(["ä", "bcd"])[::-1],
    "dates": np.array(["2026-01-01", "NaT"], "datetime64[D]"),
    "NaN with a payload": np.array([0x7FC00123, 0xFF800456], np.uint32).view(np.float32),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_keep_strides_alignment_and_flags(kind) -> None:
    array = ARRAYS[kind]
    got = trip({"inside": [array]})["inside"][0]
    assert type(got) is np.ndarray
    assert (got.dtype, got.shape, got.strides) == (array.dtype, array.shape, array.strides)
    assert got.tobytes() == array.tobytes()
    assert got.flags.writeable == array.flags.writeable
    assert got.flags.aligned == array.flags.aligned
    assert not np.shares_memory(got, array)
    if array.size:
        assert address(got) % 64 == address(array) % 64


class Subclass(np.ndarray):
    pass


@pytest.mark.parametrize(
    "array", [np.zeros(3).view(Subclass), np.array([1, "a", None], object), np.zeros(2, "S0")]
)
def test_other_arrays_are_pickled_as_ever(array) -> None:
    got = trip(array)
    assert type(got) is type(array)
    assert got.dtype == array.dtype
    assert got.tolist() == array.tolist()


@dataclasses.dataclass(frozen=True)
class Holder:
    inside: Any


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda x: x, lambda x: x),
        (lambda x: [x], lambda x: x[0]),
        (lambda x: {"a": (1, x)}, lambda x: x["a"][1]),
        (lambda x: collections.OrderedDict(a=x), lambda x: x["a"]),
        (lambda x: Pair(None, x), lambda x: x.second),
        (lambda x: Layer(x, 0), lambda x: x.weight),
        (Holder, lambda x: x.inside),
        (lambda x: RankValues(0, [x]), lambda x: x[0]),
    ],
)
def test_descriptions_arrive_as_arrays_wherever_they_are(wrap, unwrap) -> None:
    case = ArrayCase("int16", (3, 4), "negative", elements=(1, 2))
    got = unwrap(trip(wrap(case), rank=1))
    assert type(got) is np.ndarray
    assert got.tobytes() == case.numpy().tobytes()
    assert got.strides == (-8, -2)


@pytest.mark.parametrize("framework", HERE)
def test_descriptions_become_and_arrive_as_arrays_of_their_framework(framework) -> None:
    case = ArrayCase("float32", (3,), framework=framework, elements=(1.0, math.nan))
    for array in (case.build(), trip(case)):
        kind = type(array)
        assert kind.__module__.partition(".")[0] == KINDS[framework].partition(".")[0]
        assert kind.__name__ == KINDS[framework].rpartition(".")[2]
        assert view(array).array.tobytes() == case.numpy().tobytes()


def test_one_object_stays_one_object() -> None:
    case, array = ArrayCase("int8", (2,)), np.arange(3)
    got = trip([case, case, array, array, RankValues(0, case), RankValues(1, (array, case))], 1)
    assert got[0] is got[1] is got[4] is got[5][1]
    assert got[2] is got[3] is got[5][0]
    same = ArrayCase("int8", (2,))
    first, second = trip([case, same])
    assert first is not second


_seen: list[Any] = []


def _arrive(name: str) -> str:
    _seen.append(name)
    return name


class Traveller:
    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return _arrive, (self.name,)


def test_each_rank_gets_its_own_value_and_makes_no_other() -> None:
    value = {"own": RankValues(*map(Traveller, "abc")), "all": Traveller("all")}
    data = dump(value)
    for rank, name in enumerate("abc"):
        _seen.clear()
        assert load(data, rank) == {"own": name, "all": "all"}
        assert sorted(_seen) == sorted([name, "all"])


def test_rank_values_inside_of_rank_values_are_chosen_from_too() -> None:
    value = RankValues(0, RankValues("a", "b"), [RankValues(1, 2, 3)][0])
    with pytest.raises(TypeError, match="2 values do not fit the number of ranks"):
        dump(value)
    with pytest.raises(ValueError, match="drawn for 2 ranks, and rank 2 gets none"):
        load(dump(RankValues(1, 2)), 2)
    nested = RankValues(0, RankValues("a", "b"))
    assert [trip(nested, rank) for rank in range(2)] == [0, "b"]


@pytest.mark.parametrize("value", [lambda: 1, threading.Lock(), (x for x in "a")])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: RankValues(0, x), lambda x: [x]])
def test_what_cannot_be_pickled_is_said_with_a_remedy(value, wrap) -> None:
    said = r"cannot be sent to the other ranks: .*; draw a description of it, and"
    with pytest.raises(TypeError, match=said):
        dump(wrap(value))


# Strategies of dtypes, ops, shapes, elements ----------------------------------------------------


def drawn(strategy: Any, settings: Any = LONG) -> list[Any]:
    """Return what the strategy draws."""
    found: list[Any] = []

    @settings
    @hypothesis.given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def test_all_dtypes_are_drawn() -> None:
    assert set(drawn(ranked.dtypes())) == set(NAMES)
    assert set(drawn(ranked.dtypes(movable=True))) == {*NAMES, *MOVABLE}
    assert minimal(ranked.dtypes()) == "float32"


def _is_defined(name: str, op: str) -> bool:
    try:
        check_reducible(dtype_of(name), op)
    except TypeError:
        return False
    return True


def test_all_reductions_are_drawn_and_no_others() -> None:
    found = set(drawn(ranked.reductions(), hypothesis.settings(LONG, max_examples=1000)))
    assert found == {(name, op) for name in NAMES for op in OPS if _is_defined(name, op)}
    for op in ("mean", "xor"):
        assert set(drawn(ranked.dtypes(op))) == {name for name in NAMES if _is_defined(name, op)}
    assert minimal(ranked.reductions()) == ("float32", "sum")
    assert set(drawn(ranked.ops())) == set(OPS)
    assert set(drawn(ranked.ops(np.bool_))) == {"min", "max", "and", "or", "xor"}


def test_dtypes_and_ops_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="op must be one of sum"):
        ranked.dtypes("median")
    with pytest.raises(InvalidArgument, match="S3 has no reductions"):
        ranked.ops("S3")


def test_shapes_of_every_kind_are_drawn() -> None:
    # What is drawn depends on the numbers in the library's code, which hypothesis tries too.
    found = drawn(ranked.shapes(), hypothesis.settings(LONG, max_examples=600))
    sizes = [math.prod(shape) for shape in found]
    assert {len(shape) for shape in found} == {0, 1, 2, 3, 4}
    assert any(size == 0 and shape[0] for size, shape in zip(sizes, found, strict=True))
    assert any(1 in shape for shape in found)
    assert {len(shape) for size, shape in zip(sizes, found, strict=True) if size > 5_000} == {1, 2}
    assert max(math.prod(shape) for shape in drawn(ranked.shapes(large=False))) <= 625


def test_shapes_shrink_to_small_ones() -> None:
    assert minimal(ranked.shapes()) == ()
    assert minimal(ranked.shapes(), lambda shape: len(shape) > 0) == (1,)
    assert minimal(ranked.shapes(), lambda shape: len(shape) == 2) == (1, 1)
    assert minimal(ranked.shapes(), lambda shape: math.prod(shape) > 2) == (3,)
    assert minimal(ranked.shapes(), lambda shape: math.prod(shape) > 4321) == (4322,)
    assert minimal(ranked.shapes(), lambda shape: 0 in shape) == (0,)


@pytest.mark.parametrize("name", [*SOME, "U2", "datetime64[s]", *MORE])
def test_all_special_elements_are_drawn_and_every_element_is_exact(name) -> None:
    dtype = dtype_of(name)
    settings = hypothesis.settings(
        FAST, suppress_health_check=list(hypothesis.HealthCheck), max_examples=40
    )
    found = {
        bits(element, dtype): element
        for some in drawn(st.lists(ranked.elements(name), min_size=10), settings)
        for element in some
    }
    missing = [x for x in specials(dtype) if bits(x, dtype) not in found]
    assert len(missing) <= len(specials(dtype)) // 4 if dtype.kind == "c" else not missing
    for pattern, element in found.items():
        there = np.frombuffer(pattern, dtype)[0].item()
        if dtype.kind in "biufcV" and dtype.names is None:
            assert there == element or (there != there and element != element)


def test_elements_shrink_to_zero() -> None:
    found = [
        repr(minimal(ranked.elements(name))) for name in ("int8", "float32", "bool", "complex64")
    ]
    assert found == ["0", "0.0", "False", "0j"]


# Strategies of arrays ---------------------------------------------------------------------------


def test_arrays_shrink_to_one_zero() -> None:
    zero = ArrayCase("float32", (), elements=(0.0,))
    assert minimal(ranked.arrays()) == zero
    movable = ranked.arrays(ranked.dtypes(movable=True))
    least = minimal(movable, lambda case: case.dtype not in {"float32", "U2", "S3"})
    assert least == ArrayCase("bool", (), elements=(False,))
    least = minimal(ranked.arrays("int8", [(5, 6)]))
    assert least == ArrayCase("int8", (5, 6), elements=(0,))
    least = minimal(ranked.arrays("float32", [(), 3]), lambda case: np.isnan(case.numpy()).any())
    assert repr(least) == "ArrayCase('float32', (), elements=(nan,))"
    for layout, shape in (("negative", (1,)), ("transposed", (1, 1))):
        least = minimal(ranked.arrays(), lambda case, layout=layout: case.layout == layout)
        assert least == ArrayCase("float32", shape, layout, elements=(0.0,))


def test_rank_arrays_shrink_rank_by_rank() -> None:
    zero = ArrayCase("float32", (), elements=(0.0,))
    assert minimal(ranked.rank_arrays()) == RankValues(zero, zero, zero)
    least = minimal(ranked.rank_arrays(), lambda values: values[1].framework != "numpy")
    assert least == RankValues(zero, dataclasses.replace(zero, framework=HERE[1]), zero)


def test_all_frameworks_large_arrays_and_flags_are_drawn() -> None:
    found = drawn(ranked.arrays())
    assert {case.framework for case in found} == set(HERE)
    assert {case.readonly for case in found} == {False, True}
    assert any(case.seed for case in found)
    assert any(math.prod(case.shape) > 1000 for case in found)
    assert all(LAYOUTS[case.layout].least_ndim <= len(case.shape) for case in found)


def test_ranks_differ_in_all_but_dtype_and_shape() -> None:
    found = drawn(ranked.rank_arrays())
    for values in found:
        assert len(values) == RANKS
        assert len({(case.dtype, case.shape) for case in values}) == 1
    for name in ("layout", "framework", "readonly", "elements"):
        assert any(len({getattr(case, name) for case in values}) == RANKS for values in found) or (
            name == "readonly" and any(len({case.readonly for case in v}) == 2 for v in found)
        )


@pytest.mark.parametrize(
    ("arguments", "check"),
    [
        ({"dtypes": np.float64}, lambda case: case.dtype == "float64"),
        ({"dtypes": ["int8", np.int16]}, lambda case: case.dtype in {"int8", "int16"}),
        ({"dtypes": ranked.dtypes("mean")}, lambda case: case.numpy().dtype.kind not in "biu"),
        ({"shapes": (2, 3)}, lambda case: case.shape == (2, 3)),
        ({"shapes": ()}, lambda case: case.shape == ()),
        ({"shapes": 4}, lambda case: case.shape == (4,)),
        ({"shapes": ((2, 3), (4,))}, lambda case: case.shape in {(2, 3), (4,)}),
        ({"shapes": st.integers(1, 3)}, lambda case: case.shape in {(1,), (2,), (3,)}),
        ({"layouts": "negative"}, lambda case: case.layout == "negative"),
        ({"layouts": ["sliced", "swapped"]}, lambda case: case.layout in {"sliced", "swapped"}),
        ({"layouts": st.just("unaligned")}, lambda case: case.layout == "unaligned"),
        ({"frameworks": st.just("buffer")}, lambda case: case.framework == "buffer"),
        ({"elements": [0, 1]}, lambda case: not case.seed and set(case.elements) <= {0, 1}),
        ({"elements": st.booleans()}, lambda case: set(case.elements) <= {False, True}),
        ({"readonly": True}, lambda case: case.readonly),
    ],
    ids=lambda x: "" if callable(x) else str(x),
)
def test_arguments_are_values_sequences_or_strategies(arguments, check) -> None:
    few = hypothesis.settings(FAST, max_examples=5)
    assert all(map(check, drawn(ranked.arrays(**arguments), few)))
    for values in drawn(ranked.rank_arrays(**arguments), few):
        assert all(map(check, values))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dtypes": "float33"}, ValueError, "not the name of a dtype"),
        ({"layouts": "scattered"}, ValueError, "layout must be one of"),
        ({"frameworks": ["numpy", "tf"]}, ValueError, "framework must be one of"),
        ({"shapes": []}, InvalidArgument, "nothing to choose from"),
        (
            {"dtypes": "bfloat16", "frameworks": "buffer"},
            InvalidArgument,
            "no framework to choose from has such arrays, in any of the dtypes bfloat16",
        ),
        (
            {"layouts": "negative", "frameworks": ["torch", "jax"]},
            InvalidArgument,
            "no framework to choose from",
        ),
        ({"readonly": True, "frameworks": "jax"}, InvalidArgument, "no framework to choose from"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_what_no_framework_has_is_refused(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        minimal(ranked.arrays(**arguments))


def test_jax_has_64_bits_where_it_is_configured(monkeypatch) -> None:
    wide = {"int64", "uint64", "float64", "complex128"}
    for enabled in (False, True):
        config = type("Config", (), {"jax_enable_x64": enabled})
        monkeypatch.setitem(sys.modules, "jax", type("Jax", (), {"config": config}))
        found = {name for name in NAMES if _frameworks.layouts_of("jax", dtype_of(name))}
        assert found == set(NAMES) - (set() if enabled else wide)
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setenv("JAX_ENABLE_X64", "True")
    assert _frameworks.layouts_of("jax", dtype_of("int64")) == ("contiguous",)
    monkeypatch.delenv("JAX_ENABLE_X64")
    assert _frameworks.layouts_of("jax", dtype_of("int64")) == ()


def test_layouts_are_those_of_framework_and_dtype() -> None:
    assert set(drawn(ranked.layouts())) == set(LAYOUTS)
    assert set(drawn(ranked.layouts("numpy", "int8"))) == set(LAYOUTS) - {"unaligned", "swapped"}
    assert set(drawn(ranked.layouts("jax"))) == {"contiguous"}
    assert "negative" not in drawn(ranked.layouts("torch"))
    assert minimal(ranked.layouts()) == "contiguous"
    with pytest.raises(InvalidArgument, match="buffer has no arrays of dtype bfloat16"):
        ranked.layouts("buffer", "bfloat16")


def test_frameworks_are_those_that_are_installed(monkeypatch) -> None:
    assert set(drawn(ranked.frameworks())) == set(HERE)
    assert minimal(ranked.frameworks()) == "numpy"
    _frameworks.installed_frameworks.cache_clear()
    monkeypatch.setattr(_frameworks, "find_spec", lambda _: None)
    try:
        assert _frameworks.installed_frameworks() == ("numpy", "buffer", "dlpack")
    finally:
        _frameworks.installed_frameworks.cache_clear()


@pytest.mark.parametrize(
    ("files", "visible", "there"),
    [
        ([], None, False),
        (["/dev/nvidiactl"], None, True),
        (["/dev/nvidiactl"], "0,1", True),
        (["/dev/nvidiactl"], "", False),
        (["/dev/nvidiactl"], "-1", False),
        (["/dev/kfd"], None, True),
    ],
)
def test_cupy_is_there_where_a_device_is(monkeypatch, files, visible, there) -> None:
    monkeypatch.setattr(_frameworks, "find_spec", lambda _: True)
    monkeypatch.setattr(_frameworks.os.path, "exists", files.__contains__)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ("cupy" in _frameworks.installed_frameworks.__wrapped__()) is there


# Strategies of ranks and trees ------------------------------------------------------------------


def test_each_rank_has_a_draw_of_its_own() -> None:
    found = drawn(ranked.per_rank(st.integers(0, 9)))
    assert all(len(values) == RANKS for values in found)
    assert any(len(set(values)) == RANKS for values in found)
    assert minimal(ranked.per_rank(st.integers()), lambda v: v[2] > 4) == RankValues(0, 0, 5)
    # Every rank is a root.
    assert set(drawn(ranked.roots())) == set(range(RANKS))
    assert minimal(ranked.roots()) == 0


def _nodes(tree: Any) -> Any:
    yield tree
    if isinstance(tree, dict):
        children = list(tree.values())
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, ArrayCase):
        children = [tree.weight, tree.bias]
    else:
        children = list(tree) if isinstance(tree, list | tuple) else []
    for child in children:
        yield from _nodes(child)


def test_trees_have_every_container_and_leaf() -> None:
    found = drawn(ranked.trees())
    nodes = [node for tree in found for node in _nodes(tree)]
    kinds = {type(node) for node in nodes}
    assert kinds == {
        *(list, tuple, dict, collections.OrderedDict, Pair, Layer),
        *(type(None), RankValues),
    }
    leaves = {type(node[0]) for node in nodes if isinstance(node, RankValues)}
    assert leaves == {int, float, ArrayCase}
    assert any(tree in ([], {}, ()) for tree in found if not isinstance(tree, RankValues))
    for tree in found[:50]:
        assert not any(isinstance(node, RankValues) for node in _nodes(trip(tree, 1)))


def test_trees_of_other_leaves_shrink_to_a_leaf() -> None:
    trees = ranked.trees(st.integers(), max_leaves=3)
    assert minimal(trees) == 0
    least = minimal(trees, lambda tree: isinstance(tree, Layer))
    assert least == Layer(0, 0)
    for tree in drawn(trees, FAST):
        assert sum(isinstance(node, int) for node in _nodes(tree)) <= 3
