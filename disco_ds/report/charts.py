"""Line charts as inline SVG: no script needed to see them, colours from the page's style."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup, escape

from disco_ds.report.record import Point

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 10, 24
MAX_POINTS = 400
FEW_POINTS = 12
"""Up to so many are marked."""
NUM_COLOURS = 6


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    label: str
    points: Sequence[Point]
    colour: int
    """Number of the page's colour, from 0."""
    dashed: bool = False
    """For levels to compare with, such as chance."""


@dataclass(frozen=True)
class Chart:
    """A titled chart over optimizer steps."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    note: str = ""
    percent: bool = False

    @property
    def legend(self) -> list[Series]:
        """Lines to name beside the chart; none when there is only one."""
        shown = [line for line in self.series if any(v is not None for _, v in line.points)]
        return shown if len(shown) > 1 else []

    @cached_property
    def svg(self) -> Markup:
        """The drawing; its data are in ``data-chart`` for the page's tooltip."""
        drawn = [Series(s.label, thin(s.points), s.colour, s.dashed) for s in self.series]
        xs = [x for line in drawn for x, y in line.points if y is not None]
        ys = [y for line in drawn for _, y in line.points if y is not None]
        if not ys:
            return Markup("")
        x_ticks, y_ticks = ticks(min(xs), max(xs), 4), ticks(min(ys), max(ys), 4)
        right = max(max(xs), min(xs) + 1)
        scale_x = _scale(min(xs), right, LEFT, WIDTH - RIGHT)
        low, high = min(*ys, *y_ticks), max(*ys, *y_ticks)
        scale_y = _scale(low, high, HEIGHT - BOTTOM, TOP)
        body = [*self._grid(x_ticks, y_ticks, scale_x, scale_y, right)]
        body += [Markup(_path(line, scale_x, scale_y)) for line in drawn]
        return Markup(
            '<svg viewBox="0 0 {w} {h}" role="img" aria-label="{title}" data-chart="{data}">'
            "{body}</svg>"
        ).format(
            w=WIDTH,
            h=HEIGHT,
            title=self.title,
            data=_chart_data(drawn, self, (min(xs), right), (low, high)),
            body=Markup("").join(body),
        )

    def _grid(
        self,
        x_ticks: Sequence[float],
        y_ticks: Sequence[float],
        scale_x: Callable[[float], float],
        scale_y: Callable[[float], float],
        right: float,
    ) -> list[Markup]:
        parts = []
        for value in y_ticks:
            y = scale_y(value)
            parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
                f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
                f"{escape(self.text(value))}</text>"
            )
        for value in x_ticks:
            if value <= right:
                x = scale_x(value)
                anchor = "end" if x > WIDTH - 30 else "middle"
                parts.append(
                    f'<text x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">'
                    f"{escape(short(value))}</text>"
                )
        return [Markup(part) for part in parts]

    def text(self, value: float) -> str:
        """A value as this chart writes it."""
        return f"{short(100 * value)} %" if self.percent else short(value)


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most about ``limit`` points that keep every bucket's lowest and highest value."""
    if len(points) <= limit:
        return list(points)
    kept: list[Point] = []
    size = math.ceil(2 * len(points) / limit)
    for start in range(0, len(points), size):
        bucket = [p for p in points[start : start + size] if p[1] is not None]
        if not bucket:
            kept.append(points[start])
            continue
        low, high = min(bucket, key=_value), max(bucket, key=_value)
        kept.extend(sorted({low, high}))
    return kept


def _value(point: Point) -> float:
    return point[1] if point[1] is not None else 0.0


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from the first at or below ``low`` to the first at or above ``high``."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def short(value: float) -> str:
    """A number in few characters: 1.5k, 0.05, 2e-05."""
    size = abs(value)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            factor = 1e3 if letter == "k" else limit
            return f"{value / factor:.4g}{letter}"
    return "0" if size < 1e-300 else f"{value:.4g}"


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _path(
    line: Series, scale_x: Callable[[float], float], scale_y: Callable[[float], float]
) -> str:
    """A path with gaps where there is no value, and dots for points on their own."""
    commands, dots, pen_down = [], [], False
    for number, (x, y) in enumerate(line.points):
        if y is None:
            pen_down = False
            continue
        place = f"{scale_x(x):.1f} {scale_y(y):.1f}"
        commands.append(f"{'L' if pen_down else 'M'}{place}")
        after = line.points[number + 1][1] if number + 1 < len(line.points) else None
        alone = not pen_down and after is None
        if alone or (len(line.points) <= FEW_POINTS and not line.dashed):
            dots.append(place.split())
        pen_down = True
    style = f"s{line.colour % NUM_COLOURS}" + (" dashed" if line.dashed else "")
    circles = "".join(f'<circle class="{style}" cx="{x}" cy="{y}" r="3"/>' for x, y in dots)
    return f'<path class="{style}" d="{"".join(commands)}"/>{circles}'


def _chart_data(
    drawn: Sequence[Series],
    chart: Chart,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
) -> str:
    return json.dumps(
        {
            "x": x_range,
            "y": y_range,
            "box": [LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM],
            "percent": chart.percent,
            "series": [
                {"label": line.label, "colour": line.colour % NUM_COLOURS, "points": line.points}
                for line in drawn
            ],
        },
        separators=(",", ":"),
    )
