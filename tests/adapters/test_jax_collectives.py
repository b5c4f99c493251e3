"""JAX's collectives: eagerly over threads, and in compiled programs over processes."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from tests.support.launched import Report
from tests.support.launcher import is_open_mpi, needs_mpiexec, run_python
from tests.support.on_ranks import each_rank_of

jax = pytest.importorskip("jax")
pytest.importorskip("optax")
cases = pytest.importorskip("tests.adapters.jax_cases")
programs = pytest.importorskip("tests.adapters.jax_programs")
collectives = pytest.importorskip("arraycomm.adapters.jax")
errors, tokens = (
    pytest.importorskip(f"arraycomm.adapters.jax._{name}") for name in ("errors", "tokens")
)

LIMIT = 300
# Most of the time goes into compiling, on every rank anew.
RANKS = 3 if is_open_mpi() else 2
# What an MPI may do otherwise: in which order calls come out of programs, and how a program ends.
ON_EACH_MPI = {
    "independent_calls_keep_their_order",
    "one_rank_may_compile_again",
    "another_place_in_the_program_is_a_mismatch",
    "errors_of_programs_are_of_their_own_classes",
    "loops_that_carry_a_result_alone_end",
    "rows_choose_alike_on_all_ranks_or_all_raise",
}
# What takes longest to compile, and shows of few updates and transformations what others do.
AT_NIGHT = {"every_transformation_updates_as_in_one_process"}
# Flax need not be there.
FLAX_CHECKS = [
    "an_overflow_on_one_rank_counts_on_all",
    "every_library_trains_as_one_process",
    "modules_and_states_of_nnx_get_the_values_of_the_root",
    "what_orbax_restores_on_rank_0_is_everywhere",
]


# Fewer ranks need no other code but for messages, whose ring closes with this rank or with one other.
# Sums are what gathers are differentiated to, and in pairs of transformations.
@pytest.mark.parametrize(
    ("size", "name"),
    [
        *((3, name) for name in cases.CASES if name not in {"allreduce", "reduce_scatter"}),
        *((1, "sendrecv"), (2, "sendrecv")),
    ],
)
@each_rank_of("size")
def test_eager_derivatives_are_those_of_the_sum_of_all_losses(
    comm: ac.Communicator, name: str
) -> None:
    with jax.enable_x64(True):
        cases.assert_derivatives(cases.CASES[name], comm)


@pytest.mark.parametrize("length", [2, 40_000])
@each_rank_of(2)
def test_results_promote_as_what_was_passed_does(comm: ac.Communicator, length: int) -> None:
    """A weak type, as that of `jax.numpy.asarray(1.0)`, stays one on this rank; a strong one too."""
    jnp = jax.numpy
    strong, number = jnp.ones((2, length)), jnp.asarray(2)
    for x in (strong, jnp.full((2, length), 1.0)):
        found = {
            "allreduce": comm.allreduce(x),
            "iallreduce": comm.iallreduce(x, "mean").wait(),
            "allgather": comm.allgather(x),
            "alltoall": comm.alltoall(x),
            "bcast": comm.bcast(x),
            "scan": comm.scan(x),
            "tree": ac.allreduce_tree({"x": x, "other": number}, "sum", comm=comm)["x"],
            "gradients": ac.allreduce_gradients([x, None], comm=comm)[0],
            "plan": comm.plan([x])([x])[0],
            "synchronize": ac.synchronize([x], comm=comm)[0],
            "adapter": collectives.all_reduce(comm=comm).update([x], None)[0][0],
            **{name: case.call(x, comm=comm) for name, case in cases.CASES.items()},
        }
        assert [name for name, y in found.items() if y.weak_type != x.weak_type] == []
        half = jnp.ones(length, jnp.bfloat16)
        kinds = {name: (y + half).dtype for name, y in found.items()}
        assert set(kinds.values()) == {(x + half).dtype}
    # Ranks may differ. What is exchanged stays of the type that it was.
    mixed = comm.allreduce(number if comm.rank else jnp.int32(2))
    assert (mixed.weak_type, int(mixed)) == (bool(comm.rank), 4)
    assert not ac.exchange(np.ones(2, np.int32), number).weak_type


@pytest.mark.parametrize("case", cases.CASES.values(), ids=cases.CASES)
@each_rank_of(2)
def test_eager_calls_under_vmap_are_those_of_each_row(comm: ac.Communicator, case: Any) -> None:
    batch = cases.draw(comm.rank, (3, *case.shape(comm.size)))
    found = jax.vmap(lambda x: case.call(x, comm=comm))(batch)
    wanted = jax.numpy.stack([case.call(x, comm=comm) for x in batch])
    np.testing.assert_array_equal(found, wanted)


@each_rank_of(2)
def test_compiled_collective_on_threads_is_refused(comm: ac.Communicator) -> None:
    with pytest.raises(
        ac.BackendUnavailableError, match="allgather: jitted JAX collectives need a process"
    ):
        jax.jit(lambda x: collectives.allgather(x, comm=comm))(jax.numpy.ones(2))
    rows = collectives.allgather(jax.numpy.full(2, comm.rank), comm=comm)
    np.testing.assert_array_equal(rows[:, 0], range(comm.size))


@pytest.mark.parametrize(
    ("name", "length", "wrong"),
    [
        *(("allreduce", 2, "x"), ("alltoall", 2, "token")),
        *(("sendrecv", 2, "x"), ("sendrecv", 10_000, "token")),
    ],
)
@each_rank_of(3)
def test_wrong_argument_on_one_rank_raises_on_all(
    comm: ac.Communicator, name: str, length: int, wrong: str
) -> None:
    ahead, behind = (comm.rank + 1) % 3, (comm.rank - 1) % 3
    around = {"dest": ahead, "source": behind} if name == "sendrecv" else {}
    collective = partial(getattr(collectives, name), comm=comm, **around)
    rows = jax.numpy.full((3, length), comm.rank)
    if comm.rank == 2:
        with pytest.raises(TypeError, match=f"{name}: {wrong} must be"):
            collective(**{"x": rows, wrong: "text"})
    elif comm.rank == 1 and around:
        # It receives from rank 0, and hears nothing of rank 2.
        assert collective(rows)[0, 0] == 0
    else:
        told = "recv" if around else name
        with pytest.raises(ac.PeerError, match=f"{told}: rank 2 raised instead of"):
            collective(rows)
    np.testing.assert_array_equal(collectives.alltoall(rows, comm=comm)[:, 0], range(3))
    assert collectives.sendrecv(rows, ahead, behind, comm=comm)[0, 0] == behind


@each_rank_of(2)
def test_both_hear_of_an_x_that_is_gone_and_get_others_where_x_is(comm: ac.Communicator) -> None:
    other = 1 - comm.rank
    for x in (jax.numpy.ones(3), jax.device_put(np.ones(3), jax.devices()[0])):
        assert collectives.sendrecv(x, other, other, comm=comm).committed == x.committed
    if comm.rank:
        x.delete()
    with pytest.raises(ValueError if comm.rank else ac.PeerError, match=r"x is .* deleted"):
        collectives.sendrecv(x, other, other, comm=comm)


def test_error_that_a_token_takes_is_raised_once_the_program_has_ended() -> None:
    def work(x: Any) -> Any:
        for _ in range(20):
            x = jax.numpy.tanh(x @ x.T)
        return x[0] > 0

    token, ready = tokens.ProgramToken("an effect"), jax.numpy.zeros(0, bool)
    token.receive(ready)
    assert token.take(ValueError("of a callback"))
    made = jax.jit(work)(jax.numpy.ones((500, 500)))
    with pytest.raises(ValueError, match="of a callback"):
        token.put(made)
    assert made.is_ready()
    token.put(ready)
    token.clear()


PLACED = OSError(2, "there is none", "a file"), UnicodeDecodeError("utf8", b"\xff", 0, 1, "why")
OTHERS = MemoryError("no room"), ImportError("no", name="a"), ExceptionGroup("all", [KeyError(1)])


@pytest.mark.parametrize("error", [*PLACED, *OTHERS, ac.CommTimeoutError("late")], ids=type)
def test_error_of_a_program_says_and_has_what_that_of_a_call_does(error: Exception) -> None:
    found = errors.as_jax_error(error)
    assert isinstance(found, type(error))
    assert isinstance(found, jax.errors.JaxRuntimeError)
    assert str(found) == str(error)
    for name in (name for name in dir(error) if not name.startswith("_")):
        value = getattr(error, name, None)
        assert callable(value) or getattr(found, name, None) == value


@lru_cache
def _report(module: str, *chosen: str) -> Report:
    return Report(run_python("-m", module, *chosen, ranks=RANKS, timeout=LIMIT), RANKS)


def _programs(*, at_night: bool = False) -> Report:
    names = [check.__name__ for check in programs.CHECKS]
    chosen = [name for name in names if (name in AT_NIGHT) is at_night]
    if is_open_mpi():
        chosen = sorted(ON_EACH_MPI)
    return _report("tests.adapters.jax_programs", *chosen)


def _marks(name: str) -> list[pytest.MarkDecorator]:
    each = [pytest.mark.each_mpi] * (name in ON_EACH_MPI)
    return each + [pytest.mark.at_night] * (name in AT_NIGHT)


@needs_mpiexec
@pytest.mark.parametrize(
    "check",
    [pytest.param(check.__name__, marks=_marks(check.__name__)) for check in programs.CHECKS],
)
def test_compiled_programs(check: str) -> None:
    _programs(at_night=check in AT_NIGHT).assert_passed(check)


@needs_mpiexec
@pytest.mark.each_mpi
def test_program_of_the_checks_ends_well_with_a_call_in_flight() -> None:
    _programs().assert_ended_well()


@needs_mpiexec
@pytest.mark.at_night
@pytest.mark.parametrize("check", FLAX_CHECKS)
def test_modules(check: str) -> None:
    pytest.importorskip("flax")
    _report("tests.adapters.flax_programs").assert_passed(check)


FAILING = """
import jax, jax.numpy as jnp, arraycomm as ac
from arraycomm.adapters.jax import allreduce
comm = ac.init(timeout=60)
program = jax.jit(lambda x: allreduce(jnp.sin(x)) + 1)
program(jnp.ones(3)).block_until_ready()
if comm.rank == 1:
    raise ValueError("rank 1 is broken")
try:
    jax.block_until_ready([program(jnp.ones(3)) for _ in range(2)])
except ac.PeerError as error:
    assert error.rank == 1
    assert "ValueError: rank 1 is broken" in error.traceback
    print("caught by its class")
    raise
"""


@needs_mpiexec
@pytest.mark.each_mpi
def test_compiled_program_raises_if_another_rank_fails() -> None:
    job = run_python("-c", FAILING, ranks=RANKS, timeout=60)
    assert job.returncode
    assert "caught by its class" in job.stdout
    assert "PeerError: rank 1 failed and takes part no more" in job.stderr


NAN_OF_ONE_RANK = """
import jax, jax.numpy as jnp, arraycomm as ac
from arraycomm.adapters.jax import allreduce
jax.config.update("jax_debug_nans", True)
comm = ac.init(timeout=60)

@jax.jit
def step(w, x):
    loss = lambda x: jnp.sqrt(x).sum() + allreduce(x).sum()
    return w + allreduce(x, "mean"), jax.grad(loss)(x)

w = jnp.ones(3)
for turn in range(4):
    w, seen = step(w, jnp.full(3, -1.0 if (comm.rank == 1 and turn == 2) else 1.0))
    comm.allreduce(w, "max")
print("went on")
"""


@needs_mpiexec
@pytest.mark.each_mpi
def test_nan_of_one_rank_is_named_without_repeating_calls() -> None:
    """JAX repeats a program operation by operation to find which one has made it."""
    job = run_python("-c", NAN_OF_ONE_RANK, ranks=RANKS, timeout=60)
    assert job.returncode
    assert "FloatingPointError: invalid value (nan)" in job.stderr
    assert "PeerError: rank 1 failed and takes part no more" in job.stderr
    unwanted = ("went on", "MismatchError", "DeadlockError")
    assert not [text for text in unwanted if text in job.stdout + job.stderr]
