"""Curves: few enough points of each, axes with round numbers, SVG in the page's own colours, and PNGs by matplotlib."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from launch.reports.data import Points
from launch.reports.parts import number

# The plot within the SVG, in its own units: a phone shows it about as large as it is, a desktop a little larger.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 236, 52, 12, 10, 42
MOST_POINTS = 400  # of a curve on a page of few: one for each unit of width
FEW = 4
MOST_POINTS_OF_MANY = 150
MEANS = 50  # stretches that a mean is taken of
# Those of page.css on white, in the same order: each has 3:1 or more against it.
COLOURS = ("#0b62c4", "#c2410c", "#15803d", "#9333ea", "#b91c1c", "#0e7490", "#a16207", "#be185d")
DASHES = ((), (6, 3), (2, 3), (9, 3, 2, 3))


def dash(number: int) -> int:
    """Of DASHES: with the colour it tells 32 curves apart, and neighbours without it."""
    return (number + number // len(COLOURS)) % len(DASHES)


@dataclass(frozen=True)
class Curve:
    """`number` chooses colour and dashes, the same in every chart of a page. `dots`: single points without a line.

    `faint`: behind another that is the mean of it.
    """

    label: str
    points: Points
    number: int = 0
    dots: bool = False
    faint: bool = False

    @property
    def dash(self) -> int:
        return dash(self.number)


@dataclass(frozen=True)
class Chart:
    """Curves on one axis. `key` names the PNG; `unit` stands behind figures."""

    key: str
    title: str
    curves: Sequence[Curve]
    unit: str = ""
    x_title: str = "step"
    from_zero: bool = False

    @property
    def begins_at_zero(self) -> bool:
        """As it should, where no value lies below."""
        return self.from_zero and min(min(c.points[1]) for c in self.curves) >= 0

    @property
    def most_points(self) -> int:
        return MOST_POINTS if len(self.curves) <= FEW else MOST_POINTS_OF_MANY

    def drawn(self) -> Chart:
        """With few enough points of each curve."""
        fewer = [replace(c, points=downsample(c.points, self.most_points)) for c in self.curves]
        return replace(self, curves=fewer)


@dataclass(frozen=True)
class Charts:
    """Several, with a sentence about them."""

    kind: ClassVar[str] = "charts"
    charts: Sequence[Chart]
    note: str = ""

    @property
    def plots(self) -> list[Plot]:
        return [Plot.of(chart) for chart in self.charts]

    @property
    def fewer(self) -> str:
        """That not all points are drawn, where it is so."""
        longest, most = max(((len(c.points[0]), chart.most_points) for chart in self.charts for c in chart.curves), default=(0, 0))
        if longest <= most:
            return ""
        return f"Curves of up to {longest:,} points: {most} of each are drawn, the lowest and the highest of each stretch among them."


@dataclass(frozen=True)
class Plot:
    """A chart as the template draws it; every position is in units of the SVG."""

    chart: Chart
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    lines: Sequence[tuple[Curve, str]]  # with the points of a polyline
    summary: str
    data: str  # for the program that shows values under the pointer, JSON

    @classmethod
    def of(cls, chart: Chart) -> Plot:
        said = "; ".join(summary(c, chart) for c in chart.curves if not c.faint) if len(chart.curves) <= 2 else _ends(chart)
        chart = chart.drawn()
        xs = [x for c in chart.curves for x in c.points[0]]
        ys = [y for c in chart.curves for y in c.points[1]]
        x_low, x_high = _apart(min(xs), max(xs), 0.5)
        y_ticks = ticks(0.0, max(ys) or 1.0) if chart.begins_at_zero else ticks(min(ys), max(ys))
        x_at = _scale(x_low, x_high, LEFT, WIDTH - RIGHT)
        y_at = _scale(min(y_ticks[0], *ys), max(y_ticks[-1], *ys), HEIGHT - BOTTOM, TOP)
        x_ticks = [x for x in ticks(x_low, x_high, 5, whole=True) if x_low <= x <= x_high]
        lines = [(c, " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in zip(*c.points, strict=True))) for c in chart.curves]
        data = {
            "x": [x_low, x_high],
            "unit": chart.unit,
            "x_title": chart.x_title,
            "curves": [[c.label, *([float(f"{v:.6g}") for v in values] for values in c.points)] for c in chart.curves],
        }
        return cls(
            chart,
            [(x_at(x), _tick(x, x_ticks)) for x in x_ticks],
            [(y_at(y), _tick(y, y_ticks)) for y in y_ticks],
            lines,
            said,
            json.dumps(data, separators=(",", ":")),
        )


def downsample(points: Points, most: int) -> Points:
    """At most `most` points: the first, the last, and the lowest and highest of each stretch between, so that no spike is lost."""
    steps, values = points
    if len(values) <= most:
        return points
    kept = {0, len(values) - 1}
    stretches = (most - 2) // 2
    for n in range(stretches):
        inside = range(n * len(values) // stretches, (n + 1) * len(values) // stretches)
        kept |= {min(inside, key=values.__getitem__), max(inside, key=values.__getitem__)}
    chosen = sorted(kept)
    return [steps[i] for i in chosen], [values[i] for i in chosen]


def with_mean(curve: Curve) -> list[Curve]:
    """The curve, and over a long one the mean of each stretch of it: noise hides where it goes."""
    steps, values = curve.points
    width = len(values) // MEANS
    if width < 4 or min(values) == max(values):
        return [curve]
    starts = range(0, len(values) - width + 1, max(1, width // 2))
    means = [statistics.fmean(values[at : at + width]) for at in starts]
    middle = [steps[at + width // 2] for at in starts]
    return [replace(curve, label="each line", faint=True), Curve(f"mean of {width:,} lines", (middle, means), curve.number)]


def ticks(low: float, high: float, about: int = 4, whole: bool = False) -> list[float]:
    """Round numbers that enclose low to high, `about` so many steps apart. `whole`: no fractions of one."""
    low, high = _apart(low, high, abs(low) * 0.1 or 1.0)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    if whole:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12 - math.floor(math.log10(step))) for n in range(first, last + 1)]


def _apart(low: float, high: float, pad: float) -> tuple[float, float]:
    """Both, `pad` added on either side where they are one value, or so near to it that no axis tells them apart."""
    nearest = max(abs(low), abs(high), 1e-200) * 1e-12
    return (low, high) if high - low > nearest else (low - max(pad, nearest), high + max(pad, nearest))


def _scale(low: float, high: float, at_low: float, at_high: float) -> Scale:
    return Scale(low, (at_high - at_low) / (high - low), at_low)


@dataclass(frozen=True)
class Scale:
    low: float
    factor: float
    at_low: float

    def __call__(self, value: float) -> float:
        return self.at_low + (value - self.low) * self.factor


def _tick(value: float, all_of_them: Sequence[float]) -> str:
    """As short as tells it from its neighbours: 40k, 1.5M, 0.25."""
    largest = max(map(abs, all_of_them))
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if largest >= size:
            return f"{value / (1e3 if suffix == 'k' else size):g}{suffix}" if value else "0"
    return f"{value:g}"


def summary(curve: Curve, chart: Chart) -> str:
    """6.24 at step 1, 1.573 at step 40; lowest 1.53 at step 39."""
    steps, values = curve.points
    unit = f" {chart.unit}" if chart.unit else ""
    name = f"{curve.label}: " if len(chart.curves) > 1 else ""
    if len(values) == 1:
        return f"{name}{number(values[0])}{unit} at {chart.x_title} {number(steps[0])}"
    low, high = min(values), max(values)
    if low == high:
        return f"{name}{number(low)}{unit} throughout"
    ends = f"{number(values[0])} → {number(values[-1])}{unit}"
    return f"{name}{ends} (lowest {number(low)}, highest {number(high)})"


def _ends(chart: Chart) -> str:
    """Of many curves."""
    last = sorted((c.points[1][-1], c.label) for c in chart.curves)
    return f"at the end from {number(last[0][0])} ({last[0][1]}) to {number(last[-1][0])} ({last[-1][1]})"


def write_pngs(charts: Sequence[Chart], folder: Path, stem: str) -> list[Path]:
    """<stem>-<key>.png for each chart."""
    import matplotlib  # half a second, for who wants pictures only

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for chart in (c.drawn() for c in charts):
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        for curve in chart.curves:
            style = DASHES[curve.dash]
            line = (0, style) if style else "solid"
            shown = {"linestyle": "none"} if curve.dots else {"linestyle": line}
            # parse_math: a name with two dollar signs is no formula.
            axes.plot(
                *curve.points,
                label=_plain(curve.label),
                color=COLOURS[curve.number % len(COLOURS)],
                marker="o" if curve.dots or len(curve.points[0]) == 1 else None,
                linewidth=1.4,
                alpha=0.35 if curve.faint else 1.0,
                **shown,
            )
        axes.set_title(_plain(chart.title), parse_math=False)
        axes.set_xlabel(_plain(chart.x_title), parse_math=False)
        axes.set_ylabel(_plain(chart.unit), parse_math=False)
        if chart.begins_at_zero:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(chart.curves) > 1:
            for entry in axes.legend(frameon=False, fontsize="small").get_texts():
                entry.set_parse_math(False)
        written.append(folder / f"{stem}-{chart.key}.png")
        temporary = written[-1].with_name(f".{written[-1].name}")
        figure.savefig(temporary, dpi=120, format="png")
        temporary.replace(written[-1])
        pyplot.close(figure)
    return written


def _plain(label: str) -> str:
    """matplotlib leaves out a label that begins with an underscore, and warns of letters that its font lacks."""
    return "".join(c if c.isprintable() and ord(c) < 0x2500 else "?" for c in label).lstrip("_") or "-"
