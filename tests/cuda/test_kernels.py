"""The kernels for devices, compiled for the host: no device is needed, and none is tested here.

One thread of the grid runs after another. How a compiler for devices treats the arithmetic is read
from what it makes of the same source.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from arraycomm import _folds
from arraycomm._arrays.device_memory import DeviceBuffer
from arraycomm._cuda import kernels
from arraycomm._cuda.kernels import CHUNK_BYTES, MAX_PIECES, MAX_ROWS, Kernels, Shown
from tests.support import nvrtc
from tests.support.guarded import GUARD, check_guard, guarded, placed, values
from tests.support.oracle import CASES, COMPLEX, DTYPES, FLOAT, NARROW, OPS, family, same_result

Array = np.ndarray[Any, Any]


# Sizes and limits stand in both languages; the table of a launch has to fit in what CUDA passes by value.
_SAME = f"""
static_assert(sizeof(Rows) == {kernels.ROWS_BYTES} && sizeof(Rows) <= 4096, "");
static_assert(sizeof(Spoiled) == {ctypes.sizeof(kernels.Spoiled)}, "");
static_assert(sizeof(Few) == {ctypes.sizeof(kernels.Few)} && FEW_ROWS == {kernels.FEW_ROWS}, "");
static_assert(sizeof(Pieces) == {kernels.PIECES.itemsize} && sizeof(Pieces) <= 4096, "");
static_assert(MAX_ROWS == {MAX_ROWS} && MAX_PIECES == {MAX_PIECES}, "");
static_assert(CHUNK_BYTES == {CHUNK_BYTES}, "");
"""
_HOST = r"""
template <class Argument>
void run(void (*body)(const Argument &), unsigned blocks, unsigned threads, const Argument &argument) {
    gridDim.x = blocks, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) body(argument);
}

#define REDUCTION(OP, DTYPE)                                                                        \
    extern "C" void fold_##OP##_##DTYPE(unsigned blocks, unsigned threads, const Rows *call) {      \
        run(reduce_rows<dtype_##DTYPE, op_##OP<dtype_##DTYPE>, false>, blocks, threads, *call);     \
    }                                                                                               \
    extern "C" void prefixes_##OP##_##DTYPE(unsigned blocks, unsigned threads, const Rows *call) {  \
        run(reduce_rows<dtype_##DTYPE, op_##OP<dtype_##DTYPE>, true>, blocks, threads, *call);      \
    }                                                                                               \
    extern "C" void fold_few_##OP##_##DTYPE(unsigned blocks, unsigned threads, const Few *call) {   \
        run(fold_few_rows<dtype_##DTYPE, op_##OP<dtype_##DTYPE>>, blocks, threads, *call);          \
    }
#define CONVERSIONS(DTYPE)                                                                          \
    extern "C" void widen_##DTYPE(const dtype_##DTYPE::Element *from, float *to, Size count) {      \
        for (Size i = 0; i < count; ++i) to[i] = dtype_##DTYPE::widen(from[i]);                     \
    }                                                                                               \
    extern "C" void narrow_##DTYPE(const float *from, dtype_##DTYPE::Element *to, Size count) {     \
        for (Size i = 0; i < count; ++i) to[i] = dtype_##DTYPE::narrow(from[i]);                    \
    }
extern "C" void copy_pieces_here(unsigned blocks, unsigned threads, const Pieces *call) {
    run(copy_chunk, blocks, threads, *call);
}
extern "C" void spoil_here(unsigned blocks, unsigned threads, const Spoiled *call) {
    run(spoil_result, blocks, threads, *call);
}
"""


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Every reduction, as functions of a library of the host."""
    compiler = shutil.which("g++") or pytest.skip("needs g++, to compile the kernels for the host")
    folder = tmp_path_factory.mktemp("kernels")
    source, library = folder / "host.cpp", folder / "host.so"
    lines = [f'#include "{kernels.SOURCE}"', _SAME, _HOST]
    lines += [f"REDUCTION({op}, {dtype.name})" for dtype, op in CASES]
    lines += [f"CONVERSIONS({dtype.name})" for dtype in NARROW]
    source.write_text("\n".join(lines))
    # Optimization takes longer here than the tests do.
    options = ["-std=c++17", "-O0", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


class HostKernels(Kernels):
    """Launches on the host, with as many blocks and threads as are given, or as on a device."""

    def __init__(self, host: ctypes.CDLL, blocks: int | None = None, threads: int = 256) -> None:
        super().__init__(0, self._on_host)
        self._host = host
        self._blocks = blocks
        self._threads = threads
        self.launches = 0

    def _on_host(self, nbytes: int) -> DeviceBuffer:
        memory = np.full(nbytes, GUARD, np.uint8)
        return DeviceBuffer(memory.ctypes.data, nbytes, memory.dtype, memory, memory=None)

    def _launch(
        self,
        kernel: str,
        definitions: tuple[str, ...],
        blocks: int,
        argument: int,
        nbytes: int,
        stream: int,
    ) -> None:
        self.launches += 1
        name = f"{kernel}_here"
        if definitions:
            op, dtype = (re.sub(r"^-D\w+=(op|dtype)_", "", one) for one in definitions)
            name = f"{kernel}_{op}_{dtype}"
        self._host[name](self._blocks or blocks, self._threads, ctypes.c_void_p(argument))


@pytest.fixture
def launcher(host: ctypes.CDLL) -> HostKernels:
    return HostKernels(host)


def _addresses(arrays: Sequence[Array]) -> list[int]:
    return [array.ctypes.data for array in arrays]


def _check(
    launcher: HostKernels, kernel: str, dtype, op, rows: Sequence[Array], offset: int = 0
) -> None:
    count, prefixes = len(rows[0]), [np.empty(len(rows[0]), dtype) for _ in rows]
    _folds.prefixes(op, dtype, rows, prefixes)
    wanted = prefixes[-1:] if kernel == "fold" else prefixes
    outs = [guarded(count, dtype, offset) for _ in wanted]
    into = _addresses([out for out, _ in outs])
    launcher.reduce(kernel, op, dtype, _addresses(rows), into, count, 0)
    for (out, whole), want in zip(outs, wanted, strict=True):
        assert same_result(out.copy(), want, op)
        check_guard(out, whole)


_KERNELS = pytest.mark.parametrize("kernel", ["fold", "prefixes"])
_EACH = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# What is carried from one launch to the next in more bits than it has.
_CARRIED = [
    (dtype, op)
    for dtype, op in CASES
    if op in ("sum", "mean", "prod") and dtype.name not in ("int8", "int32", "int64", "uint64")
]


def _rows(dtype, count: int, rows: int, step: int = 0) -> list[Array]:
    return [placed(values(dtype, count, k), k * step) for k in range(rows)]


@_KERNELS
@_EACH
def test_kernels_do_what_the_folds_of_the_host_do(launcher, dtype, kernel) -> None:
    """Also where memory is aligned to elements only."""
    for op in OPS[family(dtype)]:
        for count, rows in [(0, 3), (1, 4), (1000, 70), (7, 1), (7, 2), (7, 5)]:
            _check(launcher, kernel, dtype, op, _rows(dtype, count, rows))
        _check(launcher, kernel, dtype, op, _rows(dtype, 100, 3, dtype.alignment), dtype.alignment)


@_KERNELS
@pytest.mark.parametrize(("dtype", "op"), _CARRIED, ids=str)
def test_more_rows_than_one_launch_takes_are_rounded_once(launcher, dtype, op, kernel) -> None:
    _check(launcher, kernel, dtype, op, _rows(dtype, 37, 2 * MAX_ROWS + 3))
    assert launcher.launches == 3


@_EACH
def test_the_fold_may_replace_the_first_row(host, dtype) -> None:
    # Few threads, each of which has several shares: one that was taken twice would show here.
    few = HostKernels(host, blocks=3, threads=2)
    ops = OPS[family(dtype)]
    for op, many in [*((op, 3) for op in ops), (ops[0], MAX_ROWS + 2)]:
        rows = _rows(dtype, 100, many)
        wanted, before = np.empty(100, dtype), [row.tobytes() for row in rows[1:]]
        _folds.fold(op, dtype, [row.copy() for row in rows], wanted)
        few.reduce("fold", op, dtype, _addresses(rows), [rows[0].ctypes.data], 100, 0)
        assert same_result(rows[0].copy(), wanted, op), op
        assert [row.tobytes() for row in rows[1:]] == before, op


@pytest.mark.parametrize(
    ("op", "wanted"), [("and", 1), ("or", 1), ("xor", 0), ("min", 1), ("max", 1)]
)
def test_any_byte_but_zero_is_true(launcher, op, wanted) -> None:
    rows = [np.full(20, byte, np.uint8) for byte in (2, 4)]
    out = np.full(20, GUARD, np.uint8)
    launcher.reduce("fold", op, np.dtype(bool), _addresses(rows), [out.ctypes.data], 20, 0)
    assert (out == wanted).all()


def test_misaligned_elements_are_refused(launcher) -> None:
    row = placed(np.zeros(2, np.float32), 1)
    with pytest.raises(ValueError, match="aligned to 4 bytes"):
        launcher.reduce("fold", "sum", row.dtype, [row.ctypes.data], [row.ctypes.data], 2, 0)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_narrow_float_is_widened_as_ml_dtypes_does_it(host, dtype) -> None:
    count = 1 << (8 * dtype.itemsize)
    every = np.arange(count).astype(f"uint{8 * dtype.itemsize}").view(dtype)
    wide = np.empty(count, np.float32)
    host[f"widen_{dtype.name}"](*_pointers(every, wide), ctypes.c_int64(count))
    assert same_result(wide, every.astype(np.float32), "sum")


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_float32_is_rounded_as_ml_dtypes_does_it(host, dtype) -> None:
    """At every narrow float, halfway to the next, beside that, beyond them all, and anywhere."""
    every = np.arange(1 << (8 * dtype.itemsize)).astype(f"uint{8 * dtype.itemsize}").view(dtype)
    wide = every.astype(np.float32)
    finite = np.unique(wide[np.isfinite(wide)].astype(float))
    beyond = 2 * finite[-1] - finite[-2]
    middle = ((finite + np.append(finite[1:], beyond)) / 2).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(end)) for end in (-np.inf, np.inf)]
    rng = np.random.default_rng(0)
    anywhere = rng.integers(0, 1 << 32, 500_000, np.uint32).view(np.float32)
    values = np.concatenate([wide, middle, -middle, *beside, anywhere])
    narrow = np.empty(len(values), dtype)
    host[f"narrow_{dtype.name}"](*_pointers(values, narrow), ctypes.c_int64(len(values)))
    with np.errstate(all="ignore"):
        assert same_result(narrow, values.astype(dtype), "sum")


def _pointers(*arrays: Array) -> Iterator[ctypes.c_void_p]:
    return (ctypes.c_void_p(array.ctypes.data) for array in arrays)


def _piece(nbytes: int, offset: int) -> Array:
    return placed(np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8), offset)


@pytest.mark.parametrize("offset", [0, 1, 4, 12])
def test_pieces_are_gathered_where_they_belong(launcher, offset) -> None:
    sizes = [0, 1, 16, 5, CHUNK_BYTES, 3, CHUNK_BYTES + 1, 0, 3 * CHUNK_BYTES, 100]
    sources = [_piece(size, offset * (place % 2)) for place, size in enumerate(sizes)]
    target, whole = guarded(sum(sizes) + 8 * len(sizes), np.dtype(np.uint8), offset)
    wanted, pieces, end = target.copy(), [], 0
    for place, source in enumerate(sources):
        zeros = place in (2, 6)
        pieces.append((0 if zeros else source.ctypes.data, end, source.size))
        wanted[end : end + source.size] = 0 if zeros else source
        end += source.size + 8
    launcher.gather_pieces(pieces, target.ctypes.data, 0)
    assert np.array_equal(target, wanted)
    check_guard(target, whole)


def test_more_pieces_than_one_launch_takes_are_all_gathered(launcher) -> None:
    values = np.arange(2 * MAX_PIECES + 1, dtype=np.int64)
    addresses = [values[k:].ctypes.data for k in range(len(values))]
    target = np.zeros_like(values)
    pieces = [(address, 8 * k, 8) for k, address in enumerate(addresses)]
    launcher.gather_pieces(pieces, target.ctypes.data, 0)
    assert np.array_equal(target, values)
    assert launcher.launches == 3


@pytest.mark.parametrize("dtype", ["float16", "complex64", "float8_e5m2", "int16"])
@pytest.mark.parametrize("nbytes", [1, 12, CHUNK_BYTES * 9 + 3])
@pytest.mark.parametrize("differs", [False, True])
def test_results_are_spoilt_only_if_their_call_is_given_up_or_differs(
    launcher, nbytes, dtype, differs
) -> None:
    target, whole = guarded(nbytes, np.dtype(np.uint8), 1)
    given_up, before = np.zeros(1, np.uint32), target.copy()
    digests = np.full(3, 1 << 40 | 5, np.uint64)
    for shown in (Shown(), Shown(digests.ctypes.data, 3)):
        launcher.spoil(target.ctypes.data, nbytes, given_up.ctypes.data, shown, 0)
        assert np.array_equal(target, before)
    given_up[0], digests[2] = not differs, digests[2] ^ np.uint64(differs << 41)
    launcher.spoil(target.ctypes.data, nbytes, given_up.ctypes.data, shown, 0)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    found = target[: nbytes - nbytes % kind.itemsize].copy().view(kind)
    assert (target == 255).all()
    assert (found == -1).all() if kind.kind == "i" else np.isnan(found).all()
    check_guard(target, whole)


@pytest.mark.parametrize(("blocks", "threads"), [(1, 1), (3, 5), (4, 256)])
@pytest.mark.parametrize("digests", [[], [7, 7, 7], [7, 7, 8]], ids=str)
@pytest.mark.parametrize("given_up", [None, 0, 1])
def test_a_fold_of_few_rows_ends_its_call(host, given_up, digests, blocks, threads) -> None:
    """It spoils the result of one that is given up, or differs between ranks, and says that the device has come there."""
    dtype, rows = np.dtype(np.float16), _rows(np.dtype(np.float16), 100, 3)
    out, whole = guarded(100, dtype, 0)
    few, _ = kernels.few_of(dtype, _addresses(rows), out.ctypes.data, 100)
    words = np.array([given_up or 0, 5], np.uint32)
    if given_up is not None:
        few.given_up, few.word, few.number = words.ctypes.data, words.ctypes.data + 4, 7
    gathered = np.array(digests, np.uint64)
    few.shown = Shown(gathered.ctypes.data if digests else 0, len(digests))
    at, size, chosen = (
        ctypes.addressof(few),
        ctypes.sizeof(few),
        kernels.definitions_of("sum", dtype),
    )
    HostKernels(host, blocks, threads)._launch("fold_few", chosen, 1, at, size, 0)
    wanted = np.empty(100, dtype)
    _folds.fold("sum", dtype, rows, wanted)
    is_void = given_up or len(set(digests)) > 1
    assert np.isnan(out).all() if is_void else same_result(out.copy(), wanted, "sum")
    assert words[1] == (5 if given_up is None else 7)
    check_guard(out, whole)


def test_nothing_is_launched_for_nothing(launcher) -> None:
    launcher.gather_pieces([(0, 0, 0)], 0, 0)
    launcher.reduce("fold", "sum", np.dtype(np.float32), [0, 0], [0], 0, 0)
    assert launcher.launches == 0


# ---- what compilers for devices make of it ----------------------------------------------------


_FLOATING = re.compile(
    r"^\s*((?:add|sub|mul|div|fma|mad|abs|neg|min|max)\.\S*f(?:16|32|64))", re.MULTILINE
)
_IEEE = {f"{name}.rn.f{bits}" for name in ("add", "sub", "mul", "div") for bits in (32, 64)}


def _operations(ptx: str) -> set[str]:
    """The floating-point arithmetic in PTX."""
    return set(_FLOATING.findall(ptx))


_ALL = [(kernel, dtype, op) for kernel in ("fold", "prefixes", "few") for dtype, op in CASES]
# Those with arithmetic of floats, for a compiler that takes long.
_ROUNDING = [
    ("prefixes", dtype, op)
    for dtype, op in _CARRIED
    if dtype in (*NARROW, *FLOAT, *COMPLEX)
]  # fmt: skip


def _source_of(chosen: Sequence[tuple[str, Any, str]]) -> str:
    """The source with these kernels, under names of their own."""
    bodies = {
        "fold": ("Rows", "reduce_rows<{}, false>"),
        "prefixes": ("Rows", "reduce_rows<{}, true>"),
        "few": ("Few", "fold_few_rows<{}>"),
    }
    lines = [
        f"KERNEL void {kernel}_{op}_{dtype.name}(const {bodies[kernel][0]} call) {{ "
        + bodies[kernel][1].format(f"dtype_{dtype.name}, op_{op}<dtype_{dtype.name}>")
        + "(call); }"
        for kernel, dtype, op in chosen
    ]
    return "\n".join([kernels.SOURCE.read_text(encoding="utf-8"), *lines])


def _by_nvcc(source: str, architecture: int) -> str:
    command = ["nvcc", "--ptx", *kernels.OPTIONS, f"-arch=sm_{architecture}", "-x", "cu", "-"]
    done = subprocess.run(
        [*command, "-o", "/dev/stdout"], input=source, check=True, capture_output=True, text=True
    )
    return done.stdout


def _by_nvrtc(source: str, architecture: int) -> str:
    options = (*kernels.OPTIONS, f"--gpu-architecture=sm_{architecture}")
    return nvrtc.compile_to_ptx(source, options)


_NEEDS_NVCC = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
_NEEDS_NVRTC = pytest.mark.skipif(
    nvrtc.library() is None, reason="needs nvidia-cuda-nvrtc-cu12, for NVRTC"
)


@pytest.mark.parametrize(
    ("compile_to_ptx", "architecture", "chosen"),
    [
        pytest.param(_by_nvcc, 80, _ROUNDING, marks=[_NEEDS_NVCC, pytest.mark.at_night]),
        *(pytest.param(_by_nvrtc, number, _ALL, marks=_NEEDS_NVRTC) for number in (80, 90, 100)),
    ],
)
def test_compilers_fuse_flush_and_spill_nothing(compile_to_ptx, architecture, chosen) -> None:
    """On every architecture that arraycomm's users have, without a device or its driver."""
    ptx = compile_to_ptx(_source_of(chosen), architecture)
    assert f".target sm_{architecture}" in ptx
    assert ptx.count(".entry") == len(chosen) + 2
    assert _operations(ptx) == _IEEE
    assert ".ftz" not in ptx
    # Sixteen bytes of floats of any size are loaded at once.
    assert "ld.global.v4" in ptx
    # Tables of addresses that were copied to a thread's own memory would be slow.
    assert ".local" not in ptx


@pytest.mark.parametrize(("dtype", "op"), [("complex64", "prod"), ("bool", "or")])
def test_nvrtc_compiles_what_is_launched(dtype, op) -> None:
    pytest.importorskip("cupy", reason="needs CuPy, for NVRTC")
    if missing := kernels.missing():
        pytest.skip(missing)
    definitions = (f"-DOP=op_{op}", f"-DDTYPE=dtype_{dtype}")
    code = kernels.compiled(90, definitions)
    assert code.startswith(b"\x7fELF")
    for kernel in (b"fold", b"fold_few", b"prefixes"):
        assert b".text." + kernel in code
    assert b".text.copy_pieces" in kernels.compiled(90, ())
    assert _operations(kernels.compiled(999, definitions).decode()) <= _IEEE
