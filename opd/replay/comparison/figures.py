"""What differs between the turns of two runs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np

from judge.votes.screening import words
from opd.replay.comparison.values import QUANTILES, Figures, Matched, ReplayedTurn, TurnDifference


def match(a: Sequence[ReplayedTurn], b: Sequence[ReplayedTurn]) -> Matched:
    """Pair the turns by id, and the rest by session name, prompt and response: among equal ones,
    the first with the first.
    """
    by_id = {turn.turn_id: turn for turn in b}
    pairs = [(turn, by_id[turn.turn_id]) for turn in a if turn.turn_id in by_id]
    paired = {turn.turn_id for turn, _ in pairs}
    by_content: dict[tuple[str | None, str, str], list[ReplayedTurn]] = {}
    for turn in b:
        if turn.turn_id not in paired:
            by_content.setdefault(turn.content, []).append(turn)
    num_by_id, only_a = len(pairs), 0
    for turn in a:
        if turn.turn_id in paired:
            continue
        if waiting := by_content.get(turn.content):
            pairs.append((turn, waiting.pop(0)))
        else:
            only_a += 1
    return Matched(
        pairs=tuple(pairs),
        num_by_content=len(pairs) - num_by_id,
        only_a=only_a,
        only_b=sum(map(len, by_content.values())),
    )


def figures(turns: Sequence[ReplayedTurn]) -> Figures:
    """What one setting did with these turns."""
    decided = [turn for turn in turns if turn.accepted is not None]
    num_accepted = sum(turn.accepted is True for turn in decided)
    votes = [vote for turn in turns for vote in turn.votes]
    spoken = [[vote for vote in turn.votes if vote is not None] for turn in turns]
    agreements = [_pair_agreement(scores) for scores in spoken if len(scores) > 1]
    hints = [turn.hint for turn in turns if turn.hint is not None]
    scored = [turn.advantages for turn in turns if turn.advantages is not None]
    tokens = np.concatenate(scored) if scored else np.empty(0, dtype=np.float32)
    judge_tokens = _total(turn.judge_tokens for turn in turns)
    teacher_counts = [t.teacher_tokens for t in turns if t.teacher_tokens is not None]
    has_tokens = tokens.size > 0
    return Figures(
        num_turns=len(turns),
        num_decided=len(decided),
        num_accepted=num_accepted,
        accept_rate=_ratio(num_accepted, len(decided)),
        abstained=_ratio(sum(vote is None for vote in votes), len(votes)),
        unanimous=_ratio(sum(share == 1.0 for share in agreements), len(agreements)),
        pair_agreement=mean(agreements),
        hint_chars=mean(len(hint.text) for hint in hints),
        hint_words=mean(hint.num_words for hint in hints),
        leaked_words=mean(h.leaked_words for h in hints if h.leaked_words is not None),
        leaking_hints=_ratio(sum(hint.leaks_value for hint in hints), len(hints)),
        num_scored=len(scored),
        advantage_quantiles=(
            tuple(map(float, np.quantile(tokens, QUANTILES))) if has_tokens else None
        ),
        advantage_abs_mean=float(np.abs(tokens).mean()) if has_tokens else None,
        judge_tokens=judge_tokens,
        num_uncounted_votes=len(votes) - sum(turn.num_counted for turn in turns),
        judge_tokens_per_accepted=_ratio(judge_tokens, num_accepted),
        teacher_tokens=_total(teacher_counts),
        teacher_tokens_per_scored=mean(teacher_counts),
        positive_votes=dict(
            Counter(turn.votes.count(1) for turn in turns if turn.accepted is not None)
        ),
    )


def difference(a: ReplayedTurn, b: ReplayedTurn) -> TurnDifference:
    """What differs between two settings on one turn."""
    gap = None
    if (
        a.advantages is not None
        and b.advantages is not None
        and len(a.advantages) == len(b.advantages) > 0
    ):
        gap = float(np.abs(a.advantages - b.advantages).mean())
    return TurnDifference(
        a=a,
        b=b,
        decision_differs=None not in (a.accepted, b.accepted) and a.accepted != b.accepted,
        advantage_gap=gap,
        hint_distance=_distance(a, b),
    )


def largest(differences: Iterable[TurnDifference], limit: int) -> tuple[TurnDifference, ...]:
    """Those that differ at all, the largest first: in the decision, then in the advantages, then in
    the hint's words.
    """
    differing = [one for one in differences if one.decision_differs or _size(one) > (0.0, 0.0)]
    ranked = sorted(differing, key=lambda one: (one.decision_differs, _size(one)), reverse=True)
    return tuple(ranked[:limit])


def mean(values: Iterable[float]) -> float | None:
    """The mean; None for nothing."""
    known = list(values)
    return sum(known) / len(known) if known else None


def _size(one: TurnDifference) -> tuple[float, float]:
    """An unknown value ranks as no difference."""
    return one.advantage_gap or 0.0, one.hint_distance or 0.0


def _distance(a: ReplayedTurn, b: ReplayedTurn) -> float | None:
    if a.hint is None or b.hint is None:
        return None
    mine, theirs = set(words(a.hint.text)), set(words(b.hint.text))
    either = mine | theirs
    return len(mine ^ theirs) / len(either) if either else None


def _pair_agreement(scores: Sequence[int]) -> float:
    pairs = list(combinations(scores, 2))
    return sum(one == other for one, other in pairs) / len(pairs)


def _ratio(part: int | None, whole: int) -> float | None:
    return part / whole if part is not None and whole else None


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
