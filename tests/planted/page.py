"""docs/evidence/planted.md: the table of faults, and which laws caught each when the script last ran."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.planted.catalogue import CATALOGUE, FAULTS
from tests.planted.copies import ROOT
from tests.planted.fault import Fault

# By the fault's name: the laws that failed, and the error of each.
Caught = Mapping[str, Mapping[str, str]]

PAGE: Final = ROOT / "docs" / "evidence" / "planted.md"
CAUGHT: Final = Path(__file__).with_name("caught.json")

_HEAD: Final = """\
---
description: Faults planted in the library, and the law that catches each
---

# Mutation tests

Would the tests notice if the library were wrong? The script below puts one fault at a time into a copy of the source, and runs the
laws of `properties/` and of [`arraycomm.testing.conformance`](../testing.md#conformance-tests-for-a-transport-or-a-communicator) on it.
A fault is caught if a law fails. A time limit that ends a run does not count.

```console
$ make planted
```

Each run tries the laws that are named with the fault, with 25 examples each and then with 150. All other laws follow if these pass.
The examples are the same in every run. A fault whose text the library no longer has is an error, also in the test suite.

`python -m tests.planted --only 'NaN dropped'` plants one fault.

Compiled programs of JAX need a process for each rank, so faults of that adapter are caught by examples in `tests/adapters`, not by laws.

`make mutants` tries small random changes: another comparison, another number, a call less. After `python -m tests.planted.mutants --record properties`, which
finds out what executes each line of Python, it tries only those laws on a change of the line, and first the tests that are named like its module. Changes that
a caller does not see are not counted, nor those without a verdict. "Since then" has tests and laws for what had survived, so it is no fresh sample.

| seeds | changes | caught by laws | by tests of the changed room | caught | since then |
|---|---|---|---|---|---|
| 129, 230 and 331 | 65 | 14 | 38 | 80 % | 92 % |
| 947 and 1361 | 42 | tried on some | 27 with those | 64 % | 93 % |
| 1733, 2711 and 3011 | 19 | 9 | 7 | 84 % | 100 % |
| 4001, 4013, 4021 and 4027, 11 to 13 minutes each | 23 | 10 | 10 | 87 % | 91 % |
| 4051 and 4057, 13 minutes each | 18 | 8 | 8 | 89 % | 100 % |

Tests of other rooms catch the two that survived the last sample; the sampler now tries them, too. Of the three of the sample before, a test now catches one: tasks
of joblib had no timeout in tests. One is in a line for MLX, which was not installed; with it a test
of the room catches the change. The third changes how much longer than its timeout a test takes if a rank is stuck outside Python.

"""

_FINDINGS: Final = """
## Findings

At first these faults were not caught, or only by chance. Laws were written or sharpened for them:

- Laws repeated calls with the same arrays, so a call that sent or folded what the one before had left was right by chance.
- Nobody changed an array once its request was finished, or its call had returned. So nothing said whether others still read it.
- `out` was filled with the right result already when a second call was to fill it.
- Arrays of broadcasts and messages were seldom longer than what travels with a header.
- Trees of the laws were too small for the memory that ranks share, and were seldom cut into several messages.
- No law had rows so long that a fold goes block by block, and few had subnormal float16.
- The laws of layouts compared calls of which the second took the fast path.
- A rank of weight 0 never measured NaN.
- Gradients of torch were compared after a step, which reduces what a backward pass has left out, and never before it.
- Optimizers, sharded states, gradients of collectives, batch norm and error feedback had examples, but no laws.
- No test called `allgather` or `reduce_scatter` of the JAX adapter under `vmap`.
"""


def record(found: Caught) -> None:
    """Keep what caught these faults, and write the page anew."""
    kept = json.loads(CAUGHT.read_text(encoding="utf-8")) if CAUGHT.exists() else {}
    kept |= found
    known = {fault.name: dict(sorted(kept.get(fault.name, {}).items())) for fault in FAULTS}
    # A fault on each line.
    lines = (f" {_as_json(name)}: {_as_json(errors)}" for name, errors in known.items())
    CAUGHT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    PAGE.write_text(page(known), encoding="utf-8")


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def page(caught: Caught) -> str:
    """Return the whole page."""
    count = sum(bool(caught.get(fault.name)) for fault in FAULTS)
    lines = [_HEAD + f"The last run caught {count} of {len(FAULTS)} planted faults.\n"]
    for heading, faults in CATALOGUE.items():
        lines += [f"\n## {heading}\n", "| fault | what is wrong | caught by |", "|---|---|---|"]
        lines += [_row(fault, caught.get(fault.name, {})) for fault in faults]
    lines += ["\n## Laws\n", "Each law, and the faults above that it has caught.\n"]
    lines += ["| law | faults |", "|---|---|"]
    lines += [f"| {_words(law)} | {'; '.join(faults)} |" for law, faults in by_law(caught).items()]
    return "\n".join(lines) + "\n" + _FINDINGS


def _words(law: str) -> str:
    return law.replace("_", " ")


def _row(fault: Fault, errors: Mapping[str, str]) -> str:
    return f"| {fault.name} | {fault.what} | {_by(fault, errors)} |"


def _by(fault: Fault, errors: Mapping[str, str]) -> str:
    """Say which laws caught a fault: those that are named with it, before any others."""
    if not errors:
        return "**not caught**"
    first = [law for law in fault.laws if law in errors] or list(errors)
    said = ", ".join(f"{_words(law)}: {errors[law]}" for law in first[:2])
    place = {"threads": "", "mpi": ", over MPI"}
    where = place.get(fault.run.partition(" ")[0], f", in `{fault.run}`")
    more = len(errors) - len(first[:2])
    return said + where + (f"; and {more} more" if more else "")


def by_law(caught: Caught) -> dict[str, list[str]]:
    """Return for each law the faults that it caught, those first that the fewest others caught."""
    found: dict[str, list[str]] = {}
    for fault in sorted(caught, key=lambda fault: len(caught[fault])):
        for law in caught[fault]:
            found.setdefault(law, []).append(fault)
    return dict(sorted(found.items()))


def laws() -> list[str]:
    """Return the names of all laws, from the text of the files that state them."""
    folders = [ROOT / "properties", ROOT / "arraycomm" / "testing" / "conformance"]
    texts = [path.read_text("utf-8") for folder in folders for path in folder.glob("*.py")]
    return sorted(name for text in texts for name in re.findall(r"def test_(\w+)\(", text))
