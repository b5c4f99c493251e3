"""Ranks of one node that die, where no launcher ends the others: these see it within seconds, whatever they do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.session import dying
from tests.support.launched import ROOT, start_numbered
from tests.support.launcher import LAUNCHED, is_open_mpi, needs_mpiexec, run_python
from tests.support.pairwise import EVERY

pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")

# The pairs of a death and a state with which a launch begins: those of each are others.
_FIRST = [0, 5, 10, 15] if EVERY else [0]
_UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
_IN_NAMESPACE = f"""
import os, sys
os.execvp("unshare", [*{_UNSHARE}, sys.executable, *sys.argv[1:]])
"""
# Hides from the launcher how a rank ends, until the program of rank 0 has.
_WRAPPER = """
"$@"
if [ "${PMI_RANK:-$PMIX_RANK}" = 0 ]; then touch "$0"; fi
while [ ! -e "$0" ]; do sleep 0.1; done
"""


def _said(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "over")


_EXPECTED = [f"{rank} saw {died}" for rank in range(dying.RANKS) for died in range(2, dying.RANKS)]
_EXPECTED = [*sorted(text for text in _EXPECTED if text[0] < text[-1]), "ended"]


@pytest.mark.parametrize("first", _FIRST)
@pytest.mark.parametrize("kernel", ["no pidfds", "PID namespaces", *["as it is"] * EVERY])
def test_processes_see_that_others_have_died(kernel: str, first: int, tmp_path: Path) -> None:
    arguments = ("-m", dying.__name__, kernel, str(first + len(kernel)), str(tmp_path))
    if kernel == "PID namespaces":
        if subprocess.run([*_UNSHARE, "true"], check=False).returncode:
            pytest.skip("this process may make no PID namespaces")
        arguments = ("-S", "-c", _IN_NAMESPACE, *arguments)
    job, statuses = start_numbered(dying.RANKS, *arguments)
    assert _said(tmp_path) == _EXPECTED, job.stdout
    assert "rank 0 of world: ranks 1–4 ended before the end of the program" in job.stdout
    assert statuses[0] == 1


@needs_mpiexec
@pytest.mark.each_mpi
@pytest.mark.parametrize("first", _FIRST)
@pytest.mark.parametrize("kernel", ["as it is", *["no pidfds"] * EVERY])
@pytest.mark.parametrize("hidden", [False, True], ids=["told to go on", "hidden by a shell"])
def test_ranks_over_mpi_see_that_others_have_died(
    hidden: bool, kernel: str, first: int, tmp_path: Path
) -> None:
    if not (hidden or is_open_mpi()):
        pytest.skip("this launcher ends the others, whatever it is told")
    done = run_python(
        *("-m", dying.__name__, kernel, str(first + hidden), str(tmp_path)),
        ranks=dying.RANKS,
        options=() if hidden else ("--runtime-options", "continuous"),
        wrapper=("sh", "-c", _WRAPPER, str(tmp_path / "over")) if hidden else (),
        cwd=ROOT,
        timeout=60,
    )
    assert _said(tmp_path) == _EXPECTED, done.stdout + done.stderr
