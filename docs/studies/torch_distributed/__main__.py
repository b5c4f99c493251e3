"""Runs torch's own tests of process groups over the backend "arraycomm": `python -m docs.studies.torch_distributed`.

They are those of `torch.testing._internal.distributed.distributed_test`, as torch runs them over gloo: each
test in processes of its own, here forked, and brought together by a file. Arguments are parts of names of
tests; with `--gloo` the backend is gloo. Writes a line for each test, and a table at the end.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

RANKS: Final = int(os.environ.get("WORLD_SIZE", "3"))
_LIMIT: Final = float(os.environ.get("LIMIT", "60"))
# Decorators of the tests read these when the module is imported.
os.environ.update(BACKEND="gloo", WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal.common_distributed import TEST_SKIPS  # noqa: E402
from torch.testing._internal.common_utils import set_rng_seed  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

import arraycomm.adapters.torch_distributed  # noqa: E402, F401

_SKIPPED: Final = {skip.exit_code for skip in TEST_SKIPS.values()}
_PASSED, _FAILED, _NOT_APPLICABLE = "passed", "failed", "not applicable"


class Tests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """torch's tests."""


def _use_arraycomm() -> None:
    """Let what asks for gloo get arraycomm, in `torch.distributed` and in its module."""
    c10d = dist.distributed_c10d
    for name in (
        "init_process_group",
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
    ):
        original = getattr(c10d, name)

        def replaced(*args: Any, original: Any = original, **options: Any) -> Any:
            if str(options.get("backend", "")).lower() == "gloo":
                options["backend"] = "arraycomm"
            args = tuple("arraycomm" if arg == "gloo" else arg for arg in args)
            return original(*args, **options)

        setattr(c10d, name, replaced)
        setattr(dist, name, replaced)


def _run_rank(name: str, rank: int, file: str, output: Path) -> None:
    """Run one rank of a test in this process, and end it with what came of that."""
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        self = Tests(name)
        self.rank, self.file_name = rank, file
        seconds = distributed_test.CUSTOM_PG_TIMEOUT.get(name, distributed_test.default_pg_timeout)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{file}",
            world_size=RANKS,
            rank=rank,
            timeout=timedelta(seconds=seconds),
        )
        self._barrier()
        set_rng_seed()
        getattr(self, name)()
        self._barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException as error:
        code = 99 if type(error).__name__ == "SkipTest" else 1
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_test(name: str, folder: Path) -> tuple[str, str]:
    """Run a test on all ranks; return what came of it, and why."""
    file = folder / "store"
    file.unlink(missing_ok=True)
    distributed_test.initialize_temp_directories()
    distributed_test.Barrier.init()
    outputs = [folder / f"rank{rank}" for rank in range(RANKS)]
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if not pid:
            _run_rank(name, rank, str(file), outputs[rank])
        pids.append(pid)
    codes = _wait(pids)
    if all(code in _SKIPPED or code == 99 for code in codes):
        return _NOT_APPLICABLE, next(
            (s.message for s in TEST_SKIPS.values() if s.exit_code == codes[0]), "skipped"
        )
    if all(code == 0 for code in codes):
        return _PASSED, ""
    if os.environ.get("VERBOSE"):
        for output in outputs:
            print(output.read_text(errors="replace"))
    return _FAILED, "; ".join(
        dict.fromkeys(_reason(o, c) for o, c in zip(outputs, codes, strict=True) if c)
    )


def _reason(output: Path, code: int) -> str:
    text = output.read_text(errors="replace")
    lines = [
        line
        for line in text.splitlines()
        if re.match(r"[A-Za-z_.]+(Error|Exception|Timeout)\b", line)
    ]
    return f"({code}) {lines[-1] if lines else text[-300:]}"


def _wait(pids: list[int]) -> list[int]:
    """Return the exit codes; ranks that take too long are ended."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + _LIMIT
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def main(arguments: list[str]) -> None:
    """Run the tests whose names contain an argument, or all."""
    gloo = "--gloo" in arguments
    parts = [argument for argument in arguments if not argument.startswith("--")]
    if not gloo:
        _use_arraycomm()
    torch.set_num_threads(1)
    Tests.setUpClass()
    names = [name for name in sorted(dir(Tests)) if name.startswith("test_")]
    names = [name for name in names if not parts or any(part in name for part in parts)]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            result, why = _run_test(name, Path(folder))
            counts[result] += 1
            print(f"{result:14} {name}  {why}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
