"""The structure of the package in numbers: `python -m tests.support.structure` fails on what a reader feels.

A circle, a private attribute used from outside, a room, module, class or function that is too large, one more kind of
prepared call. Lines are reported, and fail only if they grow by two hundredths: a change is not to be squeezed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Documented, in spite of their names: those of named tuples, of `sys`, and of `os`.
PUBLIC = {
    *("_asdict", "_replace", "_current_frames", "_getframe", "_exit"),
    # Documented by mpi4py.
    *("_addressof", "_sizeof"),
}

Trees = dict[str, ast.Module]


def modules() -> dict[str, Path]:
    """Return the file of each module of the package."""
    found = {}
    for path in [*(ROOT / "arraycomm").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "adapters":
            parts = ("arraycomm", *parts)
        elif parts[1] == "adapters":
            continue
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Yield the modules that a module imports, for type checking and inside functions as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from [name for name in (inner, node.module) if name in known][:1]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def circles(trees: Trees) -> list[str]:
    """Return the modules that are part of an import circle."""
    graph = {
        name: set(imports(tree, set(trees))) - {name, "arraycomm"} for name, tree in trees.items()
    }
    reached = {name: _reach(graph, name) for name in graph}
    return sorted(name for name in graph if name in reached[name])


def _reach(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


def foreign_private(trees: Trees) -> list[str]:
    """Return the uses of private attributes outside the module of their class."""
    found = []
    for name, tree in trees.items():
        nodes = list(ast.walk(tree))
        own = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        own |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and _is_self(n.value)}
        for node in nodes:
            if not isinstance(node, ast.Attribute) or _is_self(node.value) or node.attr in own:
                continue
            if (
                node.attr.startswith("_")
                and not node.attr.endswith("_")
                and node.attr not in PUBLIC
            ):
                found.append(f"{name}:{node.lineno} {ast.unparse(node)}")
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def docstring_lines(node: ast.AST) -> int:
    """Return how many lines the docstring of a module, class or function has."""
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return 0
    return (first.end_lineno or 0) - first.lineno + 1 if isinstance(first.value.value, str) else 0


def kinds_of_prepared_calls(trees: Trees) -> list[str]:
    """Return the classes of prepared calls: those that derive from `FastPath`, but for bases of others."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"FastPath"}
    while more := {name for name in bases if bases[name] & found} - found:
        found |= more
    return sorted(name for name in found if not any(name in bases[other] for other in found))


def sizes(paths: dict[str, Path], trees: Trees) -> Iterator[tuple[str, str, int]]:
    """Yield what has a size that a reader feels: which, its name, and its size."""
    for name, tree in trees.items():
        short = name.removeprefix("arraycomm.")
        nodes = list(ast.walk(tree))
        text = paths[name].read_text(encoding="utf-8").count("\n")
        yield "lines of a module", short, text - sum(map(docstring_lines, nodes))
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1 - docstring_lines(node)
                yield "lines of a function", f"{short}:{node.name}", size
            elif isinstance(node, ast.ClassDef):
                # Overloads are one method.
                methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
                yield "methods of a class", f"{short}:{node.name}", len(methods)
    for room in {path.parent for path in paths.values()}:
        name = str(room.relative_to(ROOT))
        yield "modules of a room", name, len(list(room.glob("*.py")))


# How large each may be.
LIMITS = {
    "lines of a module": 500,
    "lines of a function": 60,
    "methods of a class": 20,
    "modules of a room": 16,
}
# The user's object has a method for each call.
USERS = "_communicator:Communicator"
# What is larger today: it may shrink, not grow, and nothing is added.
LARGER = {
    "adapters.torch_distributed._group:ArrayCommProcessGroup": 38,
    "_training.batches.data:DistributedDataContainer": 34,
    "_cuda.devices:Devices": 32,
    "testing.pytest_plugin.in_step:InStep": 27,
    "testing.conformance._reductions:ReductionLaws": 26,
    "_cuda.links.nccl_link:NcclLink": 22,
    "_transports.mpi.transport:MPITransport": 22,
}
# Of what there is a number only, the same.
COUNTS = {
    "modules in import circles": 0,
    "uses of private attributes from outside": 17,
    "kinds of prepared calls": 7,
}
# Lines, as they were when last written down. They may grow by two hundredths.
LINES = {"lines of the package": 64_850, "lines of the tests": 60_261}
GROWTH = 1.02
# Beside what communicates: what tests it, the command line, and what is for one framework each.
BESIDE = {"testing", "cli", "adapters"}


def too_large(found: Iterable[tuple[str, str, int]], larger: dict[str, int]) -> list[str]:
    """Say of each thing that is larger than it may be how large it is, and that what has shrunk is to be noted."""
    said, names = [], set()
    for kind, name, size in found:
        if name == USERS:
            continue
        limit = LIMITS[kind]
        if size > larger.get(name, limit):
            said.append(f"{kind}: {name} has {size}, and may have {larger.get(name, limit)}")
        names |= {name} if size > limit else set()
    return said + [
        f"{name} is no longer larger: take it out of LARGER" for name in larger.keys() - names
    ]


def counted(paths: dict[str, Path], trees: Trees) -> dict[str, int]:
    """Return each number of the whole package."""
    native = [*(ROOT / "arraycomm").rglob("*.[ch]"), *(ROOT / "arraycomm").rglob("*.cu")]
    core = [path for name, path in paths.items() if not BESIDE & set(name.split("."))]
    tests = [path for folder in ("tests", "properties") for path in (ROOT / folder).rglob("*.py")]
    files = {
        "lines of the package": [*paths.values(), *native],
        "lines of the core": [*core, *native],
        "lines of the tests": tests,
        "lines of the studies": (ROOT / "docs" / "studies").rglob("*.py"),
    }
    return {
        "modules in import circles": len(circles(trees)),
        "uses of private attributes from outside": len(foreign_private(trees)),
        "kinds of prepared calls": len(kinds_of_prepared_calls(trees)),
        **{
            name: sum(path.read_text(encoding="utf-8").count("\n") for path in each)
            for name, each in files.items()
        },
    }


def main() -> int:
    paths = modules()
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in paths.items()}
    limits = COUNTS | {name: int(number * GROWTH) for name, number in LINES.items()}
    said = too_large(sizes(paths, trees), LARGER)
    for name, number in counted(paths, trees).items():
        at_most = f" (at most {limits[name]})" if name in limits else ""
        print(f"{name}: {number}{at_most}")
        if name in limits and number > limits[name]:
            said.append(f"{name}: TOO MANY")
    print(f"larger than a reader likes, as listed: {len(LARGER)}", *said, sep="\n")
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
