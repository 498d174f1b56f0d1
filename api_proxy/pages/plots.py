"""Curves as SVG, without inline styles or scripts: colours come from the page's style sheet.
Reports (`opd.report.page`) are drawn by it, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup, escape

from api_proxy.pages.measured import Curve
from api_proxy.pages.words import seen

WIDTH, HEIGHT = 520, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 10, 10, 30
_COLOURS = 6
"""Colours in the style sheet; further series start over."""
RUN_LINES = 4
"""Kinds of lines in the style sheet for other runs."""
_TICKS = 4
_SAME = 1e-3
"""Values that differ by this share of the larger one are drawn as equal: labels show 3 digits."""
_ROUNDING = 1e-9
_SMALL = 1e-290
_FEW = 40
"""Up to this many points are also drawn as dots."""

Point = tuple[float, float]


def svg(curve: Curve, others: Mapping[str, Curve] | None = None) -> Markup:
    """The curve as an SVG element; missing values are gaps. Without any value, an empty text.

    `others`: the same curve of other runs, by name. Each run has its own kind of line.
    """
    runs = [("", curve), *(others or {}).items()]
    values = [
        value for _, one in runs for series in one.series.values() for value in _known(series)
    ]
    steps = [step for _, one in runs for step in one.steps]
    if not values or not steps:
        return Markup("")
    ticks = _ticks([*values, *curve.marks.values()])
    low, high = ticks[0], ticks[-1]
    first, last = float(min(steps)), float(max(steps))
    span_x, span_y = (last - first) or 1.0, high - low

    def at(step: float, value: float) -> Point:
        x = _LEFT + (step - first) / span_x * (WIDTH - _LEFT - _RIGHT)
        return x, HEIGHT - _BOTTOM - (value - low) / span_y * (HEIGHT - _TOP - _BOTTOM)

    parts = [*_grid(curve, ticks, first, last)]
    for name, value in curve.marks.items():
        _, y = at(first, value)
        parts.append(
            f'<line class="mark" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}">'
            f"<title>{_text(name)}: {value:.4g}</title></line>"
        )
    names = series_names(curve, others)
    for place, (run, one) in enumerate(runs):
        line = f" run{(place - 1) % RUN_LINES}" if place else ""
        for series in one.series:
            kind = f"c{names.index(series) % _COLOURS}{line}"
            name = f"{run}, {series}" if run else series
            for piece in _pieces(one.steps, one.series[series]):
                points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in piece))
                parts.append(f'<polyline class="{kind}" points="{points}"/>')
                if len(one.steps) <= _FEW or len(piece) == 1:
                    parts += [_dot(kind, name, point, at(*point), curve) for point in piece]
    label = f"{curve.title}, {curve.step_unit} {first:g} to {last:g}"
    return Markup(
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{_text(label)}">{"".join(parts)}</svg>'
    )


def series_names(curve: Curve, others: Mapping[str, Curve] | None = None) -> list[str]:
    """Names of the series, in the order of their colours: equal names of all runs have one."""
    runs = [curve, *(others or {}).values()]
    return list(dict.fromkeys(name for one in runs for name in one.series))


def _dot(colour: str, name: str, point: Point, place: Point, curve: Curve) -> str:
    (step, value), (x, y) = point, place
    says = f"{curve.step_unit} {step:g}, {name}: {value:.4g}"
    return (
        f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.5">'
        f"<title>{_text(says)}</title></circle>"
    )


def _grid(curve: Curve, ticks: Sequence[float], first: float, last: float) -> Iterator[str]:
    for value in ticks:
        share = (value - ticks[0]) / (ticks[-1] - ticks[0])
        y = HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)
        yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
    bottom = HEIGHT - 8
    yield f'<text x="{_LEFT}" y="{bottom}">{first:g}</text>'
    yield f'<text x="{WIDTH - _RIGHT}" y="{bottom}" text-anchor="end">{last:g}</text>'
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    says = _text(f"{curve.step_unit} ({curve.unit})" if curve.unit else curve.step_unit)
    yield f'<text x="{middle}" y="{bottom}" text-anchor="middle">{says}</text>'


def _text(value: str) -> str:
    return str(escape(seen(value)))


def _ticks(values: Sequence[float]) -> list[float]:
    """What the y axis shows: round numbers, of which the first and the last enclose the values."""
    low, high = min(values), max(values)
    if high - low <= _SAME * max(abs(low), abs(high)):
        room = abs(low) / 10
        low, high = (low - room, low + room) if room else (0.0, 1.0)
    rough = (high - low) / _TICKS
    if not _SMALL < rough < 1 / _SMALL:
        return [low, high]
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(
        size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * (1 - _ROUNDING)
    )
    first, last = math.floor(low / step + _ROUNDING), math.ceil(high / step - _ROUNDING)
    return [number * step for number in range(first, last + 1)]


def _pieces(steps: Sequence[float], values: Sequence[float | None]) -> list[list[Point]]:
    """Runs of points between gaps."""
    found: list[list[Point]] = []
    is_open = False
    for step, value in zip(steps, values, strict=True):
        if value is None or not math.isfinite(value):
            is_open = False
            continue
        if not is_open:
            found.append([])
            is_open = True
        found[-1].append((float(step), value))
    return found


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]
