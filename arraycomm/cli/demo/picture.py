"""The demonstration's picture: the loss of each run, over that of one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

# Drawn 480 wide, so that it can be read on a phone.
_WIDTH: Final = 480
_HEIGHT: Final = 270
_LEFT: Final = 48
_RIGHT: Final = 16
_TOP: Final = 34
_BOTTOM: Final = 44
_LEGEND: Final = 24
_LINES: Final = 4
_STYLE: Final = """\
    .page{fill:#fff}.grid{stroke:#ddd}text{fill:#222}.small{font-size:12px;fill:#555}
    .alone{fill:none;stroke:#b6bcc4;stroke-width:7;stroke-linejoin:round;stroke-linecap:round}
    .s0{fill:#1f5fbf}.s1{fill:#c2570c}.s2{fill:#11845b}.s3{fill:#8250df}
    @media (prefers-color-scheme:dark){
      .page{fill:#1e2129}.grid{stroke:#3a3f4b}text{fill:#e6e6e6}.small{fill:#b8bcc6}
      .alone{stroke:#606775}.s0{fill:#7fb0ff}.s1{fill:#ffa45c}.s2{fill:#4fd1a1}.s3{fill:#c297ff}
    }
"""


class Losses(NamedTuple):
    """The mean loss in each epoch of a run."""

    title: str
    values: Sequence[float]


def draw(title: str, alone: Losses, runs: Sequence[Losses]) -> str:
    """Return the SVG: a wide line for the run in one process, and points on it for the others.

    The runs take turns, so that each shows a point in some of the epochs: drawn in all of them, the
    last run would hide the others.
    """
    height = _HEIGHT + _LEGEND * (len(runs) + 1) + 8
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"',
            '  font-family="system-ui, sans-serif" font-size="14" role="img">',
            f"  <title>{title}</title>",
            f"  <style>\n{_STYLE}  </style>",
            f'  <rect class="page" width="{_WIDTH}" height="{height}"/>',
            f'  <text x="{_LEFT}" y="22">{title}</text>',
            *_curves(alone, runs),
            *_legend([alone.title, *(run.title for run in runs)]),
            "</svg>\n",
        ]
    )


def _curves(alone: Losses, runs: Sequence[Losses]) -> Iterator[str]:
    epochs = len(alone.values)
    highest = max(value for run in (alone, *runs) for value in run.values) or 1.0

    def point(epoch: int, value: float) -> tuple[float, float]:
        across = (_WIDTH - _LEFT - _RIGHT) * epoch / max(1, epochs - 1)
        return _LEFT + across, _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / highest

    yield from _grid(highest, [point(0, highest * n / _LINES)[1] for n in range(_LINES + 1)])
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in map(point, range(epochs), alone.values))
    yield f'  <path class="alone" d="M{path}"/>'
    for number, run in enumerate(runs):
        for epoch in range(number % epochs, epochs, len(runs)):
            x, y = point(epoch, run.values[epoch])
            yield f'  <circle class="s{number % 4}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
    middle = _LEFT + (_WIDTH - _LEFT - _RIGHT) / 2
    yield (
        f'  <text class="small" x="{middle:.0f}" y="{_HEIGHT - 12}" text-anchor="middle">'
        f"loss in epochs 1 to {epochs}</text>"
    )


def _grid(highest: float, heights: Sequence[float]) -> Iterator[str]:
    for number, y in enumerate(heights):
        yield f'  <path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        yield (
            f'  <text class="small" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{highest * number / _LINES:.2f}</text>"
        )


def _legend(titles: Sequence[str]) -> Iterator[str]:
    for line, title in enumerate(titles):
        y = _HEIGHT + _LEGEND * line + 10
        if line:
            yield f'  <circle class="s{(line - 1) % 4}" cx="{_LEFT + 14}" cy="{y}" r="3.5"/>'
        else:
            yield f'  <path class="alone" d="M{_LEFT} {y}h28"/>'
        yield f'  <text x="{_LEFT + 38}" y="{y + 5}">{title}</text>'
