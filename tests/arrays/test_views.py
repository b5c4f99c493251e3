"""Arrays enter as they are: every framework, dtype and layout, and a clear no to the rest."""

from __future__ import annotations

import array as array_module
import ctypes
import mmap
import sys
import textwrap
from enum import IntEnum
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from arraycomm._arrays.results import commit_out, view_out
from arraycomm._arrays.views import view
from tests.support.frameworks import need, pointer, sample
from tests.support.launcher import run_python

LAYOUTS = {
    "contiguous": lambda a: a,
    "sliced": lambda a: a[:, 1:, ::2],
    "transposed": lambda a: a.transpose(2, 0, 1),
    "fortran": np.asfortranarray,
    "negative": lambda a: a[::-1, :, ::-1],
    "broadcast": lambda a: np.broadcast_to(a[:, :1], a.shape),
    "0-d": lambda a: a[1, 2, 3],
    "empty": lambda a: a[:, :0],
}


# What comes in ----------------------------------------------------------------------------------


def test_arrays_without_arithmetic_in_files_and_of_unaligned_fields_pass(tmp_path: Any) -> None:
    for dtype in ("M8[s]", "m8[us]", "S3", "U2", "i4,f8"):
        x = np.zeros(3, dtype)
        assert view(x).array is x
    x = np.memmap(tmp_path / "m", np.float32, "w+", shape=(4,))
    found = view(x)
    assert type(found.array) is np.ndarray
    assert pointer(found.array) == pointer(x)
    x = np.zeros(4, np.dtype([("a", "i1"), ("b", "f8")]))["b"]
    x[...] = range(4)
    assert view(x).array.tolist() == [0, 1, 2, 3]


class Level(IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        (True, "bool"),
        (-7, "int64"),
        (2.5, "float64"),
        (1 - 2j, "complex128"),
        (Level.HIGH, "int64"),
    ],
)
def test_python_numbers(number: Any, dtype: str) -> None:
    found = view(number)
    assert (found.framework, found.dtype, found.shape) == ("python", np.dtype(dtype), ())
    assert found.array.item() == number
    assert found.readonly


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**5000], ids=["max", "min", "huge"])
def test_large_python_integers_overflow(number: int) -> None:
    with pytest.raises(OverflowError, match=r"^x .* int64"):
        view(number)


def _mapped() -> mmap.mmap:
    mapped = mmap.mmap(-1, 3)
    mapped[:] = b"\1\2\3"
    return mapped


@pytest.mark.parametrize(
    ("buffer", "dtype", "readonly"),
    [
        (b"\1\2\3", "u1", True),
        (bytearray(b"\1\2\3"), "u1", False),
        (memoryview(b"\1\2\3"), "u1", True),
        (array_module.array("h", [1, 2, 3]), "i2", False),
        ((ctypes.c_float * 3)(1, 2, 3), "f4", False),
        (_mapped(), "u1", False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_buffers_are_read_in_place(buffer: Any, dtype: str, readonly: bool) -> None:
    found = view(buffer)
    assert (found.framework, found.dtype, found.readonly) == ("numpy", np.dtype(dtype), readonly)
    assert found.array.tolist() == [1, 2, 3]
    if not readonly:
        found.array[0] = 9
        assert np.frombuffer(buffer, dtype)[0] == 9


class Described:
    """Has an array interface and nothing else."""

    def __init__(self, array: Any, **changes: Any) -> None:
        self.owner = array
        self.__array_interface__ = {**array.__array_interface__, **changes}


class Structured:
    """Has the C form of the array interface and nothing else."""

    def __init__(self, array: Any) -> None:
        self.__array_struct__ = array.__array_struct__


class Named(Structured):
    """An array of a namespace that the library does not know."""

    def __array_namespace__(self) -> Any:
        return np


@pytest.mark.parametrize("kind", [np.asarray, Described, Structured])
def test_array_interfaces(kind: Any) -> None:
    for layout in LAYOUTS.values():
        expected = np.asarray(layout(sample("complex64")))
        found = view(kind(expected))
        assert (found.framework, found.dtype) == ("numpy", expected.dtype)
        assert found.array.tobytes() == expected.tobytes()
        if expected.size:
            assert (found.strides, pointer(found.array)) == (expected.strides, pointer(expected))
    for readonly in (True, False):
        x = np.zeros(3)
        x.flags.writeable = not readonly
        found = view(kind(x))
        assert (found.readonly, found.array.flags.writeable) == (readonly, not readonly)


def test_array_interface_of_other_byte_order() -> None:
    x = np.arange(3, dtype=">i4")
    x.flags.writeable = False
    found = view(Described(x))
    assert found.copied
    assert found.readonly
    assert found.array.tolist() == [0, 1, 2]


@pytest.mark.parametrize("memory", [None, bytearray(range(12))])
def test_array_interface_over_a_buffer(memory: Any) -> None:
    class Buffer(array_module.array):
        @property
        def __array_interface__(self) -> dict[str, Any]:
            form = {"version": 3, "shape": (2,), "typestr": "<i4"}
            return {**form, "data": memory, "offset": 4}

    found = view(Buffer("b", range(12)))
    assert found.array.tobytes() == bytes(range(4, 12))


def test_unknown_namespaces_are_told_apart() -> None:
    assert view(Named(np.ones(3))).framework == "namespace"


# What is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ("text", "got str; pass one of these$"),
        ([1, 2], r"got list; pass numpy.asarray\(x\) if"),
        ((1, 2), r"got tuple; pass numpy.asarray\(x\) if"),
        ({"w": 1}, "got dict; pass one of these$"),
        ({1}, r"got set; pass numpy.asarray\(sorted\(x\)\)"),
        (None, "got NoneType"),
        (np.ndarray, "got the class ndarray"),
        (Fraction(1, 2), "fractions.Fraction"),
        (object(), "got object"),
        (np.ma.masked_array([1, 2], [0, 1]), "masked .*filled"),
        (np.array([None, 1]), "Python objects.* bcast_object"),
        (np.ones(2, np.longdouble), "not supported; cast to one of bool"),
        (np.ones(2, np.clongdouble), "not supported; cast to one of bool"),
        (np.ones(2, ml_dtypes.int4), "int4 is not supported"),
        (np.longdouble(1), "not supported"),
        (np.array(["a"], np.dtypes.StringDType()), "Python objects"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_array_is_a_type_error(x: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        view(x)


class TestTorch:
    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        self.torch = need("torch")

    @pytest.mark.parametrize("part", ["conj", "imag"])
    def test_lazy_signs_are_resolved(self, part: str) -> None:
        z = self.torch.tensor([1 + 2j, 3 - 4j]).conj()
        x = z if part == "conj" else z.imag
        found = view(x)
        assert found.copied
        assert found.array.tolist() == x.tolist()

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize(
        ("kind", "words"),
        [
            ("sparse", "to_dense"),
            ("mkldnn", "to_dense"),
            ("quantized", "dequantize"),
            ("meta", "meta device"),
            ("nested", "nested"),
            ("fake", "FakeTensor"),
            ("zero", "pass a plain"),
            ("float8_e4m3fnuz", "cast to one of"),
            ("complex32", "cast to one of"),
        ],
    )
    def test_tensors_without_dense_memory(self, kind: str, words: str) -> None:
        with pytest.raises(TypeError, match=rf"^x is .*{words}"):
            view(self._unusual(kind))

    def _unusual(self, kind: str) -> Any:
        torch = self.torch
        x = torch.ones(2, 3)
        if kind == "fake":
            from torch._subclasses.fake_tensor import FakeTensorMode

            with FakeTensorMode():
                return torch.ones(3)
        makers = {
            "sparse": x.to_sparse,
            "mkldnn": x.to_mkldnn,
            "quantized": lambda: torch.quantize_per_tensor(x, 1.0, 0, torch.qint8),
            "meta": lambda: torch.ones(3, device="meta"),
            "nested": lambda: torch.nested.nested_tensor([x[0], x[1, :2]]),
            "zero": lambda: torch._efficientzerotensor(3),
        }
        return makers[kind]() if kind in makers else x.to(getattr(torch, kind))

    @pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
    @pytest.mark.parametrize("with_grad", [False, True])
    @pytest.mark.parametrize("transform", ["vmap", "grad", "functionalize", "jvp"])
    def test_traced_tensors(self, transform: str, with_grad: bool) -> None:
        func, x = self.torch.func, self.torch.ones(2, 3)

        def body(x: Any) -> Any:
            with self.torch.set_grad_enabled(with_grad):
                view(x)
            return x.sum()

        with pytest.raises(TypeError, match=r"^x is traced by torch\.func"):
            func.jvp(body, (x,), (x,)) if transform == "jvp" else getattr(func, transform)(body)(x)

    @pytest.mark.parametrize("read", [view, lambda x: view_out(x, (2,), np.dtype("f4"))])
    def test_dual_tensors(self, read: Any) -> None:
        forward_ad = self.torch.autograd.forward_ad
        with forward_ad.dual_level():
            x = forward_ad.make_dual(self.torch.ones(2), self.torch.ones(2))
            for dual in (x, 2 * x, x[:1]):
                with pytest.raises(TypeError, match=r"is a dual tensor.*unpack_dual.*detach\(\)"):
                    read(dual)
            assert view(x.detach()).array.tolist() == [1, 1]
            assert view(self.torch.ones(2)).array.tolist() == [1, 1]
        with pytest.raises(TypeError, match="is a dual tensor"):
            self.torch.func.linearize(lambda x: (read(x), x)[1], self.torch.ones(2))

    @pytest.mark.parametrize("left", [0, 8])
    def test_freed_storage(self, left: int) -> None:
        x = self.torch.ones(100)
        views = (x, x[::2], x.view(10, 10).T)
        x.untyped_storage().resize_(left)
        for freed in views:
            with pytest.raises(BufferError, match="no memory behind"):
                view(freed)


class TestMlx:
    @pytest.fixture(autouse=True)
    def _mlx(self) -> None:
        self.mx = need("mlx")

    @pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap", "compile"])
    def test_tracers(self, transform: str) -> None:
        mx, x = self.mx, self.mx.array([1.0, 2.0])

        def body(x: Any) -> Any:
            view(x * 2)
            return (x**2).sum()

        calls = {
            "grad": lambda: mx.grad(body)(x),
            "vjp": lambda: mx.vjp(body, [x], [mx.array(1.0)]),
            "jvp": lambda: mx.jvp(body, [x], [x]),
            "vmap": lambda: mx.vmap(body)(mx.ones((2, 2))),
            "compile": lambda: mx.compile(body)(x),
        }
        with pytest.raises(TypeError, match=r"^x is (traced|differentiated) by MLX"):
            calls[transform]()

    def test_what_no_gradient_goes_through(self) -> None:
        mx, kept = self.mx, []

        def body(x: Any) -> Any:
            constant = view(mx.stop_gradient(2 * x)).array + view(mx.ones(2)).array
            kept.append(3 * x)
            mx.eval(kept)
            return (x * mx.array(constant)).sum()

        assert mx.grad(body)(mx.array([1.0, 2.0])).tolist() == [3.0, 5.0]
        # Evaluated while it was traced, and now an array like any other.
        assert view(kept[0]).array.tolist() == [3.0, 6.0]


class TestJax:
    @pytest.fixture(autouse=True)
    def _jax(self) -> None:
        self.jax = need("jax")

    @pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
    def test_tracers(self, transform: str) -> None:
        def body(x: Any) -> Any:
            view(x)
            return x.sum()

        with pytest.raises(TypeError, match=r"^x is traced by JAX .*; call this outside"):
            getattr(self.jax, transform)(body)(self.jax.numpy.ones(3))

    def test_what_is_refused(self) -> None:
        jax = self.jax
        deleted = jax.numpy.ones(3)
        deleted.delete()
        for x, error, said in (
            (deleted, ValueError, r"^x is a JAX array that was deleted"),
            (jax.random.key(0), TypeError, r"^x is a typed key.*jax\.random\.key_data"),
            (jax.ShapeDtypeStruct((3,), np.float32), TypeError, r"^x must be an array"),
            (jax.numpy.ones(3, jax.numpy.int4), TypeError, "int4 is not supported"),
        ):
            with pytest.raises(error, match=said):
                view(x)

    def test_arrays_on_several_devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
        script = """
            import jax, numpy as np
            from jax.sharding import NamedSharding, PartitionSpec as P
            from arraycomm._arrays.exchange import exchange
            from arraycomm._arrays.results import to_framework
            from arraycomm._arrays.views import view
            mesh = jax.make_mesh((2,), ("d",))
            x = jax.numpy.arange(6.0).reshape(2, 3)
            replicated = view(jax.device_put(x, NamedSharding(mesh, P())))
            assert replicated.array.tolist() == x.tolist()
            result = to_framework(np.ones(4, np.float32), replicated)
            assert len(result.sharding.device_set) == 2, result.sharding
            assert result.tolist() == [1] * 4
            second = jax.device_put(x, jax.devices()[1])
            assert to_framework(np.ones(4, np.float32), view(second)).device == jax.devices()[1]
            for array in (x, np.asarray(x), replicated.source, second):
                for like in (x, replicated.source, second):
                    placed = exchange(array, like)
                    assert placed.sharding.device_set == like.sharding.device_set, placed.sharding
                    assert placed.tolist() == x.tolist()
            try:
                view(jax.device_put(x, NamedSharding(mesh, P("d"))))
            except TypeError as error:
                print(error)
        """
        done = run_python("-c", textwrap.dedent(script))
        assert "x is sharded over 2 devices" in done.stdout, done.stderr


def test_no_framework_is_imported() -> None:
    script = """
        import sys
        import arraycomm._arrays.exchange, arraycomm._arrays.results, arraycomm._arrays.views
        import numpy as np
        from arraycomm._arrays import pinned
        from arraycomm._cuda import arrays

        class Array:
            __cuda_array_interface__ = {
                "shape": (3,), "typestr": "<f4", "data": (16, False), "version": 3
            }

        assert not any(map(arrays.on_cuda, (np.ones(3), 1, Array())))
        arraycomm._arrays.views.view(np.ones(3))
        arraycomm._arrays.views.view(memoryview(b"abc"))
        print({"torch", "jax", "cupy", "mlx", "array_api_strict", "mpi4py.MPI"} & set(sys.modules))
    """
    done = run_python("-c", textwrap.dedent(script))
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr


def test_device_memory_without_cupy_says_so() -> None:
    if "cupy" in sys.modules:
        pytest.skip("CuPy is installed")

    class OnDevice:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"version": 3, "shape": (2,), "typestr": "<f4", "data": (1 << 40, False)}

    with pytest.raises(BufferError, match=r"device memory.*CuPy"):
        view(OnDevice())


# Destinations -----------------------------------------------------------------------------------


def test_out_of_other_byte_order_and_with_lazy_conjugation() -> None:
    torch = need("torch")
    for out in (np.zeros(2, ">c8"), torch.zeros(2, dtype=torch.complex64).conj()):
        found = view_out(out, (2,), np.dtype("c8"))
        found.array[...] = [1 + 2j, 3 - 4j]
        assert commit_out(found).tolist() == out.tolist() == [1 + 2j, 3 - 4j]


def _read_only() -> Any:
    x = np.zeros(3, "f4")
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        (bytes(3), TypeError, "dtype float32; got uint8"),
        (memoryview(_read_only()), BufferError, "read-only"),
        (np.lib.stride_tricks.as_strided(np.zeros(3, "f4"), (3,), (2,)), BufferError, "share mem"),
        (np.float32(1), TypeError, "must be an array; got float32"),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else type(value).__name__,
)
def test_out_that_cannot_take_the_result(out: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=rf"^(elements of )?out .*{words}"):
        view_out(out, (3,), np.dtype("f4"))


def test_out_of_torch_that_overlaps_itself_or_requires_gradients() -> None:
    torch = need("torch")
    with pytest.raises(BufferError, match="share memory"):
        view_out(torch.zeros(1).expand(3), (3,), np.dtype("f4"))
    out = torch.zeros(3, requires_grad=True)
    with pytest.raises(TypeError, match=r"^out requires gradients"):
        view_out(out, (3,), np.dtype("f4"))
    with torch.no_grad():
        found = view_out(out, (3,), np.dtype("f4"))
        found.array[...] = 5
        assert commit_out(found).tolist() == [5, 5, 5]


# Likeness ---------------------------------------------------------------------------------------
