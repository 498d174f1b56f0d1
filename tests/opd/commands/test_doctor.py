"""`opd doctor`: every state and every drop reason has its words, and the command says them."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from opd.cli.app import app
from opd.commands.allowances import allow
from opd.run import config as run_config
from opd.run.resuming import base_values
from records.feedback.feedback import Feedback
from records.hints.types import RehearsalBlock
from records.lessons.names import LessonDrop, LessonKind
from records.names import DropReason, TurnState, TurnType
from records.reading.drop_words import BLOCK_WORDS, DROP_WORDS, LESSON_WORDS
from records.reading.explaining import explain
from records.reading.waiting_limits import WaitingLimits
from records.store import Store
from tests.records.builders import (
    HINT,
    OWNER,
    REPLY,
    SCOPE,
    TRAINER,
    a_session,
    a_turn,
    recorded,
    turn_in,
)
from tests.records.lessons.builders import ready_lessons


def in_store(config_file: Path, work: Any) -> Any:
    async def run() -> Any:
        async with await Store.open(run_config.load(config_file).store) as store:
            return await work(store)

    return asyncio.run(run())


def doctor(config_file: Path, session: str, *options: str) -> Result:
    return CliRunner().invoke(app, ["doctor", session, "--run", str(config_file.parent), *options])


def explained(config_file: Path, session: str) -> list[dict[str, Any]]:
    result = doctor(config_file, session, "--json")
    assert result.exit_code == 0, result.output
    [found] = json.loads(result.output)
    assert found["session_id"] == session
    return found["turns"]


def test_every_drop_reason_has_words() -> None:
    assert set(DROP_WORDS) == set(DropReason)
    assert len(set(DROP_WORDS.values())) == len(DROP_WORDS)
    assert set(LESSON_WORDS) == set(LessonDrop)
    assert set(BLOCK_WORDS) == set(RehearsalBlock)


@pytest.mark.parametrize(
    ("state", "waits_for", "words"),
    [
        (TurnState.AWAITING_NEXT_STATE, "next_state", "the next request of its conversation"),
        (TurnState.JUDGING, "votes", f"{OWNER} is asking for them"),
        (TurnState.SCORING, "scoring", f"{OWNER} is scoring it"),
        (TurnState.READY, "batch", "1 turns are ready, a step takes 16"),
        (TurnState.LEASED, "lease", f"leased by {TRAINER}"),
    ],
)
def test_what_a_turn_waits_for(
    config_file: Path, state: TurnState, waits_for: str, words: str
) -> None:
    async def work(store: Store) -> str:
        session_id = await a_session(store)
        await turn_in(store, state, session_id=session_id)
        return session_id

    [turn] = explained(config_file, in_store(config_file, work))
    assert (turn["status"], turn["waits_for"], turn["state"]) == ("waiting", waits_for, state)
    assert words in turn["why"]
    assert turn["version"] is None
    assert turn["reason"] is None


def test_what_a_session_came_to_and_that_a_turn_waits_for_it(config_file: Path) -> None:
    async def work(store: Store) -> tuple[str, list[str]]:
        session_id = await a_session(store)
        turn_id = await turn_in(store, TurnState.READY, session_id=session_id)
        limits = WaitingLimits(
            batch_size=1, idle_timeout_s=9, hint_wait_s=None, outcome_wait_s=100.0
        )
        waited_for = []
        for outcome in (None, 0.25):
            if outcome is not None:
                await store.add_outcome(SCOPE, outcome, "wrong city", turn_id=turn_id)
            [session] = await store.sessions_named(session_id)
            [turn] = session.turns
            found = explain(turn, session, None, limits, turn.updated_at + 40)
            waited_for.append(f"{found.waits_for}: {found.why}")
        return session_id, waited_for

    session_id, (first, second) = in_store(config_file, work)
    assert first.startswith("outcome: waits for its session's outcome, 60 s at most")
    assert second == "batch: waits for a batch: a step takes 1"
    assert "outcome: 0.25, says the feedback: wrong city" in doctor(config_file, session_id).output


def test_trained_and_dropped_turns_with_votes_and_feedback(config_file: Path) -> None:
    async def work(store: Store) -> str:
        session_id = await store.ensure_session(scope=SCOPE, external_id="mine")
        trained = await turn_in(store, TurnState.TRAINED, session_id=session_id)
        await store.add_feedback(SCOPE, trained, Feedback(text="Late."))
        for _ in range(2):
            await recorded(
                store,
                session_id=session_id,
                turn_type=TurnType.SIDE,
                drop_reason=DropReason.SIDE_TURN,
                drop_detail="open_webui_title",
            )
        return session_id

    session_id = in_store(config_file, work)
    trained, side, _ = explained(config_file, session_id)
    assert (trained["status"], trained["version"], trained["hint"]) == ("trained", 1, HINT)
    assert trained["votes"] == {"positive": 3, "negative": 0, "abstained": 0, "failed": 0}
    [said] = trained["feedback"]
    assert (said["outcome"], said["reason"]) == ("too_late", "trained in version 1")
    assert (side["status"], side["reason"], side["count"]) == ("dropped", "side_turn", 2)
    assert side["rule"] == "open_webui_title"
    # The client's name leads to it as well, and the text says the same.
    result = doctor(config_file, "mine")
    assert result.exit_code == 0
    text = result.output
    assert f"session {session_id} (mine), open" in text
    assert "trained in step 1, which made policy version 1" in text
    assert "votes: 3 for a hint, 0 against, 0 abstained, 0 failed" in text
    assert f"hint: {HINT}" in text
    assert "came too late (trained in version 1)" in text
    assert "side_turn: it is a side request" in text
    assert "[open_webui_title]: the rule open_webui_title says so" in text
    assert "(dropped for this in the whole run: 2 turns)" in text


def test_a_follow_up_of_one_token_is_explained(config_file: Path) -> None:
    async def work(store: Store) -> str:
        session_id = await a_session(store)
        fields = {"drop_reason": DropReason.SIDE_TURN, "drop_detail": "ping"}
        await recorded(store, session_id=session_id, turn_type=TurnType.SIDE, **fields)
        return session_id

    [turn] = explained(config_file, in_store(config_file, work))
    assert "it asked for one token (max_tokens = 1), which counts as a ping" in turn["why"]
    assert "proxy.side_presets" in turn["why"]


def test_an_unknown_session_is_one_clear_line(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "records.db").unlink()
    result = doctor(config_file, "nobody")
    assert result.exit_code == 2
    [line] = result.output.strip().splitlines()
    assert line == f"error: no database at {tmp_path}/records.db: nothing was recorded by " + (
        f"{config_file} yet"
    )
    assert not (tmp_path / "records.db").exists()

    async def work(store: Store) -> None:
        await a_session(store)

    in_store(config_file, work)
    result = doctor(config_file, "nobody", "--json")
    assert result.exit_code == 2
    [line] = result.output.strip().splitlines()
    assert line.startswith("error: no session 'nobody' in the records of ")
    assert "did you mean" not in line


def test_a_session_that_was_probably_meant_is_named(config_file: Path) -> None:
    async def work(store: Store) -> str:
        await store.ensure_session(scope=SCOPE, external_id="customer-81")
        return await store.ensure_session(scope=SCOPE, external_id="customer-17")

    session_id = in_store(config_file, work)
    result = doctor(config_file, "costumer-17")
    assert result.exit_code == 2
    [line] = result.output.strip().splitlines()
    assert "did you mean 'customer-17' or 'customer-81'?" in line
    result = doctor(config_file, session_id[:-1])
    assert result.exit_code == 2
    assert f"did you mean '{session_id}'?" in result.output


MAIL = "ann.lee@kestrel-freight.com"


def test_what_drops_every_turn_is_told_with_the_command_that_allows_it(config_file: Path) -> None:
    tools = [{"type": "function", "function": {"name": "a", "description": f"Ask {MAIL}"}}]

    async def work(store: Store) -> str:
        session_id = await a_session(store)
        for _ in range(3):
            await store.record_turn(a_turn(session_id, tools=tools), scope=SCOPE)
        return session_id

    session_id = in_store(config_file, work)
    result = CliRunner().invoke(app, ["doctor", "--run", str(config_file.parent)])
    assert result.exit_code == 1, result.output
    lines = result.output.splitlines()
    assert "sensitive (email in tools[0].function.description), 3" in result.output
    assert MAIL not in result.output
    commands = {line.partition("protection: ")[2] for line in lines if "protection: " in line}
    # One command, the same for the session and for the scope, and in the session's own report.
    [command] = commands
    assert command in doctor(config_file, session_id).output
    program, *words = shlex.split(command)
    assert program == "opd"
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "store.redaction.allow has 1 texts" in done.output

    async def again(store: Store) -> TurnState:
        turn = a_turn(session_id, tools=tools)
        await store.record_turn(turn, scope=SCOPE)
        await store.set_next_state(turn.turn_id, [REPLY])
        stored = await store.turn(turn.turn_id)
        assert stored is not None
        return stored.state

    assert in_store(config_file, again) is TurnState.JUDGING
    assert "has every turn dropped" in doctor_of_all(config_file)


def doctor_of_all(config_file: Path) -> str:
    return CliRunner().invoke(app, ["doctor", "--run", str(config_file.parent)]).output


def test_allowing_twice_or_nothing_is_said(config_file: Path) -> None:
    def allow(text: str) -> Result:
        words = ["records", "allow", text, "--run", str(config_file.parent)]
        return CliRunner().invoke(app, words)

    assert allow(MAIL).exit_code == 0
    assert run_config.load(config_file).store.redaction.allow == [MAIL]
    assert "allowed already" in allow(MAIL).output
    empty = allow(" ")
    assert (empty.exit_code, "name the text" in empty.output) == (2, True)


def test_what_was_allowed_holds_when_the_run_is_resumed(config_file: Path) -> None:
    allow(config_file, MAIL)
    kept = base_values(config_file.parent, "serve", None)
    assert kept["store"]["redaction"]["allow"] == [MAIL]


def test_a_turn_waits_for_its_hint_where_hints_are_rehearsed(config_file: Path) -> None:
    config = run_config.load(config_file)
    rehearsing = config.rehearsal.model_copy(update={"enabled": True})

    async def work(store: Store) -> str:
        session_id = await a_session(store)
        await turn_in(store, TurnState.READY, session_id=session_id)
        return session_id

    session_id = in_store(config_file, work)
    [turn] = explained(config_file, session_id)
    assert turn["waits_for"] == "batch"
    run_config.save(config.model_copy(update={"rehearsal": rehearsing}), config_file)
    [turn] = explained(config_file, session_id)
    assert turn["waits_for"] == "hint"
    assert "until its hint is practised" in turn["why"]


def test_what_became_of_the_lessons_at_a_turn(config_file: Path) -> None:
    async def work(store: Store) -> str:
        session_id = await a_session(store)
        turn_id = await turn_in(store, TurnState.TRAINED, session_id=session_id)
        await ready_lessons(store, LessonKind.COUNTER, 2, at=turn_id, hint_id="hint-1")
        await store.drop_lessons_of("hint-1", LessonDrop.HINT_ENDED)
        await ready_lessons(store, LessonKind.HINT, 3, at=turn_id)
        return session_id

    session_id = in_store(config_file, work)
    [turn] = explained(config_file, session_id)
    assert turn["lessons"] == {"counter dropped (hint_ended)": 2, "hint ready": 3}
    lines = doctor(config_file, session_id).output
    assert "lessons at its state: 2 counter dropped (hint_ended), 3 hint ready" in lines
