"""Draws a run: its story, tables, example turns with the numbers of every token, and curves, in
one HTML file.

Pure presentation, by the pages' means (`api_proxy.pages`): the same colours, curves and tokens,
frozen. The page needs no other file and runs nothing; its policy allows only its own style sheet.
It depends on no store, no model and no objective.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import FileSystemLoader
from markupsafe import Markup

from api_proxy.pages.login_routes import FILES
from api_proxy.pages.measured import Curve
from api_proxy.pages.plots import svg
from api_proxy.pages.rendering import environment_of
from api_proxy.pages.tokens import Signal, coloured

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, header and rows."""
MOST_TOKENS = 2000
"""Tokens of an answer that the report shows, once for each signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportExample:
    """One trained turn as text; `ids`, `tokens` (the text of each id) and the values of `signals`
    have one entry per response token. Raises ValueError for lengths that differ.
    """

    title: str
    prompt: str
    next_state: str
    hint: str
    ids: Sequence[int]
    tokens: Sequence[str]
    signals: Sequence[Signal]

    def __post_init__(self) -> None:
        lengths = {len(self.ids), len(self.tokens), *(len(one.values) for one in self.signals)}
        if len(lengths) > 1:
            raise ValueError(f"{self.title}: ids, tokens and signals have lengths {lengths}")


def write_report(
    path: Path,
    *,
    title: str,
    facts: Sequence[tuple[str, str]],
    tables: Sequence[Table],
    curves: Sequence[Curve],
    examples: Sequence[ReportExample] | None,
    story: Sequence[str] = (),
    details: Sequence[Table] = (),
) -> None:
    """Write the page: the paragraphs `story` at its top, `tables` below them, `details` at its end.
    All text is escaped here.

    A curve without any value is left out. With `examples` None, the page does not show trained
    turns.
    """
    style = (FILES / "pages.css").read_text(encoding="utf-8")
    plots = [(curve, svg(curve)) for curve in curves]
    templates = environment_of(FileSystemLoader(Path(__file__).parent / "templates"))
    page = templates.get_template("report.html.jinja").render(
        title=title,
        style=Markup(style),  # our own file
        style_hash=style_hash(style),
        story=story,
        facts=facts,
        tables=tables,
        details=details,
        plots=[(curve, picture) for curve, picture in plots if picture],
        most_tokens=MOST_TOKENS,
        examples=(
            None
            if examples is None
            else [(example, colored_tokens(example)) for example in examples]
        ),
    )
    path.write_text(page, encoding="utf-8")


def style_hash(style: str) -> str:
    """What a Content-Security-Policy calls this style sheet."""
    return f"sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}"


def colored_tokens(example: ReportExample) -> list[tuple[Signal, Markup]]:
    """For each signal the response as HTML, its first MOST_TOKENS tokens coloured as on the page of
    a turn.
    """
    tokens, ids = example.tokens[:MOST_TOKENS], example.ids[:MOST_TOKENS]
    return [(one, coloured(tokens, ids, [one], one)) for one in example.signals]
