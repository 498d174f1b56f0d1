"""The values of a comparison: what each run made of a turn, and what differs. Pure.

An unknown value is None, and is shown as "-": it is never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from records.types import Logprobs

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class HintFacts:
    """A hint, and how much of it only the future knew: the share of its different words that occur
    in the next state and nowhere before it (None: it has no words), and whether it names a value
    (a number, an identifier, an address) that does.
    """

    text: str
    num_words: int
    leaked_words: float | None
    leaks_value: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedTurn:
    """What one run made of a turn.

    `content` identifies it if its id does not: session name, prompt, response. `accepted`: the
    judge gave a hint; None while there is no verdict. `votes` are +1, -1 or None (abstained).
    `judge_tokens` are those of the `num_counted` votes that report them; `teacher_tokens` those of
    all candidates. `advantages` [R] in nats, teacher minus policy.
    """

    turn_id: str
    content: tuple[str | None, str, str]
    accepted: bool | None
    votes: tuple[int | None, ...]
    hint: HintFacts | None
    judge_tokens: int | None
    num_counted: int
    teacher_tokens: int | None
    advantages: Logprobs | None
    response: str
    next_state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """The turns that both runs have, in pairs, those paired only by content, and the numbers of
    turns that only one has.
    """

    pairs: tuple[tuple[ReplayedTurn, ReplayedTurn], ...]
    num_by_content: int
    only_a: int
    only_b: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one setting did with the turns that both have.

    `unanimous` and `pair_agreement` are over turns with at least two votes that did not abstain:
    the share on which all agree, and the mean share of pairs of votes that agree. Advantages are
    over the tokens of the `num_scored` turns that have them. With `num_uncounted_votes`, the
    judge's tokens are at least that many. A turn is accepted before it is scored: the teacher's
    tokens are per scored turn.
    """

    num_turns: int
    num_decided: int
    num_accepted: int
    accept_rate: float | None
    abstained: float | None
    unanimous: float | None
    pair_agreement: float | None
    hint_chars: float | None
    hint_words: float | None
    leaked_words: float | None
    leaking_hints: float | None
    num_scored: int
    advantage_quantiles: tuple[float, ...] | None
    advantage_abs_mean: float | None
    judge_tokens: int | None
    num_uncounted_votes: int
    judge_tokens_per_accepted: float | None
    teacher_tokens: int | None
    teacher_tokens_per_scored: float | None
    positive_votes: dict[int, int]
    """Number of turns by their positive votes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDifference:
    """One turn under both settings. `advantage_gap` is the mean absolute difference of its tokens'
    advantages, in nats; `hint_distance` the share of different words that only one hint has.
    """

    a: ReplayedTurn
    b: ReplayedTurn
    decision_differs: bool
    advantage_gap: float | None
    hint_distance: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs on the same turns. `settings` are (key, A, B) where their configurations differ;
    `differences` the turns that differ most, largest first.
    """

    name_a: str
    name_b: str
    settings: tuple[tuple[str, str, str], ...]
    matched: Matched
    a: Figures
    b: Figures
    num_both_decided: int
    num_decisions_differ: int
    accepted_by_a_alone: int
    accepted_by_b_alone: int
    num_hints_differ: int
    differences: tuple[TurnDifference, ...]
    report: Path | None = None
