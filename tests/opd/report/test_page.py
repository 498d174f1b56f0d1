"""The report: escaped text, a span per token, gaps for missing values, a page on its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from api_proxy.measured import Curve
from opd.report.curves import correction_curves, metric_rows, run_curves
from opd.report.page import ReportExample, colored_tokens, plot_svg, write_report


def example(tokens: list[str], advantages: list[float]) -> ReportExample:
    return ReportExample(
        title="Turn 1",
        prompt="[user] <b>hi</b>",
        next_state="[user] no",
        hint="Say hello.",
        tokens=tokens,
        advantages=advantages,
    )


def test_each_token_gets_the_tint_of_its_advantage() -> None:
    html = colored_tokens(example(["<a>", "b\n"], [-2.0, 1.0]))
    assert html.count("<span") == 2
    assert "&lt;a&gt;" in html
    assert "rgba(218,54,51,1.00)" in html
    assert "rgba(46,160,67,0.50)" in html
    assert "advantage -2.000 nats" in html


def test_a_token_that_did_not_train_changes_no_other_tint() -> None:
    html = colored_tokens(example(["a", "b", "c"], [float("nan"), 2.0, -1.0]))
    assert '<span title="did not train">a</span>' in html
    assert "rgba(46,160,67,1.00)" in html
    assert "rgba(218,54,51,0.50)" in html
    assert "nan" not in html


def test_tokens_and_advantages_must_have_one_length() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1 advantages"):
        example(["a", "b"], [0.0])


def test_updates_are_whole_numbers_on_an_axis() -> None:
    drawn = plot_svg(Curve(title="a", unit="", steps=[1, 2, 3], series={"a": [1.0, 2.0, 4.0]}))
    assert "<!-- 2 -->" in drawn
    assert "<!-- 1.25 -->" not in drawn


def test_plot_is_an_svg_and_takes_missing_values() -> None:
    svg = plot_svg(Curve(title="t", unit="u", steps=[1, 2, 3], series={"a": [0.1, None, 0.3]}))
    assert svg.startswith("<svg")
    assert svg.rstrip().endswith("</svg>")


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
    assert "<script" not in page
    assert "src=" not in page
    assert "<link" not in page


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
    assert "stroke-dasharray" in plot_svg(weights)
    assert set(curves) <= {curve.title for curve in run_curves(rows)}


def test_lengths_are_drawn_by_difficulty_where_there_are_rewards() -> None:
    rows = [{"step": 0, "length/mean": 12.0}]
    assert "Length by difficulty" not in {curve.title for curve in run_curves(rows)}
    rewarded = [{"step": 0, "length/easy_mean": 9.0, "length/hard_mean": 30.0}]
    [curve] = [one for one in run_curves(rewarded) if one.title == "Length by difficulty"]
    assert curve.series["prompts that mostly fail"] == [30.0]
