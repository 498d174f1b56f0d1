"""Teacher scoring on a real store with the real client; the server here only brings the faults.

Scores of a real model are compared with a transformers forward pass in tests/integration.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from records.names import DropReason, TurnState
from records.turns.recording import Recording, RecordingKind
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.engine.errors import EngineLogprobError
from rollout_bridge.engine.types import ModelInfo
from rollout_bridge.scoring.hinting import hinted_prompt_ids
from rollout_bridge.scoring.policy_scores import PolicyScorer
from rollout_bridge.scoring.scoring import ScoringWorker, TeacherChanged, check_scores
from tests.rollout_bridge.chat_tokenizers import without_switches
from tests.rollout_bridge.fault_teacher import (
    HINT,
    MESSAGES,
    RESPONSE,
    FaultTeacher,
    change,
    config,
    run_until_left_scoring,
    scoring_turn,
)
from tests.rollout_bridge.scoring.figures import scoring_figures
from tests.spans import kept_spans, said
from tests.workers import running, until


async def test_exactly_the_sampled_ids_are_scored_under_the_hinted_prompt(
    store, client, teacher, rendering
):
    turn_id = await scoring_turn(store, rendering)
    worker = ScoringWorker(store, client, rendering, config(), "scoring-1")
    await run_until_left_scoring(store, worker)
    stored_ids = rendering.prompt_ids(MESSAGES)
    hinted_ids = hinted_prompt_ids(rendering, MESSAGES, [], stored_ids, HINT, 4096)
    assert len(hinted_ids) > len(stored_ids)
    (request,) = teacher.requests
    assert request["input_ids"] == [*hinted_ids.tolist(), *RESPONSE.tolist()]
    assert request["logprob_start_len"] == len(hinted_ids) - 1
    score = await store.score_of(turn_id)
    assert score is not None
    assert score.hint == HINT
    assert (score.teacher, score.teacher_version) == ("teacher", "0")
    assert np.array_equal(score.hinted_prompt_ids, hinted_ids)
    assert score.teacher_logprobs.tolist() == [-0.25, -0.5, -0.75]
    turn = await store.turn(turn_id)
    assert turn is not None
    assert turn.state is TurnState.READY
    registry = worker.metrics.registry
    assert registry.get_sample_value("teacher_scored_total") == 1
    assert registry.get_sample_value("teacher_tokens_total") == 3
    assert registry.get_sample_value("teacher_prompt_tokens_total") == len(hinted_ids)
    assert registry.get_sample_value("teacher_latency_seconds_count") == 1


def favouring(teacher: FaultTeacher, hinted_length: int, plain: list[float]) -> None:
    """Let the teacher say -0.25, -0.5, -0.75 under the hint, and `plain` without it."""

    def spoil(entries):
        if teacher.requests[-1]["logprob_start_len"] == hinted_length - 1:
            return entries
        values = [None, *plain]
        return [[value, entry[1], None] for value, entry in zip(values, entries, strict=True)]

    teacher.spoil = spoil


@pytest.mark.parametrize(
    ("plain", "reason"),
    [
        ([-0.25, -0.4, -0.1], None),
        ([-0.25, -0.5, -0.3], DropReason.HINT_AGREES),
        ([-0.5, -0.6, -3.0], DropReason.HINT_AGREES),
    ],
)
async def test_a_hint_that_agrees_with_its_answer_is_none(
    store, client, teacher, rendering, plain, reason
):
    turn_id = await scoring_turn(store, rendering)
    stored = rendering.prompt_ids(MESSAGES)
    hinted = hinted_prompt_ids(rendering, MESSAGES, [], stored, HINT, 4096)
    favouring(teacher, len(hinted), plain)
    worker = ScoringWorker(store, client, rendering, config(least_fall=0.5), "scoring-1")
    await run_until_left_scoring(store, worker)
    assert [len(one["input_ids"]) for one in teacher.requests] == [
        len(hinted) + len(RESPONSE),
        len(stored) + len(RESPONSE),
    ]
    turn = await store.turn(turn_id)
    assert turn is not None
    assert (turn.state, turn.drop_reason) == (
        (TurnState.READY, None) if reason is None else (TurnState.DROPPED, reason)
    )
    # The turn is no source of the hint then, and a hint without any is gone.
    assert len(await store.hints()) == (1 if reason is None else 0)


async def test_a_check_that_cannot_be_made_lets_no_hint_pass(store, client, teacher, rendering):
    turn_id = await scoring_turn(store, rendering)
    stored = rendering.prompt_ids(MESSAGES)
    hinted = hinted_prompt_ids(rendering, MESSAGES, [], stored, HINT, 4096)
    favouring(teacher, len(hinted), [-0.25, 0.5, -0.1])
    worker = ScoringWorker(store, client, rendering, config(least_fall=0.5), "scoring-1")
    await run_until_left_scoring(store, worker)
    turn = await store.turn(turn_id)
    assert turn is not None
    assert turn.drop_reason is DropReason.TEACHER_LOGPROBS_INVALID


async def test_what_the_policy_answered_anew_may_agree_with_the_hint(
    store, client, teacher, rendering
):
    recording = Recording(kind=RecordingKind.RESAMPLED, source="x", position=0)
    turn_id = await scoring_turn(store, rendering, recording=recording)
    worker = ScoringWorker(store, client, rendering, config(least_fall=0.5), "scoring-1")
    await run_until_left_scoring(store, worker)
    turn = await store.turn(turn_id)
    assert turn is not None
    assert turn.state is TurnState.READY
    assert len(teacher.requests) == 1


@pytest.mark.parametrize("value", [False, True])
async def test_the_hinted_prompt_has_the_switch_that_the_request_set(
    store, client, teacher, rendering, value
):
    switched = rendering.with_thinking(value)
    stored_ids = switched.prompt_ids(MESSAGES)
    await scoring_turn(store, rendering, prompt_ids=stored_ids, switches={"enable_thinking": value})
    worker = ScoringWorker(store, client, rendering, config(), "scoring-1")
    await run_until_left_scoring(store, worker)
    assert await store.drops() == {}
    hinted_ids = hinted_prompt_ids(switched, MESSAGES, [], stored_ids, HINT, 4096)
    (request,) = teacher.requests
    assert request["input_ids"] == [*hinted_ids.tolist(), *RESPONSE.tolist()]
    assert rendering.decode(hinted_ids).endswith("</think>\n\n") == (not value)


async def test_a_switch_that_the_template_lacks_drops_the_turn(store, client, teacher, tmp_path):
    plain = without_switches(tmp_path / "plain")
    await scoring_turn(store, plain, switches={"enable_thinking": False})
    worker = ScoringWorker(store, client, plain, config(), "scoring-1")
    await run_until_left_scoring(store, worker)
    assert await store.drops() == {DropReason.HINTED_PROMPT_MISMATCH: 1}
    assert teacher.requests == []


@pytest.mark.parametrize("top_k", [0, 2])
async def test_turns_of_one_session_go_to_one_server_one_after_the_other(
    store, client, teacher, rendering, top_k
):
    turn_ids = [
        await scoring_turn(store, rendering, session=name) for name in ("a", "b", "a", "a", "b")
    ]
    turns = await store.turns(turn_ids)
    settings = config(top_k=top_k, loop_concurrency=5)
    await run_until_left_scoring(
        store, ScoringWorker(store, client, rendering, settings, "scoring-1")
    )
    assert sorted(teacher.routing_keys) == sorted(turn.session_id for turn in turns)
    assert teacher.most_in_flight == 1


async def test_a_control_may_replace_the_hint(store, client, teacher, rendering):
    turn_id = await scoring_turn(store, rendering)
    worker = ScoringWorker(
        store,
        client,
        rendering,
        config(),
        "scoring-1",
        rewrite_hint=lambda turn, hint: f"Not this: {hint}",
    )
    await run_until_left_scoring(store, worker)
    score = await store.score_of(turn_id)
    assert score is not None
    assert score.hint == f"Not this: {HINT}"
    stored_ids = rendering.prompt_ids(MESSAGES)
    expected = hinted_prompt_ids(rendering, MESSAGES, [], stored_ids, score.hint, 4096)
    assert np.array_equal(score.hinted_prompt_ids, expected)


async def test_a_control_may_leave_the_hint_out(store, client, teacher, rendering):
    turn_id = await scoring_turn(store, rendering)
    worker = ScoringWorker(
        store, client, rendering, config(), "scoring-1", rewrite_hint=lambda turn, hint: None
    )
    await run_until_left_scoring(store, worker)
    score = await store.score_of(turn_id)
    assert score is not None
    assert score.hint == ""
    assert np.array_equal(score.hinted_prompt_ids, rendering.prompt_ids(MESSAGES))
    (sample,) = await store.lease(owner="trainer", count=1, ttl_s=60)
    assert sample.turn_id == turn_id


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda entries: entries[:-1], DropReason.TEACHER_MISALIGNED),
        (lambda entries: entries[1:], DropReason.TEACHER_MISALIGNED),
        (lambda entries: [], DropReason.TEACHER_MISALIGNED),
        (lambda entries: None, DropReason.TEACHER_MISALIGNED),
        (lambda entries: [*entries, entries[-1]], DropReason.TEACHER_MISALIGNED),
        (change(1, token=0), DropReason.TEACHER_MISALIGNED),
        (change(-1, token=0), DropReason.TEACHER_MISALIGNED),
        (change(1, logprob=None), DropReason.TEACHER_LOGPROBS_INVALID),
        (change(-1, logprob=None), DropReason.TEACHER_LOGPROBS_INVALID),
        (change(2, logprob=0.5), DropReason.TEACHER_LOGPROBS_INVALID),
    ],
)
async def test_scores_that_do_not_fit_drop_the_turn(
    store, client, teacher, rendering, spoil, reason
):
    teacher.spoil = spoil
    turn_id = await scoring_turn(store, rendering)
    worker = ScoringWorker(store, client, rendering, config(), "scoring-1")
    await run_until_left_scoring(store, worker)
    assert await store.drops() == {reason: 1}
    assert await store.score_of(turn_id) is None
    if reason is DropReason.TEACHER_MISALIGNED:
        assert scoring_figures(worker.metrics)["hint/dropped_misaligned"] == 1


class NonFinitePolicy:
    """A policy engine whose log-probs cannot be used."""

    async def model_info(self) -> ModelInfo:
        return ModelInfo(model_path="m", weight_version="3", vocab_size=None, context_length=None)

    async def score(self, *_: object, **__: object) -> np.ndarray:
        raise EngineLogprobError("token 1: nan")


async def test_a_policys_bad_log_probs_are_not_told_as_the_teachers(
    store, client, teacher, rendering
):
    recording = Recording(kind=RecordingKind.RECORDED, source="a file", position=2)
    turn_id = await scoring_turn(store, rendering, recording=recording)
    policy = PolicyScorer(NonFinitePolicy())
    worker = ScoringWorker(store, client, rendering, config(), "scoring-1", policy=policy)
    await run_until_left_scoring(store, worker)
    turn = await store.turn(turn_id)
    assert turn is not None
    assert turn.drop_reason is DropReason.ROLLOUT_LOGPROBS_INVALID
    assert teacher.requests == []


async def test_a_turn_without_user_message_is_dropped_unasked(store, client, teacher, rendering):
    await scoring_turn(store, rendering, messages=[{"role": "system", "content": "go"}])
    worker = ScoringWorker(store, client, rendering, config(), "scoring-1")
    await run_until_left_scoring(store, worker)
    assert await store.drops() == {DropReason.NO_USER_MESSAGE: 1}
    assert teacher.requests == []


async def test_a_sampled_id_that_the_tokenizer_does_not_have_drops_the_turn_alone(
    store, teacher, rendering
):
    await scoring_turn(store, rendering)
    await scoring_turn(store, rendering, response_ids=RESPONSE + 10_000)
    engine = EngineClientConfig(attempts=1)
    async with EngineClient(
        teacher.base_url, config=engine, vocab_size=rendering.vocab_size
    ) as client:
        worker = ScoringWorker(store, client, rendering, config(), "scoring-1")
        await run_until_left_scoring(store, worker)
    assert await store.drops() == {DropReason.FOREIGN_TOKENS: 1}
    assert (await store.counts())[TurnState.READY] == 1


async def test_stored_ids_that_are_not_the_messages_are_dropped(store, client, teacher, rendering):
    await scoring_turn(store, rendering, prompt_ids=np.arange(5, dtype=np.int32))
    worker = ScoringWorker(store, client, rendering, config(), "scoring-1")
    await run_until_left_scoring(store, worker)
    assert await store.drops() == {DropReason.HINTED_PROMPT_MISMATCH: 1}


@pytest.mark.parametrize("rewrite", [lambda turn, hint: hint, lambda turn, hint: None])
@pytest.mark.parametrize("told_by", ["configuration", "teacher"])
async def test_what_exceeds_the_context_is_dropped_unasked(
    store, client, teacher, rendering, rewrite, told_by
):
    limit = len(rendering.prompt_ids(MESSAGES)) + len(RESPONSE) - 1
    teacher.context_length = limit if told_by == "teacher" else 4096
    settings = config(context_length=limit) if told_by == "configuration" else config()
    await scoring_turn(store, rendering)
    worker = ScoringWorker(store, client, rendering, settings, "scoring-1", rewrite_hint=rewrite)
    await run_until_left_scoring(store, worker)
    assert await store.drops() == {DropReason.HINTED_PROMPT_TOO_LONG: 1}
    assert teacher.requests == []


async def test_what_the_teacher_finds_too_long_is_dropped(store, client, teacher, rendering):
    teacher.fail(400, "The input is longer than the model's context length")
    await scoring_turn(store, rendering)
    worker = ScoringWorker(store, client, rendering, config(), "scoring-1")
    await run_until_left_scoring(store, worker)
    assert await store.drops() == {DropReason.HINTED_PROMPT_TOO_LONG: 1}


@pytest.mark.parametrize("status", [400, 500])
async def test_a_teacher_that_fails_keeps_every_turn(store, client, teacher, rendering, status):
    teacher.fail(status, "no")
    for _ in range(5):
        await scoring_turn(store, rendering)
    worker = ScoringWorker(store, client, rendering, config(loop_concurrency=2), "scoring-1")
    async with running(worker):

        async def failed_for_a_while() -> bool:
            return worker.loop.failures_in_a_row >= 4

        await until(failed_for_a_while)
        assert (await store.counts())[TurnState.SCORING] == 5
        teacher.failure = None

        async def all_scored() -> bool:
            return (await store.counts())[TurnState.READY] == 5

        await until(all_scored)
    assert await store.drops() == {}


async def test_a_teacher_that_fails_for_too_long_drops_the_turn(store, client, teacher, rendering):
    teacher.fail(500, "no")
    await scoring_turn(store, rendering)
    settings = config(loop_give_up_after_s=0.2)
    worker = ScoringWorker(store, client, rendering, settings, "scoring-1")
    await run_until_left_scoring(store, worker)
    assert await store.drops() == {DropReason.TEACHER_UNAVAILABLE: 1}


async def test_a_teacher_with_other_weights_stops_the_worker(store, client, teacher, rendering):
    await scoring_turn(store, rendering)
    worker = ScoringWorker(store, client, rendering, config(), "scoring-1")
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))

    async def scored() -> bool:
        return (await store.counts())[TurnState.READY] == 1

    await until(scored)
    teacher.version = "1"
    turn_id = await scoring_turn(store, rendering)
    with pytest.raises(TeacherChanged, match="must stay at weight version '0', but reports '1'"):
        await task
    # Nothing was written, and the turn is free for the next worker.
    assert await store.score_of(turn_id) is None
    assert len(await store.claim(TurnState.SCORING, owner="next", limit=9, ttl_s=60)) == 1


async def test_a_teacher_of_another_version_than_configured_is_refused(
    store, client, teacher, rendering
):
    await scoring_turn(store, rendering)
    worker = ScoringWorker(store, client, rendering, config(expected_version="7"), "scoring-1")
    with pytest.raises(TeacherChanged, match="'7', but reports '0'"):
        await worker.run(asyncio.Event())


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ([-0.5, -1.0], None),
        ([0.0, -1e9], None),
        ([-0.5], DropReason.TEACHER_MISALIGNED),
        ([[-0.5, -1.0]], DropReason.TEACHER_MISALIGNED),
        ([-0.5, float("nan")], DropReason.TEACHER_LOGPROBS_INVALID),
        ([float("-inf"), -0.5], DropReason.TEACHER_LOGPROBS_INVALID),
        ([0.1, -0.5], DropReason.TEACHER_LOGPROBS_INVALID),
    ],
)
def test_check_scores(scores, reason):
    problem = check_scores(np.array(scores, dtype=np.float32), 2)
    assert (problem[0] if problem else None) == reason


async def test_scoring_is_a_span_of_the_turn(store, client, teacher, rendering):
    with kept_spans() as kept:
        turn_id = await scoring_turn(store, rendering)
        worker = ScoringWorker(store, client, rendering, config(), "scoring-1")
        await run_until_left_scoring(store, worker)
        [span] = kept.of_turn(turn_id)
    assert (span.name, said(span)) == (
        "score",
        {"opd.teacher": "teacher", "opd.candidates": 1},
    )
