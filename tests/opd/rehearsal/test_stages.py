"""The two stages of a lesson: what its row leads to, and what is dropped on the way."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from opd.rehearsal.desk import Desk, Scored
from opd.rehearsal.losses import TextLosses
from opd.rehearsal.needs import RehearsalStore
from opd.rehearsal.places import Place
from opd.rehearsal.policy_sampler import PolicySampler
from opd.rehearsal.stages import ClaimedLesson, SamplingStage, ScoringStage
from records.hints.types import Hint, HintPrompt, HintStatus
from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.lessons.types import Lesson, LessonSample, LessonScore
from records.messages import Message
from records.names import DropReason
from records.types import TurnRecord, VersionSpan
from tests.opd.rehearsal.builders import HINT_TEXT, a_hint, a_prompt, a_state

OWNER = "rehearsal"
IDS = np.array([4, 5], dtype=np.int32)
LOGPROBS = np.array([-0.1, -0.2], dtype=np.float32)
SPANS = (VersionSpan(version=0, start=0, end=2),)


class Records:
    """One state, one hint, one text; what became of lessons."""

    def __init__(self, hint: Hint | None, turns: Sequence[TurnRecord] | None = None) -> None:
        self.the_hint = hint
        self.turns = [a_state("t0", "How warm is it?")] if turns is None else list(turns)
        self.prompts = [a_prompt()]
        self.samples: list[LessonSample] = []
        self.scores: list[LessonScore] = []
        self.drops: list[LessonDrop] = []
        self.finds = False
        self.redactor = SimpleNamespace(messages=self.clean)

    async def hint(self, hint_id: str) -> Hint | None:
        return self.the_hint

    async def hint_prompts(self, hint_id: str) -> list[HintPrompt]:
        return self.prompts

    async def load_turns(self, turn_ids: Sequence[str]) -> list[TurnRecord]:
        return [turn for turn in self.turns if turn.turn_id in turn_ids]

    def clean(self, messages: list[Message]) -> list[Message]:
        return [{**one, "content": "[secret]"} for one in messages] if self.finds else messages

    async def redact(self, work: Any, *args: Any) -> Any:
        return work(*args)

    async def commit_lesson_sample(self, owner: str, sample: LessonSample) -> bool:
        self.samples.append(sample)
        return True

    async def commit_lesson_score(self, owner: str, score: LessonScore) -> bool:
        self.scores.append(score)
        return True

    async def drop_lesson(
        self, owner: str, lesson_id: str, reason: LessonDrop, detail: str = ""
    ) -> bool:
        self.drops.append(reason)
        return True


class ADesk:
    """Answers at once; knows under which hints the teacher read."""

    def __init__(self, drop: DropReason | None = None) -> None:
        self.drop = drop
        self.words: list[str | None] = []
        self.hints: list[str | None] = []
        self.teacher = SimpleNamespace(name="start")
        self.serves = "0"

    async def place(self, turn: TurnRecord, words: str | None = None) -> Place:
        self.words.append(words)
        return Place(turn=turn, messages=turn.messages, prompt_ids=turn.prompt_ids)

    async def answer(self, engine: object, place: Place) -> Any:
        rollout = SimpleNamespace(ids=[4, 5], logprobs=[-0.1, -0.2], finish_reason="stop")
        return SimpleNamespace(
            drop=self.drop,
            message={"role": "assistant", "content": "It is 21 C."},
            rollout=rollout,
            version_spans=SPANS,
            sampling={"temperature": 1.0},
        )

    async def score(self, place: Place, hint: str | None, response_ids: object) -> Scored:
        self.hints.append(hint)
        return self.scored(place, "start-0")

    async def score_own(self, place: Place, response_ids: object) -> Scored:
        return self.scored(place, self.serves)

    def scored(self, place: Place, version: str) -> Scored:
        return Scored(
            version=version,
            prompt_ids=place.prompt_ids,
            logprobs=LOGPROBS,
            topk_ids=None,
            topk_logprobs=None,
        )


def a_lesson(kind: LessonKind, state: LessonState, hint_id: str | None) -> Lesson:
    sample = LessonSample(
        lesson_id="l0",
        prompt_ids=np.array([1, 2, 3], dtype=np.int32),
        response_ids=IDS,
        rollout_logprobs=LOGPROBS,
        version_spans=SPANS,
        sampling={"temperature": 1.0},
        finish_reason="stop",
    )
    return Lesson(
        lesson_id="l0",
        kind=kind,
        scope="key",
        hint_id=hint_id,
        state_turn_id="t0",
        prompt_id="p0" if kind is LessonKind.COUNTER else None,
        state=state,
        drop_reason=None,
        drop_detail=None,
        created_at=1.0,
        trained_version=None,
        sample=sample if state is LessonState.SCORING else None,
    )


BOTH = pytest.mark.parametrize("state", [LessonState.SAMPLING, LessonState.SCORING])


async def processed(
    records: Records,
    kind: LessonKind,
    state: LessonState,
    desk: ADesk | None = None,
    *,
    holds: bool = False,
) -> ADesk:
    """Have the stage that takes lessons of `state` process one; a keep-lesson `holds` a hint."""
    desk = desk or ADesk()
    store, own = cast(RehearsalStore, records), cast(Desk, desk)
    if state is LessonState.SAMPLING:
        stage = SamplingStage(store, cast(PolicySampler, None), own, OWNER)
    else:
        stage = ScoringStage(store, own, TextLosses(), OWNER)
    hint_id = None if kind is LessonKind.KEEP and not holds else "h0"
    await stage.process(ClaimedLesson(a_lesson(kind, state, hint_id)))
    return desk


def made(records: Records, state: LessonState) -> int:
    return len(records.samples if state is LessonState.SAMPLING else records.scores)


@BOTH
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (LessonKind.HINT, HintStatus.ACTIVE),
        (LessonKind.COUNTER, HintStatus.ACTIVE),
        (LessonKind.COUNTER, HintStatus.RESTING),
        (LessonKind.COUNTER, HintStatus.STUCK),
    ],
)
async def test_lessons_of_hints_that_are_practised_are_made(
    kind: LessonKind, status: HintStatus, state: LessonState
) -> None:
    records = Records(a_hint(status=status))
    await processed(records, kind, state)
    assert records.drops == []
    assert made(records, state) == 1


@BOTH
@pytest.mark.parametrize("kind", [LessonKind.HINT, LessonKind.COUNTER])
@pytest.mark.parametrize(
    "status",
    [
        HintStatus.CONTRADICTED,
        HintStatus.MERGED,
        HintStatus.WITHDRAWN,
        HintStatus.DELETED,
        None,
    ],
)
async def test_lessons_of_hints_that_ended_are_dropped(
    kind: LessonKind, status: HintStatus | None, state: LessonState
) -> None:
    records = Records(None if status is None else a_hint(status=status))
    await processed(records, kind, state)
    assert records.drops == [LessonDrop.HINT_ENDED]
    assert made(records, state) == 0


@BOTH
@pytest.mark.parametrize("status", [HintStatus.RESTING, HintStatus.STUCK])
async def test_a_hint_that_rests_or_is_stuck_teaches_nothing_itself(
    status: HintStatus, state: LessonState
) -> None:
    records = Records(a_hint(status=status))
    await processed(records, LessonKind.HINT, state)
    assert records.drops == [LessonDrop.HINT_ENDED]


@BOTH
async def test_keep_lessons_need_no_hint(state: LessonState) -> None:
    records = Records(None)
    await processed(records, LessonKind.KEEP, state)
    assert records.drops == []
    assert made(records, state) == 1


@BOTH
@pytest.mark.parametrize("status", [HintStatus.ACTIVE, HintStatus.RESTING, HintStatus.DELETED])
async def test_what_a_hint_taught_is_held_while_there_is_the_hint(
    state: LessonState, status: HintStatus
) -> None:
    records = Records(a_hint(status=status))
    desk = await processed(records, LessonKind.KEEP, state, holds=True)
    is_ended = status is HintStatus.DELETED
    assert records.drops == ([LessonDrop.HINT_ENDED] if is_ended else [])
    assert made(records, state) == (0 if is_ended else 1)
    assert desk.hints == [], "the frozen teacher does not read it"


async def test_what_a_hint_taught_is_held_as_the_policy_that_answered_scores_it() -> None:
    records = Records(a_hint())
    await processed(records, LessonKind.KEEP, LessonState.SCORING, holds=True)
    [score] = records.scores
    assert (score.teacher, score.teacher_version, score.hint) == ("policy", "0", "")
    desk = ADesk()
    desk.serves = "1"
    await processed(records, LessonKind.KEEP, LessonState.SCORING, desk, holds=True)
    assert records.drops == [LessonDrop.STALE]
    assert len(records.scores) == 1


@BOTH
@pytest.mark.parametrize("gone", ["no text", "a text that is not used"])
async def test_words_that_are_used_no_more(state: LessonState, gone: str) -> None:
    records = Records(a_hint())
    records.prompts = [a_prompt(dropped="not followed")] if gone != "no text" else []
    await processed(records, LessonKind.COUNTER, state)
    assert records.drops == [LessonDrop.HINT_ENDED]


@BOTH
@pytest.mark.parametrize("kind", list(LessonKind))
@pytest.mark.parametrize("is_there", [False, True])
async def test_a_state_that_is_gone(kind: LessonKind, state: LessonState, is_there: bool) -> None:
    empty = np.array([], dtype=np.int32)  # what was redacted has no ids
    turns = [a_state("t0", "How warm is it?", prompt_ids=empty)] if is_there else []
    records = Records(a_hint(), turns)
    await processed(records, kind, state)
    assert records.drops == [LessonDrop.FORGOTTEN]
    assert made(records, state) == 0


@pytest.mark.parametrize("kind", list(LessonKind))
async def test_an_answer_with_a_finding_is_not_stored(kind: LessonKind) -> None:
    records = Records(a_hint())
    records.finds = True
    await processed(records, kind, LessonState.SAMPLING)
    assert records.drops == [LessonDrop.SENSITIVE]
    assert records.samples == []


async def test_an_answer_that_could_not_train() -> None:
    records = Records(a_hint())
    await processed(records, LessonKind.HINT, LessonState.SAMPLING, ADesk(DropReason.LENGTH_CUT))
    assert records.drops == [LessonDrop.LENGTH_CUT]


async def test_the_policy_reads_the_words_and_the_teacher_the_hint() -> None:
    of_kind = {}
    for kind in LessonKind:
        sampled = await processed(Records(a_hint()), kind, LessonState.SAMPLING)
        scored = await processed(Records(a_hint()), kind, LessonState.SCORING)
        of_kind[kind] = (sampled.words, scored.hints)
    assert of_kind == {
        LessonKind.HINT: ([None], [HINT_TEXT]),
        LessonKind.COUNTER: ([a_prompt().text], [None]),
        LessonKind.KEEP: ([None], [None]),
    }
