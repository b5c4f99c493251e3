"""What a drawn value is: descriptions of arrays, one value for each rank, and their way to a rank.

A drawn array is described, not made: a description prints in one line, and every rank builds the
array anew from it, with the strides, alignment and flags that no pickle would keep.
"""

from __future__ import annotations

import ast
import io
import math
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, Protocol, TypeVar, overload

import ml_dtypes
import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._arrays.frameworks import torch_carriers
from arraycomm._arrays.results import allocate
from arraycomm._dtypes import BY_DTYPE, BY_NAME, DType, name_of

T_co = TypeVar("T_co", covariant=True)
Shape = tuple[int, ...]

# Dtypes -----------------------------------------------------------------------------------------

# Some of those that are moved and never reduced; the last is a structure.
MOVABLE: Final = ("datetime64[s]", "timedelta64[ms]", "S3", "U2", "i4,f8")


@lru_cache(maxsize=256)
def dtype_of(name: str) -> DType:
    """Return the dtype of this name, in native byte order."""
    if name in BY_NAME:
        return BY_NAME[name].dtype
    try:
        described: Any = ast.literal_eval(name) if name[:1] in {"[", "{"} else name
        dtype: DType = np.dtype(described).newbyteorder("=")
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"{name!r} is not the name of a dtype: {error}") from None
    return dtype


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype that is given in any way in which NumPy takes it."""
    if not isinstance(dtype, str):
        return name_of(np.dtype(dtype).newbyteorder("="))
    found = dtype_of(dtype)
    return name_of(found) if found in BY_DTYPE else dtype


def family(dtype: DType) -> str:
    """Return NumPy's letter for what the elements are, where the floats of ml_dtypes are floats."""
    return "f" if dtype.kind == "V" and dtype in BY_DTYPE else dtype.kind


def part_of(dtype: DType) -> DType:
    """Return the dtype of the real and the imaginary part."""
    return np.dtype(f"f{dtype.itemsize // 2}")


def field_dtypes(dtype: DType) -> list[DType]:
    """Return the dtypes of a structure's fields; of a field that is an array, its elements'."""
    return [dtype[name].base for name in dtype.names or ()]


# Elements ---------------------------------------------------------------------------------------

_INT64: Final[DType] = np.dtype(np.int64)


@lru_cache(maxsize=256)
def specials(dtype: DType) -> tuple[Any, ...]:
    """Return the elements that go wrong first, as Python values, the simplest of them first."""
    return _SPECIALS[family(dtype)](dtype)


def _special_integers(dtype: DType) -> tuple[Any, ...]:
    limits = np.iinfo(dtype)
    return tuple(dict.fromkeys((0, 1, max(-1, limits.min), int(limits.max), int(limits.min))))


def _special_floats(dtype: DType) -> tuple[Any, ...]:
    limits: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    largest, step = float(limits.max), float(limits.eps)
    normal, subnormal = float(limits.smallest_normal), float(limits.smallest_subnormal)
    wanted = (1 + step, 1 - step / 2, normal, subnormal, largest, math.inf)
    found = [0.0, -0.0, 1.0, -1.0, math.nan]
    for value in wanted:
        # e4m3fn has no infinity.
        if round_to(value, dtype) == value:
            found += [value, -value]
    return tuple(found)


def _special_complex(dtype: DType) -> tuple[Any, ...]:
    parts = _special_floats(part_of(dtype))
    return (
        *(complex(part, 0.0) for part in parts),
        *(complex(parts[-number], part) for number, part in enumerate(parts)),
    )


def _special_records(dtype: DType) -> tuple[Any, ...]:
    if dtype.names is None:
        return (b"\0" * dtype.itemsize, b"\xff" * dtype.itemsize)
    columns = [specials(field) for field in field_dtypes(dtype)]
    return tuple(
        tuple(column[row % len(column)] for column in columns)
        for row in range(max(map(len, columns), default=0))
    )


_SPECIALS: Final[dict[str, Callable[[DType], tuple[Any, ...]]]] = {
    "b": lambda _: (False, True),
    "i": _special_integers,
    "u": _special_integers,
    "f": _special_floats,
    "c": _special_complex,
    "m": lambda _: _special_integers(_INT64),  # the least is NaT
    "M": lambda _: _special_integers(_INT64),
    "S": lambda dtype: (b"", b"a", b"\xff" * dtype.itemsize),
    "U": lambda dtype: ("", "a", "\U0010ffff" * (dtype.itemsize // 4)),
    "V": _special_records,
}


def round_to(value: float, dtype: DType) -> float:
    """Return the number of this floating dtype that is nearest."""
    if math.isnan(value):
        return math.nan  # without the payload and the sign, which no repr shows
    with np.errstate(all="ignore"):
        return float(np.asarray(value).astype(dtype))


def _as_array(elements: Sequence[Any], dtype: DType) -> Array:
    if dtype.kind in "mM":
        return np.array(list(elements), _INT64).view(dtype)
    with np.errstate(all="ignore"):
        return np.array(list(elements), dtype)  # of a structure, tuples are elements


def _filled(dtype: DType, shape: Shape, elements: tuple[Any, ...], seed: int) -> Array:
    """Return an array that begins with the elements, and goes on with them or at random."""
    count = math.prod(shape)
    if not count or not (elements or seed):
        return np.zeros(shape, dtype)
    first = _as_array(elements[:count], dtype)
    if not seed:
        return np.resize(first, shape)
    array = _random(dtype, count, np.random.default_rng(seed))
    array[: len(first)] = first
    return array.reshape(shape)


def _random(dtype: DType, count: int, rng: np.random.Generator) -> Array:
    """Return elements of the whole range, a quarter of them special."""
    if dtype.names is not None:
        return _random_records(dtype, count, rng)
    array = _RANDOM[family(dtype)](dtype, count, rng)
    special = _as_array(specials(dtype), dtype)
    chosen = rng.random(count) < 0.25
    array[chosen] = special[rng.integers(0, len(special), int(chosen.sum()))]
    return array


def _random_bits(dtype: DType, count: int, rng: np.random.Generator) -> Array:
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()


def _random_floats(dtype: DType, count: int, rng: np.random.Generator) -> Array:
    """Half of them of any exponent, half of magnitudes at which the order of a sum matters."""
    bits = _random_bits(dtype, count, rng)
    near = rng.standard_normal(count) * 10.0 ** rng.integers(-2, 3, count)
    with np.errstate(all="ignore"):
        chosen = np.isnan(bits) | (rng.random(count) < 0.5)
        bits[chosen] = near.astype(dtype)[chosen]
    return bits


def _random_records(dtype: DType, count: int, rng: np.random.Generator) -> Array:
    array = np.zeros(count, dtype)
    for name in dtype.names or ():
        field = array[name]
        field[...] = _random(dtype[name].base, field.size, rng).reshape(field.shape)
    return array


def _random_text(dtype: DType, count: int, rng: np.random.Generator) -> Array:
    width = dtype.itemsize // 4
    return rng.integers(0, 0x250, (count, width), np.uint32).view(dtype).reshape(count)


_RANDOM: Final[dict[str, Callable[[DType, int, np.random.Generator], Array]]] = {
    "b": lambda _, count, rng: rng.integers(0, 2, count).astype(bool),
    "i": _random_bits,
    "u": _random_bits,
    "f": _random_floats,
    "c": lambda dtype, count, rng: _random_floats(part_of(dtype), 2 * count, rng).view(dtype),
    "m": _random_bits,
    "M": _random_bits,
    "S": _random_bits,
    "U": _random_text,
    "V": _random_bits,
}

# Layouts ----------------------------------------------------------------------------------------


class Placement(NamedTuple):
    """Where in its memory an array lies, in bytes."""

    start: int
    strides: Shape


class _Layout(NamedTuple):
    place: Callable[[Shape, int], Placement]
    # With fewer dimensions it is the contiguous layout under another name.
    least_ndim: int = 0
    fits: Callable[[DType], bool] = lambda _: True


def _steps(lengths: Sequence[int], itemsize: int) -> Shape:
    """Return the strides of a C-contiguous array of these lengths."""
    steps = [itemsize]
    for length in reversed(lengths[1:]):
        steps.append(steps[-1] * max(length, 1))
    return tuple(reversed(steps[: len(lengths)]))


def _contiguous(shape: Shape, itemsize: int) -> Placement:
    return Placement(0, _steps(shape, itemsize))


def _fortran(shape: Shape, itemsize: int) -> Placement:
    return Placement(0, _steps(shape[::-1], itemsize)[::-1])


def _transposed(shape: Shape, itemsize: int) -> Placement:
    """The first axis is the last in memory."""
    steps = _steps(shape[1:] + shape[:1], itemsize)
    return Placement(0, steps[-1:] + steps[:-1])


def _sliced(shape: Shape, itemsize: int) -> Placement:
    larger = _steps([2 * length for length in shape], itemsize)
    return Placement(0, tuple(2 * step for step in larger))


def _offset(shape: Shape, itemsize: int) -> Placement:
    """A frame of one element is around it, one element before it where it has no axis."""
    larger = _steps([length + 2 for length in shape], itemsize)
    return Placement(sum(larger) or itemsize, larger)


def _negative(shape: Shape, itemsize: int) -> Placement:
    strides = tuple(-step for step in _steps(shape, itemsize))
    return Placement(-_reach(shape, strides)[0], strides)


def _broadcast(shape: Shape, itemsize: int) -> Placement:
    return Placement(0, (0,) * len(shape[:1]) + _steps(shape[1:], itemsize))


def _reach(shape: Shape, strides: Shape) -> tuple[int, int]:
    """Return the least and the greatest distance of an element from the first."""
    if 0 in shape:
        return 0, 0
    ends = [(length - 1) * step for length, step in zip(shape, strides, strict=True)]
    return sum(end for end in ends if end < 0), sum(end for end in ends if end > 0)


LAYOUTS: Final = {
    "contiguous": _Layout(_contiguous),
    "fortran": _Layout(_fortran, 2),
    "transposed": _Layout(_transposed, 2),
    "sliced": _Layout(_sliced, 1),
    "offset": _Layout(_offset),
    "negative": _Layout(_negative, 1),
    "broadcast": _Layout(_broadcast, 1),
    "unaligned": _Layout(
        lambda shape, itemsize: Placement(1, _steps(shape, itemsize)),
        fits=lambda dtype: dtype.alignment > 1,
    ),
    "swapped": _Layout(
        _contiguous, fits=lambda dtype: dtype.itemsize > 1 and dtype.newbyteorder() != dtype
    ),
}


def _laid_out(values: Array, dtype: DType, placement: Placement) -> Array:
    """Return a copy of the values at this place of new memory, whose gaps are no zeros."""
    start, strides = placement
    end = _reach(values.shape, strides)[1] + dtype.itemsize
    memory = allocate((start + (end if values.size else 0),), np.dtype(np.uint8))
    memory[...] = 0xA5
    array: Array = np.ndarray(values.shape, dtype, memory, start, strides)
    array[...] = values
    return array


# Frameworks -------------------------------------------------------------------------------------


class _Framework(NamedTuple):
    """What there is of a framework's arrays, and how one is made of NumPy's.

    `build` gets new memory laid out as wanted, and takes it over or copies it.
    """

    modules: tuple[str, ...]
    build: Callable[[Array], Any]
    has: Callable[[DType], bool]
    layouts: tuple[str, ...]
    readonly: bool = False


class DLPackOnly:
    """An array of which nothing but DLPack is to be seen."""

    __slots__ = ("_array",)

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> object:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def _build_torch(array: Array) -> Any:
    import torch

    for dtype, (carrier, narrow) in torch_carriers().items():
        if array.dtype == narrow:
            return torch.from_numpy(array.view(f"i{carrier.itemsize}")).view(dtype)
    return torch.from_numpy(array)


def _build_jax(array: Array) -> Any:
    import jax

    if not _has_64_bits(array.dtype):
        return jax.numpy.array(array)
    # Its configuration is one of each thread, and the thread that drew is another.
    with jax.enable_x64(True):
        return jax.numpy.array(array)


def _build_strict(array: Array) -> Any:
    import array_api_strict

    return array_api_strict.asarray(array, copy=False)


def _build_cupy(array: Array) -> Any:
    import cupy

    memory: Any = array.base
    start = address_of(array) - address_of(memory)
    there = cupy.asarray(memory)
    return cupy.ndarray(array.shape, array.dtype, there.data + start, array.strides)


def _build_mlx(array: Array) -> Any:
    import mlx.core as mx

    name = name_of(array.dtype)
    dtype = getattr(mx, "bool_" if name == "bool" else name)
    if not array.size:
        return mx.zeros(array.shape, dtype)  # MLX forgets the lengths of an empty array of NumPy's
    if name == "bfloat16":
        return mx.array(array.view(np.uint16)).view(dtype)
    return mx.array(array)


_NARROW: Final = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # which only ml_dtypes has


def _in_buffers(dtype: DType) -> bool:
    """Tell whether the buffer protocol has a format for this dtype that NumPy reads back."""
    if dtype.names is not None:
        return all(map(_in_buffers, field_dtypes(dtype)))
    return dtype.kind in "biufcSU" and name_of(dtype) not in _NARROW


def _named(*missing: str) -> Callable[[DType], bool]:
    return lambda dtype: dtype in BY_DTYPE and name_of(dtype) not in missing


def _has_64_bits(dtype: DType) -> bool:
    return dtype.itemsize == (16 if dtype.kind == "c" else 8)


_STRIDED: Final = ("contiguous", "fortran", "transposed", "sliced", "offset", "broadcast")
_SIGNED: Final = (*_STRIDED, "negative")

# Those with the most dtypes first: so their places among those that have a dtype seldom change
# while Hypothesis makes an example simpler.
FRAMEWORKS: Final = {
    "numpy": _Framework(
        (), lambda array: array, lambda _: True, (*_SIGNED, "unaligned", "swapped"), True
    ),
    "torch": _Framework(("torch",), _build_torch, _named(), _STRIDED),
    "jax": _Framework(("jax", "jaxlib"), _build_jax, _named(), ("contiguous",)),
    "mlx": _Framework(
        ("mlx",),
        _build_mlx,
        _named("float8_e4m3fn", "float8_e5m2", "float64", "complex128"),
        ("contiguous",),
    ),
    "buffer": _Framework(
        (), lambda array: memoryview(array.data), _in_buffers, (*_SIGNED, "unaligned"), True
    ),
    # Older versions of NumPy export nothing read-only.
    "dlpack": _Framework(
        (), DLPackOnly, _named(*_NARROW), _SIGNED, np.lib.NumpyVersion(np.__version__) >= "2.1.0"
    ),
    "array_api_strict": _Framework(
        ("array_api_strict",), _build_strict, _named(*_NARROW, "float16"), _SIGNED
    ),
    "cupy": _Framework(("cupy",), _build_cupy, _named(*_NARROW), _SIGNED),
}


@cache
def installed_frameworks() -> tuple[str, ...]:
    """Return the frameworks whose arrays can be built here, found without importing any."""
    return tuple(name for name, framework in FRAMEWORKS.items() if _is_here(name, framework))


def _is_here(name: str, framework: _Framework) -> bool:
    return all(map(find_spec, framework.modules)) and (name != "cupy" or _device_is_here())


def _device_is_here() -> bool:
    """Tell by the drivers' files: asking a driver would be the end of forking for this process."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}
    return not hidden and any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))


def layouts_of(framework: str, dtype: DType) -> tuple[str, ...]:
    """Return the layouts in which a framework can have arrays of a dtype; none if it lacks it.

    JAX has dtypes of 64 bits only where its configuration says so.
    """
    if framework == "jax" and _has_64_bits(dtype) and not _jax_has_64_bits():
        return ()
    return _layouts_of(framework, dtype)


@lru_cache(maxsize=1024)
def _layouts_of(framework: str, dtype: DType) -> tuple[str, ...]:
    described = FRAMEWORKS[framework]
    if not described.has(dtype):
        return ()
    return tuple(
        name for name, layout in LAYOUTS.items() if name in described.layouts and layout.fits(dtype)
    )


def _jax_has_64_bits() -> bool:
    config: Any = getattr(sys.modules.get("jax"), "config", None)
    if config is not None:
        return bool(config.jax_enable_x64)
    return os.environ.get("JAX_ENABLE_X64", "").lower() in {"1", "true", "t", "yes", "y", "on"}


# Descriptions of arrays -------------------------------------------------------------------------


class _Printer(Protocol):
    def text(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True, repr=False)
class ArrayCase:
    """An array as it is drawn: a description, from which each rank builds the array.

    Attributes
    ----------
    dtype : str
        The dtype's name; of a structure, what `numpy.dtype` takes for it.
    shape : tuple of int
        Lengths of the dimensions.
    layout : str
        How the elements lie in memory: "contiguous", "fortran", "transposed" (the first axis is the
        last in memory), "sliced" (every other element of a larger array on each axis), "offset" (an
        inner window of a larger array), "negative" (every stride is), "broadcast" (the first axis
        has stride 0, so the elements are constant along it), "unaligned" (the address is no
        multiple of the itemsize), "swapped" (the other byte order).
    framework : str
        Whose array is built: "numpy", "torch", "jax", "array_api_strict", "cupy", "mlx", "buffer"
        (a `memoryview`), "dlpack" (an object with DLPack and nothing else).
    readonly : bool
        The array cannot be written. JAX's never can, and say nothing of it.
    elements : tuple
        The first elements in C order, repeated to the end: Python numbers, strings, bytes; integers
        for dates; tuples for structures. None are zeros.
    seed : int
        Where it is not 0, elements after the first are random numbers of this seed.

    Examples
    --------
    >>> from arraycomm.testing.strategies import ArrayCase
    >>> case = ArrayCase("float32", (2, 3), layout="transposed", elements=(1.0, 2.0))
    >>> case.build()
    array([[1., 2., 1.],
           [2., 1., 2.]], dtype=float32)
    >>> case.build().strides
    (4, 8)
    """

    dtype: str
    shape: Shape
    layout: str = "contiguous"
    framework: str = "numpy"
    readonly: bool = False
    elements: tuple[Any, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        check_among(self.framework, FRAMEWORKS, "framework")
        check_among(self.layout, LAYOUTS, "layout")
        if self.layout not in _layouts_of(self.framework, dtype_of(self.dtype)):
            raise ValueError(
                f"there is no array of {self.framework} of dtype {self.dtype} with the layout "
                f"{self.layout!r}"
            )
        if self.readonly and not FRAMEWORKS[self.framework].readonly:
            raise ValueError(f"arrays of {self.framework} have no read-only flag")

    def numpy(self) -> Array:
        """Return the elements as a new NumPy array, C-contiguous and in native byte order."""
        dtype = dtype_of(self.dtype)
        if self.layout != "broadcast":
            return _filled(dtype, self.shape, self.elements, self.seed)
        row = (1,) * len(self.shape[:1]) + self.shape[1:]
        return np.broadcast_to(_filled(dtype, row, self.elements, self.seed), self.shape).copy()

    def build(self) -> Any:
        """Return a new array of the framework in this layout, with the elements of `numpy()`."""
        values = self.numpy()
        dtype = values.dtype.newbyteorder() if self.layout == "swapped" else values.dtype
        placement = LAYOUTS[self.layout].place(self.shape, dtype.itemsize)
        array = _laid_out(values, dtype, placement)
        array.flags.writeable = not self.readonly
        return FRAMEWORKS[self.framework].build(array)

    def __repr__(self) -> str:
        said = [repr(self.dtype), repr(self.shape)]
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                said.append(f"{field.name}={_literal(value)}")
        return f"ArrayCase({', '.join(said)})"

    def _repr_pretty_(self, printer: _Printer, _cycle: bool) -> None:
        # Hypothesis would show every field of a dataclass.
        printer.text(repr(self))


def check_among(name: str, table: dict[str, Any], kind: str) -> None:
    """Raise `ValueError` unless the name is one of the table's."""
    if name not in table:
        raise ValueError(f"{kind} must be one of {', '.join(table)}; got {name!r}")


def _literal(value: Any) -> str:
    if type(value) is tuple:
        items = [_literal(item) for item in value]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if type(value) is complex:
        return f"complex({value.real!r}, {value.imag!r})"  # 'a+bj' loses signs of zeros
    return repr(value)


# One value for each rank ------------------------------------------------------------------------


class RankValues(Sequence[T_co]):
    """One value for each rank, in the order of ranks.

    Each rank that a test runs on gets its own of these values, never the object itself.
    """

    __slots__ = ("values",)

    def __init__(self, *values: T_co) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T_co, ...]: ...
    def __getitem__(self, index: int | slice) -> T_co | tuple[T_co, ...]:
        return self.values[index]

    def __iter__(self) -> Iterator[T_co]:
        return iter(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankValues) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)

    def __repr__(self) -> str:
        return f"RankValues({', '.join(map(repr, self.values))})"


class _Drawing(threading.local):
    ranks: int | None = None


_drawing: Final = _Drawing()


def set_rank_count(count: int | None) -> None:
    """Say how many ranks the example has that this thread is drawing; None after the last."""
    _drawing.ranks = count


def rank_count() -> int:
    """Return how many ranks the example has that this thread is drawing.

    Raises
    ------
    RuntimeError
        Where no such example is being drawn.
    """
    if _drawing.ranks is None:
        raise RuntimeError(
            "how many ranks there are is known only while arraycomm.testing.given draws an "
            "example; use per_rank, rank_arrays, roots and trees in the arguments of its decorator"
        )
    return _drawing.ranks


# Containers -------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A named tuple as drawn trees have it."""

    first: Any
    second: Any


@dataclass
class Layer:
    """A dataclass as drawn trees have it."""

    weight: Any
    bias: Any


# The way to a rank ------------------------------------------------------------------------------


def dump(value: Any) -> bytes:
    """Return a drawn value as it travels to all ranks, of which each takes what is its own.

    Raises `TypeError` for what cannot be pickled, and for values of different numbers of ranks.
    """
    first, counts = _dump_for(0, value)
    parts = [first, *(_dump_for(rank, value)[0] for rank in range(1, max(counts, default=1)))]
    return pickle.dumps(parts, pickle.HIGHEST_PROTOCOL)


def load(data: bytes, rank: int) -> Any:
    """Return a value as it arrives on this rank: descriptions of arrays are built.

    Of one value for each rank nothing but this rank's is unpickled or built.
    """
    parts = pickle.loads(data)
    if len(parts) > 1 and rank >= len(parts):
        raise ValueError(f"the value was drawn for {len(parts)} ranks, and rank {rank} gets none")
    return pickle.loads(parts[rank if len(parts) > 1 else 0])


def _dump_for(rank: int, value: Any) -> tuple[bytes, set[int]]:
    stream = io.BytesIO()
    pickler = _Pickler(stream, rank)
    try:
        pickler.dump(value)
    except MemoryError:
        raise
    except Exception as error:  # of any class: pickling calls what every type brings along
        raise TypeError(
            f"{type(value).__name__} cannot be sent to the other ranks: {error}; draw a "
            "description of it, and build it in the test"
        ) from error
    return stream.getvalue(), pickler.counts


class _Pickler(pickle.Pickler):
    """Writes what one rank is to get; its memo keeps one object one object."""

    def __init__(self, stream: io.BytesIO, rank: int) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._rank = rank
        # The numbers of ranks for which values were found.
        self.counts: set[int] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ArrayCase):
            return _built, astuple(obj)
        if isinstance(obj, RankValues):
            return _same, (self._own(obj),)
        if type(obj) is np.ndarray and obj.dtype.itemsize and not obj.dtype.hasobject:
            return _restored, _described(obj)
        return NotImplemented

    def _own(self, values: RankValues[Any]) -> Any:
        self.counts.add(len(values))
        if len(self.counts) > 1 or self._rank >= len(values):
            raise ValueError(f"{len(values)} values do not fit the number of ranks")
        return values[self._rank]


def _built(*description: Any) -> Any:
    return ArrayCase(*description).build()


def _same(value: Any) -> Any:
    return value


def address_of(array: Array) -> int:
    """Return the address of an array's first element."""
    return int(array.__array_interface__["data"][0])


_ALIGNMENT: Final = 64  # what `allocate` aligns to


def _described(array: Array) -> tuple[Any, ...]:
    """Return what `_restored` needs; along strides of 0, the elements are taken once."""
    once = array[(*(slice(0, 1) if not step else slice(None) for step in array.strides), ...)]
    place = Placement(address_of(array) % _ALIGNMENT, array.strides)
    return array.dtype, array.shape, place, array.flags.writeable, once.shape, once.tobytes()


def _restored(
    dtype: DType, shape: Shape, place: Placement, writeable: bool, once: Shape, data: bytes
) -> Array:
    before = -_reach(shape, place.strides)[0]
    start = before + (place.start - before) % _ALIGNMENT
    values: Array = np.broadcast_to(np.ndarray(once, dtype, data), shape)
    array = _laid_out(values, dtype, Placement(start, place.strides))
    array.flags.writeable = writeable
    return array
