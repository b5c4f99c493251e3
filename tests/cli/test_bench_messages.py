"""The benchmark of messages: what each contender receives is what the rank before it has sent."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from arraycomm.cli.bench import arguments as bench
from arraycomm.cli.bench import messages
from tests.support.launcher import needs_mpiexec, run_python


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


def test_sizes_are_those_of_the_mode_unless_others_are_given() -> None:
    assert tuple(bench.requested_messages(parse("messages"))) == messages.SIZES
    assert tuple(bench.requested_messages(parse("messages", "--sizes", "8"))) == (8,)
    assert bench.requested_messages(parse("latency")) == ()


# Once as it is, and once with messages that go the other way round.
PROGRAM = """
import sys
import arraycomm
from arraycomm.cli import main
words = ["bench", "messages", "--sizes", "8,64K", "--repeats", "1", "--seconds", "0.01", "--json"]
status = main([*words, "right.json"])
arraycomm.finalize()
sendrecv = arraycomm.Communicator.sendrecv
arraycomm.Communicator.sendrecv = lambda self, x, to, of, **more: sendrecv(self, x, of, to, **more)
sys.exit(status or 2 * (main([*words, "wrong.json"]) != 1))
"""


@needs_mpiexec
def test_right_messages_are_timed_and_wrong_ones_are_seen(tmp_path: Path) -> None:
    done = run_python("-c", PROGRAM, ranks=3, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    right, wrong = (
        json.loads((tmp_path / name).read_text("utf-8"))["lines"]
        for name in ("right.json", "wrong.json")
    )
    assert [line["nbytes"] for line in right] == [8, 64 << 10]
    for line in right:
        assert [e["status"] for e in line["contenders"]] == ["ok"] * len(messages.KEYS)
        assert line["contenders"][0]["ratios"].keys() == {"mpi4py-message", "mpi4py-pickled"}
    assert [e["status"] for e in wrong[1]["contenders"]] == ["wrong", "wrong", "ok", "ok"]
    assert "Messages of float32" in done.stdout
