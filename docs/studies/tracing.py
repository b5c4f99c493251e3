"""The picture and the table of `docs/tracing.md`: `python -m docs.studies.tracing`, with matplotlib.

Runs the page's program on three ranks, draws its trace to `docs/trace.png`, and puts what
`arraycomm trace` prints into the page.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

PAGE: Final = Path(__file__).parents[1] / "tracing.md"
PICTURE: Final = PAGE.with_name("trace.png")
RANKS: Final = 3


def record(folder: str) -> str:
    """Run the page's program, draw its trace, and return what the command prints."""
    program = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert program is not None
    (Path(folder) / "straggler.py").write_text(program[1], encoding="utf-8")
    ours = [sys.executable, "-m", "arraycomm"]
    subprocess.run([*ours, "run", "-n", str(RANKS), "straggler.py"], cwd=folder, check=True)
    command = [*ours, "trace", "run.json", "-o", "run.png"]
    printed = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    PICTURE.write_bytes((Path(folder) / "run.png").read_bytes())
    return printed.stdout


def main() -> None:
    with TemporaryDirectory() as folder:
        printed = record(folder)
    page = re.sub(
        r"(-o run\.png\n).*?```",
        lambda found: f"{found[1]}{printed}```",
        PAGE.read_text("utf-8"),
        count=1,
        flags=re.DOTALL,
    )
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
