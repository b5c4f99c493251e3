"""The oldest versions that pyproject.toml allows, as constraints for pip: `python oldest.py EXTRA ...`.

It runs in an environment that holds nothing yet.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

PROJECT: Final = Path(__file__).parents[2] / "pyproject.toml"


def constraints(extras: Iterable[str]) -> Iterator[str]:
    """Yield a constraint for each package that the project, or one of these extras, names."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    named = list(project["dependencies"])
    for extra in extras:
        named += project["optional-dependencies"][extra]
    for requirement in named:
        found = re.match(r"([\w.-]+)(?:\[[^\]]*\])?>=([\w.]+)", requirement)
        if found:
            yield f"{found[1]}=={found[2]}"
        elif not requirement.startswith("arraycomm["):
            raise ValueError(f"{requirement} has no lower bound")


if __name__ == "__main__":
    print(*constraints(sys.argv[1:]), sep="\n")
