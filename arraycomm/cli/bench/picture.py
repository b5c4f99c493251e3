"""The benchmark's results as a picture: times and bandwidths by size, and ratios, of all contenders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from arraycomm.cli.bench.contenders import REFERENCES, TITLES
from arraycomm.cli.bench.lines import Line
from arraycomm.cli.bench.report import ARRAYS, comparisons, find, name_of, subject
from arraycomm.cli.bench.tables import ratio_text, size_text

_PANEL: Final = (3.7, 2.5)
_COLUMNS: Final = 4
_DPI: Final = 130
_SMALL: Final = 8
_RATIO_TICKS: Final = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 10.0)
_BY_SIZE: Final = ("latency", "bandwidth")


class _Theme(NamedTuple):
    """Colours for a page: its ground, its text, its grid, arraycomm, and the others in their order."""

    ground: str
    text: str
    grid: str
    own: str
    others: Sequence[str]


# Told apart by readers who see red and green alike, and by line styles.
_LIGHT: Final = _Theme(
    "#ffffff", "#222222", "#dddddd", "#1f5fbf", ("#c2570c", "#8250df", "#11845b", "#7a6a00")
)
_DARK: Final = _Theme(
    "#1e2129", "#e6e6e6", "#3a3f4b", "#7fb0ff", ("#ffa45c", "#c297ff", "#4fd1a1", "#e0c94a")
)
_OWN_STYLES: Final = ("-", "--", ":", "-.")


class Panel(NamedTuple):
    """What is drawn together: one mode, dtype and framework; by size, or by name."""

    title: str
    framework: str
    by_size: bool
    lines: Sequence[Line]

    def contenders(self) -> list[str]:
        """Return the contenders that were timed, in the order of the tables."""
        timed = {
            entry["key"]
            for line in self.lines
            for entry in line["contenders"]
            if entry["framework"] == self.framework and entry["status"] == "ok"
        }
        return [key for key in TITLES if key in timed]


def panels(lines: Sequence[Line]) -> list[Panel]:
    """Return the panels of the lines: those by size first."""
    groups: dict[tuple[bool, str, str, str], list[Line]] = {}
    for line in lines:
        by_size = line["mode"] in _BY_SIZE
        mode = "" if by_size else line["mode"]
        for framework in dict.fromkeys(entry["framework"] for entry in line["contenders"]):
            groups.setdefault((not by_size, mode, line["dtype"], framework), []).append(line)
    found = [
        Panel(_title(mode, dtype, framework), framework, not named, group)
        for (named, mode, dtype, framework), group in sorted(
            groups.items(), key=lambda item: item[0][0]
        )
    ]
    return [panel for panel in found if panel.contenders()]


def _title(mode: str, dtype: str, framework: str) -> str:
    return f"{subject(mode, dtype)}, {ARRAYS[framework]}"


def pictures(path: Path) -> tuple[Path, Path]:
    """Return where the pictures for light and for dark pages go."""
    return path, path.with_stem(f"{path.stem}-dark")


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the results to two files, for light and for dark pages. Needs matplotlib.

    Raises
    ------
    OSError
        A file cannot be written.
    ValueError
        Nothing was timed.
    """
    drawn = panels(results["lines"])
    if not drawn:
        raise ValueError("nothing was timed")
    for theme, where in zip((_LIGHT, _DARK), pictures(path), strict=True):
        _draw(drawn, results, theme, where)


def _draw(drawn: Sequence[Panel], results: dict[str, Any], theme: _Theme, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(_rows(drawn))
    columns = max(map(len, rows))
    figure = Figure(
        figsize=(_PANEL[0] * max(columns, 2), _PANEL[1] * len(rows) + 1.0),
        layout="constrained",
        facecolor=theme.ground,
    )
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(rows), columns)
    for row, cells in enumerate(rows):
        for column, cell in enumerate(cells):
            if cell is not None:
                kind, panel = cell
                axes = figure.add_subplot(grid[row, column])
                _dress(axes, theme)
                _KINDS[kind](axes, panel, theme)
    about = (
        f"{results['ranks']} ranks, {results['machine']['cores']} cores, {_short(results['mpi'])}"
    )
    figure.suptitle(f"arraycomm bench: {about}", color=theme.text, size=12)
    _write_legend(figure, drawn, theme)
    figure.savefig(path, dpi=_DPI, facecolor=theme.ground)


def _short(mpi: str) -> str:
    """Return the name and version of an MPI, of all that it says about itself."""
    return mpi.partition(",")[0].replace(" Version:", "")


def _rows(drawn: Sequence[Panel]) -> Iterator[list[tuple[str, Panel] | None]]:
    """Yield rows of what is drawn: below one another times, bandwidths and ratios by size."""
    by_size = [panel for panel in drawn if panel.by_size]
    for start in range(0, len(by_size), _COLUMNS):
        block = by_size[start : start + _COLUMNS]
        yield [("time", panel) for panel in block]
        yield [("bandwidth", panel) for panel in block]
        if any(map(_pairs, block)):
            yield [("ratio", panel) if _pairs(panel) else None for panel in block]
    named = [panel for panel in drawn if not panel.by_size and _pairs(panel)]
    for start in range(0, len(named), _COLUMNS):
        yield [("ratio", panel) for panel in named[start : start + _COLUMNS]]


def _dress(axes: Any, theme: _Theme) -> None:
    axes.set_facecolor(theme.ground)
    axes.tick_params(colors=theme.text, labelsize=_SMALL, which="both")
    axes.grid(visible=True, color=theme.grid, linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_color(theme.grid)
        spine.set_visible(side in ("left", "bottom"))


# Curves


def _draw_times(axes: Any, panel: Panel, theme: _Theme) -> None:
    axes.set_title(panel.title, loc="left", size=10, color=theme.text)
    _draw_curves(axes, panel, theme, lambda nbytes, seconds: seconds * 1e6)
    axes.set_ylabel("µs per call", color=theme.text, size=_SMALL)


def _draw_bandwidths(axes: Any, panel: Panel, theme: _Theme) -> None:
    _draw_curves(axes, panel, theme, lambda nbytes, seconds: nbytes / seconds / 1e9)
    axes.set_ylabel("GB/s", color=theme.text, size=_SMALL)


def _draw_curves(axes: Any, panel: Panel, theme: _Theme, value: Any) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for key in panel.contenders():
        points = [
            (line["nbytes"], value(line["nbytes"], entry["median"]))
            for line in sorted(panel.lines, key=lambda line: line["nbytes"])
            if (entry := find(line, panel.framework, key)) and entry["status"] == "ok"
        ]
        axes.plot(
            *zip(*points, strict=True), marker="o", markersize=3, linewidth=1.6, **_look(key, theme)
        )
    sizes = _sizes(panel)
    axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=40, ha="right")
    axes.xaxis.set_minor_locator(NullLocator())


def _sizes(panel: Panel) -> list[int]:
    return sorted({line["nbytes"] for line in panel.lines})


def _look(key: str, theme: _Theme) -> dict[str, Any]:
    """Return the colour and line of a contender: arraycomm has one colour, each other its own."""
    if key in REFERENCES:
        return {"color": _colour(key, theme), "linestyle": "-"}
    own = [other for other in TITLES if other not in REFERENCES]
    return {"color": theme.own, "linestyle": _OWN_STYLES[own.index(key) % len(_OWN_STYLES)]}


def _colour(reference: str, theme: _Theme) -> str:
    return theme.others[REFERENCES.index(reference) % len(theme.others)]


# Bars


def _pairs(panel: Panel) -> list[tuple[str, str]]:
    """Return which contender of arraycomm is compared with which other, as the tables do."""
    return comparisons(panel.lines[0]["mode"], panel.contenders())


def _draw_ratios(axes: Any, panel: Panel, theme: _Theme) -> None:
    """Draw a group of bars for each line: arraycomm's time divided by that of each other.

    They begin at 1: down where arraycomm takes less time.
    """
    from matplotlib.ticker import NullLocator

    names, pairs = [name_of(line) for line in _ordered(panel)], _pairs(panel)
    width = 0.8 / len(pairs)
    axes.set_yscale("log")
    found = [1.0]
    for place, (own, other) in enumerate(pairs):
        for at, line in enumerate(_ordered(panel)):
            ratio = (find(line, panel.framework, own) or {}).get("ratios", {}).get(other)
            if ratio is not None:
                found.append(ratio)
                left = at - 0.4 + place * width
                axes.bar(left, ratio - 1, width * 0.9, 1, align="edge", color=_colour(other, theme))
                _write_number(axes, left + width * 0.45, ratio, theme)
    axes.axhline(1.0, color=theme.text, linewidth=1.0)
    axes.set_yticks(_RATIO_TICKS, [f"{ratio:g}" for ratio in _RATIO_TICKS])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(*_with_room(min(*found, 0.5), max(*found, 2.0)))
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right")
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(visible=False, axis="x")
    if not panel.by_size:
        axes.set_title(panel.title, loc="left", size=10, color=theme.text)
    owns = list(dict.fromkeys(TITLES[own].removeprefix("arraycomm, ") for own, _ in pairs))
    order = ",\nfrom left to right" if len(owns) > 1 else ""
    text = f"time of {', '.join(owns)}{order}\n÷ time of the other"
    axes.set_ylabel(text, color=theme.text, size=_SMALL)


def _with_room(low: float, high: float) -> tuple[float, float]:
    """Return the ends of the axis, which leave room for numbers at both ends of the bars."""
    room = (high / low) ** 0.25
    return low / room, high * room


def _write_number(axes: Any, middle: float, ratio: float, theme: _Theme) -> None:
    """Write a ratio at the end of its bar."""
    down = ratio < 1
    axes.annotate(
        ratio_text(ratio),
        (middle, ratio),
        xytext=(0, -2 if down else 2),
        textcoords="offset points",
        ha="center",
        va="top" if down else "bottom",
        rotation=90,
        size=_SMALL - 1,
        color=theme.text,
    )


def _ordered(panel: Panel) -> Sequence[Line]:
    if not panel.by_size:
        return panel.lines
    return sorted(panel.lines, key=lambda line: line["nbytes"])


_KINDS: Final = {"time": _draw_times, "bandwidth": _draw_bandwidths, "ratio": _draw_ratios}


def _write_legend(figure: Any, drawn: Sequence[Panel], theme: _Theme) -> None:
    from matplotlib.lines import Line2D

    shown = {
        key
        for panel in drawn
        for key in panel.contenders()
        # The bars have the colours of the others.
        if panel.by_size or key in REFERENCES
    }
    keys = [key for key in TITLES if key in shown]
    handles = [
        Line2D([], [], linewidth=2.0, label=TITLES[key], **_look(key, theme)) for key in keys
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 5),
        frameon=False,
        labelcolor=theme.text,
        fontsize=9,
    )
