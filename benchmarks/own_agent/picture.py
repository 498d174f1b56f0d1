"""The headline table as a picture: before and after, one row for runs that differ only in seed."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.own_agent.cell import HOLDS
from benchmarks.own_agent.table import Result, before_after, grouped, settings_of
from examples.tool_lab.evaluate import Rate

PANELS = (
    ("wanted", "silent wish held", HOLDS),
    ("contrary", "open opposite done", None),
    ("usual", "other kinds as usual", None),
)
_WIDTH = 44
"""Longest line of a row's name."""


def picture(results: Iterable[Result]) -> str:
    """An SVG drawing: an open circle for the start, a dot with its 95% interval for the end."""
    groups = grouped(results)
    num_lines = sum(label(group).count("\n") + 1.4 for group in groups)
    size = (10.4, 0.8 + 0.17 * num_lines)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharey=True)
    places = list(range(len(groups)))[::-1]
    for axes, (rate, title, target) in zip(panels, PANELS, strict=True):
        for place, group in zip(places, groups, strict=True):
            before, after = before_after(group, rate)
            if before is not None:
                axes.plot(before.value, place, "o", mfc="none", color="0.45", markersize=5)
            if after is not None:
                _drawn(axes, place, after)
        if target is not None:
            axes.axvline(target, color="0.6", linestyle="dotted", linewidth=0.9)
        axes.set_title(title, fontsize=9)
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-0.6, len(groups) - 0.4)
        axes.grid(alpha=0.25, axis="x")
        axes.tick_params(labelsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].set_yticks(places, [label(group) for group in groups], fontsize=8)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters stay letters
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _drawn(axes: Axes, place: int, rate: Rate) -> None:
    low, high = rate.interval
    axes.plot([low, high], [place, place], color="C0", linewidth=1.6)
    axes.plot(rate.value, place, "o", color="C0", markersize=4.5)


def label(group: Sequence[Result]) -> str:
    """A row's name: the wishes, how often people objected, and the settings that differ."""
    first = group[0]
    asked = first["asked_objections"]
    kinds = first["kinds"]
    wishes = " and ".join(kinds) if len(kinds) < 4 else f"{len(kinds)} wishes"
    objections = "until they hold" if asked is None else f"{asked} objections each"
    settings = settings_of(first)
    more = [] if settings == "as documented" else textwrap.wrap(settings, _WIDTH)
    return "\n".join([f"{wishes}, {objections}", *more])
