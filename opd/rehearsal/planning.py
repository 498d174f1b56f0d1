"""Which lessons are made next. Pure.

Hints take turns, scope by scope, and each goes through its states and texts in an order that meets
all pairs of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from uuid import uuid4

from opd.rehearsal.losses import TextLosses
from records.hints.types import Hint, HintStatus
from records.lessons.names import LessonKind, LessonState
from records.lessons.types import NewLesson

_DISOBEYED_WEIGHT = 3
"""Counter-lessons of a hint that loses open wishes, for each one of another hint."""
UNDER_WAY = (LessonState.SAMPLING, LessonState.SCORING, LessonState.READY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """A hint that is practised: its states and texts (prompt ids) that train."""

    hint: Hint
    states: tuple[str, ...]
    prompts: tuple[str, ...]
    is_disobeyed: bool = False
    """Whether open wishes against it are done too seldom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """A state of another kind, and the scope that it belongs to."""

    turn_id: str
    scope: str


def taking_part(hints: Sequence[Rehearsed], of_turns: Collection[str]) -> list[Rehearsed]:
    """Hints that get lessons: active ones, resting ones with turns to train on (`of_turns`), and,
    if there are any of these, resting ones whose open wishes are lost through what the others
    learn.
    """
    chosen = {
        one.hint.hint_id
        for one in hints
        if one.hint.status is HintStatus.ACTIVE or one.hint.hint_id in of_turns
    }
    return [one for one in hints if one.hint.hint_id in chosen or (chosen and one.is_disobeyed)]


def missing(
    targets: Mapping[LessonKind, int], counts: Mapping[tuple[LessonKind, LessonState], int]
) -> dict[LessonKind, int]:
    """How many lessons of each kind to add, so that as many as wanted are in progress or ready."""
    return {
        kind: max(wanted - sum(counts.get((kind, state), 0) for state in UNDER_WAY), 0)
        for kind, wanted in targets.items()
    }


def targets_of(
    parts: Mapping[LessonKind, int], pool: float, *, is_rehearsing: bool, has_turns: bool = False
) -> dict[LessonKind, int]:
    """Lessons to keep ready, for steps that take `parts` of each kind. If no hint is practised, but
    there are turns to train on whose hint rests (`has_turns`), none with a hint; otherwise none.
    """
    wanted = dict.fromkeys(LessonKind, is_rehearsing or has_turns)
    wanted[LessonKind.HINT] = is_rehearsing
    return {kind: math.ceil(pool * number) if wanted[kind] else 0 for kind, number in parts.items()}


def targets_of_return(batch_size: int, pool: float) -> dict[LessonKind, int]:
    """The same if nothing is practised and what ended hints taught must be undone: steps of
    keep-lessons only.
    """
    return dict.fromkeys(LessonKind, 0) | {LessonKind.KEEP: math.ceil(pool * batch_size)}


class Rota:
    """Whose turn it is; it continues where it stopped, except in a new process. Every other
    counter-lesson of a hint is for the text that loses most, if one does.
    """

    def __init__(self, losses: TextLosses, begin: int = 0) -> None:
        self._next = dict.fromkeys(LessonKind, begin)
        self._next_kept = begin
        self._losses = losses

    def of_hints(self, kind: LessonKind, hints: Sequence[Rehearsed], count: int) -> list[NewLesson]:
        """`count` new lessons of `kind` for hints that can have them; keep-lessons hold what these
        hints taught.
        """
        is_counter = kind is LessonKind.COUNTER
        able = [one for one in hints if one.states and (one.prompts or not is_counter)]
        disobeyed = [one for one in able if one.is_disobeyed]
        if is_counter:  # a hint that loses wishes gets more of these
            able += disobeyed * (_DISOBEYED_WEIGHT - 1)
        elif kind is LessonKind.HINT and len(disobeyed) < len(able):  # and no hint-lessons there
            able = [one for one in able if not one.is_disobeyed]
        able = _scopes_in_turn(able)
        if not able:
            return []
        made = []
        for _ in range(count):
            round_, place = divmod(self._next[kind], len(able))
            self._next[kind] += 1
            one = able[place]
            state = one.states[round_ % len(one.states)]
            made.append(
                NewLesson(
                    lesson_id=uuid4().hex,
                    kind=kind,
                    scope=one.hint.scope,
                    hint_id=one.hint.hint_id,
                    state_turn_id=state,
                    prompt_id=self._text(one, round_) if is_counter else None,
                )
            )
        return made

    def _text(self, one: Rehearsed, round_: int) -> str:
        """Each state meets all texts, sweep by sweep over the states."""
        sweep, state = divmod(round_, len(one.states))
        turn = sweep + state
        lost = self._losses.most_lost(one.prompts)
        if lost is None:
            return one.prompts[turn % len(one.prompts)]
        return lost if turn % 2 else one.prompts[turn // 2 % len(one.prompts)]

    def of_kept(self, states: Sequence[KeptState], count: int) -> list[NewLesson]:
        """`count` keep-lessons."""
        made = []
        for _ in range(count if states else 0):
            state = states[self._next_kept % len(states)]
            self._next_kept += 1
            made.append(
                NewLesson(
                    lesson_id=uuid4().hex,
                    kind=LessonKind.KEEP,
                    scope=state.scope,
                    hint_id=None,
                    state_turn_id=state.turn_id,
                    prompt_id=None,
                )
            )
        return made


def _scopes_in_turn(hints: Sequence[Rehearsed]) -> list[Rehearsed]:
    """Hints scope by scope, one of each in turn. A scope with many hints gets no more than others:
    hints of smaller scopes are repeated.
    """
    scopes: dict[str, list[Rehearsed]] = {}
    for one in hints:
        scopes.setdefault(one.hint.scope, []).append(one)
    most = max((len(of_scope) for of_scope in scopes.values()), default=0)
    repeated = [
        [of_scope[index % len(of_scope)] for index in range(most)] for of_scope in scopes.values()
    ]
    return [one for row in zip_longest(*repeated) for one in row if one is not None]
