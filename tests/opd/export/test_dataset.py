"""`opd records export --dataset`: which turns are chosen, and that the folder opens elsewhere."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from opd.export.choice import ALLOWED, WORDS, LeftOut
from opd.export.messages import NotText, plain_messages
from opd.run import config as run_config
from records.feedback.feedback import Feedback
from records.messages import Message
from records.names import DropReason, TurnState, TurnType
from records.store import Store
from records.turns.recording import Recording, RecordingKind
from tests.opd.export.conftest import ARun
from tests.records.builders import (
    ANSWER,
    OWNER,
    REPLY,
    SCOPE,
    USER,
    a_session,
    a_verdict,
    a_vote,
    claimed,
    recorded,
)

TOOLS = [{"type": "function", "function": {"name": "warmth", "parameters": {"a": 1}}}]
CALL: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "warmth", "arguments": '{"at": 1}'}}
    ],
}


def opened(folder: Path, cache: Path) -> list[dict[str, Any]]:
    """The rows, as the library reads them."""
    read = datasets.load_dataset(str(folder), split="train", cache_dir=str(cache))
    return [dict(row) for row in read]


async def judged(store: Store, *scores: int | None, **changes: Any) -> str:
    """A turn whose next state got these votes."""
    turn_id = await recorded(store, **changes)
    assert await store.set_next_state(turn_id, [REPLY])
    await claimed(store, TurnState.JUDGING)
    votes = tuple(
        a_vote(index, score=score, **({} if score == 1 else {"hint": "", "text": ""}))
        for index, score in enumerate(scores)
    )
    if 1 in scores:
        assert await store.commit_verdict(OWNER, a_verdict(turn_id, votes=votes), None)
    else:
        verdict = a_verdict(turn_id, None, votes)
        assert await store.commit_verdict(OWNER, verdict, DropReason.NO_HINT)
    return turn_id


async def say(store: Store, turn_id: str, **said: Any) -> None:
    assert await store.add_feedback(SCOPE, turn_id, Feedback(**said)) is not None


def score(value: float) -> dict[str, Any]:
    return {"score": value, "score_range": (0.0, 10.0)}


def test_answers_that_needed_no_correction_are_demonstrations(a_run: ARun, tmp_path: Path) -> None:
    async def work(store: Store) -> str:
        good = await judged(store, -1, None, -1, tools=TOOLS, response=CALL, data_source="gsm8k")
        await judged(store, -1, 1)
        await judged(store, None, None)
        await recorded(store)
        await recorded(store, turn_type=TurnType.SIDE, drop_reason=DropReason.SIDE_TURN)
        await recorded(store, drop_reason=DropReason.RECORD_ONLY)
        return good

    good = a_run.fill(work)
    result = a_run.export("--dataset", "sft")
    assert result.exit_code == 0, result.output
    assert "1 rows" in result.output
    for reason in ("NEEDED_CORRECTION", "NOT_JUDGED", "NO_NEXT_STATE", "NOT_MAIN", "NOT_TO_TRAIN"):
        assert f"1 left out: {WORDS[LeftOut[reason]]}" in result.output
    [row] = opened(a_run.out, tmp_path / "cache")
    assert (row["turn_id"], row["data_source"]) == (good, "gsm8k")
    asked, answered = row["messages"]
    assert {key: value for key, value in asked.items() if value is not None} == USER
    assert answered["content"] is None
    assert answered["tool_calls"] == CALL["tool_calls"]
    assert json.loads(row["tools"]) == TOOLS


def test_what_people_said_weighs_more_than_the_judge(sqlite_run: ARun, tmp_path: Path) -> None:
    async def work(store: Store) -> list[str]:
        return [await judged(store, -1) for _ in range(3)]

    names = sqlite_run.fill(work)

    async def said(store: Store) -> None:
        await say(store, names[0], **score(9.0))
        await say(store, names[1], **score(2.0))
        await say(store, names[2], correction="21 C.")
        await claimed(store, TurnState.JUDGING)
        for name in names:
            verdict = a_verdict(name, None, (a_vote(score=-1, hint=""),))
            assert await store.commit_verdict(OWNER, verdict, DropReason.NO_HINT)

    sqlite_run.fill(said)
    result = sqlite_run.export("--dataset", "sft")
    assert f"1 left out: {WORDS[LeftOut.NEGATIVE_FEEDBACK]}" in result.output
    assert f"1 left out: {WORDS[LeftOut.NEEDED_CORRECTION]}" in result.output
    rows = opened(sqlite_run.out, tmp_path / "cache")
    assert [row["turn_id"] for row in rows] == [names[0]]


def test_a_corrected_answer_is_preferred(a_run: ARun, tmp_path: Path) -> None:
    async def work(store: Store) -> str:
        turn_id = await recorded(store, tools=TOOLS)
        await say(store, turn_id, text="Celsius.", correction="20 C.")
        await say(store, turn_id, correction="It is 21 C.\nAbout.")
        return turn_id

    turn_id = a_run.fill(work)
    assert a_run.export("--dataset", "preference").exit_code == 0
    [row] = opened(a_run.out, tmp_path / "cache")
    assert (row["turn_id"], row["source"], row["rejected_turn_id"]) == (turn_id, "correction", None)
    assert [message["content"] for message in row["prompt"]] == [USER["content"]]
    assert [message["content"] for message in row["chosen"]] == ["It is 21 C.\nAbout."]
    assert [message["content"] for message in row["rejected"]] == [ANSWER["content"]]
    assert json.loads(row["tools"]) == TOOLS


def test_of_the_answers_to_one_prompt_the_best_stands_against_the_worst(
    a_run: ARun, tmp_path: Path
) -> None:
    async def work(store: Store) -> dict[float, str]:
        names: dict[float, str] = {}
        session_id = await a_session(store)
        for value in (5.0, 9.0, 1.0):
            response = {"role": "assistant", "content": f"worth {value}"}
            name = await recorded(store, session_id=session_id, response=response)
            await say(store, name, **score(value))
            names[value] = name
        other = await recorded(store, tools=TOOLS)  # offered tools: another prompt
        await say(store, other, **score(0.0))
        hidden = await recorded(store, drop_reason=DropReason.RECORD_ONLY)
        await say(store, hidden, **score(0.0))
        return names

    names = a_run.fill(work)
    result = a_run.export("--dataset", "preference")
    assert result.exit_code == 0, result.output
    [row] = opened(a_run.out, tmp_path / "cache")
    assert (row["turn_id"], row["rejected_turn_id"]) == (names[9.0], names[1.0])
    assert row["source"] == "scores"
    assert [message["content"] for message in row["chosen"]] == ["worth 9.0"]
    assert [message["content"] for message in row["rejected"]] == ["worth 1.0"]
    assert f"2 left out: {WORDS[LeftOut.NO_PAIR]}" in result.output
    assert f"1 left out: {WORDS[LeftOut.NOT_TO_TRAIN]}" in result.output


@pytest.mark.parametrize(
    ("changes", "said", "reason"),
    [
        ({}, {"text": "No."}, LeftOut.NO_PAIR),
        ({}, {"correction": f" {ANSWER['content']}"}, LeftOut.SAME_ANSWER),
        ({}, {"correction": "Ask ann@kestrel-freight.com"}, LeftOut.REDACTED_CORRECTION),
        ({"response": CALL, "tools": TOOLS}, {"correction": "21 C."}, LeftOut.CORRECTS_A_CALL),
        (
            {},
            {"text": "The corrected answer: 20 C.", "correction": "21 C."},
            LeftOut.AMBIGUOUS_CORRECTION,
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            {"correction": "21 C."},
            LeftOut.NOT_TEXT,
        ),
        ({"turn_type": TurnType.SIDE}, {"correction": "21 C."}, LeftOut.NOT_MAIN),
        ({"drop_reason": DropReason.ABORTED}, {"correction": "21 C."}, LeftOut.NOT_TO_TRAIN),
    ],
)
def test_where_nothing_can_be_chosen_one_line_says_why(
    sqlite_run: ARun, changes: dict[str, Any], said: dict[str, Any], reason: LeftOut
) -> None:
    async def work(store: Store) -> None:
        await say(store, await recorded(store, **changes), **said)

    sqlite_run.fill(work)
    result = sqlite_run.export("--dataset", "preference")
    assert result.exit_code == 2
    assert "the records contain no preferences that could be chosen" in result.output
    assert f"1 left out: {WORDS[reason]}" in result.output
    assert not sqlite_run.out.exists()
    assert not list(sqlite_run.folder.glob(".out-*"))


def test_an_empty_store_gives_no_data_set(sqlite_run: ARun) -> None:
    sqlite_run.fill(a_session)
    result = sqlite_run.export("--dataset", "sft")
    assert result.exit_code == 2
    assert "contain no answers that needed no correction" in result.output


@pytest.mark.parametrize(("kind", "correction"), [("sft", None), ("preference", "21 C.")])
def test_what_is_held_out_to_measure_on_is_in_no_data_set(
    sqlite_run: ARun, kind: str, correction: str | None
) -> None:
    recording = Recording(kind=RecordingKind.RECORDED, source="log", position=0, held_out=True)

    async def work(store: Store) -> None:
        turn_id = await judged(store, -1, recording=recording)
        if correction is not None:
            await say(store, turn_id, correction=correction)

    sqlite_run.fill(work)
    result = sqlite_run.export("--dataset", kind)
    assert result.exit_code == 2
    assert f"1 left out: {WORDS[LeftOut.NOT_TO_TRAIN]}" in result.output


def test_the_card_names_the_file(sqlite_run: ARun) -> None:
    sqlite_run.fill(lambda store: judged(store, -1))
    assert sqlite_run.export("--dataset", "sft").exit_code == 0
    _, head, _ = (sqlite_run.out / "README.md").read_text().split("---\n", 2)
    [config] = yaml.safe_load(head)["configs"]
    [files] = config["data_files"]
    assert [path.name for path in sqlite_run.out.glob(files["path"])] == [
        "train-00000-of-00001.parquet"
    ]


NEVER = frozenset(
    {
        DropReason.INTERNAL_ERROR,
        DropReason.FORGOTTEN,
        DropReason.RECORD_ONLY,
        DropReason.SIDE_TURN,
        DropReason.TEXT_COMPLETION,
        DropReason.ABORTED,
        DropReason.CLIENT_DISCONNECTED,
        DropReason.SHUTDOWN,
        DropReason.LENGTH_CUT,
        DropReason.EMPTY_RESPONSE,
        DropReason.SENSITIVE,
        DropReason.HELD_OUT,
    }
)
"""Turns that nobody may or should train on, whatever was said of them."""


def test_every_drop_reason_is_decided() -> None:
    assert set(DropReason) == NEVER | ALLOWED
    assert not NEVER & ALLOWED
    assert set(WORDS) == set(LeftOut)


def test_a_message_keeps_its_text_its_calls_and_nothing_else() -> None:
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "reasoning_content": "why",
        "refusal": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}],
    }
    [plain] = plain_messages([message])
    assert plain == {
        "role": "assistant",
        "content": "a b",
        "reasoning_content": "why",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        ],
    }


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "input_audio"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "custom"}]},
    ],
)
def test_a_message_that_is_more_is_refused(message: Message) -> None:
    with pytest.raises(NotText):
        plain_messages([message])


CUT = "It is"


@contextmanager
def text_model(answers: Sequence[str | None]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives these answers, None for a refusal; yields its address and what it was
    asked.
    """
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = answers[len(asked) - 1]
            message = {"role": "assistant", "content": answer}
            ended = "length" if answer == CUT else "stop"
            body = json.dumps({"choices": [{"message": message, "finish_reason": ended}]}).encode()
            self.send_response(200 if answer is not None else 400)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()


def test_a_text_model_answers_again_with_the_hint_in_view(a_run: ARun, tmp_path: Path) -> None:
    async def work(store: Store) -> list[str]:
        taught = [await judged(store, 1, 1) for _ in range(2)]
        await judged(store, -1)
        await judged(store, 1, tools=TOOLS, response=CALL)
        rejected = await judged(store, 1)
        await claimed(store, TurnState.SCORING)
        assert await store.drop(OWNER, rejected, DropReason.HINT_AGREES)
        await recorded(store)
        return taught

    names = a_run.fill(work)
    with text_model([" 21 C. ", None]) as (url, asked):
        values = run_config.load(a_run.config_file).model_dump(mode="json", exclude_none=True)
        values["judge"] |= {"base_url": url, "api_key": "secret"}
        values["judge"]["loop"]["concurrency"] = 1
        run_config.save(run_config.build(values), a_run.config_file)
        result = a_run.export("--dataset", "taught")
    assert result.exit_code == 0, result.output
    for reason in (
        "NEEDED_NO_CORRECTION",
        "CALLS_A_TOOL",
        "NOT_ANSWERED",
        "NOT_JUDGED",
        "HINT_NOT_USED",
    ):
        assert f"1 left out: {WORDS[LeftOut[reason]]}" in result.output
    [row] = opened(a_run.out, tmp_path / "cache")
    assert row["turn_id"] in names
    assert [message["content"] for message in row["messages"]] == [USER["content"], "21 C."]
    hint = a_verdict("any").hint
    assert hint is not None
    assert len(asked) == 2
    for one in asked:
        assert one["messages"][-1]["content"].startswith(USER["content"])
        assert one["messages"][-1]["content"].endswith(hint)
    assert hint not in (a_run.out / "README.md").read_text()


def test_a_text_model_that_answers_nothing_is_said(sqlite_run: ARun) -> None:
    async def work(store: Store) -> str:
        return await judged(store, 1)

    sqlite_run.fill(work)
    with text_model([CUT]) as (url, _):
        values = run_config.load(sqlite_run.config_file).model_dump(mode="json", exclude_none=True)
        values["judge"] |= {"base_url": url, "api_key": "secret"}
        run_config.save(run_config.build(values), sqlite_run.config_file)
        result = sqlite_run.export("--dataset", "taught")
    assert result.exit_code == 2
    assert "no answers to correct that could be chosen" in result.output
    assert "the judge gave no whole answer" in result.output
