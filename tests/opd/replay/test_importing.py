"""Recorded sessions become turns of the store: ids once, extending each other, nothing twice."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd.replay.importing import (
    SCOPE,
    ImportSettings,
    PreparedImport,
    is_held_out,
    prepare_session,
    session_key,
)
from opd.replay.recordings.recorded import (
    ImportProblem,
    RecordedSession,
    RecordedTokens,
    RecordedTurn,
)
from opd.replay.taking_in import PROBLEMS_FILE, ImportReport, take_in
from records.care.housekeeping import Housekeeping
from records.config import RedactionConfig, StoreConfig
from records.names import DropReason, TurnState
from records.outcomes.rows import OutcomeSource
from records.privacy.redaction import Redactor
from records.store import Store
from records.turns.recording import RecordingKind
from records.turns.turn_writes import prepare
from records.types import CapturedTurn, PolicyScore, Score, TurnRecord, Verdict
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.hinting import hinted_prompt_ids
from tests.opd.replay.recording_files import AIRLINE, AIRLINE_VOTES, read, write_lines
from tests.records.builders import REPLY, a_session, a_turn
from tests.records.builders import SCOPE as LIVE_SCOPE
from tests.records.looking import list_turns
from tests.records.new_store import new_store
from tests.rollout_bridge.chat_tokenizers import without_switches

SETTINGS = ImportSettings(context_length=32_768, held_out=0.0, renderer="ours")
NOTHING_LOOKED_FOR = RedactionConfig(secrets="off", personal="off")


@pytest.fixture(scope="module")
def session() -> RecordedSession:
    """The recording with the fewest turns."""
    return min(read(AIRLINE)[0], key=lambda one: len(one.turns))


def prepared(
    session: RecordedSession,
    rendering: Rendering,
    settings: ImportSettings = SETTINGS,
    redaction: RedactionConfig = NOTHING_LOOKED_FOR,
) -> PreparedImport:
    return prepare_session(session, rendering, Redactor(redaction), settings, time.time())


async def stored(store: Store) -> list[TurnRecord]:
    refs = await list_turns(store, limit=1000)
    return await store.turns([ref.turn_id for ref in reversed(refs)])


async def importing(
    store: Store,
    rendering: Rendering,
    folder: Path,
    *,
    settings: ImportSettings = SETTINGS,
    votes: bool = False,
) -> ImportReport:
    return await take_in(
        store,
        rendering,
        settings,
        [AIRLINE],
        [AIRLINE_VOTES] if votes else [],
        folder,
        lambda _: None,
    )


def config(folder: Path) -> StoreConfig:
    return new_store(folder / "records.db").model_copy(update={"redaction": NOTHING_LOOKED_FOR})


async def test_turns_of_a_session_extend_each_other(rendering, session, tmp_path) -> None:
    rows = prepared(session, rendering).rows
    assert rows is not None
    async with await Store.open(config(tmp_path)) as store:
        assert (await store.import_session(rows)).num_new == len(session.turns)
        turns = await stored(store)
    assert [turn.response for turn in turns] == [turn.response for turn in session.turns]
    for earlier, later in pairwise(turns):
        before = np.concatenate([earlier.prompt_ids, earlier.response_ids])
        assert later.prompt_ids[: len(before)].tolist() == before.tolist()
        assert later.parent_turn_id == earlier.turn_id
    for turn, recorded in zip(turns, session.turns, strict=True):
        assert turn.recording is not None
        assert turn.recording.kind is RecordingKind.RECORDED
        assert turn.recording.position == recorded.position
        assert turn.next_state == recorded.next_state
        assert np.isnan(turn.rollout_logprobs).all()
        assert turn.version_spans == ()
        # The ids say what was recorded, and end as a reply ends.
        said = rendering.parse(turn.response_ids, turn.tools, turn.prompt_ids)
        assert said.content.strip() == (turn.response.get("content") or "").strip()
        assert turn.response_ids[-1] in rendering.stop_token_ids
        assert rendering.prompt_ids(turn.messages, turn.tools).tolist() == turn.prompt_ids.tolist()
    followed = {turn.turn_id for turn in turns if turn.next_state}
    assert {turn.turn_id for turn in turns if turn.state is TurnState.JUDGING} == followed
    assert all(
        turn.drop_reason is DropReason.NO_NEXT_STATE
        for turn in turns
        if turn.turn_id not in followed
    )


async def test_importing_twice_changes_nothing(rendering, tmp_path) -> None:
    async with await Store.open(config(tmp_path)) as store:
        first = await importing(store, rendering, tmp_path, votes=True)
        before = await stored(store)
        again = await importing(store, rendering, tmp_path, votes=True)
        after = await stored(store)
    assert first.num_new == first.num_rendered == first.num_turns == len(before)
    assert first.num_votes == first.num_votes_new > 0
    assert (again.num_new, again.num_votes_new) == (0, 0)
    assert [(t.turn_id, t.state, t.recording) for t in after] == [
        (t.turn_id, t.state, t.recording) for t in before
    ]


async def test_what_a_recording_came_to_is_taken_in(rendering, session, tmp_path) -> None:
    assert session.outcome_reward in (0.0, 1.0)
    async with await Store.open(config(tmp_path)) as store:
        report = await importing(store, rendering, tmp_path)
        for one in read(AIRLINE)[0]:
            [found] = await store.sessions_named(session_key(one.session_id))
            assert found.outcome is not None
            assert (found.outcome.value, found.outcome.source) == (
                one.outcome_reward,
                OutcomeSource.RECORDING,
            )
    assert ImportProblem.BAD_OUTCOME not in report.problems
    odd = prepared(replace(session, outcome_reward=-1.0), rendering)
    assert [one.reason for one in odd.problems][-1] is ImportProblem.BAD_OUTCOME
    assert odd.rows is not None
    assert odd.rows.outcome is None


async def test_votes_that_come_later_have_the_turn_judged(rendering, tmp_path) -> None:
    async with await Store.open(config(tmp_path)) as store:
        await importing(store, rendering, tmp_path)
        for turn in await store.claim(TurnState.JUDGING, owner="w", limit=100, ttl_s=60):
            await store.drop("w", turn.turn_id, DropReason.NO_RECORDED_VOTES)
        assert (await store.counts())[TurnState.JUDGING] == 0
        report = await importing(store, rendering, tmp_path, votes=True)
        waiting = [turn for turn in await stored(store) if turn.state is TurnState.JUDGING]
    assert report.num_votes_new == len(waiting) > 0
    assert all(turn.recording and turn.recording.votes for turn in waiting)


def talk(name: str, said: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": said}]
    return {"session_id": name, "messages": [*messages, {"role": "user", "content": "No."}]}


async def test_a_reply_that_a_grown_log_adds_is_taken_in(rendering, tmp_path) -> None:
    whole = talk("a", "One.")
    begun = {**whole, "messages": whole["messages"][:-1]}
    async with await Store.open(config(tmp_path)) as store:
        for line, state in ((begun, TurnState.DROPPED), (whole, TurnState.JUDGING)):
            path = write_lines(tmp_path / "talks.jsonl", [line])
            await take_in(store, rendering, SETTINGS, [path], [], tmp_path, lambda _: None)
            [turn] = await stored(store)
            assert turn.state is state
    assert [message["content"] for message in turn.next_state] == ["No."]


def problems_in(folder: Path) -> list[tuple[str, str, int | None, int]]:
    lines = (folder / PROBLEMS_FILE).read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [(one["reason"], one["session"], one["message"], one["line"]) for one in found]


async def test_votes_that_are_of_no_turn_or_of_several_are_named(rendering, tmp_path) -> None:
    sessions = [talk("a", "One."), talk("b", "Two."), talk("b", "Three."), talk("a", "One.")]
    voted = [("a", 1), ("a", 2), ("nobody", 1), ("b", 1)]
    path = write_lines(tmp_path / "talks.jsonl", sessions)
    lines = [{"session_id": s, "message_index": m, "votes": ["x"]} for s, m in voted]
    votes = write_lines(tmp_path / "votes.jsonl", lines)
    told = [
        ("same_session_id", "b", 1, 3),
        ("votes_without_turn", "a", 2, 2),
        ("votes_without_turn", "nobody", 1, 3),
        ("votes_without_turn", "b", 1, 4),
    ]
    async with await Store.open(config(tmp_path)) as store:
        for _ in range(2):  # in one transaction, and against what the store has
            report = await take_in(
                store, rendering, SETTINGS, [path], [votes], tmp_path, lambda _: None
            )
            found = problems_in(tmp_path)
            assert set(found) >= set(told)
            assert (report.num_votes, report.votes_without_turn) == (1, 3)
            first = report.first_problems["same_session_id"]
            assert "session b message 1: another session" in first
        turns = await store.recorded_turns(SCOPE, "b")
    assert len(turns[1]) == 2, "nothing is lost"


async def test_another_outcome_of_a_session_is_said_and_counted(rendering, tmp_path) -> None:
    first = {**talk("a", "One."), "outcome_reward": 1.0}
    again = {**first, "outcome_reward": 0.0}
    path = write_lines(tmp_path / "talks.jsonl", [first, first, again])
    told = "outcome_reward is 0, but the session already has the outcome 1, which stays"
    async with await Store.open(config(tmp_path)) as store:
        for _ in range(2):  # in one transaction, and against what the store has
            report = await take_in(store, rendering, SETTINGS, [path], [], tmp_path, lambda _: None)
            assert report.problems == {"other_outcome": 1}
            assert report.first_problems["other_outcome"] == f"{path}:3 session a: {told}"
            assert problems_in(tmp_path) == [("other_outcome", "a", None, 3)]
        [found] = await store.sessions_named(session_key("a"))
        assert found.outcome is not None
        assert found.outcome.value == 1.0


def secretive(session: RecordedSession, place: int, field: str) -> RecordedSession:
    """The session with an e-mail address in the prompt or the response of the turn at `place`."""
    turns = list(session.turns)
    said = {"role": "user" if field == "messages" else "assistant", "content": "I am ada@acme.org."}
    if field == "messages":
        turns[place] = replace(turns[place], messages=[*turns[place].messages[:-1], said])
    else:
        turns[place] = replace(turns[place], response=said)
    return replace(session, turns=tuple(turns[: place + 1]))


@pytest.mark.parametrize(
    ("field", "reason"), [("messages", None), ("response", DropReason.SENSITIVE)]
)
def test_texts_are_redacted_before_they_become_ids(rendering, session, field, reason) -> None:
    found = prepared(secretive(session, 0, field), rendering, redaction=RedactionConfig())
    assert found.rows is not None
    [turn] = found.rows.turns
    assert turn.turn["drop_reason"] is reason
    ids = [*turn.tokens["prompt_ids"], *turn.tokens["response_ids"]]
    assert "ada@acme.org" not in rendering.decode(ids)
    assert "[email]" in rendering.decode(ids)


def test_what_the_model_cannot_take_is_named_and_the_rest_is_kept(rendering, session) -> None:
    lengths = [
        len(turn.tokens["response_ids"]) + turn.tokens["prompt_length"]
        for turn in prepared(session, rendering).rows.turns
    ]
    limit = lengths[1]
    found = prepared(session, rendering, replace(SETTINGS, context_length=limit))
    assert found.rows is not None
    assert len(found.rows.turns) == sum(length <= limit for length in lengths)
    assert {problem.reason for problem in found.problems} == {ImportProblem.TOO_LONG}
    assert [problem.position for problem in found.problems] == [
        turn.position for turn, n in zip(session.turns, lengths, strict=True) if n > limit
    ]
    assert f"session {session.session_id} message" in found.problems[0].place


def test_what_the_template_cannot_show_is_named_and_the_rest_is_kept(rendering, session) -> None:
    broken = replace(session.turns[1], response={"role": "assistant", "content": ""})
    odd = replace(session, turns=(session.turns[0], broken, session.turns[2]))
    found = prepared(odd, rendering)
    assert [problem.reason for problem in found.problems] == [ImportProblem.UNRENDERABLE]
    assert found.rows is not None
    assert len(found.rows.turns) == 2


def test_a_turn_is_rendered_with_the_switch_that_its_request_set(rendering, session) -> None:
    first, second, third, *_ = session.turns
    turns = (
        replace(first, enable_thinking=True),
        replace(second, enable_thinking=True),
        replace(third, enable_thinking=None),
    )
    found = prepared(replace(session, turns=turns), rendering)
    assert found.problems == ()
    assert found.rows is not None
    thinking = rendering.with_thinking(True)
    switches = [row.turn["sampling"].get("enable_thinking") for row in found.rows.turns]
    assert switches == [True, True, None]
    prompt = thinking.prompt_ids(first.messages, first.tools)
    assert prompt.tolist() != rendering.prompt_ids(first.messages, first.tools).tolist()
    rows = found.rows.turns
    assert list(rows[0].tokens["prompt_ids"]) == prompt.tolist()
    second_prompt = thinking.prompt_ids(second.messages, second.tools)
    assert list(rows[1].tokens["prompt_ids"]) == second_prompt.tolist()
    # Another switch: rendered anew, as it was live.
    third_prompt = rendering.prompt_ids(third.messages, third.tools)
    assert list(rows[2].tokens["prompt_ids"]) == third_prompt.tolist()
    hinted = hinted_prompt_ids(thinking, first.messages, first.tools, prompt, "Be kind.", 10**6)
    assert "Be kind." in rendering.decode(hinted)


def test_a_switch_that_the_template_lacks_is_named(session, tmp_path) -> None:
    plain = without_switches(tmp_path / "plain")
    turn = replace(session.turns[0], enable_thinking=False)
    found = prepared(replace(session, turns=(turn,)), plain)
    [problem] = found.problems
    assert problem.reason is ImportProblem.UNRENDERABLE
    assert "no switch 'enable_thinking'" in problem.detail


def test_ids_are_taken_as_they_are_only_where_they_are_of_the_same_renderer(
    rendering, session
) -> None:
    odd = RecordedTokens(
        prompt_ids=np.array([5, 6, 7], dtype=np.int32),
        response_ids=np.array([8, 2], dtype=np.int32),
        rollout_logprobs=np.array([-0.5, -0.25], dtype=np.float32),
        temperature=0.7,
        renderer="ours",
    )

    def kind_and_ids(renderer: str) -> tuple[RecordingKind, list[int], float]:
        turn: RecordedTurn = replace(session.turns[0], tokens=replace(odd, renderer=renderer))
        [row] = prepared(replace(session, turns=(turn,)), rendering).rows.turns
        sampling = row.turn["sampling"]
        return row.recording["kind"], list(row.tokens["prompt_ids"]), sampling["temperature"]

    assert kind_and_ids("ours") == (RecordingKind.RECORDED_WITH_LOGPROBS, [5, 6, 7], 0.7)
    kind, ids, temperature = kind_and_ids("another")
    assert (kind, temperature) == (RecordingKind.RECORDED, 1.0)
    assert ids != [5, 6, 7]


def test_who_is_held_out_depends_on_the_name_alone() -> None:
    names = [f"session {number}" for number in range(2000)]
    held = [name for name in names if is_held_out(name, 0.2)]
    assert 330 < len(held) < 470
    assert held == [name for name in names if is_held_out(name, 0.2)]
    assert set(held) <= {name for name in names if is_held_out(name, 0.5)}
    assert not any(is_held_out(name, 0.0) for name in names)


async def test_the_policys_log_probs_stand_in_and_held_out_turns_do_not_train(
    rendering, session, tmp_path
) -> None:
    name = session.session_id
    assert session_key(name) != session_key(name + "x")
    async with await Store.open(config(tmp_path)) as store:
        for share, expected in ((0.0, TurnState.READY), (0.999999, TurnState.DROPPED)):
            one = replace(session, session_id=f"{name} {share}")
            rows = prepared(one, rendering, replace(SETTINGS, held_out=share)).rows
            assert rows is not None
            await store.import_session(rows)
            turns = await store.recorded_turns(SCOPE, one.session_id)
            [turn_id] = turns[session.turns[0].position]
            turn = await scored(store, turn_id)
            assert turn.state is expected
            assert turn.rollout_logprobs.tolist() == [-0.5] * len(turn.response_ids)
            assert [(s.version, s.start, s.end) for s in turn.version_spans] == [
                (3, 0, len(turn.response_ids))
            ]
        assert await store.expire_stale(oldest_allowed=9) == 0, "recordings do not age"
        [held_out] = await store.held_out_turns()
        assert held_out == turn_id
        status = await store.replay_status()
    assert (status.num_held_out, status.num_accepted, status.num_scored) == (1, 2, 2)


async def scored(store: Store, turn_id: str) -> TurnRecord:
    """The turn after a hint and scores of -0.5 for each token, under version 3 of the policy."""
    claimed = await store.claim(TurnState.JUDGING, owner="w", limit=100, ttl_s=60)
    turn = next(turn for turn in claimed if turn.turn_id == turn_id)
    verdict = Verdict(turn_id=turn_id, votes=(), hint="h", selection="longest", judge="j")
    assert await store.commit_verdict("w", verdict, None)
    await store.release("w", [one.turn_id for one in claimed])
    await store.claim(TurnState.SCORING, owner="w", limit=100, ttl_s=60)
    logprobs = np.full(len(turn.response_ids), -0.5, dtype=np.float32)
    score = Score(
        turn_id=turn_id,
        hint="h",
        teacher="t",
        teacher_version="0",
        hinted_prompt_ids=turn.prompt_ids,
        teacher_logprobs=logprobs,
        latency_s=0.1,
    )
    with pytest.raises(ValueError, match="the policy has to score it"):
        await store.commit_scores("w", [score])
    policy = PolicyScore(turn_id=turn_id, version=3, logprobs=logprobs)
    assert await store.commit_scores("w", [score], policy=policy)
    found = await store.turn(turn_id)
    assert found is not None
    return found


def test_a_recorded_turn_is_no_live_one_without_a_version(rendering, session) -> None:
    rows = prepared(session, rendering).rows
    assert rows is not None
    assert all(turn.turn["priority"] == 1 for turn in rows.turns)
    live = CapturedTurn(
        turn_id="t",
        session_id="s",
        parent_turn_id=None,
        turn_type=rows.turns[0].turn["turn_type"],
        messages=session.turns[0].messages,
        tools=[],
        response=session.turns[0].response,
        prompt_ids=np.array([1], dtype=np.int32),
        response_ids=np.array([2], dtype=np.int32),
        rollout_logprobs=np.array([np.nan], dtype=np.float32),
        token_parent_id=None,
        num_shared_ids=0,
        sampling={"temperature": 1.0},
        distribution_modified=None,
        version_spans=(),
        finish_reason="stop",
        latency_s=None,
    )
    with pytest.raises(ValueError, match="no policy version is known"):
        prepare(live, scope="s", now=0.0)


async def test_live_turns_are_claimed_before_recorded_ones(rendering, session, tmp_path) -> None:
    async with await Store.open(config(tmp_path)) as store:
        rows = prepared(session, rendering).rows
        assert rows is not None
        await store.import_session(rows)
        live = a_turn(await a_session(store))
        await store.record_turn(live, scope=LIVE_SCOPE)
        await store.set_next_state(live.turn_id, [REPLY])
        [claimed] = await store.claim(TurnState.JUDGING, owner="w", limit=1, ttl_s=60)
    assert claimed.turn_id == live.turn_id
    assert claimed.recording is None


async def test_a_session_that_was_deleted_is_not_written_again(rendering, tmp_path) -> None:
    async with await Store.open(config(tmp_path)) as store:
        first = await importing(store, rendering, tmp_path)
        gone = session_key(read(AIRLINE)[0][0].session_id)
        await Housekeeping(store, time.time).delete([gone], "forget", patience_s=0.0)
        again = await importing(store, rendering, tmp_path)
        names = {turn.session_id for turn in await stored(store)}
    assert again.num_new == 0
    assert again.problems == {"forgotten": 1}
    assert len(names) == first.num_sessions - 1
