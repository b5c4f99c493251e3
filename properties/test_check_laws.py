"""Laws of calls that compare what ranks have, and of arrays that change their framework."""

from __future__ import annotations

import os
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import _launch
from arraycomm._training.comparison.digests import block_sums, digest_of, sums_by_torch
from arraycomm.testing import run
from arraycomm.testing import strategies as ranked
from arraycomm.testing._arrays.frameworks import elements_of
from arraycomm.testing._arrays.oracle import same_bits
from arraycomm.testing.conformance._checks import native

pytestmark = pytest.mark.skipif(
    _launch.detect(os.environ) is not None, reason="runs where pytest is alone"
)

KNOWN = ("numpy", "torch", "jax", "array_api_strict", "mlx")
VALUES = st.lists(st.sampled_from((0.0, -0.0, 1.0, np.nan, np.inf)), min_size=1, max_size=4)


@given(values=VALUES, place=st.integers(0, 40_000), last=st.integers(0, 4))
def test_what_is_wrong_on_one_rank_is_raised_on_all(values, place, last) -> None:
    """A difference in any bit, and an exception, are told to every rank, which go on."""
    wrong = [np.isnan(value) for value in values]
    bits = {np.float64(value).tobytes() for value in values}

    def check(comm: ac.Communicator) -> None:
        value, x = values[comm.rank], np.zeros(max(place + 1, 3))
        x[place] = value
        said = rf"at \[{place}\]"
        with pytest.raises(ac.MismatchError, match=said) if len(bits) > 1 else nullcontext():
            ac.raise_on_difference({"x": x}, comm=comm)
        # The last ranks have the same arrays in another order.
        ordered = [np.zeros(2), np.ones(2)][:: 1 if comm.rank < last else -1]
        turned = 0 < last < comm.size
        with pytest.raises(ac.MismatchError, match="another order") if turned else nullcontext():
            ac.raise_on_difference(ordered, comm=comm)
        if any(wrong):
            error = ZeroDivisionError if wrong[comm.rank] else ac.PeerError
            with pytest.raises(error), ac.raise_together(comm=comm):
                assert 1 / (not wrong[comm.rank])
        assert comm.allreduce(1) == comm.size

    run(len(values), check)


@given(
    case=ranked.arrays(ranked.dtypes(movable=True), ranked.shapes(large=False)),
    to=st.sampled_from([n for n in ranked.installed_frameworks() if n in KNOWN]),
    by_name=st.booleans(),
    copy=st.sampled_from((None, True, False)),
)
def test_exchanged_arrays_have_the_same_elements(case, to, by_name, copy) -> None:
    """A copy shares no memory; without one the memory is shared, or the call raises."""
    x, wanted = case.build(), to if by_name else ac.exchange(np.zeros(1, np.float32), to)
    try:
        y = ac.exchange(x, wanted, copy=copy)
    except BufferError:
        assert copy is False
        return
    except TypeError:  # The framework lacks the dtype.
        with pytest.raises(TypeError):
            ac.exchange(x, wanted)
        return
    assert same_bits(native(elements_of(y)), native(elements_of(x)))
    if copy is not None and elements_of(x).size:
        assert np.shares_memory(elements_of(y), elements_of(x)) is not copy


DTYPES = [np.float32, np.float16, np.uint8, np.complex128, np.bool_]


@given(st.sampled_from(DTYPES), st.integers(0, 40_000), st.integers(0, 10**9))
def test_a_digest_is_that_of_the_bits_and_their_order(dtype, count, place) -> None:
    torch = pytest.importorskip("torch")
    array = (np.random.default_rng(count).random(count) * 100).astype(dtype)
    sums = block_sums(array)
    by_torch = sums_by_torch(torch.from_numpy(array.copy()))
    assert by_torch.tolist() == sums.tolist()
    assert digest_of(array[::-1].copy()[::-1]) == digest_of(array)
    if count < 2:
        return
    other = array.copy()
    other.view(np.uint8)[place % other.nbytes] ^= 1 << place % 8 if dtype != np.bool_ else 1
    assert digest_of(other) != digest_of(array)
    one, two = place % count, place // count % count
    other = array.copy()
    other[[one, two]] = other[[two, one]]
    assert (digest_of(other) == digest_of(array)) == (other.tobytes() == array.tobytes())
