"""The structure of the package in numbers, most with a limit: `python -m tests.support.structure`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
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


def lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


# Beside what communicates: what tests it, the command line, and what is for one framework each.
BESIDE = {"testing", "cli", "adapters"}


def flat(room: Path) -> int:
    """Return how many modules lie in a folder itself."""
    return len(list(room.glob("*.py")))


def numbers() -> dict[str, tuple[int, int | None]]:
    """Return each number with its limit, or None if it is only reported.

    A limit of lines is there against large growth, two hundredths from now. A change is not to be
    squeezed into it.
    """
    paths = modules()
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in paths.items()}
    package = ROOT / "arraycomm"
    native = [*package.rglob("*.[ch]"), *package.rglob("*.cu")]
    core = [path for name, path in paths.items() if not BESIDE & set(name.split("."))]
    rooms = {path.parent for path in paths.values()} - {package, ROOT / "adapters"}
    tests = [path for folder in ("tests", "properties") for path in (ROOT / folder).rglob("*.py")]
    studies = (ROOT / "docs" / "studies").rglob("*.py")
    return {
        "modules in import circles": (len(circles(trees)), 0),
        "uses of private attributes from outside": (len(foreign_private(trees)), 17),
        "lines of the longest module": (max(map(lines, paths.values())), 765),
        "modules flat in arraycomm/": (flat(package), 16),
        "modules flat in one room": (max(map(flat, rooms)), 18),
        "lines of the package": (sum(map(lines, [*paths.values(), *native])), 66_000),
        "lines of the core": (sum(map(lines, [*core, *native])), None),
        "lines of the tests": (sum(map(lines, tests)), 61_500),
        "lines of the studies": (sum(map(lines, studies)), None),
    }


def main() -> int:
    failed = False
    for name, (number, limit) in numbers().items():
        too_many = limit is not None and number > limit
        failed = failed or too_many
        said = "" if limit is None else f" (at most {limit}){' TOO MANY' * too_many}"
        print(f"{name}: {number}{said}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
