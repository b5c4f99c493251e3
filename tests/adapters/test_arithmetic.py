"""Gradients are added up and averaged by their own namespace, where they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import arraycomm as ac
from arraycomm._dtypes import BY_NAME
from arraycomm.testing._arrays.frameworks import DLPackOnly
from tests.adapters.arrays import MAKERS, elements
from tests.support.on_ranks import each_rank_of

STEPS = 3
FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "float64")
COMPLEX = ("complex64", "complex128")
Array = NDArray[Any]


# The dtypes of frameworks that have not all of them.
OF_NUMPY = {
    "array_api_strict": ("float32", "float64", *COMPLEX),
    "remote": ("float16", "float32", "float64", *COMPLEX),
}
CASES = [
    (framework, dtype)
    for framework in MAKERS
    for dtype in (*FLOATS, *COMPLEX)
    if framework not in OF_NUMPY or dtype in OF_NUMPY[framework]
]


class Keep:
    """An optimizer whose parameters are the last gradients."""

    def update(self, params: Any, grads: Any) -> Any:
        return grads


def accumulate(comm: ac.Communicator, steps: list[Any]) -> Any:
    optimizer = ac.DistributedOptimizer(Keep(), comm=comm, accumulate=len(steps))
    result = None
    for grads in steps:
        result = optimizer.update(result, grads)
    return result


def drawn(dtype: str, rank: int = 0) -> list[Array]:
    rng = np.random.default_rng(rank)
    real = rng.standard_normal((STEPS, 5, 4))
    values = real + 1j * rng.standard_normal(real.shape) if dtype in COMPLEX else real
    return list(values.astype(BY_NAME[dtype].dtype))


def mean(arrays: list[Array]) -> Array:
    """The mean over steps, by hand: parts of complex numbers are divided as real numbers."""
    dtype = arrays[0].dtype
    wide = np.dtype(np.float32) if dtype.name in FLOATS[:4] else dtype
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total = total + array.astype(wide)
    parts = total.reshape(-1).view(total.real.dtype)
    return np.divide(parts, parts.dtype.type(len(arrays))).view(wide).reshape(5, 4).astype(dtype)


@pytest.mark.parametrize(("framework", "dtype"), CASES)
@each_rank_of(1)
def test_the_mean_over_steps_has_the_bits_of_numpy(
    comm: ac.Communicator, framework: str, dtype: str
) -> None:
    steps = [MAKERS[framework](array) for array in drawn(dtype)]
    got = accumulate(comm, steps)
    assert type(got) is type(steps[0])
    assert elements(got).dtype == BY_NAME[dtype].dtype
    assert elements(got).tobytes() == mean(drawn(dtype)).tobytes()


@pytest.mark.parametrize("framework", MAKERS)
@each_rank_of(3)
def test_ranks_reduce_the_means_of_their_steps(comm: ac.Communicator, framework: str) -> None:
    steps = [MAKERS[framework](array) for array in drawn("float32", comm.rank)]
    first, second, third = (mean(drawn("float32", rank)) for rank in range(3))
    got = elements(accumulate(comm, steps))
    assert got.tobytes() == ((first + second + third) / np.float32(3)).tobytes()


@pytest.fixture
def reads(framework: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host reads of the framework's arrays, from now on."""
    read: list[str] = []

    def count(kind: Any, method: str) -> None:
        original = getattr(kind, method)

        def counting(x: Any, *args: Any, **kwargs: Any) -> Any:
            read.append(method)
            return original(x, *args, **kwargs)

        monkeypatch.setattr(kind, method, counting)

    example = MAKERS[framework](np.zeros(1, np.float32))
    methods = {"torch": ("data_ptr", "numpy", "__dlpack__", "__array__", "tolist", "cpu")}
    for method in methods.get(framework, ("__dlpack__", "__array__")):
        count(type(example), method)
    return read


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("framework", ["torch", "array_api_strict", "remote"])
@each_rank_of("size")
def test_the_host_reads_gradients_in_no_step_but_the_last(
    comm: ac.Communicator, framework: str, size: int, reads: list[str]
) -> None:
    steps = [MAKERS[framework](array) for array in drawn("float32")]
    optimizer = ac.DistributedOptimizer(Keep(), comm=comm, accumulate=STEPS)
    if comm.rank == 0:
        reads.clear()
    comm.barrier()
    for grads in steps[:-1]:
        optimizer.update(None, grads)
    comm.barrier()
    before = len(reads)
    comm.barrier()
    optimizer.update(None, steps[-1])
    comm.barrier()
    assert (before, len(reads)) == (0, size)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@each_rank_of(2)
def test_sums_do_not_share_memory_with_gradients(comm: ac.Communicator, framework: str) -> None:
    gradient = MAKERS[framework](np.ones(3, np.float32))
    optimizer = ac.DistributedOptimizer(Keep(), comm=comm, accumulate=2)
    optimizer.update(None, gradient)
    gradient[...] = 3
    got = optimizer.update(None, gradient)
    assert elements(got).tolist() == [2.0] * 3
    gradient[...] = 9
    assert elements(got).tolist() == [2.0] * 3


@each_rank_of(1)
def test_torch_keeps_no_history(comm: ac.Communicator, torch: Any) -> None:
    leaf = torch.ones(3, requires_grad=True)
    optimizer = ac.DistributedOptimizer(Keep(), comm=comm, accumulate=2)
    with pytest.raises(TypeError, match="allreduce_gradients: tree requires gradients"):
        optimizer.update(None, leaf)
    with torch.no_grad():
        optimizer.update(None, leaf * 1)
        optimizer.update(None, leaf)
    optimizer.update(None, torch.ones(3))
    got = optimizer.update(None, torch.ones(3))
    assert not got.requires_grad
    assert got.grad_fn is None


@each_rank_of(2)
def test_torch_views_of_conjugates_are_added_up(comm: ac.Communicator, torch: Any) -> None:
    got = accumulate(comm, [torch.tensor([1 + 2j]).conj(), torch.tensor([3 - 4j])])
    assert got.tolist() == [2 - 3j]


@pytest.mark.parametrize("framework", [name for name in MAKERS if name != "remote"])
@each_rank_of(1)
def test_parts_of_complex_numbers_are_divided_as_real_numbers(
    comm: ac.Communicator, framework: str
) -> None:
    values = np.array([complex(np.inf, -0.0), complex(-0.0, np.inf), 1 - 5j], np.complex64)
    got = elements(accumulate(comm, [MAKERS[framework](values)] * 2))
    assert got.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    "value", [1.5, 2 - 3j, np.float32(1.5), np.float64(2), np.complex64(1j), np.array(1.5)]
)
@each_rank_of(2)
def test_numbers_come_back_as_what_they_are(comm: ac.Communicator, value: Any) -> None:
    got = accumulate(comm, [value, value, value])
    assert type(got) is type(value)
    assert got == value


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "array_api_strict"])
@pytest.mark.parametrize("dtype", [np.int32, np.bool_])
@each_rank_of(1)
def test_integers_and_booleans_have_no_mean(comm: ac.Communicator, framework: str, dtype) -> None:
    optimizer = ac.DistributedOptimizer(Keep(), comm=comm, accumulate=2)
    with pytest.raises(TypeError, match=r"allreduce_gradients: tree\['w'\]: op 'mean' is not"):
        optimizer.update(None, {"w": MAKERS[framework](np.ones(3, dtype))})


@each_rank_of(1)
def test_a_torch_tensor_without_memory_of_its_own_is_refused_at_once(
    comm: ac.Communicator, torch: Any
) -> None:
    optimizer = ac.DistributedOptimizer(Keep(), comm=comm, accumulate=2)
    with pytest.raises(TypeError, match=r"allreduce_gradients: tree.* is a tensor of layout"):
        optimizer.update(None, torch.ones(3).to_sparse())


@each_rank_of(2)
def test_gradients_may_change_framework_between_steps(comm: ac.Communicator) -> None:
    array = np.array([1.0, 2.0, 6.0], np.float32)
    frameworks = ("torch", "numpy", "array_api_strict", "jax", "torch")
    steps = [MAKERS[framework](array) for framework in frameworks]
    got = accumulate(comm, steps)
    assert type(got) is type(steps[-1])
    np.testing.assert_array_equal(elements(got), array)


@each_rank_of(1)
def test_jax_keeps_64_bits_without_its_64_bit_mode(comm: ac.Communicator, jax: Any) -> None:
    assert not jax.config.jax_enable_x64
    got = accumulate(comm, [MAKERS["jax"](np.full(2, 1 + 2.0**-50))] * 3)
    assert got.dtype == np.float64
    assert elements(got).tolist() == [1 + 2.0**-50] * 2


@each_rank_of(2)
def test_plain_dlpack_objects_are_added_up_as_numpy_arrays(comm: ac.Communicator) -> None:
    got = accumulate(comm, [DLPackOnly(np.full(3, step + 1.0)) for step in range(3)])
    assert isinstance(got, np.ndarray)
    assert got.tolist() == [2.0] * 3
