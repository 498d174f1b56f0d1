"""Teacher scoring of several candidates, top-k tokens, several teachers, or prompts alone."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from records.names import DropReason, TurnState
from records.store import Store
from records.types import UNSCORED, ReadySample
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.scoring.hinting import hinted_prompt_ids
from rollout_bridge.scoring.scoring import ScoringWorker, TeacherChanged
from tests.rollout_bridge.fault_teacher import (
    HINT,
    MESSAGES,
    RESPONSE,
    change,
    config,
    run_until_left_scoring,
    scoring_turn,
    served,
)
from tests.rollout_bridge.scoring.figures import scoring_figures
from tests.workers import until

HINTS = ("Use Celsius.", HINT, "Give each temperature in Celsius, please.")


async def the_sample(store: Store) -> ReadySample:
    (sample,) = await store.lease(owner="trainer", count=1, ttl_s=60)
    return sample


async def test_every_candidate_is_scored_under_its_own_prompt(store, client, teacher, rendering):
    await scoring_turn(store, rendering, hints=HINTS)
    worker = ScoringWorker(store, client, rendering, config(), "scoring-1")
    await run_until_left_scoring(store, worker)
    sample = await the_sample(store)
    stored_ids = rendering.prompt_ids(MESSAGES)
    prompts = [hinted_prompt_ids(rendering, MESSAGES, [], stored_ids, hint, 4096) for hint in HINTS]
    assert [(one.candidate, one.hint) for one in sample.teachings] == list(enumerate(HINTS))
    for teaching, ids, request in zip(sample.teachings, prompts, teacher.requests, strict=True):
        assert np.array_equal(teaching.hinted_prompt_ids, ids)
        assert request["input_ids"] == [*ids.tolist(), *RESPONSE.tolist()]
        assert teaching.teacher_logprobs is not None
        assert teaching.teacher_logprobs.tolist() == [-0.25, -0.5, -0.75]
        assert teaching.topk_ids is None
    assert (sample.hint, scoring_figures(worker.metrics)["teacher/scored"]) == (HINTS[0], 1)
    registry = worker.metrics.registry
    assert registry.get_sample_value("teacher_tokens_total") == 9
    assert registry.get_sample_value("teacher_prompt_tokens_total") == sum(map(len, prompts))


@pytest.mark.parametrize(
    ("lowered", "left"),
    [((0, 1), [0, 1]), ((1, 2), [2, 1]), ((2,), None)],
    ids=["the first", "others", "fewer than half"],
)
async def test_candidates_that_agree_with_the_answer_are_left_out(
    store, client, teacher, rendering, lowered, left
):
    turn_id = await scoring_turn(store, rendering, hints=HINTS)
    stored = rendering.prompt_ids(MESSAGES)
    lengths = [
        len(hinted_prompt_ids(rendering, MESSAGES, [], stored, hint, 4096)) for hint in HINTS
    ]

    def spoil(entries):
        for place in lowered:
            if teacher.requests[-1]["logprob_start_len"] == lengths[place] - 1:
                found = -2.0 - place
                return [[None if i == 0 else found, e[1], None] for i, e in enumerate(entries)]
        return entries

    teacher.spoil = spoil
    worker = ScoringWorker(store, client, rendering, config(least_fall=0.5), "scoring-1")
    await run_until_left_scoring(store, worker)
    if left is None:
        [turn] = await store.turns([turn_id])
        assert turn.drop_reason is DropReason.HINT_AGREES
        assert await store.hints() == []
        return
    sample = await the_sample(store)
    wanted = [HINTS[place] for place in left]
    assert [(one.candidate, one.hint) for one in sample.teachings] == list(enumerate(wanted))
    assert sample.hint == wanted[0], "what trains is what is told of the turn"
    [remembered] = await store.hints()
    assert remembered.text == wanted[0]


async def test_top_k_comes_with_the_same_request(store, client, teacher, rendering):
    await scoring_turn(store, rendering)
    worker = ScoringWorker(store, client, rendering, config(top_k=2), "scoring-1")
    await run_until_left_scoring(store, worker)
    (request,) = teacher.requests
    assert request["top_logprobs_num"] == 2
    sample = await the_sample(store)
    (teaching,) = sample.teachings
    assert teaching.topk_ids is not None
    assert teaching.topk_logprobs is not None
    assert teaching.topk_ids.tolist() == [[0, 1]] * 3
    assert teaching.topk_logprobs.tolist() == [[-0.5, -1.0]] * 3
    assert sample.teacher_logprobs.tolist() == [-0.25, -0.5, -0.75]


@pytest.mark.parametrize(
    ("top", "reason"),
    [
        (lambda position: [-0.5], DropReason.TEACHER_MISALIGNED),
        (lambda position: [-0.5, None], DropReason.TEACHER_LOGPROBS_INVALID),
        (lambda position: [0.5, -1.0], DropReason.TEACHER_LOGPROBS_INVALID),
        (
            lambda position: [-0.5, -1.0] if position < 3 else [None, -1.0],
            DropReason.TEACHER_LOGPROBS_INVALID,
        ),
    ],
)
async def test_top_k_that_does_not_fit_drops_the_turn(
    store, client, teacher, rendering, top, reason
):
    teacher.top = top
    await scoring_turn(store, rendering)
    worker = ScoringWorker(store, client, rendering, config(top_k=2), "scoring-1")
    await run_until_left_scoring(store, worker)
    assert await store.drops() == {reason: 1}


async def test_a_bad_score_of_any_candidate_drops_the_whole_turn(store, client, teacher, rendering):
    teacher.spoil = lambda entries: (
        change(1, logprob=None)(entries) if len(teacher.requests) == 2 else entries
    )
    turn_id = await scoring_turn(store, rendering, hints=HINTS)
    worker = ScoringWorker(store, client, rendering, config(), "scoring-1")
    await run_until_left_scoring(store, worker)
    assert await store.drops() == {DropReason.TEACHER_LOGPROBS_INVALID: 1}
    assert await store.score_of(turn_id) is None


async def test_a_candidate_that_has_no_place_is_left_out(store, client, teacher, rendering):
    hints = ("Use Celsius. " + "Really. " * 40, HINT)
    stored_ids = rendering.prompt_ids(MESSAGES)
    fits = hinted_prompt_ids(rendering, MESSAGES, [], stored_ids, HINT, 4096)
    settings = config(context_length=len(fits) + len(RESPONSE))
    await scoring_turn(store, rendering, hints=hints)
    await run_until_left_scoring(
        store, ScoringWorker(store, client, rendering, settings, "scoring-1")
    )
    sample = await the_sample(store)
    assert [(one.candidate, one.hint) for one in sample.teachings] == [(1, HINT)]
    assert (sample.hint, len(teacher.requests)) == (HINT, 1)


async def test_without_any_candidate_that_has_a_place_the_turn_is_dropped(
    store, client, teacher, rendering
):
    settings = config(context_length=len(rendering.prompt_ids(MESSAGES)) + len(RESPONSE))
    await scoring_turn(store, rendering, hints=HINTS)
    await run_until_left_scoring(
        store, ScoringWorker(store, client, rendering, settings, "scoring-1")
    )
    assert await store.drops() == {DropReason.HINTED_PROMPT_TOO_LONG: 1}
    assert teacher.requests == []


@pytest.mark.parametrize("rewritten", [None, "Another hint for all"])
async def test_a_control_that_makes_all_hints_one_is_scored_once(
    store, client, teacher, rendering, rewritten
):
    await scoring_turn(store, rendering, hints=HINTS)
    worker = ScoringWorker(
        store, client, rendering, config(), "scoring-1", rewrite_hint=lambda turn, hint: rewritten
    )
    await run_until_left_scoring(store, worker)
    sample = await the_sample(store)
    assert [one.hint for one in sample.teachings] == [rewritten or ""]
    assert len(teacher.requests) == 1


async def test_without_engine_scores_only_the_prompts_are_built(store, teacher, rendering):
    turn_id = await scoring_turn(store, rendering, hints=HINTS)
    await scoring_turn(store, rendering, messages=[{"role": "system", "content": "go"}])
    async with EngineClient("http://127.0.0.1:1") as nobody:
        settings = config(engine_scores=False)
        worker = ScoringWorker(store, nobody, rendering, settings, "scoring-1")
        await run_until_left_scoring(store, worker)
    assert await store.drops() == {DropReason.NO_USER_MESSAGE: 1}
    sample = await the_sample(store)
    assert sample.turn_id == turn_id
    assert np.isnan(sample.teacher_logprobs).all()
    stored_ids = rendering.prompt_ids(MESSAGES)
    for teaching, hint in zip(sample.teachings, HINTS, strict=True):
        ids = hinted_prompt_ids(rendering, MESSAGES, [], stored_ids, hint, 4096)
        assert np.array_equal(teaching.hinted_prompt_ids, ids)
        assert (teaching.teacher, teaching.teacher_version) == ("teacher", UNSCORED)
        assert teaching.teacher_logprobs is None
    assert scoring_figures(worker.metrics) == {
        "teacher/scored": 1,
        "hint/dropped_no_user_message": 1,
    }


async def test_a_turn_goes_to_the_teacher_that_it_names(store, client, teacher, rendering):
    async with served() as other:
        other.version = "math-7"
        settings = config(teachers={"math": other.base_url}, expected_version="0")
        mine = await scoring_turn(store, rendering)
        named = await scoring_turn(store, rendering, teacher_key="teacher")
        routed = await scoring_turn(store, rendering, teacher_key="math")
        lost = await scoring_turn(store, rendering, teacher_key="poetry")
        worker = ScoringWorker(store, client, rendering, settings, "scoring-1")
        await run_until_left_scoring(store, worker)
        assert (len(teacher.requests), len(other.requests)) == (2, 1)
    assert await store.drops() == {DropReason.UNKNOWN_TEACHER: 1}
    turn = await store.turn(lost)
    assert turn is not None
    assert turn.drop_reason is DropReason.UNKNOWN_TEACHER
    for turn_id, expected in (
        (mine, ("teacher", "0")),
        (named, ("teacher", "0")),
        (routed, ("math", "math-7")),
    ):
        score = await store.score_of(turn_id)
        assert score is not None
        assert (score.teacher, score.teacher_version) == expected


async def test_a_default_teacher_takes_the_turns_that_name_none(store, client, teacher, rendering):
    async with served() as other:
        settings = config(teachers={"math": other.base_url}, default_teacher="math")
        await scoring_turn(store, rendering)
        worker = ScoringWorker(store, client, rendering, settings, "scoring-1")
        await run_until_left_scoring(store, worker)
        assert (len(teacher.requests), len(other.requests)) == (0, 1)


async def test_a_named_teacher_must_stay_what_it_was_too(store, client, teacher, rendering):
    async with served() as other:
        settings = config(teachers={"math": other.base_url})
        worker = ScoringWorker(store, client, rendering, settings, "scoring-1")
        first = await scoring_turn(store, rendering, teacher_key="math")
        task = asyncio.create_task(worker.run(asyncio.Event()))

        async def scored() -> bool:
            return await store.score_of(first) is not None

        await until(scored)
        other.version = "1"
        await scoring_turn(store, rendering, teacher_key="math")
        with pytest.raises(TeacherChanged, match="math: the teacher must stay at weight version"):
            await task


async def test_a_teacher_whose_weights_have_no_name_gets_one(store, client, teacher, rendering):
    teacher.version = ""
    turn_id = await scoring_turn(store, rendering)
    await run_until_left_scoring(
        store, ScoringWorker(store, client, rendering, config(), "scoring-1")
    )
    score = await store.score_of(turn_id)
    assert score is not None
    assert score.teacher_version == "unnamed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teachers": {"teacher": "http://x"}}, "name of the run's own teacher"),
        ({"teachers": {"math": "localhost:1"}}, "needs a name and a base URL"),
        ({"teachers": {"": "http://x"}}, "needs a name and a base URL"),
        ({"default_teacher": "math"}, "'math' is not one of teacher"),
        ({"top_k": -1}, "greater than or equal to 0"),
        ({"top_k": 4, "engine_scores": False}, "set engine_scores = true, or top_k = 0"),
    ],
)
def test_teachers_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        config(**options)


async def test_a_worker_that_dies_between_candidates_leaves_nothing_half_done(
    store, client, teacher, rendering
):
    turn_id = await scoring_turn(store, rendering, hints=HINTS)
    asked = asyncio.Event()

    def hold(entries: list[Any]) -> list[Any]:
        if len(teacher.requests) == 2:
            asked.set()
        return entries

    teacher.spoil = hold
    first = ScoringWorker(store, client, rendering, config(loop_stop_grace_s=0.0), "scoring-1")
    task = asyncio.create_task(first.run(asyncio.Event()))
    await asked.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if (await store.counts())[TurnState.SCORING]:
        assert await store.score_of(turn_id) is None
    second = ScoringWorker(store, client, rendering, config(), "scoring-2")
    await run_until_left_scoring(store, second)
    assert [one.hint for one in (await the_sample(store)).teachings] == list(HINTS)
