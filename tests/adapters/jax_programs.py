"""Checks of compiled JAX programs in one launched program; see `test_jax_collectives.py`."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax._src.interpreters import pxla
from jax.interpreters import mlir

import arraycomm as ac
from arraycomm._training.programs import calls_of
from arraycomm.adapters.jax import all_reduce, allgather, allreduce, bcast, make_token, sendrecv
from tests.adapters import jax_transformations as transformations
from tests.adapters import optax_table
from tests.adapters.jax_cases import CASES
from tests.support import internals
from tests.support.launched import Check, checks_in, perform
from tests.support.pairwise import EVERY

RUNS = 30


def assert_same(got: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


def raised(call: Callable[[], Any], kind: Any = Exception, said: str | None = None) -> Any:
    """Return the error of a call, which is of this kind and says this."""
    with pytest.raises(kind, match=said and re.escape(said)) as caught:
        jax.block_until_ready(call())
    return caught.value


# Transformations


def pairs_of_transformations_are_those_of_one_process() -> None:
    comm, count = ac.world(), {True: 0, False: 0}
    with jax.enable_x64(False):
        for number, row in enumerate(transformations.rows()):
            count[transformations.check(row, comm, judge=number % comm.size)] += 1
    if comm.rank == 0:
        print(f"{count[True]} programs compared, {count[False]} refused by JAX")
    assert count[True] > 10


def loops_that_carry_a_result_alone_end() -> None:
    """XLA takes what stands at the same place before and after a turn for something that no turn changes."""
    comm = ac.world()
    for call, end in (
        (allreduce, 5),
        (lambda x: bcast(x, 0) * 2, 5),
        (lambda x: allreduce(x, "max") + 1, 3),
    ):
        grown = jax.jit(lambda c=call, e=end: lax.while_loop(lambda x: x < e, c, 1.0))()
        assert end <= float(grown) < end * comm.size
    pair = jax.jit(
        lambda: lax.while_loop(
            lambda c: c[0] < 9,
            lambda c: tuple(all_reduce("sum").update(c[::-1], None)[0]),
            (1.0, 2.0),
        )
    )()
    steps = [(1.0, 2.0)]
    while steps[-1][0] < 9:
        steps.append(tuple(comm.size * x for x in steps[-1][::-1]))
    assert tuple(map(float, pair)) == steps[-1]


def rows_choose_alike_on_all_ranks_or_all_raise() -> None:
    comm = ac.world()
    x = jnp.asarray([1.0, 3.0, 10.0]) + comm.rank

    def grow(x: Any) -> Any:
        return lax.while_loop(lambda s: allreduce(s, "max") < 50, lambda s: 2 * s, x)

    assert_same(jax.vmap(grow)(x), jnp.stack([grow(row) for row in x]))
    assert_same(jax.jit(jax.vmap(grow))(x), jax.vmap(grow)(x))
    x = jnp.asarray([1.0, 3.0, 10.0]) + 2 * comm.rank

    def branch(x: Any, other: ac.Communicator) -> Any:
        return lax.cond(x > 2.5, lambda x: allreduce(x, comm=other), jnp.negative, x)

    def loop(x: Any, other: ac.Communicator) -> Any:
        return lax.while_loop(lambda s: s < 11, lambda s: allreduce(s, comm=other), x)

    def condition(x: Any, other: ac.Communicator) -> Any:
        return lax.while_loop(lambda s: s + 0 * allreduce(s, comm=other) < 11, lambda s: s + 1, x)

    for what, program in (("a branch", branch), ("a loop", loop), ("a loop", condition)):
        for wrap in (jax.vmap, lambda f: jax.jit(jax.vmap(f))):
            other = comm.dup()
            said = f"vmap: the condition of {what} with a collective inside"
            mixed = wrap(lambda x, p=program, c=other: p(x, c))
            raised(lambda mixed=mixed: mixed(x), ac.MismatchError, said)


def compiled_results_have_the_bits_of_eager_ones() -> None:
    rank = ac.world().rank
    tiny = (1e-40 * np.arange(1, 8) + 1e-41 * rank).astype(np.float32)
    thirds = np.arange(7) / 3 - rank
    for dtype, op in (
        *((jnp.float32, op) for op in ("sum", "max", "prod", "mean")),
        *((jnp.bfloat16, "mean"), (jnp.float16, "sum"), (jnp.int8, "sum"), (jnp.complex64, "prod")),
    ):
        x = jnp.asarray(tiny if dtype == jnp.float32 else thirds, dtype)
        program = jax.jit(lambda x, op=op: allreduce(x, op))
        # In full, and then as once before.
        got, again, eager = program(x), program(x), allreduce(x, op)
        plain = ac.world().allreduce(x, op)
        assert len({np.asarray(y).tobytes() for y in (got, again, eager, plain)}) == 1
    subnormal = jax.jit(allreduce)
    assert all(np.asarray(subnormal(jnp.asarray(tiny)))[0] > 0 for _ in range(2))


def donated_argument_is_reduced_in_place_and_another_stays() -> None:
    for call in (allreduce, lambda x: bcast(x, ac.world().size - 1)):
        x = jnp.arange(30_000.0)
        there = x.unsafe_buffer_pointer()
        y = jax.jit(call, donate_argnums=0)(x)
        assert y.unsafe_buffer_pointer() == there
    x = jnp.arange(3.0)
    for call, shares in ((allreduce, False), (lambda x: allreduce(x + 1), True)):
        program = jax.jit(call)
        assert ("output_operand_alias" in program.lower(x).as_text()) == shares
        program(x)
        assert x.tolist() == [0, 1, 2]


def large_results_have_the_bits_of_eager_ones() -> None:
    comm = ac.world()
    own = np.random.default_rng(comm.rank)
    # The last one has a part of a cache line left, for which the shared segment has no place.
    for shape in ((600, 512), (1, 1 << 20), (300_001,)):
        for dtype in (np.float32, np.float16):
            x = own.standard_normal(shape).astype(dtype)
            expected = comm.allreduce(x, "mean")
            for donated in ((), (0,)):
                program = jax.jit(lambda x: allreduce(x, "mean"), donate_argnums=donated)
                for _ in range(2):
                    assert_same(program(jnp.array(x)), expected)
    other = comm.dup()
    short = jax.jit(lambda x: allreduce(x, comm=other))
    raised(lambda: short(jnp.ones(400_000 - (comm.rank == 0))), ac.MismatchError, "(399999,)")


def repeated_calls_are_as_the_first() -> None:
    comm = ac.world().dup()
    program = jax.jit(lambda x: [allreduce(x, comm=comm), allreduce(x, "max", comm=comm)])
    for turn in range(3):
        total, largest = program(jnp.full(3, float(turn + comm.rank)))
        assert largest.tolist() == [turn + comm.size - 1] * 3
        assert total.tolist() == [sum(turn + rank for rank in range(comm.size))] * 3
    # The full call for arrays of other shapes, the fast path for those seen before.
    assert internals.has_fast_paths(calls_of(comm).comm, 2)
    # Whatever wants to see every call does.
    path = comm.bcast_object(f"{tempfile.mkdtemp()}/trace.json")
    with comm.trace(path):
        jax.block_until_ready(program(jnp.ones(3)))
    if comm.rank == 0:
        events = json.loads(Path(path).read_text())["traceEvents"]
        calls = [event for event in events if event["ph"] == "X"]
        assert sum("of a program" in str(event) for event in calls) == 2 * comm.size
    program(jnp.ones(3))
    with ac.join(comm):
        raised(lambda: program(jnp.ones(3)), said="allreduce: inside join only")
    for _ in range(2):
        assert_same(program(jnp.ones(3))[0], jnp.full(3, float(comm.size)))


def programs_are_dispatched_without_python() -> None:
    comm, size = ac.world(), ac.world().size
    weights, key = np.arange(3.0), jax.random.key(0)

    @jax.jit
    def program(x: Any, unused: Any, key: Any) -> Any:
        return {"sum": allreduce(x * weights), "key": key, "twice": [x, x]}

    def results(turn: int) -> Any:
        return program(jnp.full(3, float(turn)), jnp.ones(turn // 2 + 1), key)

    silent = jax.jit(lambda x: [allreduce(x), None][1:])
    results(0), results(0), silent(jnp.ones(2))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pxla.ExecuteReplicated, "__call__", None)
        found = results(1)
        assert silent(jnp.ones(2)) == [None]
    assert_same(found["sum"], weights * size)
    assert_same(jax.random.key_data(found["key"]), jax.random.key_data(key))
    assert_same(found["twice"], [jnp.full(3, 1.0)] * 2)
    # Programs that JAX compiles anew come in between.
    assert_same(results(2)["sum"], weights * size * 2)
    assert_same(results(1)["sum"], weights * size)
    assert_same(jax.jit(bcast)(jnp.full(2, float(comm.rank))), jnp.zeros(2))
    assert_same(results(2)["sum"], weights * size * 2)


def programs_on_several_devices_keep_their_order() -> None:
    comm = ac.world().dup()
    first, last = jax.devices()[0], jax.devices()[-1]
    before = jax.jit(work, static_argnums=1)
    late = jax.jit(lambda x: allreduce(x, comm=comm))
    early = jax.jit(lambda x: allgather(x, comm=comm))
    x, y = jax.device_put(jnp.ones(300), first), jax.device_put(jnp.zeros(300), last)
    for turn in range(4):
        # Each has to wait for what is computed before it, on one rank longer than on the other.
        found = [late(before(x, 3 * comm.rank + 1)), early(before(y, 8)), late(x), early(y)]
        jax.effects_barrier()
        made = calls_of(comm).comm.stats()
        assert [made[name]["calls"] for name in ("allreduce", "allgather")] == [2 * turn + 2] * 2
        assert_same(found[0::2], [jnp.full(300, float(comm.size))] * 2)
        assert_same(found[1::2], [jnp.zeros((comm.size, 300))] * 2)


def results_promote_as_what_was_passed_does() -> None:
    size = ac.world().size
    for x in (jnp.full((size, 2), 2.0), jnp.ones((size, 2))):
        programs = {name: case.call for name, case in CASES.items()}
        programs["all_reduce"] = lambda x: all_reduce().update([x], None)[0][0]
        found = jax.jit(lambda x, made=programs: {name: call(x) for name, call in made.items()})(x)
        assert [name for name, y in found.items() if y.weak_type != x.weak_type] == []
    double = jax.jit(lambda x: 2 * x)
    for x in (
        jnp.asarray(1.0),
        ac.allreduce_tree([jnp.asarray(1.0)])[0],
        allreduce(jnp.asarray(1.0)),
    ):
        double(x)
    # It is compiled once.
    assert double._cache_size() == 1


def tokens_go_through() -> None:
    def calls(x: Any) -> Any:
        y, token = allreduce(x, token=make_token())
        z, token = allgather(y, token=token)
        return z, token

    (z, token), (eager, _) = jax.jit(calls)(jnp.ones(2)), calls(jnp.ones(2))
    assert_same(z, eager)
    assert (token.shape, token.dtype) == ((), jnp.uint32)
    slope = jax.grad(lambda x: calls(x * x)[0].sum())(jnp.ones(2))
    assert (slope == 2 * ac.world().size ** 2).all()


# The order of calls


def work(x: Any, amount: int) -> Any:
    """Return x, after a time that depends on the amount."""
    made = jnp.outer(x, x)
    for _ in range(amount):
        made = jnp.tanh(made @ made.T / 100)
    return x + 0 * made.sum()


def independent_calls_keep_their_order() -> None:
    comm = ac.world()
    reducing = all_reduce("sum")
    own, x = np.random.default_rng(comm.rank), jnp.arange(60.0) + comm.rank
    total = comm.allreduce(np.asarray(x))
    programs = []
    for count in (2, 5):
        amounts = own.integers(0, 7, count)

        def plain(x: Any, amounts: Any = amounts) -> list[Any]:
            return [allreduce(work(x * (i + 1), int(n))) for i, n in enumerate(amounts)]

        def update(x: Any, amounts: Any = amounts) -> list[Any]:
            grads = [work(x * (i + 1), int(n)) for i, n in enumerate(amounts)]
            return [reducing.update([grad], None)[0][0] for grad in grads]

        programs += [jax.jit(plain), jax.jit(update)]
    for run in range(RUNS):
        program = programs[run % len(programs)]
        flying = [program(x), program(x)]
        # Calls outside, on the same communicator, while two programs are in flight.
        np.testing.assert_allclose(comm.allreduce(np.asarray(x)), total)
        np.testing.assert_allclose(allreduce(x), total)
        for results in flying:
            for number, result in enumerate(results):
                np.testing.assert_allclose(result, total * (number + 1))


def one_rank_may_compile_again() -> None:
    comm = ac.world()

    @jax.jit
    def program(x: Any, batch: Any) -> Any:
        return allreduce(x) + 0 * batch.sum(), allgather(x)

    x = jnp.full(3, comm.rank + 1.0)
    for run in range(4):
        # The last batch of rank 1 is smaller each time.
        total, rows = program(x, jnp.ones(4 - run * (comm.rank == 1)))
        assert_same(total, rows.sum(0))


def another_place_in_the_program_is_a_mismatch() -> None:
    comm = ac.world().dup()
    two = jax.jit(lambda x: [allreduce(x, comm=comm), allreduce(2 * x, comm=comm)])
    one = jax.jit(lambda x: allreduce(x, comm=comm))
    x = jnp.ones(3)
    said = "rank 1: allreduce(sum, call 1 of a program)"
    error = raised(lambda: [one(x), one(x)] if comm.rank == 1 else two(x), ac.MismatchError, said)
    assert "allreduce(sum, call 2 of a program)" in str(error)
    # Those of the second length do not go in one message.
    for length in (2, 20_000):
        messages_from_another_place_are_a_mismatch(length)


def ring_of_ranks() -> tuple[ac.Communicator, Callable[[Any], Any]]:
    """Return a communicator, and a call in which each of its ranks receives from the one before."""
    comm = ac.world().dup()
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return comm, lambda x: sendrecv(x, ahead, behind, comm=comm)


def messages_from_another_place_are_a_mismatch(length: int) -> None:
    comm, ring = ring_of_ranks()
    size, rank = comm.size, comm.rank
    once, twice = jax.jit(ring), jax.jit(lambda x: ring(ring(x)))
    assert (twice(jnp.full(length, float(rank))) == (rank - 2) % size).all()
    x = jnp.ones(length)
    if rank > 1:
        once(once(x))
    else:
        two_calls = (lambda: once(once(x))) if rank else (lambda: twice(x))
        raised(two_calls, ac.MismatchError, "receives in call")


def messages_are_large_or_small_and_alike() -> None:
    comm, ring = ring_of_ranks()
    size, rank = comm.size, comm.rank
    for like in (jnp.ones((), bool), jnp.zeros((3, 0)), jnp.ones((2, 3), jnp.bfloat16)):
        for each in (ring, jax.jit(ring)):
            assert_same(each(like), like)
    large = jnp.full((200, 200), float(rank))
    for each in (ring, jax.jit(ring)):
        assert_same(each(large), jnp.full((200, 200), float((rank - 1) % size)))
    itself = jax.jit(lambda x: sendrecv(x, rank, rank, comm=comm))
    assert_same(itself(large), large)
    for mine, theirs in (((2,), (3,)), ((200, 200), (3,)), ((200, 200), (200, 199))):
        x = jnp.ones(mine if rank == 0 else theirs)
        if rank > 1:
            ring(x)
            continue
        said = "must send arrays of the shape and dtype that they receive; got float"
        error = raised(lambda x=x: ring(x), ac.MismatchError, said)
        assert f"{mine if rank == 1 else theirs} from rank {(rank - 1) % size}" in str(error)
    assert_same(ring(jnp.full(2, float(rank))), jnp.full(2, float((rank - 1) % size)))


# Errors


def errors_of_programs_are_of_their_own_classes() -> None:
    comm = ac.world()
    flags = jnp.ones(3, bool)
    program = jax.jit(lambda x: allreduce(jnp.sin(x)))
    for _ in range(2):
        error = raised(lambda: jax.jit(allreduce)(flags), TypeError)
        assert isinstance(error, jax.errors.JaxRuntimeError)
        assert str(error).startswith("allreduce: op 'sum' is not defined for bool")
    # One rank raises eagerly; what the others have compiled raises, and can be called again.
    error = raised(lambda: allreduce(flags) if comm.rank == 1 else program(jnp.ones(3)))
    assert type(error) is TypeError if comm.rank == 1 else isinstance(error, ac.PeerError)
    if isinstance(error, ac.PeerError):
        assert (error.rank, error.in_step) == (1, True)
    assert_same(program(jnp.ones(3)), allreduce(jnp.sin(jnp.ones(3))))
    other = comm.dup()
    gather = jax.jit(lambda x: allgather(x, comm=other))
    raised(lambda: gather(jnp.ones(2 + comm.rank)), ac.MismatchError)
    raised(lambda: gather(jnp.ones(2)), ac.CommunicatorClosedError)


def errors_end_the_rest_of_a_program() -> None:
    comm = ac.world()

    def turn(x: Any) -> Any:
        return allreduce(x) / comm.size + allgather(x).min()

    turns = jax.jit(lambda x: lax.scan(lambda x, _: (turn(x), None), x, length=3)[0])
    # It would never end with results that have not come.
    until = jax.jit(lambda x: lax.while_loop(lambda x: x[0] < 4, turn, x))
    once, before = jax.jit(turn), jax.jit(work, static_argnums=1)

    def later(x: Any) -> Any:
        # It is dispatched before it can run.
        return once(before(x, 5))

    for program, count in ((turns, 3), (until, 3), (later, 300)):
        x = jnp.ones(count)
        for _ in range(3):
            expected = jax.block_until_ready(program(x))
        for _ in range(2):
            # One rank raises in place of the first call; the others make none of those that follow.
            if comm.rank == 1:
                raised(lambda: allreduce(jnp.ones(3, bool)), TypeError)
            else:
                error = raised(lambda p=program, x=x: [p(x), p(x)], ac.PeerError)
                assert isinstance(error, jax.errors.JaxRuntimeError)
                assert (error.rank, error.in_step) == (1, True)
            for _ in range(2):
                assert_same(program(x), expected)
    # Another thread may dispatch programs that were compiled here.
    x = jnp.ones(3)
    with ThreadPoolExecutor(1) as other:
        other.submit(turns, x).result()
        if comm.rank == 1:
            raised(lambda: allreduce(jnp.ones(3, bool)), TypeError)
        else:
            other.submit(raised, lambda: turns(x), ac.PeerError).result()
        assert_same(turns(x), other.submit(turns, x).result())


def what_cannot_be_compiled_is_refused_by_name() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    part = jax.sharding.PartitionSpec("i")
    x = jnp.ones(2 * ac.world().size)
    sharded = jax.shard_map(allreduce, mesh=mesh, in_specs=part, out_specs=part)
    own = ac.op(lambda one, other: one + other)
    largest = partial(allreduce, op="max")

    def on_both(x: Any) -> Any:
        parts = jax.NamedSharding(mesh, part)
        return allreduce(lax.with_sharding_constraint(jnp.repeat(x, 2), parts))

    def forgetful(x: Any) -> Any:
        """As the primitives of lineax are."""
        solve_p = jax.extend.core.Primitive("solve")
        solve_p.def_abstract_eval(lambda x: x)
        solve_p.def_impl(jax.jit(solve_p.bind))
        turns = lambda x: lax.fori_loop(0, 2, lambda _, x: allreduce(x), x)  # noqa: E731
        mlir.register_lowering(solve_p, mlir.lower_fun(turns, multiple_results=False))
        return solve_p.bind(x)

    for call, said in (
        (sharded, "allreduce: a collective of arraycomm cannot be called inside jax.shard_map"),
        (jax.jit(sharded), "allreduce: a collective of arraycomm cannot be called inside"),
        (jax.jit(lambda x: allreduce(x, own)), "allreduce: op must be the name of a reduction"),
        (jax.grad(lambda x: allreduce(x, "max").sum()), 'allreduce: op must be "sum" or "mean"'),
        (lambda x: jax.linear_transpose(largest, x)(x), 'allreduce: op must be "sum" or'),
        (jax.jit(lambda x: ac.world().allreduce(x)), "or use arraycomm.adapters.jax.allreduce"),
        (jax.jit(lambda x: ac.allreduce_gradients([x])), "or use arraycomm.adapters.jax.all_re"),
        (lambda x: allreduce(x, token=3), r"allreduce: token must be one of make_token\(\)"),
        (lambda x: allreduce(np.asarray(x)), "allreduce: x must be a jax.Array; got ndarray"),
        (lambda x: allreduce(jax.random.key(1)), "allreduce: x is a typed key of JAX"),
        (forgetful, "cannot be called inside a function whose effects are forgotten"),
        (jax.jit(forgetful), "cannot be called inside a function whose effects are forgotten"),
        (jax.jit(on_both), "allreduce: a program with a collective .* runs on one device"),
        (jax.export.export(jax.jit(allreduce)), "allreduce: a program .* cannot be exp"),
    ):
        with pytest.raises(TypeError, match=said):
            call(x)
    with pytest.raises(ValueError, match="reduce_scatter: x must have"):
        jax.jit(CASES["reduce_scatter"].call)(jnp.ones(ac.world().size + 1))
    assert_same(allreduce(x, own), allreduce(x))


def sendrecv_says_what_is_wrong_with_ranks_tags_and_shapes() -> None:
    size, rank = ac.world().size, ac.world().rank

    def ring(x: Any, by: Any = 1) -> Any:
        return sendrecv(x, (rank + by) % size, (rank - by) % size)

    x = jnp.arange(2.0) + rank
    said = "sendrecv: dest must be an int that is known when a program is traced"
    raised(lambda: jax.jit(ring)(x, 1), TypeError, said)
    assert_same(ring(x, jnp.int32(1)), ring(x))
    said = f"sendrecv: source must be a rank of the communicator, 0 to {size - 1}"
    raised(lambda: jax.jit(lambda x: sendrecv(x, rank, size))(x), ValueError, said)
    for tag in (-1, 1 << 20):
        call = jax.jit(lambda x, tag=tag: sendrecv(x, rank, rank, tag))
        said = f"sendrecv: tag must be 0 to 1048575; got {tag}"
        raised(lambda call=call: call(x), ValueError, said)
    raised(lambda: jax.jit(lambda x: bcast(x, x[0]))(x), said="bcast: root must be an int")
    said = "sendrecv: ranks must send arrays of the shape and dtype that they"
    for call in (ring, jax.jit(ring, static_argnums=1)):
        for wrong in (jnp.ones(2 + rank), x.astype((jnp.float32, jnp.int32)[rank])):
            raised(lambda call=call, wrong=wrong: call(wrong, 1), ac.MismatchError, said)
        assert_same(call(x, 1), jnp.arange(2.0) + (rank - 1) % size)


# Optimizers


def least_squares(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(12, 4))), jnp.asarray(rng.normal(size=12))


def trained(optimizer: Any, data: Any, steps: int = 3) -> Any:
    x, y = data
    params = {"w": jnp.zeros(4), "b": jnp.zeros(())}
    state = optimizer.init(params)

    def value_fn(params: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"] - y) ** 2)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        value, grad = jax.value_and_grad(value_fn)(params)
        updates, state = optimizer.update(
            grad, state, params, value=value, grad=grad, value_fn=value_fn
        )
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params


WRAPPED: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    # As the one of L-BFGS, which takes ten times as long to compile.
    "search along a line": lambda wrap: wrap(
        optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(9))
    ),
    "plateau": lambda wrap: wrap(
        optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1))
    ),
    "finite outside": lambda wrap: optax.apply_if_finite(wrap(optax.adam(0.1)), 3),
    "several steps outside": lambda wrap: optax.MultiSteps(
        wrap(optax.adam(0.1)), 2
    ).gradient_transformation(),
    "partitioned outside": lambda wrap: optax.partition(
        {"w": wrap(optax.sgd(0.1)), "b": wrap(optax.adam(0.1))}, {"w": "w", "b": "b"}
    ),
}


def updates_are_those_of_one_process_with_all_data() -> None:
    comm = ac.world()
    x, y = least_squares(0)
    part = 12 // comm.size
    own = slice(comm.rank * part, (comm.rank + 1) * part)
    for number, (name, make) in enumerate(WRAPPED.items()):
        got = trained(make(ac.DistributedOptimizer), (x[own], y[own]))
        rows = comm.allgather(np.append(got["w"], got["b"]))
        assert {row.tobytes() for row in rows} == {rows[0].tobytes()}, name
        if comm.rank == number % comm.size:
            # Compiled once: the others have the same bits.
            expected = trained(make(lambda plain: plain), (x, y))
            for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8, err_msg=name)


def virtual_ranks_update_alike_on_any_number_of_ranks() -> None:
    """Compiled or eagerly, on all ranks or on one alone."""
    random, comm = np.random.default_rng(3), ac.world()
    count = 2 * comm.size + 1
    # JAX counts subnormal numbers as zero, and sums have to keep them.
    scale = np.array([1.0, 1e-38, -0.0], np.float32)
    data = random.normal(size=(3, count, 3)).astype(np.float32) * scale

    def train(over: ac.Communicator, dtype: Any, compiled: bool) -> Any:
        optimizer = ac.DistributedOptimizer(optax.adam(0.1), comm=over, virtual_ranks=count)
        update = jax.jit(optimizer.update) if compiled else optimizer.update
        params, seen = jnp.ones(3, dtype), []
        state = optimizer.init(params)
        for rows in data:
            for first in range(0, count, over.size):
                rank = first + over.rank
                # What a rank without a virtual rank passes does not count.
                row = rows[rank] if rank < count else np.full(3, np.nan)
                changes, state = update(jnp.asarray(row, dtype), state, params)
                params = optax.apply_updates(params, changes)
                seen.append(int(state.count))
        assert seen[-1] == 0
        return params, state

    alone = comm.split(comm.rank)
    for dtype in (jnp.float32, jnp.bfloat16):
        expected = train(alone, dtype, compiled=False)
        assert_same(train(comm, dtype, compiled=True), expected)
    # What is added up eagerly by several ranks is a law.
    assert_same(train(alone, dtype, compiled=True), expected)


def virtual_ranks_compile_updates_unlike_the_parameters() -> None:
    """Updates of another dtype than the parameters', and None for a leaf without a gradient."""
    count, dtype = ac.world().size + 1, jnp.bfloat16
    schedule = optax.linear_schedule(0.1, 0.01, 3)
    for plain in (optax.sgd(0.1), optax.inject_hyperparams(optax.sgd)(learning_rate=schedule)):
        optimizer = ac.DistributedOptimizer(plain, virtual_ranks=count)
        params = {"a": jnp.ones(3, dtype), "b": jnp.ones(2, dtype)}
        for passed in (params, None):
            seen = []
            for update in (optimizer.update, jax.jit(optimizer.update)):
                state = optimizer.init(params)
                for _ in range(2):
                    changes, state = update({"a": jnp.ones(3, dtype), "b": None}, state, passed)
                seen.append(changes["a"])
            assert_same(*seen)


def every_schedule_is_compiled_as_in_one_process() -> None:
    def trained(wrap: Callable[[Any], Any]) -> dict[str, Any]:
        made = {name: wrap(optax.sgd(each)) for name, each in optax_table.SCHEDULES.items()}

        @jax.jit
        def step(params: Any, states: Any) -> Any:
            held = {}
            for name, optimizer in made.items():
                grads = jnp.full(1, 1.0 + ac.world().rank)
                updates, state = optimizer.update(grads, states[name], params[name])
                held[name] = optax.apply_updates(params[name], updates), state
            return tuple({name: held[name][part] for name in held} for part in range(2))

        params = {name: jnp.ones(1) for name in made}
        held = params, {name: made[name].init(params[name]) for name in made}
        for _ in range(4):
            held = step(*held)
        return {name: 1 - param[0] for name, param in held[0].items()}

    mean = (1 + ac.world().size) / 2
    alone = trained(lambda plain: optax.chain(optax.scale(mean / (1 + ac.world().rank)), plain))
    for name, moved in trained(ac.DistributedOptimizer).items():
        np.testing.assert_allclose(moved, alone[name], rtol=1e-12, err_msg=name)
    assert len(alone) > 10


def every_transformation_updates_as_in_one_process() -> None:
    """All are traced; a few, or with EVERY all, are run as well, every other one compiled."""
    comm = ac.world()
    own, whole = optax_table.Problem(comm.rank, comm.size), optax_table.Problem(0, 1)
    count = 0
    for number, (name, make) in enumerate(optax_table.TRANSFORMATIONS.items()):
        optimizer = ac.DistributedOptimizer(make())
        jax.make_jaxpr(partial(own.step, name, optimizer))(*own.start(name, optimizer))
        if number % 25 and not EVERY:
            continue
        expected, count = None, count + 1
        if comm.rank == count % comm.size:
            expected = whole.trained(name, make(), compiled=True)
        for compiled in (False, True) if EVERY else (count % 2 == 0,):
            got = own.trained(name, optimizer, compiled=compiled)
            for one, other in zip(got, expected or got, strict=True):
                close: Any = {"rtol": 1e-6, "atol": 1e-8, "err_msg": name}
                np.testing.assert_allclose(plain_of(one), plain_of(other), **close)
    if comm.rank == 0:
        print(f"{len(optax_table.TRANSFORMATIONS)} transformations traced, {count} run")


def plain_of(x: Any) -> Any:
    is_key = jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def skipping_alone_is_a_mismatch() -> None:
    for outside, compiled in (
        (lambda inner: optax.apply_if_finite(inner, 3), True),
        (
            lambda inner: optax.MultiSteps(
                inner, 2, should_skip_update_fn=optax.skip_not_finite
            ).gradient_transformation(),
            False,
        ),
    ):
        optimizer = outside(ac.DistributedOptimizer(optax.sgd(1.0)))
        said = "the ranks are in different updates of one optimizer: rank"
        error = raised(lambda o=optimizer, c=compiled: _skip(o, c), ac.MismatchError, said)
        assert "DistributedOptimizer(optax.apply_if_finite(...))" in str(error)


def branches_may_live_longer_than_programs() -> None:
    rank = ac.world().rank
    optimizer = ac.DistributedOptimizer(optax.sgd(1.0))

    def make(grads: Any, state: Any) -> Any:
        return optimizer.update(grads, state)

    def skip(grads: Any, state: Any) -> Any:
        return jnp.zeros_like(grads), state

    @jax.jit
    def step(number: Any, state: Any, batch: Any) -> Any:
        grads = jnp.full(2, batch.mean() + rank)
        return lax.cond(number % 2 == 0, make, skip, grads, state)[0]

    expected = -1 - sum(range(ac.world().size)) / ac.world().size
    for number in range(10):
        # Rank 1 compiles again, with branches that JAX has traced before.
        size = 4 + number // 3 if rank == 1 else 4
        update = step(number, optimizer.init(jnp.ones(2)), jnp.ones(size))
        assert (update == (0 if number % 2 else expected)).all()


def _skip(optimizer: Any, compiled: bool) -> None:
    params = {"a": jnp.zeros(3)}
    state = optimizer.init(params)
    update = jax.jit(optimizer.update) if compiled else optimizer.update
    for step in range(8):
        bad = step == 2 and ac.world().rank == 1
        updates, state = update({"a": jnp.full(3, np.inf if bad else 1.0)}, state, params)
        params = optax.apply_updates(params, updates)


def further_arguments_are_reduced_or_refused() -> None:
    rank = ac.world().rank

    def update(op: str = "mean", accumulate: int = 1, **extra: Any) -> Any:
        seen: dict[str, Any] = {}

        def note(updates: Any, state: Any, params: Any = None, **given: Any) -> Any:
            seen.update(given)
            return updates, state

        plain = optax.GradientTransformationExtraArgs(lambda params: (), note)
        optimizer = ac.DistributedOptimizer(plain, op=op, accumulate=accumulate)
        params = {"a": jnp.ones(2)}
        optimizer.update(params, optimizer.init(params), params, **extra)
        return seen

    seen = update(value=float(rank), grad={"a": jnp.full(2, float(rank))}, scale=3.0)
    mean = sum(range(ac.world().size)) / ac.world().size
    assert float(seen["value"]) == mean
    assert (seen["grad"]["a"] == mean).all()
    found = update(grad_fn=lambda x: x * rank)["grad_fn"](jnp.ones(2))
    assert (found == mean).all()
    for kind, said, call in (
        (
            ac.MismatchError,
            "key must be the same on every",
            lambda: update(key=jax.random.key(rank)),
        ),
        (TypeError, "got hessian_fn, of which it is not", lambda: update(hessian_fn=lambda x: x)),
        (
            ValueError,
            'op must be "mean" for an update with value_fn',
            lambda: update(op="sum", value_fn=lambda x: 0.0),
        ),
        (
            TypeError,
            "cannot be made inside a transformation",
            lambda: jax.jit(lambda x: ac.DistributedOptimizer(optax.sgd(x)) and x)(1.0),
        ),
        (
            ValueError,
            "with accumulate=2 update takes gradients only",
            lambda: update(accumulate=2, value=1.0),
        ),
        (
            TypeError,
            "value_fn must return one number",
            lambda: update(value_fn=lambda params: params["a"])["value_fn"]({"a": jnp.ones(2)}),
        ),
    ):
        raised(call, kind, said)


# What optax and derivatives add to calls is not the library's, and optimized it takes twice as long to compile.
AS_WRITTEN: list[Check] = [
    pairs_of_transformations_are_those_of_one_process,
    updates_are_those_of_one_process_with_all_data,
    every_schedule_is_compiled_as_in_one_process,
    every_transformation_updates_as_in_one_process,
    skipping_alone_is_a_mismatch,
    branches_may_live_longer_than_programs,
    further_arguments_are_reduced_or_refused,
]
CHECKS = checks_in(globals())

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 2)
    ac.init(timeout=60)
    chosen = [check for check in CHECKS if not sys.argv[1:] or check.__name__ in sys.argv[1:]]
    for as_written in (False, True):
        # The others are compiled as the programs of users are.
        jax.config.update("jax_disable_most_optimizations", as_written)
        perform(check for check in chosen if (check in AS_WRITTEN) is as_written)
    # The program ends while its last call is still in flight.
    jax.jit(lambda x: allreduce(work(x, 5)))(jnp.ones(300))
