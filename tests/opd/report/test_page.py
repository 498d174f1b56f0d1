"""The report: escaped text, a span per token, gaps for missing values, a page on its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from api_proxy.pages.login_routes import FILES
from api_proxy.pages.measured import Curve
from api_proxy.pages.plots import svg
from api_proxy.pages.tokens import Signal, signals_of
from opd.report.curves import correction_curves, metric_rows, run_curves
from opd.report.page import (
    MOST_TOKENS,
    ReportExample,
    colored_tokens,
    style_hash,
    write_report,
)
from tests.api_proxy.pages.hostile import HOSTILE, assert_harmless
from tests.records.builders import a_turn


def signal(name: str, values: list[float | None]) -> Signal:
    return Signal(name=name, title=name.title(), says=f"What {name} is.", values=values)


def example(
    tokens: list[str], advantages: list[float | None], *others: Signal, **changes: Any
) -> ReportExample:
    values = {
        "title": "Turn 1",
        "prompt": "[user] <b>hi</b>",
        "next_state": "[user] no",
        "hint": "Say hello.",
        "ids": range(len(tokens)),
        "tokens": tokens,
        "signals": [signal("advantage", advantages), *others],
    }
    return ReportExample(**(values | changes))


def test_each_token_gets_the_tint_of_its_number() -> None:
    [(_, html), (_, by_ratio)] = colored_tokens(
        example(["<a>", "b\n"], [-2.0, 1.0], signal("ratio", [0.0, 3.0]))
    )
    assert html.count("<span") == 2
    assert ">&lt;a&gt;</span>" in html
    assert '<span class="t sm4" title="Token 1, id 0. Advantage: -2">' in html
    assert '<span class="t sp2" title="Token 2, id 1. Advantage: 1">' in html
    assert '<span class="t sp4" title="Token 2, id 1. Ratio: 3">' in by_ratio


def test_a_token_that_did_not_train_changes_no_other_tint() -> None:
    [(_, html)] = colored_tokens(example(["a", "b", "c"], [None, 2.0, -1.0]))
    assert '<span class="t no" title="Token 1, id 0. Advantage: not known">a</span>' in html
    assert '<span class="t sp4"' in html
    assert '<span class="t sm2"' in html


def test_tokens_and_numbers_must_have_one_length() -> None:
    with pytest.raises(ValueError, match="ids, tokens and signals have lengths"):
        example(["a", "b"], [0.0])


def test_the_choice_of_a_colour_is_frozen_with_its_scale(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    number = MOST_TOKENS + 3
    unknown = Signal(
        name="ratio", title="Ratio", says="", values=[None] * number, missing="Slime does not say."
    )
    turn = example(["x"] * number, [0.25] * number, unknown)
    write_report(path, title="r", facts=[], tables=[], curves=[], examples=[turn, turn])
    page = path.read_text()
    assert re.findall(r'<input type="radio" name="([^"]*)" id="([^"]*)"( checked)?>', page) == [
        ("signal-1", "signal-1-advantage", " checked"),
        ("signal-1", "signal-1-ratio", ""),
        ("signal-2", "signal-2-advantage", " checked"),
        ("signal-2", "signal-2-ratio", ""),
    ]
    assert "What advantage is." in page
    assert "0.25 and above" in page
    assert "None of the tokens has this number.</strong> Slime does not say." in page
    assert page.count('title="Token ') == 2 * MOST_TOKENS
    assert "3 more tokens are not shown here." in page


def test_the_style_shows_one_pane_for_each_choice() -> None:
    """Without scripts, the place of a choice among the choices selects the pane at that place."""
    known = len(signals_of(a_turn("s"), None, None, None))  # type: ignore[arg-type]
    style = (FILES / "pages.css").read_text(encoding="utf-8")
    places = re.findall(r"input:nth-of-type\((\d+)\):checked ~ div:nth-of-type\((\d+)\)", style)
    assert places == [(str(place), str(place)) for place in range(1, known + 1)]


def test_page_stands_alone_and_escapes_what_users_wrote(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(
        path,
        title="Run <1>",
        facts=[("updates", "3")],
        tables=[("Drops", ("reason", "turns"), [("stale", "2")])],
        curves=[Curve(title="Loss", unit="", steps=[1], series={"total": [0.5]})],
        examples=[example(["x"], [0.3])],
    )
    page = path.read_text()
    assert "Run &lt;1&gt;" in page
    assert "&lt;b&gt;hi&lt;/b&gt;" in page
    assert "<b>hi</b>" not in page
    for part in ("<script", "src=", "<link", " style=", "url("):
        assert part not in page
    [style] = re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL)
    assert f"default-src 'none'; style-src '{style_hash(style)}'" in page
    assert page.index("Content-Security-Policy") < page.index("<style>")


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_stored_stays_text(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.html"
    turn = ReportExample(
        title=text,
        prompt=text,
        next_state=text,
        hint=text,
        ids=[1],
        tokens=[text],
        signals=[Signal(name="ratio", title="Ratio", says=text, values=[None], missing=text)],
    )
    write_report(
        path,
        title=text,
        story=[text],
        facts=[(text, text)],
        tables=[(text, (text,), [(text,)])],
        details=[(text, (text,), [(text,)])],
        curves=[Curve(title=text, unit=text, steps=[1], series={text: [0.5]}, says=text)],
        examples=[turn],
    )
    assert_harmless(path.read_text(encoding="utf-8"))


def test_a_curve_without_a_value_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    curves = [
        Curve(
            title="known", unit="", steps=[1, 2], series={"a": [None, 1.0]}, says="Healthy: low."
        ),
        Curve(title="unknown", unit="", steps=[1, 2], series={"a": [None, None]}),
    ]
    write_report(path, title="r", facts=[], tables=[], curves=curves, examples=None)
    page = path.read_text(encoding="utf-8")
    assert (page.count("<svg"), page.count("<figure>")) == (1, 1)
    assert "Healthy: low." in page
    assert "unknown" not in page


def test_rows_leave_out_an_unfinished_line_and_curves_leave_out_skipped_steps(
    tmp_path: Path,
) -> None:
    rows = [{"step": 1, "loss": 0.5, "skipped": None}, {"step": 1, "skipped": "below_noise"}]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 2, "lo'
    (tmp_path / "metrics.jsonl").write_text(text)
    read = metric_rows(tmp_path)
    assert read == rows
    loss = next(curve for curve in run_curves(read) if curve.title == "Loss")
    assert loss.steps == [1]
    assert loss.series["total"] == [0.5]


def test_run_without_metrics_has_no_rows(tmp_path: Path) -> None:
    assert metric_rows(tmp_path) == []


def test_the_six_plots_of_rollout_correction_are_drawn_with_their_bounds() -> None:
    rows = [
        {"step": step, "rollout_corr/rollout_is_mean": 1.0 + step, "rollout_corr/kl": -0.1}
        for step in range(3)
    ]
    curves = {curve.title: curve for curve in correction_curves(rows)}
    assert len(curves) == 6
    weights = curves["Mean importance weight"]
    assert weights.series["applied"] == [1.0, 2.0, 3.0]
    assert weights.series["before the cap"] == [None, None, None]
    assert 'class="mark"' in svg(weights)
    assert set(curves) <= {curve.title for curve in run_curves(rows)}


def test_lengths_are_drawn_by_difficulty_where_there_are_rewards() -> None:
    rows = [{"step": 0, "length/mean": 12.0}]
    assert "Length by difficulty" not in {curve.title for curve in run_curves(rows)}
    rewarded = [{"step": 0, "length/easy_mean": 9.0, "length/hard_mean": 30.0}]
    [curve] = [one for one in run_curves(rewarded) if one.title == "Length by difficulty"]
    assert curve.series["prompts that mostly fail"] == [30.0]
