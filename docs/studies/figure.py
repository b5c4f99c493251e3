"""How are curves and bars drawn as an SVG, readable on light and dark pages and on a phone?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, floor, log10
from typing import Final, NamedTuple

WIDTH: Final = 460
HEIGHT: Final = 250
LEFT: Final = 62
TOP: Final = 34
RIGHT: Final = 26
BOTTOM: Final = 42
LEGEND: Final = 26
LEFT_OF_LEGEND: Final = 20
BAR: Final = 42
LEFT_OF_BARS: Final = 16
RIGHT_OF_BARS: Final = 48
# From here to 1, the number of a bar would stand on the mark of 1: it stands behind it.
CLOSE: Final = 0.8

STYLE: Final = """\
    .page{fill:#fff}.frame{fill:none;stroke:#888}.grid{stroke:#ddd;stroke-width:1}
    text{fill:#222}.small{font-size:12px;fill:#555}.middle{text-anchor:middle}.end{text-anchor:end}
    .curve{fill:none;stroke-width:2.2;stroke-linejoin:round}
    .own{stroke:#1f5fbf}.header{stroke:#1f5fbf;stroke-dasharray:2 4}
    .better{stroke:#11845b}
    .mpi{stroke:#c2570c;stroke-dasharray:9 4}.gloo{stroke:#8250df;stroke-dasharray:3 3}
    .mpi4py{stroke:#c2570c}.bar{fill:#1f5fbf}.lost{fill:#c2570c}.one{stroke:#222;stroke-width:1.4;stroke-dasharray:4 3}
    @media (prefers-color-scheme:dark){
      .page{fill:#1e2129}.frame{stroke:#999}.grid{stroke:#3a3f4b}text{fill:#e6e6e6}.small{fill:#b8bcc6}
      .own,.header{stroke:#7fb0ff}.better{stroke:#4fd1a1}.mpi,.mpi4py{stroke:#ffa45c}.gloo{stroke:#c297ff}
      .bar{fill:#7fb0ff}.lost{fill:#ffa45c}.one{stroke:#e6e6e6}
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


class Axis(NamedTuple):
    """What stands below the panels, and how a power of ten on this axis is written."""

    title: str
    text: Callable[[float], str]


class Bar(NamedTuple):
    """One thing's time divided by another's, or by others' if it is over 1."""

    text: str
    ratio: float


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


def figure(
    title: str, legend: Sequence[tuple[str, str]], panels: Sequence[Panel], axis: Axis
) -> str:
    """Return the SVG: panels one below the other, over a legend of (style, text)."""
    height = HEIGHT * len(panels) + LEGEND * len(legend) + 12
    parts = []
    for down, panel in enumerate(panels):
        parts += _panel(panel, 0, down * HEIGHT, axis)
    parts += _legend(legend, HEIGHT * len(panels) + 8)
    return _page(title, height, parts)


def bars(title: str, drawn: Sequence[Bar], most: float) -> str:
    """Return the SVG: a bar for each ratio, under its text; 1 is marked, and bars end at `most`."""
    unit = (WIDTH - LEFT_OF_BARS - RIGHT_OF_BARS) / most
    parts = [f'  <text class="small" x="{LEFT_OF_BARS}" y="22">{title}</text>']
    for index, bar in enumerate(drawn):
        parts += _bar(bar, 30 + index * BAR, unit, most)
    return _page(title, BAR * len(drawn) + 42, parts)


def _page(title: str, height: int, parts: Sequence[str]) -> str:
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        '  font-family="system-ui, sans-serif" font-size="14" role="img">',
        f"  <title>{title}</title>",
        f"  <style>\n{STYLE}  </style>",
        f'  <rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def _bar(bar: Bar, top: float, unit: float, most: float) -> Iterator[str]:
    width = min(bar.ratio, most) * unit
    style = "bar" if bar.ratio <= 1 else "lost"
    yield f'  <text x="{LEFT_OF_BARS}" y="{top + 14:.0f}">{bar.text}</text>'
    yield (
        f'  <rect class="{style}" x="{LEFT_OF_BARS}" y="{top + 20:.0f}" '
        f'width="{width:.1f}" height="12" rx="2"/>'
    )
    yield f'  <path class="one" d="M{LEFT_OF_BARS + unit:.1f} {top + 17:.0f}v18"/>'
    after = LEFT_OF_BARS + max(width, unit if bar.ratio > CLOSE else 0) + 6
    yield f'  <text x="{after:.1f}" y="{top + 31:.0f}">{bar.ratio:.2f}</text>'


def time_text(seconds: float) -> str:
    """Return a power of ten of seconds as an axis shows it."""
    scale, unit = next((u for u in UNITS if seconds >= u[0] * 0.999), UNITS[-1])
    return f"{seconds / scale:g} {unit}"


def _panel(panel: Panel, left: float, top: float, axis: Axis) -> Iterator[str]:
    points = [point for curve in panel.curves for point in curve.points]
    ranks, times = zip(*points, strict=True)
    x = Scale(min(ranks), max(ranks), left + LEFT, left + WIDTH - RIGHT)
    lowest, highest = 10.0 ** floor(log10(min(times))), 10.0 ** ceil(log10(max(times)))
    y = Scale(lowest, highest, top + HEIGHT - BOTTOM, top + TOP)
    yield f'  <text class="middle" x="{(x.start + x.end) / 2:.0f}" y="{top + 22}">{panel.title}</text>'
    yield from _axes(x, y, axis)
    yield (
        f'  <rect class="frame" x="{x.start:.0f}" y="{y.end:.0f}" '
        f'width="{x.end - x.start:.0f}" height="{y.start - y.end:.0f}"/>'
    )
    for curve in panel.curves:
        path = "L".join(f"{x(ranks):.1f} {y(seconds):.1f}" for ranks, seconds in curve.points)
        yield f'  <path class="curve {curve.style}" d="M{path}"/>'


def _axes(x: Scale, y: Scale, axis: Axis) -> Iterator[str]:
    for value in x.decades():
        at = f"{x(value):.1f}"
        yield f'  <line class="grid" x1="{at}" x2="{at}" y1="{y.start:.0f}" y2="{y.end:.0f}"/>'
        yield f'  <text class="small middle" x="{at}" y="{y.start + 16:.0f}">{axis.text(value)}</text>'
    for value in y.decades():
        at = f"{y(value):.1f}"
        yield f'  <line class="grid" x1="{x.start:.0f}" x2="{x.end:.0f}" y1="{at}" y2="{at}"/>'
        yield (
            f'  <text class="small end" x="{x.start - 6:.0f}" y="{y(value) + 4:.1f}">'
            f"{time_text(value)}</text>"
        )
    yield (
        f'  <text class="small middle" x="{(x.start + x.end) / 2:.0f}" y="{y.start + 32:.0f}">'
        f"{axis.title}</text>"
    )


def _legend(legend: Sequence[tuple[str, str]], top: float) -> Iterator[str]:
    for index, (style, text) in enumerate(legend):
        middle = top + index * LEGEND + LEGEND / 2
        yield f'  <path class="curve {style}" d="M{LEFT_OF_LEGEND} {middle:.0f}h44"/>'
        yield f'  <text x="{LEFT_OF_LEGEND + 54}" y="{middle + 5:.0f}">{text}</text>'
