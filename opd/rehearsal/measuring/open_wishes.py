"""Open wishes against hints: which ones are asked about, and what their answers mean. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opd.rehearsal.measuring.measuring import Wish
from opd.rehearsal.preparing.preparing import PreparedHint
from rollout_bridge.rehearsal.config import RehearsalConfig
from rollout_bridge.rehearsal.estimates import Obedience, PooledObedience, pooled, summed
from rollout_bridge.rehearsal.journal import VersionRow

ENOUGH_ANSWERS = 16
"""With fewer answers, nothing can be said about one hint's open wishes."""
LOOK_BACK = 8
"""Number of versions among which that many answers are sought."""


def wishes_against(one: PreparedHint) -> list[Wish]:
    """The hint's texts that never train, at its states, the held-back ones first."""
    turns = (*one.held_back, *one.training)
    hint_id = one.hint.hint_id
    return [
        Wish(hint_id=hint_id, turn=turn, prompt=prompt) for turn in turns for prompt in one.wishes
    ]


def spare_wishes_against(one: PreparedHint) -> list[Wish]:
    """For a hint without a text that only measures: the open wish that trains."""
    turns = (*one.held_back, *one.training)
    hint_id = one.hint.hint_id
    prompts = [] if one.wishes else one.open_wishes
    return [Wish(hint_id=hint_id, turn=turn, prompt=prompt) for turn in turns for prompt in prompts]


def wishes_in_turn(of_hints: Sequence[Sequence[Wish]], count: int, *, begin: int) -> list[Wish]:
    """`count` wishes from place `begin` on, equally many of each hint; all hints and wishes take
    turns.
    """
    lists = [wishes for wishes in of_hints if wishes]
    if not lists:
        return []
    places = (divmod(place, len(lists)) for place in range(begin, begin + count))
    return [lists[hint][turn % len(lists[hint])] for turn, hint in places]


def together(some: Mapping[str, Obedience], more: Mapping[str, Obedience]) -> dict[str, Obedience]:
    """All answers of each hint."""
    found = {}
    for hint_id in {**some, **more}:
        of_hint = summed([part[hint_id] for part in (some, more) if hint_id in part])
        assert of_hint is not None
        found[hint_id] = of_hint
    return found


def obedience_of(
    hint_id: str,
    rows: Sequence[VersionRow],
    now: Obedience | None,
    config: RehearsalConfig,
) -> PooledObedience | None:
    """How often open wishes against one hint are done: `now`, and at as many earlier versions as
    ENOUGH_ANSWERS takes. None if the last LOOK_BACK have fewer.
    """
    parts = [] if now is None else [now]
    for row in reversed(rows[-LOOK_BACK:]):
        if _num_asked(parts) >= ENOUGH_ANSWERS:
            break
        if hint_id in row.obedience_of:
            parts.append(row.obedience_of[hint_id].obedience())
    if _num_asked(parts) < ENOUGH_ANSWERS:
        return None
    return pooled(parts, floor=config.obedience_floor)


def _num_asked(parts: Sequence[Obedience]) -> int:
    return sum(one.asked for one in parts)


def why_failed(latest: Sequence[Obedience], together: PooledObedience | None) -> str | None:
    """Why training stops at a version, by open wishes at the `latest` ones; None: it goes on. Not
    for the start: if it falls short, that is chance.
    """
    all_ = summed(latest)
    if all_ is None:
        return None
    if not all_.is_judged:
        return (
            f"the judge cannot say of {all_.abstained} of {all_.abstained + all_.asked} answers "
            "whether they do what an open wish asks"
        )
    if together is None or together.passed:
        return None
    low, high = together.rate.interval
    return (
        f"open wishes are done in {together.rate.value:.2f} of {together.rate.count} answers "
        f"({low:.2f} to {high:.2f}), and at least {together.floor:.2f} is asked for (the start: "
        f"{together.before:.2f})"
    )
