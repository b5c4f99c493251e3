"""How are curves over many ranks drawn as an SVG, readable on light and on dark pages?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor, log10
from typing import Final, NamedTuple

WIDTH: Final = 460
HEIGHT: Final = 250
LEFT: Final = 62
TOP: Final = 34
RIGHT: Final = 26
BOTTOM: Final = 42
LEGEND: Final = 26

STYLE: Final = """\
    .page{fill:#fff}.frame{fill:none;stroke:#888}.grid{stroke:#ddd;stroke-width:1}
    text{fill:#222}.small{font-size:12px;fill:#555}.middle{text-anchor:middle}.end{text-anchor:end}
    .curve{fill:none;stroke-width:2.2;stroke-linejoin:round}
    .own{stroke:#1f5fbf}.header{stroke:#1f5fbf;stroke-dasharray:2 4}
    .better{stroke:#11845b}.digests{stroke:#11845b;stroke-dasharray:2 4}
    .mpi{stroke:#c2570c;stroke-dasharray:9 4}
    @media (prefers-color-scheme:dark){
      .page{fill:#1e2129}.frame{stroke:#999}.grid{stroke:#3a3f4b}text{fill:#e6e6e6}.small{fill:#b8bcc6}
      .own,.header{stroke:#7fb0ff}.better,.digests{stroke:#4fd1a1}.mpi{stroke:#ffa45c}
    }
"""
UNITS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


class Curve(NamedTuple):
    """Points with positive coordinates, in the style of a class."""

    style: str
    points: Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """Curves over one pair of axes."""

    title: str
    curves: Sequence[Curve]


class Scale(NamedTuple):
    """Maps `low` to `start` and `high` to `end`, by their logarithms."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return where a value lies."""
        share = (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return self.start + share * (self.end - self.start)

    def decades(self) -> Iterator[float]:
        """Return the powers of ten in between."""
        for power in range(ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9) + 1):
            yield 10.0**power


def figure(title: str, legend: Sequence[tuple[str, str]], rows: Sequence[Sequence[Panel]]) -> str:
    """Return the SVG: panels in rows, over a legend of (style, text)."""
    width = WIDTH * max(map(len, rows))
    height = HEIGHT * len(rows) + LEGEND * ceil(len(legend) / 2) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        '  font-family="system-ui, sans-serif" font-size="14">',
        f"  <title>{title}</title>",
        f"  <style>\n{STYLE}  </style>",
        f'  <rect class="page" width="{width}" height="{height}"/>',
    ]
    for down, row in enumerate(rows):
        for across, panel in enumerate(row):
            parts += _panel(panel, across * WIDTH, down * HEIGHT)
    parts += _legend(legend, HEIGHT * len(rows) + 8, width)
    return "\n".join([*parts, "</svg>", ""])


def time_text(seconds: float) -> str:
    """Return a power of ten of seconds as an axis shows it."""
    scale, unit = next((u for u in UNITS if seconds >= u[0] * 0.999), UNITS[-1])
    return f"{seconds / scale:g} {unit}"


def _panel(panel: Panel, left: float, top: float) -> Iterator[str]:
    points = [point for curve in panel.curves for point in curve.points]
    ranks, times = zip(*points, strict=True)
    x = Scale(min(ranks), max(ranks), left + LEFT, left + WIDTH - RIGHT)
    lowest, highest = 10.0 ** floor(log10(min(times))), 10.0 ** ceil(log10(max(times)))
    y = Scale(lowest, highest, top + HEIGHT - BOTTOM, top + TOP)
    yield f'  <text class="middle" x="{(x.start + x.end) / 2:.0f}" y="{top + 22}">{panel.title}</text>'
    yield from _axes(x, y)
    yield (
        f'  <rect class="frame" x="{x.start:.0f}" y="{y.end:.0f}" '
        f'width="{x.end - x.start:.0f}" height="{y.start - y.end:.0f}"/>'
    )
    for curve in panel.curves:
        path = "L".join(f"{x(ranks):.1f} {y(seconds):.1f}" for ranks, seconds in curve.points)
        yield f'  <path class="curve {curve.style}" d="M{path}"/>'


def _axes(x: Scale, y: Scale) -> Iterator[str]:
    for value in x.decades():
        at = f"{x(value):.1f}"
        yield f'  <line class="grid" x1="{at}" x2="{at}" y1="{y.start:.0f}" y2="{y.end:.0f}"/>'
        yield f'  <text class="small middle" x="{at}" y="{y.start + 16:.0f}">{value:,.0f}</text>'
    for value in y.decades():
        at = f"{y(value):.1f}"
        yield f'  <line class="grid" x1="{x.start:.0f}" x2="{x.end:.0f}" y1="{at}" y2="{at}"/>'
        yield (
            f'  <text class="small end" x="{x.start - 6:.0f}" y="{y(value) + 4:.1f}">'
            f"{time_text(value)}</text>"
        )
    yield (
        f'  <text class="small middle" x="{(x.start + x.end) / 2:.0f}" y="{y.start + 32:.0f}">'
        "ranks</text>"
    )


def _legend(legend: Sequence[tuple[str, str]], top: float, width: float) -> Iterator[str]:
    for index, (style, text) in enumerate(legend):
        left = LEFT + (index % 2) * width / 2
        middle = top + (index // 2) * LEGEND + LEGEND / 2
        yield f'  <path class="curve {style}" d="M{left:.0f} {middle:.0f}h44"/>'
        yield f'  <text x="{left + 54:.0f}" y="{middle + 5:.0f}">{text}</text>'
