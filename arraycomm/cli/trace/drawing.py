"""A trace as a picture: for each rank a row, whose height is shared by waiting and transfer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from arraycomm.cli.trace.spans import Span

# Told apart by readers who see red and green alike, and by their lightness.
_WAITING, _TRANSFER, _LINE = "#e69f00", "#0072b2", "#bbbbbb"
_ROW_INCHES: Final = 0.45
_HEIGHT: Final = 0.72
_DPI: Final = 150
# The picture is cut into this many columns; in each, a colour's height is its share of the time.
_COLUMNS: Final = 1400
# What can be seen of calls that took less than this share of a column.
_LEAST: Final = 0.06
# Seconds that are nothing but rounding.
_NOTHING: Final = 1e-9
# The part of the width from which a bar has room for each letter of its operation.
_LETTER: Final = 0.011

Ends = tuple[float, float]


def draw(spans: Sequence[Span], ranks: Sequence[int], title: str, path: str, ends: Ends) -> None:
    """Draw what the calls did between two times to a file, whose format its name tells.

    Needs matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = sorted({(span.rank, span.row) for span in spans} | {(rank, 0) for rank in ranks})
    scale, unit = (1.0, "s") if ends[1] - ends[0] >= 2 else (1e3, "ms")
    figure = Figure(figsize=(10, 1.6 + _ROW_INCHES * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        own = [span for span in spans if (span.rank, span.row) == row]
        _draw_row(axes, place, own, ends, scale)
        _write_names(axes, place, own, ends, scale)
    axes.set_yticks(range(len(rows)), [_label(rank, row) for rank, row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(ends[0] * scale, ends[1] * scale)
    axes.set_xlabel(f"time in {unit}")
    axes.set_title(title, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
    _write_legend(figure)
    figure.savefig(path, dpi=_DPI)


def _draw_row(axes: Any, place: int, spans: Sequence[Span], ends: Ends, scale: float) -> None:
    """Draw one row from below: transfer, and waiting on top of it."""
    columns = np.linspace(*ends, _COLUMNS + 1)
    transfer = shares([(span.end - span.transfer, span.end) for span in spans], columns)
    begun = [(span.end - span.transfer, span.waiting) for span in spans]
    waiting = shares([(start - waited, start) for start, waited in begun], columns)
    bottom = place + _HEIGHT / 2
    axes.axhline(bottom, color=_LINE, linewidth=0.8, zorder=3)
    level = np.full(_COLUMNS + 1, bottom)
    for part, colour in ((transfer, _TRANSFER), (waiting, _WAITING)):
        above = level - _HEIGHT * np.append(part, 0)
        axes.fill_between(columns * scale, level, above, step="post", color=colour, linewidth=0)
        level = above


def shares(pieces: Iterable[Ends], columns: Any) -> Any:
    """Return the share of each column that lies in pieces of time, of which none overlap.

    A column with any of a piece in it has some share that can be seen.
    """
    ordered = sorted(piece for piece in pieces if piece[1] > piece[0])
    if not ordered:
        return np.zeros(len(columns) - 1)
    times = np.array(ordered)
    covered = np.cumsum(np.diff(times, axis=1))
    before = np.stack([covered - np.diff(times, axis=1)[:, 0], covered], axis=1)
    inside = np.diff(np.interp(columns, times.reshape(-1), before.reshape(-1)))
    share = inside / np.diff(columns)
    return np.where(inside > _NOTHING, np.clip(share, _LEAST, 1), 0)


def _write_names(axes: Any, place: int, spans: Iterable[Span], ends: Ends, scale: float) -> None:
    """Write the operation into each transfer that is wide enough."""
    for span in spans:
        start, end = max(span.end - span.transfer, ends[0]), min(span.end, ends[1])
        if end - start > _LETTER * (ends[1] - ends[0]) * len(span.operation):
            middle = (start + end) / 2 * scale
            axes.text(middle, place, span.operation, color="w", size=9, ha="center", va="center")


def _write_legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=_WAITING, label="waiting for another rank"),
        Patch(color=_TRANSFER, label="transfer"),
    ]
    figure.legend(handles=patches, loc="outside lower right", ncols=2, frameon=False)


def _label(rank: int, row: int) -> str:
    return f"rank {rank}" if row == 0 else f"requests {row}" if row > 1 else "requests"
