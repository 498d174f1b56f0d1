"""A comparison in words and numbers, for a terminal and a page. Pure; unknown values are "-"."""

from __future__ import annotations

from typing import TypeAlias

from opd.replay.comparison.values import QUANTILES, Comparison, Figures

Line: TypeAlias = tuple[str, str, str]
"""A name, and its values in A and in B."""


def table(compared: Comparison) -> list[Line]:
    """What is measured of each setting: (name, A, B)."""
    columns = [_column(one) for one in (compared.a, compared.b)]
    return [(name, columns[0][name], columns[1][name]) for name in columns[0]]


def _column(of: Figures) -> dict[str, str]:
    at_least = "at least " if of.num_uncounted_votes else ""
    quantiles = of.advantage_quantiles or (None,) * len(QUANTILES)
    return {
        "turns with a verdict": f"{of.num_decided} of {of.num_turns}",
        "accepted (a hint)": str(of.num_accepted),
        "accept rate": percent(of.accept_rate),
        "votes that abstained": percent(of.abstained),
        "turns on which all votes agree": percent(of.unanimous),
        "pairs of votes that agree": percent(of.pair_agreement),
        "hint length, characters": number(of.hint_chars, 1),
        "hint length, words": number(of.hint_words, 1),
        "words of hints that only the future knew": percent(of.leaked_words),
        "hints that name a value of the future": percent(of.leaking_hints),
        "turns with advantages": str(of.num_scored),
        "advantage, mean of |A|, nats": number(of.advantage_abs_mean, 4),
        **{
            f"advantage, {level:.0%} quantile, nats": number(value, 4)
            for level, value in zip(QUANTILES, quantiles, strict=True)
        },
        "judge tokens": number(of.judge_tokens, 0, at_least),
        "votes without a token count": str(of.num_uncounted_votes),
        "judge tokens per accepted turn": number(of.judge_tokens_per_accepted, 1, at_least),
        "teacher tokens": number(of.teacher_tokens),
        "teacher tokens per accepted turn that is scored": number(of.teacher_tokens_per_scored, 1),
    }


def facts(compared: Comparison) -> list[tuple[str, str]]:
    """The facts about both together."""
    matched = compared.matched
    differ = compared.num_decisions_differ
    share = percent(differ / compared.num_both_decided if compared.num_both_decided else None)
    return [
        ("turns in both", str(len(matched.pairs))),
        ("of these matched only by content", str(matched.num_by_content)),
        (f"turns only in {compared.name_a}", str(matched.only_a)),
        (f"turns only in {compared.name_b}", str(matched.only_b)),
        ("decided by both", str(compared.num_both_decided)),
        ("of these decided differently", f"{differ} ({share})"),
        (f"accepted by {compared.name_a} alone", str(compared.accepted_by_a_alone)),
        (f"accepted by {compared.name_b} alone", str(compared.accepted_by_b_alone)),
        ("accepted by both with different hints", str(compared.num_hints_differ)),
    ]


def lines(compared: Comparison) -> list[str]:
    """The comparison for a terminal."""
    rows = [("", compared.name_a, compared.name_b), *compared.settings, *table(compared)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    told = [f"{name:<{widths[0]}}  {a:>{widths[1]}}  {b}".rstrip() for name, a, b in rows]
    told.insert(1 + len(compared.settings), "")
    named = [f"{name}: {value}" for name, value in facts(compared)]
    drawn = [] if compared.report is None else ["", f"turn by turn: {compared.report}"]
    return [*told, "", *named, *drawn]


def percent(share: float | None) -> str:
    """A share in percent."""
    return "-" if share is None else f"{share:.1%}"


def number(value: float | None, digits: int = 0, before: str = "") -> str:
    """A number with this many digits, after a word."""
    return "-" if value is None else f"{before}{value:.{digits}f}"
