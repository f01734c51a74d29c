"""Define charts, and compute the positions, axis ticks and summary that a page draws."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.reports.formats import number
from launch.reports.parts import Block
from launch.reports.run_files import Points

# Size and margins of a chart in units of the SVG, which are pixels on a phone.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 236, 52, 12, 10, 42
MAX_POINTS = 200  # of a curve, about one for every two units of width
NUM_MEANS = 50  # intervals of a long curve whose means are drawn
NUM_COLOURS, NUM_DASHES = 8, 4  # in page.css


def dash(number: int) -> int:
    """Return the dash pattern of a curve.

    Up to 32 curves differ in colour or dashes, and neighbours differ even in black and white.
    """
    return (number + number // NUM_COLOURS) % NUM_DASHES


@dataclass(frozen=True)
class Curve:
    """A curve; its `number` sets colour and dashes, which are the same in all charts of a page.

    `dots` draws points without a line; `faint` draws the values behind their mean.
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
    """Charts side by side, with a note below."""

    charts: Sequence[Chart]
    note: str = ""

    def __len__(self) -> int:
        return len(self.charts)

    @property
    def plots(self) -> list[dict[str, Any]]:
        """Return the values that the template needs for each chart."""
        return list(map(_plot, self.charts))


def _plot(chart: Chart) -> dict[str, Any]:
    """Return a chart's downsampled curves, with positions in units of the SVG."""
    curves = [replace(c, points=downsample(c.points)) for c in chart.curves]
    xs = [x for c in curves for x in c.points[0]]
    ys = [y for c in curves for y in c.points[1]]
    x_low, x_high, x_ticks = _axis(min(xs), max(xs), integer=True)
    starts_at_zero = chart.from_zero and min(ys) >= 0
    y_low, y_high, y_ticks = _axis(0.0 if starts_at_zero else min(ys), max(ys))
    y_low, y_high = min(y_low, y_ticks[0]), max(y_high, y_ticks[-1])

    def x_at(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - RIGHT - LEFT)

    def y_at(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - BOTTOM - TOP)

    lines = []
    for c in curves:  # as text, because the template would take three times longer
        points = [(f"{x_at(x):.1f}", f"{y_at(y):.1f}") for x, y in zip(*c.points, strict=True)]
        lines.append((c, points, "".join(f"{x},{y} " for x, y in points)))
    # page.js shows these values under the pointer.
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
        "lines": lines,
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
    """Return at most MAX_POINTS points: both ends, and the extremes of equal intervals.

    Extremes are included so that every spike stays visible.
    """
    steps, values = points
    if len(values) <= MAX_POINTS:
        return points
    indices = {0, len(values) - 1}
    num_intervals = (MAX_POINTS - 2) // 2
    for n in range(num_intervals):
        interval = range(n * len(values) // num_intervals, (n + 1) * len(values) // num_intervals)
        indices |= {min(interval, key=values.__getitem__), max(interval, key=values.__getitem__)}
    return [steps[i] for i in sorted(indices)], [values[i] for i in sorted(indices)]


def with_mean(curve: Curve) -> list[Curve]:
    """Return the curve and, if it is long, a second curve of its means, which shows the trend."""
    steps, values = curve.points
    width = len(values) // NUM_MEANS
    if width < 4 or min(values) == max(values):
        return [curve]
    starts = range(0, len(values) - width + 1, max(1, width // 2))
    means = [statistics.fmean(values[start : start + width]) for start in starts]
    middles = [steps[start + width // 2] for start in starts]
    return [
        replace(curve, label="logged values", faint=True),
        Curve(f"mean of {width:,} values", (middles, means), curve.number),
    ]


def _axis(low: float, high: float, integer: bool = False) -> tuple[float, float, list[float]]:
    """Return an axis range and round ticks that enclose it; widen a range of one value."""
    from matplotlib import ticker  # imported here because it takes half a second

    pad = 0.0 if high > low else abs(low) * 0.1 or 0.5
    low, high = low - pad, high + pad
    locator = ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=integer)
    return low, high, [float(tick) for tick in locator.tick_values(low, high)]


def summary(chart: Chart) -> str:
    """Describe one or two curves by their ends and extremes, and more by the range of their ends.

    For one curve: 6.24 → 1.573 (lowest 1.53, highest 6.24).
    """
    if len(chart.curves) > 2:
        (low, lowest), *_, (high, highest) = sorted(
            (c.points[1][-1], c.label) for c in chart.curves
        )
        return f"at the end from {number(low)} ({lowest}) to {number(high)} ({highest})"
    descriptions = []
    for curve in (c for c in chart.curves if not c.faint):
        name = f"{curve.label}: " if len(chart.curves) > 1 else ""
        values = curve.points[1]
        ends = f"{number(values[0])} → {number(values[-1])} {chart.unit}".rstrip()
        extremes = f"lowest {number(min(values))}, highest {number(max(values))}"
        descriptions.append(f"{name}{ends} ({extremes})")
    return "; ".join(descriptions)
