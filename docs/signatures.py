"""What signatures on the site show as defaults: values, not the names that they have in the sources."""

from __future__ import annotations

import ast
from typing import Any

from griffe import Alias, Extension, Function, Kind, Object

# Classes that a program does not make itself: their signature is that of a call.
CALLED = ("arraycomm._trees.plan.Plan",)


class Defaults(Extension):
    """Have every default of a parameter that is a constant's name, or wrapped, be that value."""

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Go through all functions of the package, once it is loaded."""
        for name in CALLED:
            members = pkg[name.partition(".")[2]].members
            members["__init__"] = members["__call__"]
        for function in _functions(pkg):
            for parameter in function.parameters:
                if parameter.default is not None:
                    parameter.default = _value(str(parameter.default), function)


def _functions(scope: Object | Alias) -> Any:
    for member in scope.members.values():
        if isinstance(member, Function):
            yield member
        elif not member.is_alias and member.kind is not Kind.ATTRIBUTE:
            yield from _functions(member)


def _value(text: str, function: Function) -> str:
    tree: Any = ast.parse(text, mode="eval").body
    if isinstance(tree, ast.Call) and ast.unparse(tree.func) == "default":
        return _value(ast.unparse(tree.args[0]), function)
    if not text.isupper() and not text.endswith(".DEFAULT"):
        return text
    found: Any = function.parent
    for name in text.split("."):
        found = found.resolve(name) if isinstance(found, Object) else found
        found = function.package[found.partition(".")[2]] if isinstance(found, str) else found
    return str(found.value)
