"""Draws a run: curves from its metrics, example turns with the advantage of every token, one HTML
file.

Pure presentation. It reads numbers and text that others computed, and writes a self-contained page
(pictures inline, no scripts). It depends on no store, no model and no objective.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from jinja2 import Environment, FileSystemLoader

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

from api_proxy.measured import Curve

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, header and rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportExample:
    """One trained turn as text; `tokens` and `advantages` have one entry per response token."""

    title: str
    prompt: str
    next_state: str
    hint: str
    tokens: Sequence[str]
    advantages: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.advantages):
            raise ValueError(
                f"{self.title}: {len(self.tokens)} tokens but {len(self.advantages)} advantages"
            )


def write_report(
    path: Path,
    *,
    title: str,
    facts: Sequence[tuple[str, str]],
    tables: Sequence[Table],
    curves: Sequence[Curve],
    examples: Sequence[ReportExample] | None,
) -> None:
    """Write the page. All text is escaped here.

    With `examples` None, the page does not show trained turns.
    """
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True
    )
    page = templates.get_template("report.html.jinja").render(
        title=title,
        facts=facts,
        tables=tables,
        plots=[(curve, plot_svg(curve)) for curve in curves],
        examples=(
            None
            if examples is None
            else [(example, colored_tokens(example)) for example in examples]
        ),
    )
    path.write_text(page, encoding="utf-8")


def plot_svg(curve: Curve) -> str:
    """The curve as an SVG element; missing values are gaps."""
    figure, axes = pyplot.subplots(figsize=(5.2, 2.8), layout="constrained")
    for number, (name, values) in enumerate(curve.series.items()):
        shown = [float("nan") if value is None else value for value in values]
        marker = "o" if len(shown) < 40 else None
        # The first is drawn wider, so that it is visible below another one with the same values.
        width = 1.4 if number or len(curve.series) == 1 else 2.8
        axes.plot(curve.steps, shown, label=name, linewidth=width, marker=marker, markersize=2.5)
    for number, (name, value) in enumerate(curve.marks.items()):
        style = ("dashed", "dotted")[number % 2]
        axes.axhline(value, color="0.5", linewidth=0.9, linestyle=style, label=name)
    axes.set_xlabel(curve.step_unit)
    axes.set_ylabel(curve.unit)
    if all(float(step).is_integer() for step in curve.steps):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if len(curve.series) + len(curve.marks) > 1:
        axes.legend(fontsize=8, frameon=False)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def colored_tokens(example: ReportExample) -> str:
    """The response as HTML, each token tinted by its advantage: green is pushed up, red down.

    A token without one (NaN: a guard removed it from the step) has no tint and says so.
    """
    known = [abs(value) for value in example.advantages if math.isfinite(value)]
    largest = max(known, default=0.0) or 1.0
    spans = []
    for token, advantage in zip(example.tokens, example.advantages, strict=True):
        shown = html.escape(token).replace("\n", "⏎<br>")
        if not math.isfinite(advantage):
            spans.append(f'<span title="did not train">{shown}</span>')
            continue
        strength = abs(advantage) / largest
        color = "46,160,67" if advantage > 0 else "218,54,51"
        spans.append(
            f'<span style="background:rgba({color},{strength:.2f})" '
            f'title="advantage {advantage:+.3f} nats">{shown}</span>'
        )
    return "".join(spans)
