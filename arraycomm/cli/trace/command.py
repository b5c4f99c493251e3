"""`arraycomm trace`: its arguments, and what it prints and draws."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

from arraycomm._trace.files import read
from arraycomm.cli.trace.drawing import draw
from arraycomm.cli.trace.spans import Span, ranks_of, spans_of
from arraycomm.cli.trace.tables import report

_USAGE_ERROR: Final = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `arraycomm trace`."""
    parser.add_argument(
        "path", help="what Communicator.trace or ARRAYCOMM_TRACE has written; or what ranks have "
        "saved beside it before the job failed"
    )  # fmt: skip
    parser.add_argument(
        "--output",
        "-o",
        metavar="PICTURE",
        help="where to draw the timeline, such as run.png; needs pip install 'arraycomm[plot]'",
    )
    parser.add_argument(
        "--from",
        dest="start",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="leave out what ended before; 0 by default",
    )
    parser.add_argument(
        "--to",
        dest="end",
        type=float,
        metavar="SECONDS",
        help="leave out what began later; the end of the trace by default",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print where the time went and who waited for whom, and draw the timeline if asked to."""
    try:
        trace = read(arguments.path)
    except FileNotFoundError:
        return _refuse(f"there is no file {arguments.path} in {os.getcwd()}")
    except (OSError, ValueError) as error:
        return _refuse(str(error))
    every, ranks = spans_of(trace), ranks_of(trace)
    seconds = max((span.end for span in every), default=0.0)
    ends = arguments.start, seconds if arguments.end is None else arguments.end
    if not ends[0] < ends[1]:
        return _refuse(f"--from must be less than {ends[1]} s, the end; got {ends[0]}")
    spans = [span for span in every if span.end > ends[0] and span.start < ends[1]]
    print("\n".join([*_about(arguments.path, trace, spans, seconds), "", *report(spans, ranks)]))
    if arguments.output is not None:
        title = f"{_many(len(ranks), 'rank')}: who waited, and when data moved"
        try:
            draw(spans, ranks, title, arguments.output, ends)
        except ImportError:
            return _refuse(
                "--output needs matplotlib; got no such module; install it with: "
                "pip install 'arraycomm[plot]'"
            )
        except (OSError, ValueError) as error:
            return _refuse(f"the picture could not be drawn: {error}")
        print(f"\nThe timeline is drawn in {arguments.output}.")
    return 0


def _many(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _refuse(text: str) -> int:
    print(f"arraycomm trace: {text}", file=sys.stderr)
    return _USAGE_ERROR


def _about(path: str, trace: dict[str, Any], spans: Sequence[Span], seconds: float) -> list[str]:
    """Say what the trace has, and what is not in it."""
    about = trace["otherData"]["arraycomm"]
    ranks = about["ranks"]
    many = _many(len(spans), "call"), _many(len(ranks), "rank")
    lines = [f"{path}: {many[0]} of {many[1]} in {seconds:.3f} s"]
    missing = sorted(set(range(about["size"])) - set(ranks))
    if missing:
        lines.append(f"Nothing was saved by rank {', '.join(map(str, missing))}.")
    for rank, dropped in about["dropped"].items():
        lines.append(f"Rank {rank} did not keep its last {_many(dropped, 'call')}.")
    lines.append("Bytes, waiting and transfer are those of all ranks together.")
    return lines
