"""Draw curves as SVG in the page's own colours: thinned points, round axes, a summary in words."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.reports.parts import Block, number
from launch.reports.run_files import Points

# The plot within the SVG, in the SVG's units: natural size on a phone, a little larger on a
# desktop.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 236, 52, 12, 10, 42
MOST_POINTS = 200  # per curve: about one for each two units of width
MEANS = 50  # stretches of a curve whose means are drawn
NUM_COLOURS, NUM_DASHES = 8, 4  # of page.css


def dash(number: int) -> int:
    """Return a dash pattern. 32 curves differ, and neighbours differ even without colour."""
    return (number + number // NUM_COLOURS) % NUM_DASHES


@dataclass(frozen=True)
class Curve:
    """A curve; `number` chooses its colour and dashes, the same in every chart of a page.

    `dots` draws points without a line; `faint` is for a curve behind its own mean.
    """

    label: str
    points: Points
    number: int = 0
    dots: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves that share axes."""

    title: str
    curves: Sequence[Curve]
    unit: str = ""
    x_title: str = "step"
    from_zero: bool = False


@dataclass(frozen=True)
class Charts(Block):
    charts: Sequence[Chart]
    note: str = ""

    def __len__(self) -> int:
        return len(self.charts)

    @property
    def plots(self) -> list[dict[str, Any]]:
        """Return the template's values for each chart; positions are in units of the SVG."""
        return list(map(_plot, self.charts))


def _plot(chart: Chart) -> dict[str, Any]:
    curves = [replace(c, points=downsample(c.points)) for c in chart.curves]
    xs = [x for c in curves for x in c.points[0]]
    ys = [y for c in curves for y in c.points[1]]
    x_low, x_high, x_ticks = _axis(min(xs), max(xs), whole=True)
    starts_at_zero = chart.from_zero and min(ys) >= 0
    y_low, y_high, y_ticks = _axis(0.0 if starts_at_zero else min(ys), max(ys))
    y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])

    def x_at(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - RIGHT - LEFT)

    def y_at(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - BOTTOM - TOP)

    # For the values that page.js shows under the pointer.
    data = {
        "x": [x_low, x_high],
        "unit": chart.unit,
        "x_title": chart.x_title,
        "curves": [
            [c.label, *([float(f"{v:.6g}") for v in axis] for axis in c.points)] for c in curves
        ],
    }
    return {
        "chart": replace(chart, curves=curves),
        "x_ticks": [(x_at(x), f"{x:,g}") for x in x_ticks if x_low <= x <= x_high],
        "y_ticks": [(y_at(y), f"{y:,g}") for y in y_ticks],
        "lines": [
            (c, [(x_at(x), y_at(y)) for x, y in zip(*c.points, strict=True)]) for c in curves
        ],
        "summary": summary(chart),
        "data": json.dumps(data, separators=(",", ":")),
    }


def curve(
    label: str, points: Iterable[tuple[float, float]], number: int = 0, **style: bool
) -> Curve:
    """Return a curve of (x, y) pairs."""
    pairs = list(points)
    return Curve(label, ([x for x, _ in pairs], [y for _, y in pairs]), number, **style)


def downsample(points: Points) -> Points:
    """Return at most MOST_POINTS: both ends, and the lowest and highest of each stretch.

    That way no spike is lost.
    """
    steps, values = points
    if len(values) <= MOST_POINTS:
        return points
    chosen = {0, len(values) - 1}
    stretches = (MOST_POINTS - 2) // 2
    for n in range(stretches):
        inside = range(n * len(values) // stretches, (n + 1) * len(values) // stretches)
        chosen |= {min(inside, key=values.__getitem__), max(inside, key=values.__getitem__)}
    return [steps[i] for i in sorted(chosen)], [values[i] for i in sorted(chosen)]


def with_mean(curve: Curve) -> list[Curve]:
    """Return the curve and, if it is long, the means of its stretches, which show the trend."""
    steps, values = curve.points
    width = len(values) // MEANS
    if width < 4 or min(values) == max(values):
        return [curve]
    starts = range(0, len(values) - width + 1, max(1, width // 2))
    means = [statistics.fmean(values[at : at + width]) for at in starts]
    middles = [steps[at + width // 2] for at in starts]
    return [
        replace(curve, label="each line", faint=True),
        Curve(f"mean of {width:,} lines", (middles, means), curve.number),
    ]


def _axis(low: float, high: float, whole: bool = False) -> tuple[float, float, list[float]]:
    """Return a range, widened if it is empty, and round ticks that enclose it."""
    from matplotlib import ticker  # half a second, only for a page with curves

    pad = 0.0 if high > low else abs(low) * 0.1 or 0.5
    low, high = low - pad, high + pad
    locator = ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=whole)
    return low, high, [float(tick) for tick in locator.tick_values(low, high)]


def summary(chart: Chart) -> str:
    """Describe in words where the curves begin and end; of many, only the range of their ends.

    One curve: 6.24 → 1.573 (lowest 1.53, highest 6.24).
    """
    if len(chart.curves) > 2:
        (low, lowest), *_, (high, highest) = sorted(
            (c.points[1][-1], c.label) for c in chart.curves
        )
        return f"at the end from {number(low)} ({lowest}) to {number(high)} ({highest})"
    courses = []
    for curve in (c for c in chart.curves if not c.faint):
        name = f"{curve.label}: " if len(chart.curves) > 1 else ""
        values = curve.points[1]
        ends = f"{number(values[0])} → {number(values[-1])} {chart.unit}".rstrip()
        extremes = f"lowest {number(min(values))}, highest {number(max(values))}"
        courses.append(f"{name}{ends} ({extremes})")
    return "; ".join(courses)
