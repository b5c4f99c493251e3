"""Ranks that others than arraycomm know of: no process of them becomes a world of its own unasked."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import arraycomm as ac
from arraycomm._start.choice import choose_start
from arraycomm._start.joining import join
from arraycomm._start.numbering import LIMIT, numbering
from tests.support.launcher import LAUNCHED

pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")

# As in most tutorials of torch, the environment says nothing of the rank.
BESIDE_TORCH = """
import os, re, sys
import torch.distributed as dist
import arraycomm as ac
rank, address, path = int(sys.argv[1]), *sys.argv[2:]
def refused(call):
    try:
        return call()
    except ac.BackendUnavailableError as error:
        return str(error)
early = ac.init().size, ac.world().size
dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=2)
assert early == (1, 1)
assert refused(ac.world).startswith("world: torch.distributed has 2 ranks, but"), refused(ac.world)
assert refused(ac.init) == refused(ac.world)
ac.finalize()
said = refused(ac.init)
assert said.startswith("init: torch.distributed has 2 ranks, but for arraycomm each process"), said
assert f"PROCESS_ID to {rank} here; or start" in said, said
assert "torch.distributed.init_process_group('arraycomm'); or call init(backend=" in said, said
assert ac.init(backend="self").allreduce(1) == ac.world().size == 1
ac.finalize()
variables = re.findall("ARRAYCOMM_[A-Z_]+", said)
os.environ.update(zip(variables, (address, "2", str(rank)), strict=True))
print(ac.init().allreduce(1), ac.world().backend)
ac.finalize()
dist.destroy_process_group()
"""


def test_init_beside_torch_names_what_works(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-c", BESIDE_TORCH]
    jobs = [
        subprocess.Popen(
            [*command, str(rank), address, str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert [job.communicate(timeout=120)[0] for job in jobs] == ["2 processes\n"] * 2
    finally:
        for job in jobs:
            job.kill()


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in os.environ:
        if name.startswith(("ARRAYCOMM_", "SLURM_", "WORLD_SIZE", "RANK")):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "WORLD_SIZE is 2 and RANK is missing, but .*ESSES to 2, and .*PROCESS_ID to 0, 1 and s",
        ),
        ({"WORLD_SIZE": "4", "RANK": "3"}, "WORLD_SIZE is 4, but .* to 4, and .*_ID to 3 here; or"),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}, "HOROVOD_SIZE is 2, but .*_ID to 0 here; or"),
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES is 2 and JAX_PROCESS_ID is missing, but"),
        ({"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "1"}, "PADDLE_TRAINERS_NUM is 2, but"),
        ({"WORLD_SIZE": "2", "PMI_SIZE": "1", "PMI_RANK": "0"}, "WORLD_SIZE is 2 and RANK is miss"),
    ],
    ids=["Lightning", "without a master", "Horovod", "JAX", "Paddle", "mpiexec -n 1"],
)
def test_variables_of_several_processes_make_no_world_of_one(
    variables: dict[str, str], said: str, nothing_known: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        nothing_known.setenv(name, value)
    with pytest.raises(ac.BackendUnavailableError, match=rf"^init: {said}"):
        choose_start("auto")
    assert choose_start("self").backend == "self"


def test_jax_that_has_met_makes_no_world_of_one(nothing_known: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(num_processes=2, process_id=1)
    module = SimpleNamespace(global_state=state)
    nothing_known.setitem(sys.modules, "jax._src.distributed", module)
    with pytest.raises(ac.BackendUnavailableError, match=r"jax.dis\S+ has 2 .*_ID to 1 here"):
        choose_start("auto")
    state.num_processes = None
    assert choose_start("auto").backend == "self"


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_that_may_be_on_several_hosts_hear_that_this_needs_mpi(rank: int) -> None:
    """As in pods of Kubeflow, which say nothing of hosts."""
    variables = {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "10.0.0.1"}
    found = numbering(variables | {"MASTER_PORT": str(os.getpid()), LIMIT: "0.3"})
    assert found is not None
    with pytest.raises(ac.CommTimeoutError) as caught:
        join(found)
    place = "the socket of this host (without MPI all processes have to be on one host; on several "
    assert f"{place}start them with mpiexec)" in str(caught.value)
    assert "10.0.0.1" not in str(caught.value)


@pytest.mark.parametrize(
    "variables", [{}, {"WORLD_SIZE": "1"}, {"MASTER_ADDR": "a"}, {"RANK": "0"}]
)
def test_one_process_alone_is_a_world(
    variables: dict[str, str], nothing_known: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        nothing_known.setenv(name, value)
    assert choose_start("auto").backend == "self"
