"""Laws of calls that compare what ranks have, and of arrays that change their framework."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import _launch
from arraycomm.testing import run
from arraycomm.testing import strategies as ranked
from arraycomm.testing._arrays.frameworks import elements_of
from arraycomm.testing._arrays.oracle import same_bits

pytestmark = pytest.mark.skipif(
    _launch.detect(os.environ) is not None, reason="runs where pytest is alone"
)

KNOWN = ("numpy", "torch", "jax", "array_api_strict", "mlx")
VALUES = st.lists(st.sampled_from((0.0, -0.0, 1.0, np.nan, np.inf)), min_size=1, max_size=4)


@given(values=VALUES, infinite=st.booleans(), place=st.integers(0, 2))
def test_what_is_wrong_on_one_rank_is_raised_on_all(values, infinite, place) -> None:
    """A NaN, a difference in any bit, and an exception are told to every rank, which go on."""
    wrong = [np.isnan(value) or (infinite and np.isinf(value)) for value in values]
    bits = {np.float64(value).tobytes() for value in values}

    def check(comm: ac.Communicator) -> None:
        value, x = values[comm.rank], np.zeros(3)
        x[place] = value
        expected = [(any(wrong), FloatingPointError), (len(bits) > 1, ac.MismatchError)]
        calls = [
            lambda: ac.raise_on_nan([None, x], infinite=infinite, comm=comm),
            lambda: ac.raise_on_difference({"x": x}, comm=comm),
        ]
        for (raises, kind), call in zip(expected, calls, strict=True):
            if raises:
                with pytest.raises((kind, ac.PeerError)):
                    call()
            else:
                call()
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
    except TypeError:
        # The framework lacks the dtype.
        with pytest.raises(TypeError):
            ac.exchange(x, wanted)
        return
    assert same_bits(elements_of(y), elements_of(x))
    if copy is not None and elements_of(x).size:
        assert np.shares_memory(elements_of(y), elements_of(x)) is not copy
