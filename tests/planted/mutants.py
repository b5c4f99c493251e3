"""Small random changes of the package, and whether a law catches each: `python -m tests.planted.mutants`.

What no law catches the tests of its room are tried on. Prints what survives both, and the scores. What fails
without the change as well does not count, and a run that its time limit ends is no verdict. A sample takes
`--seconds`. `EQUIVALENT` has those that change nothing that a caller sees, with reasons.
`--record properties tests/trees` finds out which laws and tests execute each line: from then on only these laws
are tried on a change of the line, and these tests before the rest of the room.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from coverage import CoverageData

from tests.planted.copies import ROOT, Copy
from tests.planted.fault import Fault
from tests.planted.runs import catch

# The tests of each room of the package, which are tried if no law catches a change; each run has files of its own.
_ADAPTERS: Final = " ".join(
    f"tests/adapters/test_{name}.py" for name in ("shard", "copies", "accumulation", "arithmetic")
)
_OF_TORCH: Final = ("training", "batchnorm", "data", "collectives", "parameters")
_TORCH: Final = [
    f"tests/adapters/test_torch_{name}.py" for name in (*_OF_TORCH, "modules", "optimizers")
]
TESTS: Final = {
    "_arrays": "tests/arrays tests/adapters/test_jax_collectives.py",
    "_calls": "tests/collectives tests/cuda/test_devices.py",
    "_collectives": "tests/collectives",
    "_prepared": "tests/collectives tests/native",
    "_cuda": "tests/cuda",
    "_exit": "tests/session tests/faults",
    "_folds": "tests/native tests/arrays/test_folds.py",
    "_jobs": "tests/cli tests/session/test_launch_function.py tests/adapters/test_joblib.py",
    "_launch": "tests/session tests/testing/test_plugin.py",
    "_messages": "tests/collectives tests/protocol/test_deadlock.py",
    "_native": "tests/native tests/session/test_builds.py tests/collectives",
    "_protocol": "tests/protocol tests/collectives",
    "_reduce": "tests/collectives tests/native",
    "_start": "tests/session tests/transports/test_processes.py",
    "_trace": "tests/trace tests/cli/test_trace.py tests/collectives/test_trace.py",
    "_training": f"tests/training {_ADAPTERS} tests/adapters/test_torch_modules.py tests/adapters/test_torch_parameters.py",
    "_transports": "tests/transports tests/collectives",
    "_transports/mpi": "tests/transports; mpi tests/transports tests/protocol tests/collectives/test_explain.py; tests/hosts",
    "_trees": "tests/trees tests/collectives/test_refusals.py",
    "cli": "tests/cli",
    "testing": "tests/testing",
    "testing/_arrays": "tests/testing/test_strategies.py tests/testing/test_oracle.py; tests/testing",
    "testing/_ranks": "tests/testing/test_run.py tests/testing/test_schedule.py; tests/testing",
    "adapters/jax": "tests/adapters/test_jax_adapter.py tests/adapters/test_jax_collectives.py",
    "adapters/numpy": f"tests/adapters/test_numpy_adapter.py tests/adapters/test_array_optimizers.py {_ADAPTERS}",
    "adapters/sklearn": "tests/adapters/test_sklearn_adapter.py tests/adapters/test_learners.py",
    "adapters/torch": " ".join((*_TORCH, "tests/training tests/adapters/test_shard.py")),
    "adapters/torch_distributed": "tests/adapters/test_torch_distributed.py",
    "adapters": "tests/adapters",
    "": "tests/test_println.py tests/test_errors.py tests/test_callsite.py tests/adapters/test_torch_compile.py "
    "tests/collectives tests/session",
}
_SWAPPED: Final[dict[type[ast.AST], str]] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip
# A line of the library as it is changed, and why no law can see it.
EQUIVALENT: Final[dict[str, str]] = {
    "self.word = int(self.table.nbytes + self.flat.nbytes < room)": "the rows come later",
    "self._streams, self._tried = past < through, {}": "both ways take as long",
    "if last is not None and not (link.overlaps and number + (1 + 1) < count):": "folded sooner",
    "if done <= end:": "an empty part more",
    "if payload < 0 and nbytes < GATHER_BYTES // link.size": "both ways give the same",
    "if done <= own.stop:": "an empty part more",
    "if following > len(self.waiting) - 1:": "after all have come, nothing comes but inner passes",
    "saved = by_slices + (widest if nodes == 2 else widest + 1)": "an estimate of which is quicker",
    "if number <= 0:": "folded by NumPy",
    "self._data: Bytes = np.empty((0 + 1), np.uint8)": "the length of the root alone is read",
    'return _several("(", key, ")" if len(key) == 1 else ",)", sort=False)': "still unique",
    'return _several("(", key, ")" if len(key) != (1 + 1) else ",)", sort=False)': "still unique",
    'fold_on("sum", _SUMS, total, (0 + 1), [part.copy()], part, more=True)': "a sum counts no rows",
    "return None if self.refuses else (0 + 1)": "a key, the same in every call",
    "if (self->fold > 0 && (size_t)self->part % fold_itemsize(self->fold)) return false;": "bool has one byte",
    "self.outgoing.append(_Frame(self.ring, (_TAKEN, (0 + 1), number)))": "nobody reads this tag",
    "return np.array(rows, np.int64).reshape(-(1 + 1), 4)": "NumPy takes it for -1",
    "return BufferView(NOTHING, framework.name, x, True, False, framework.device_of(x))": "it has no elements",
    "if self.status is None or (not now and looked < self._looked - _LOOK_EVERY):": "looks too often",
    "least = st.sampled_from((1, (1 + 1), -2))": "any keys are right",
    "if device is None and not differing:": "the other way enters the same",
    "sent.fill((0 + 1))": "nobody reads what lies between leaves",
    "if (found != NULL) PyErr_Clear();": "arrays of NumPy have a dtype",
    "late = time.monotonic() >= self._deadline": "one moment",
    "while (self->next <= self->count) {": "an empty group more",
    "if length < group.inline_bytes:": "on all ranks; it comes again",
    ": wait_for_all(&self->slots, step, clock_now() - WAIT_NANOSECONDS);": "Python waits instead",
    "return (np.arange(count, dtype=np.uint32) // (rank + (1 + 1)) % 3).astype(np.uint8)": "other data",
    "start, rounds = 0, (1 + 1)": "a step more, on all ranks",
    "if here is None and there is None:": "arrays on devices are of frameworks that have both",
    'part = self._directory / f"part-{(self._job.rank + 1)}"': "still unique",
    "self.leaves, self.spec = optree.tree_flatten(tree, none_is_leaf=False)": "trees that have None are prepared, too",
}


class Mutant(NamedTuple):
    """A change of one place of a file."""

    file: str
    line: int
    before: str
    after: str
    fault: Fault


def room_of(file: str) -> str:
    """Return the room of a file of the package, "" for what lies in none."""
    parts = file.removeprefix("arraycomm/").split("/")[:-1]
    return next(found for end in (2, 1, 0) if (found := "/".join(parts[:end])) in TESTS)


def mutants() -> Iterator[Mutant]:
    """Yield every change of the package."""
    for folder in ("arraycomm", "adapters"):
        for path in sorted((ROOT / folder).rglob("*.*")):
            if path.suffix in (".py", ".c"):
                yield from _of_file(path)


def _of_file(path: Path) -> Iterator[Mutant]:
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    file = f"arraycomm/{name}" if name.startswith("adapters") else name
    compiled = "_folds" not in name
    for line, after in _in_python(text) if path.suffix == ".py" else _in_c(text):
        fault = Fault("mutant: changed", file, text, after, (), "threads", True, compiled)
        shown = [each.splitlines()[line - 1].strip() for each in (text, after)]
        if shown[0] != shown[1]:
            yield Mutant(file, line, *shown, fault)


def _in_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield changed texts, each with a line that differs."""
    data, starts = text.encode(), [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for start, end, line, new in _changes(ast.parse(text)):
        first, last = starts[start[0] - 1] + start[1], starts[end[0] - 1] + end[1]
        yield line, (data[:first] + new(data[first:last].decode()).encode() + data[last:]).decode()


# In C, what stands between two spaces, and whole statements that call something.
_IN_C: Final = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "&&": "||", "||": "&&",
    "+=": "-=",
}  # fmt: skip
_C_PLACE: Final = re.compile(r"(?<= )[<>=!+&|-]{1,2}(?= )|^ +[a-z_]+\([^={}]*\);$", re.MULTILINE)


def _in_c(text: str) -> Iterator[tuple[int, str]]:
    for found in _C_PLACE.finditer(text):
        new = ";" if found[0].endswith(";") else _IN_C.get(found[0], found[0])
        line = text.count("\n", 0, found.start()) + 1
        if not text.splitlines()[line - 1].lstrip().startswith(("*", "/", "#")):
            yield line, text[: found.start()] + new + text[found.end() :]


def _changes(tree: ast.Module) -> Iterator[tuple]:
    """Yield places, with the line that is shown and a function that changes the text there."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                yield from _changes_of(node)


def _changes_of(node: ast.AST) -> Iterator[tuple]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield _between(node.left, node.comparators[0], _SWAPPED[type(node.ops[0])])
    elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED:
        yield _between(node.left, node.right, _SWAPPED[type(node.op)])
    elif isinstance(node, ast.BoolOp):
        yield _between(node.values[0], node.values[1], _SWAPPED[type(node.op)])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield *_place(node), node.lineno, lambda text: f"({text.removeprefix('not ')})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield *_place(node), node.lineno, lambda text: str(text != "True")
    elif (isinstance(node, ast.Constant) and isinstance(node.value, int)) or (
        isinstance(node, ast.Attribute) and node.attr == "rank" and isinstance(node.ctx, ast.Load)
    ):
        yield *_place(node), node.lineno, lambda text: f"({text} + 1)"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield *_place(node), node.lineno, lambda _: "pass"


def _place(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _between(left: ast.expr, right: ast.expr, operator: str) -> tuple:
    start, end = (left.end_lineno, left.end_col_offset), (right.lineno, right.col_offset)

    def swapped(text: str) -> str:
        opened, closed = text.count(")"), text.count("(")
        return f"{')' * opened} {operator} {'(' * closed}"

    return start, end, right.lineno, swapped


_RECORD: Final = ROOT / ".cache" / "mutants.coverage"
_WORD: Final = re.compile("[a-z]{3,}")


def _record(paths: list[str]) -> None:
    _RECORD.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    command += ["-p", "tests.planted.recorder", "--cov=arraycomm", "--cov=adapters", "--cov-append"]
    command += ["--cov-context=test", "--cov-report=", "-k", "not TestSelf"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"COVERAGE_FILE": str(_RECORD)}, check=False)


@cache
def _executing(file: Path) -> dict[int, set[str]] | None:
    """Return which laws and tests execute each line; None if that is not known, or was before a change."""
    data = CoverageData(str(_RECORD))
    data.read()
    if str(file) not in data.measured_files() or file.stat().st_mtime > _RECORD.stat().st_mtime:
        return None
    lines = data.contexts_by_lineno(str(file))
    # Without "|run", and parameters.
    return {line: {re.split(r"[\[|]", test)[0] for test in lines[line]} for line in lines}


def _runs(mutant: Mutant) -> list[Fault]:
    """Return what is tried on a change: of its room first what executes the line, or is named alike."""
    room, *others = TESTS[room_of(mutant.file)].split("; ")
    words = {*_WORD.findall(mutant.file)}.difference(_WORD.findall(room_of(mutant.file)))
    lines = _executing(mutant.fault.source(ROOT))
    # If it begins with "and", the line before is changed as well; "" is what is executed as modules are imported.
    changed = (mutant.line, mutant.line - mutant.before.startswith(("and ", "or ")))
    found = {""} if lines is None else {test for line in changed for test in lines.get(line, ())}
    laws = ["threads"] if "" in found else [t for t in found if t.startswith("properties/")]
    first = [test for test in found if test.startswith(tuple(room.split()))] or [
        path.relative_to(ROOT).as_posix()
        for folder in room.split()
        for path in (ROOT / folder).glob("test_*.py")
        if words.intersection(_WORD.findall(path.stem))
    ]
    left = " ".join([room, *(f"--deselect={test}" for test in first)])
    runs = [" ".join(sorted(laws)), " ".join(sorted(first)), left, *others]
    return [replace(mutant.fault, run=run) for run in runs if run]


_CATCHERS: Final = ("caught by a law", "caught by a test")


def _caught_by(copy: Copy, mutant: Mutant) -> str:
    """Return what catches a change; if nothing does, why not, or "survives"."""
    if mutant.after in EQUIVALENT:
        return EQUIVALENT[mutant.after]
    if mutant.after == mutant.before.replace("strict=True", "strict=False"):
        return "no lengths differ"
    hung = False
    for fault in _runs(mutant):
        try:
            found = catch(copy, fault)
        except subprocess.CalledProcessError:
            return "does not compile"
        if found:
            return _CATCHERS[not fault.run.startswith(("threads", "properties/"))]
        hung = hung or found.hung
    return "no verdict" if hung else "survives"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.planted.mutants", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="when to begin no further one")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="how many copies are used at a time")
    parser.add_argument("--record", nargs="+", help="record what these tests execute, and end")
    arguments = parser.parse_args()
    if arguments.record:
        _record(arguments.record)
        return
    waiting = list(mutants())
    random.Random(arguments.seed).shuffle(waiting)
    end = time.monotonic() + arguments.seconds
    found = Counter[str]()
    with TemporaryDirectory(prefix="mutants-") as folder:

        def work(number: int) -> None:
            copy = Copy(Path(folder) / str(number))
            while waiting and time.monotonic() < end:
                mutant = waiting.pop()
                by = _caught_by(copy, mutant)
                found[by] += 1
                said = f"{mutant.file}:{mutant.line}: {by}\n- {mutant.before}\n+ {mutant.after}"
                print(said, flush=True)

        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(work, range(arguments.jobs)))
    laws, tests, survive = (found[by] for by in (*_CATCHERS, "survives"))
    print(
        f"tried {found.total()}; of {laws + tests + survive} caught: laws {laws}, "
        f"tests {tests}; no verdict on {found['no verdict']} more"
    )


if __name__ == "__main__":
    main()
