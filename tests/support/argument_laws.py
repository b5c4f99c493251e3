"""Which laws pass each argument, and which tests show each failure: `python -m tests.support.argument_laws` writes the page.

Calls are read from the source of the laws, and of what these use; what can fail, from docs/failures.md.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import arraycomm as ac

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "evidence" / "laws.md"
# On each line how a row of docs/failures.md begins, and the tests, laws and checks of programs that show it.
SHOWN: Final = Path(__file__).with_name("failures.txt")
_CLASSES: Final = (ac.Communicator, ac.Request, ac.GridCommunicator, ac.DistributedDataContainer)
_FUNCTIONS: Final = (
    *("DistributedDataContainer", "DistributedOptimizer", "allreduce_gradients"),
    *("allreduce_tree", "exchange", "join", "mean_metrics", "op", "println"),
    *("raise_on_difference", "raise_together", "synchronize", "testall", "waitall", "waitany"),
)
# What no law of results can state: where ranks come from, and how a program ends.
_LEFT_OUT: Final = ("abort", "from_mpi", "give_up", "shrink", "trace")

Laws = dict[str, set[str]]
Place = tuple[str, ast.AST]  # A module of laws, and what it defines.


def public_calls() -> dict[str, list[str]]:
    """Return the parameters of each public call, by its name with its class."""
    found = {name: getattr(ac, name) for name in _FUNCTIONS}
    for kind in _CLASSES:
        members = inspect.getmembers(kind, inspect.isfunction)
        found |= {
            f"{kind.__name__}.{name}": member
            for name, member in members
            if not name.startswith("_")
            and name not in _LEFT_OUT
            and member.__module__.startswith("arraycomm")
        }
    return {name: _parameters(call) for name, call in found.items()}


def _parameters(call: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(call).parameters if name != "self"]


def laws() -> dict[str, dict[str, list[str]]]:
    """Return for each call and parameter the laws that pass it."""
    paths = [*ROOT.glob("properties/*.py"), *ROOT.glob("arraycomm/testing/conformance/*.py")]
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(paths)}
    scopes = {module: dict(_named(module, tree)) for module, tree in trees.items()}
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                there = scopes.get((node.module or "").rpartition(".")[2], {})
                scopes[module] |= {x.name: there[x.name] for x in node.names if x.name in there}
    calls, found = public_calls(), defaultdict[str, Laws](lambda: defaultdict(set))
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for name, passed in _passed((module, node), scopes, calls):
                    for parameter in passed:
                        found[name][parameter].add(node.name.removeprefix("test_"))
    return {
        name: {parameter: sorted(found[name][parameter]) for parameter in parameters}
        for name, parameters in calls.items()
    }


def _named(module: str, tree: ast.Module) -> Iterator[tuple[str, Place]]:
    """Yield what the laws of a module may use: functions, classes and tables."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("Test"):
            yield node.name, (module, node)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((n.id, (module, node)) for n in targets if isinstance(n, ast.Name))


def _passed(
    law: Place, scopes: dict[str, dict[str, Place]], calls: dict[str, list[str]]
) -> Iterator[tuple[str, list[str]]]:
    """Yield the calls of a law, and of what it uses, with the parameters that they pass."""
    used = [law]
    tables, keywords = dict[str, int](), set[str]()
    for module, whole in used:
        for node in ast.walk(whole):
            found = scopes[module].get(node.id) if isinstance(node, ast.Name) else None
            if found is not None and found not in used:
                used.append(found)
            elif isinstance(node, ast.Dict):
                # A table of calls: a name, and its positional arguments.
                tables |= {
                    str(key.value): len(value.elts)
                    for key, value in zip(node.keys, node.values, strict=True)
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple)
                }
            elif isinstance(node, ast.Call):
                if any(isinstance(each, ast.Starred) for each in node.args):  # call(*args, out=out)
                    keywords |= {each.arg for each in node.keywords if each.arg}
                for full in _called(node.func, calls):
                    yield full, _bound(node, calls[full])
                if isinstance(node.func, ast.Name) and node.func.id == "requested":
                    # A request by its name, which follows the communicator.
                    _, named, *rest = node.args
                    for full in _matching(ast.literal_eval(named), calls):
                        yield full, _bound(ast.Call(node.func, rest, node.keywords), calls[full])
    for name, count in tables.items():
        for form in (name, f"i{name}"):
            for full in _matching(form, calls):
                yield full, [*calls[full][:count], *keywords.intersection(calls[full])]


def _called(function: ast.expr, calls: dict[str, list[str]]) -> list[str]:
    """Return the functions or methods that a call may be of: `", ".join(names)` is one of a string."""
    if isinstance(function, ast.Name):
        return [function.id] if function.id in calls else []
    if not isinstance(function, ast.Attribute) or isinstance(function.value, ast.Constant):
        return []
    if isinstance(function.value, ast.Name) and function.value.id in ("ac", "arraycomm"):
        return [function.attr] if function.attr in calls else []
    return [full for full in _matching(function.attr, calls) if "." in full]


def _matching(name: str, calls: dict[str, list[str]]) -> list[str]:
    return [full for full in calls if full.rpartition(".")[2] == name]


def _bound(node: ast.Call, parameters: list[str]) -> list[str]:
    given = [each.arg for each in node.keywords]
    if None in given or ("options" in parameters and given):  # **options
        return parameters
    return [*parameters[: len(node.args)], *(name for name in given if name in parameters)]


def failures() -> tuple[dict[str, list[str]], set[str]]:
    """Return what shows each row of docs/failures.md; and the beginnings that are those of no row."""
    text, found = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8"), {}
    known = dict(line.split(" | ") for line in SHOWN.read_text(encoding="utf-8").splitlines())
    for row in re.findall(r"^\| (?!what happened)(.+?) \|", text, re.MULTILINE):
        starts = [start for start in known if row.startswith(start)]
        found[row] = [name for start in starts for name in known.pop(start).split()]
    return found, set(known)


def files() -> dict[str, str]:
    """Return the file of each test and law, and of the checks that programs of several ranks make."""
    folders = ("tests", "properties", "arraycomm/testing/conformance")
    return {
        name: path.relative_to(ROOT).as_posix()
        for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
        for name in re.findall(
            r"def (?:test_(?=\w)|(?=[a-z]\w+\(\) -> None))(\w+)\(", path.read_text("utf-8")
        )
    }


def page() -> str:
    """Return the page of the evidence."""
    lines = [
        "---",
        "description: Which laws pass each argument of each public call, and which tests show each failure",
        "---",
        "",
        "# Laws of each argument",
        "",
        "Each argument of each public call, and the laws that pass it, read from the laws in",
        "`arraycomm/testing/conformance` and `properties/`. The tests fail if an argument has no law.",
        "",
        "| call | argument | laws |",
        "|---|---|---|",
    ]
    for name, parameters in laws().items():
        for parameter, found in parameters.items():
            shown = ", ".join(law.replace("_", " ") for law in found[:3])
            more = f", and {len(found) - 3} more" if len(found) > 3 else ""
            lines.append(f"| `{name}` | `{parameter}` | {shown}{more} |")
    lines += [
        *("", "## Tests of each failure", ""),
        "Each row of [what can go wrong](../failures.md), and the tests and laws that show what each rank gets then.",
        *("The tests fail if a row has none.", "", "| what happened | tests |", "|---|---|"),
    ]
    places = files()
    for row, names in failures()[0].items():
        shown = ", ".join(f"{name.replace('_', ' ')} (`{places.get(name)}`)" for name in names)
        plain = re.sub(r"\[(.+?)\](\(.+?\)|\[.+?\])", r"\1", row)
        lines.append(f"| {plain} | {shown} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
