"""Draws a comparison of two runs into one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from api_proxy.pages.measured import Curve
from opd.replay.comparison.values import Comparison, Figures, ReplayedTurn, TurnDifference
from opd.replay.comparison.words import facts, number, table
from opd.report.page import write_report

_LEVELS = tuple(range(0, 101, 2))


def draw(compared: Comparison, out: Path) -> None:
    """Write the page; missing folders are created."""
    header = ("", compared.name_a, compared.name_b)
    out.parent.mkdir(parents=True, exist_ok=True)
    tables = [("Measured on the turns that both have", header, table(compared))]
    if compared.settings:
        tables.insert(0, ("Settings that differ", header, list(compared.settings)))
    write_report(
        out,
        title=f"{compared.name_a} against {compared.name_b}",
        facts=facts(compared),
        tables=[*tables, _turns(compared)] if compared.differences else tables,
        curves=curves(compared),
        examples=None,
    )


def curves(compared: Comparison) -> list[Curve]:
    """Distributions of both settings, in the same plots."""
    pairs = compared.matched.pairs
    sides = {
        compared.name_a: [a for a, _ in pairs],
        compared.name_b: [b for _, b in pairs],
    }
    most = max((*compared.a.positive_votes, *compared.b.positive_votes), default=0)
    return [
        Curve(
            title="Advantage of a token",
            unit="nats",
            steps=_LEVELS,
            series={name: _advantages(turns) for name, turns in sides.items()},
            step_unit="percent of tokens below",
        ),
        Curve(
            title="Length of a hint",
            unit="characters",
            steps=_LEVELS,
            series={name: _hint_lengths(turns) for name, turns in sides.items()},
            step_unit="percent of hints below",
        ),
        Curve(
            title="Turns by positive votes",
            unit="share of turns with a verdict",
            steps=range(most + 1),
            series={
                compared.name_a: _by_votes(compared.a, most),
                compared.name_b: _by_votes(compared.b, most),
            },
            step_unit="positive votes",
        ),
    ]


def _advantages(turns: Sequence[ReplayedTurn]) -> list[float | None]:
    scored = [turn.advantages for turn in turns if turn.advantages is not None]
    return _quantiles(np.concatenate(scored) if scored else np.empty(0))


def _hint_lengths(turns: Sequence[ReplayedTurn]) -> list[float | None]:
    return _quantiles(np.array([len(turn.hint.text) for turn in turns if turn.hint is not None]))


def _quantiles(values: np.ndarray) -> list[float | None]:
    if not values.size:
        return [None] * len(_LEVELS)
    return [float(value) for value in np.percentile(values, _LEVELS)]


def _by_votes(of: Figures, most: int) -> list[float | None]:
    if not of.num_decided:
        return [None] * (most + 1)
    return [of.positive_votes.get(votes, 0) / of.num_decided for votes in range(most + 1)]


def _turns(compared: Comparison) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    header = (
        "turn",
        "response",
        "next state",
        f"hint of {compared.name_a}",
        f"hint of {compared.name_b}",
        "mean difference of A, nats",
    )
    return (
        f"The {len(compared.differences)} turns that differ most",
        header,
        [_turn(one) for one in compared.differences],
    )


def _turn(one: TurnDifference) -> Sequence[str]:
    return (
        one.a.turn_id,
        one.a.response,
        one.a.next_state,
        _decision(one.a),
        _decision(one.b),
        number(one.advantage_gap, 4),
    )


def _decision(turn: ReplayedTurn) -> str:
    votes = " ".join("0" if vote is None else f"{vote:+d}" for vote in turn.votes)
    if turn.accepted is None:
        return "- (no verdict)"
    return f"{turn.hint.text if turn.hint is not None else 'no hint'} [{votes}]"
