"""What an error says to do instead works: each remedy is followed here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from arraycomm.testing import run
from tests.support.frameworks import need

X = np.arange(3.0)


class Case(NamedTuple):
    """A call that is refused, what its error must say, and the call that follows it."""

    wrong: Callable[[Communicator], Any]
    says: str
    remedy: Callable[[Communicator], Any]


CASES: dict[str, Case] = {
    "list": Case(
        lambda comm: comm.allreduce([X, X]),
        r"^allreduce: .* got list; pass numpy\.asarray\(x\) .* arraycomm\.allreduce_tree",
        lambda comm: (comm.allreduce(np.asarray([X, X])), ac.allreduce_tree([X, X], comm=comm)),
    ),
    "dict to all": Case(
        lambda comm: comm.bcast({"a": X}),
        r"^bcast: .* got dict; .* arraycomm\.synchronize .* bcast_object",
        lambda comm: (ac.synchronize({"a": X}, comm=comm), comm.bcast_object({"a": X})),
    ),
    "text": Case(
        lambda comm: comm.allgather("text"),
        r"^allgather: .* got str; pass one of these, or use allgather_object",
        lambda comm: comm.allgather_object("text"),
    ),
    "text to the root": Case(
        lambda comm: comm.gather("text"),
        r"or use gather_object",
        lambda comm: comm.gather_object("text"),
    ),
    "text to itself": Case(
        lambda comm: comm.dup().send("text", comm.rank),
        r"or use send_object",
        lambda comm: comm.isend_object("text", comm.rank) and comm.recv_object(comm.rank),
    ),
    "set as a leaf": Case(
        lambda comm: ac.allreduce_tree({"a": {1.0, 2.0}}, comm=comm),
        r"^allreduce_tree: tree\['a'\] .* got set; pass numpy\.asarray\(sorted\(tree\['a'\]\)\)"
        r" if it holds numbers$",
        lambda comm: ac.allreduce_tree({"a": np.asarray(sorted({1.0, 2.0}))}, comm=comm),
    ),
    "text as a leaf": Case(
        lambda comm: ac.allreduce_tree({"a": "text"}, comm=comm),
        r"^allreduce_tree: tree\['a'\] .* got str; pass one of these$",
        lambda comm: ac.allreduce_tree({"a": X}, comm=comm),
    ),
    "object as a leaf": Case(
        lambda comm: ac.allreduce_tree({"a": object()}, comm=comm),
        r"^allreduce_tree: .* or use a method __arraycomm_tree__ of its class",
        lambda comm: ac.allreduce_tree({"a": _Tree()}, comm=comm),
    ),
    "sparse": Case(
        lambda comm: comm.allreduce(need("scipy.sparse").csr_array(np.eye(2))),
        r"pass x\.toarray\(\)",
        lambda comm: comm.allreduce(need("scipy.sparse").csr_array(np.eye(2)).toarray()),
    ),
    "narrow": Case(
        lambda comm: comm.allreduce(np.ones(2, ml_dtypes.float8_e4m3fnuz)),
        r"cast to one of (?!.*long double)",
        lambda comm: comm.allreduce(np.ones(2, ml_dtypes.float8_e4m3fnuz).astype(np.float32)),
    ),
    "long double": Case(
        lambda comm: comm.allreduce(np.ones(2, np.longdouble)),
        r"a long double to float64 or complex128",
        lambda comm: comm.allreduce(np.ones(2, np.longdouble).astype(np.float64)),
    ),
    "complex long double": Case(
        lambda comm: comm.allreduce(np.ones(2, np.clongdouble)),
        r"a long double to float64 or complex128",
        lambda comm: comm.allreduce(np.ones(2, np.clongdouble).astype(np.complex128)),
    ),
    "Python objects": Case(
        lambda comm: comm.bcast(np.array([None])),
        r"use bcast_object or allgather_object",
        lambda comm: comm.bcast_object(np.array([None])),
    ),
    "large int": Case(
        lambda comm: comm.allreduce(1 << 70),
        r"pass a float or an array",
        lambda comm: comm.allreduce(float(1 << 70)),
    ),
    "masked": Case(
        lambda comm: comm.allreduce(np.ma.masked_equal(X, 1)),
        r"pass x\.filled\(value\), or x\.data and the mask",
        lambda comm: comm.allreduce(np.ma.masked_equal(X, 1).filled(0)),
    ),
    "matrix": Case(
        lambda comm: comm.allreduce(X[None].view(np.matrix)),
        r"pass the plain array, numpy\.asarray\(x\)",
        lambda comm: comm.allreduce(np.asarray(X[None].view(np.matrix))),
    ),
    "sum of bool": Case(
        lambda comm: comm.allreduce(X > 0),
        r'use "or", or cast to an integer dtype',
        lambda comm: (comm.allreduce(X > 0, "or"), comm.allreduce((X > 0).astype(np.int32))),
    ),
    "mean of int": Case(
        lambda comm: comm.allreduce(X.astype(np.int32), "mean"),
        r"cast to a floating dtype first",
        lambda comm: comm.allreduce(X, "mean"),
    ),
    "read-only out": Case(
        lambda comm: comm.allreduce(X, out=np.broadcast_to(X, (3,))),
        r"pass memory that can be written",
        lambda comm: comm.allreduce(X, out=np.empty(3)),
    ),
    "required gradient": Case(
        lambda comm: comm.allreduce(_torch().ones(3, requires_grad=True)),
        r"pass x\.detach\(\) or call this under torch\.no_grad\(\), or use arraycomm\.adapters\.t",
        lambda comm: comm.allreduce(_torch().ones(3, requires_grad=True).detach()),
    ),
    "nested": Case(
        lambda comm: comm.allreduce(_nested()),
        r"or to_padded_tensor\(0\.0\)",
        lambda comm: comm.allreduce(_nested().to_padded_tensor(0.0)),
    ),
    "sparse tensor": Case(
        lambda comm: comm.allreduce(_torch().eye(2).to_sparse()),
        r"pass to_dense\(\)",
        lambda comm: comm.allreduce(_torch().eye(2).to_sparse().to_dense()),
    ),
    "typed key": Case(
        lambda comm: comm.bcast(need("jax").random.key(0)),
        r"pass jax\.random\.key_data\(x\), and jax\.random\.wrap_key_data on the result",
        lambda comm: need("jax").random.wrap_key_data(
            comm.bcast(need("jax").random.key_data(need("jax").random.key(0)))
        ),
    ),
    "no such dtype": Case(
        lambda comm: ac.exchange(X.astype(np.float16), "array_api_strict"),
        r"cast first, or take the array as NumPy's",
        lambda comm: ac.exchange(X.astype(np.float32), "array_api_strict"),
    ),
    "copy": Case(
        lambda comm: ac.exchange(X[::-1], "torch", copy=False),
        r"pass copy=None or copy=True",
        lambda comm: ac.exchange(X[::-1], "torch", copy=None),
    ),
}


class _Tree:
    def __arraycomm_tree__(self) -> Any:
        return [X], lambda leaves: leaves


def _torch() -> Any:
    return need("torch")


def _nested() -> Any:
    return _torch().nested.nested_tensor([_torch().ones(1), _torch().ones(2)])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_what_an_error_says_to_do_works(name: str) -> None:
    case = CASES[name]

    def check(comm: Communicator) -> None:
        with pytest.raises((TypeError, ValueError, BufferError, OverflowError), match=case.says):
            case.wrong(comm)
        case.remedy(comm)

    run(2, check)


def test_an_older_version_of_the_standard_is_no_error() -> None:
    strict = need("array_api_strict")
    with strict.ArrayAPIStrictFlags(api_version="2022.12"):
        result = ac.exchange(strict.ones(2), "numpy")
        assert result.tolist() == [1, 1]
        out = strict.zeros(2)
        run(1, lambda comm: comm.allreduce(strict.ones(2), out=out))
        assert [float(x) for x in out] == [1, 1]
