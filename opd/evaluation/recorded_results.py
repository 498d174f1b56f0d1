"""The results on recorded states: as JSON values, as rows of a table, as the plot of a page."""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from typing import Any

from api_proxy.pages.measured import Curve
from opd.evaluation.recorded import WinRate
from opd.evaluation.task_results import estimate_json, shown
from opd.report.page import Table


def as_json(found: WinRate) -> dict[str, Any]:
    """Everything, state by state."""
    return {
        "win_rate": estimate_json(found.wins),
        "nats_per_token": estimate_json(found.difference),
        "states": len(found.contests),
        "states_trained": sum(one.was_trained for one in found.contests),
        "sessions": len({one.session_id for one in found.contests}),
        "left_out": dict(found.left_out),
        "contests": [asdict(one) for one in found.contests],
    }


def table(found: WinRate, version: int, against: int) -> Table:
    """The main figures, one line each."""
    contests = found.contests
    more, less = sum(one.wins > 0.5 for one in contests), sum(one.wins < 0.5 for one in contests)
    tokens = fmean(one.tokens for one in contests)
    tokens_against = fmean(one.tokens_against for one in contests)
    rows = [
        ["win rate", shown(found.wins)],
        ["difference, nats per token", shown(found.difference, sign=True)],
        ["states won / lost / even", f"{more} / {less} / {len(contests) - more - less}"],
        ["sessions", str(len({one.session_id for one in contests}))],
        ["states that the run trained on", str(sum(one.was_trained for one in contests))],
        ["mean tokens of an answer", f"{tokens:.1f} against {tokens_against:.1f}"],
    ]
    rows += [[f"left out, {reason}", str(number)] for reason, number in found.left_out.items()]
    return (
        f"version {version} against version {against} at {len(contests)} recorded states",
        ["", "95% intervals over sessions"],
        rows,
    )


def curve(found: WinRate) -> Curve:
    """The states' differences, smallest first: how many are won, and by how much."""
    ordered = sorted(one.difference for one in found.contests)
    return Curve(
        title="Hinted teacher: one version minus the other",
        unit="nats per token",
        steps=[(place + 0.5) / len(ordered) for place in range(len(ordered))],
        series={"states": ordered},
        step_unit="share of states",
        marks={"even": 0.0},
    )
