"""`opd replay compare`: two runs of the same turns, each in a store of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from opd.replay.comparison.cli import compare_runs
from opd.replay.comparison.compare import compare, differing_settings
from opd.replay.comparison.values import Comparison
from opd.replay.comparison.words import lines
from opd.run import config as run_config
from records.names import DropReason, TurnState, TurnType
from records.store import Store
from records.types import Score, Vote
from tests.records.builders import (
    HINT,
    OWNER,
    SCOPE,
    a_score,
    a_turn,
    a_verdict,
    a_vote,
    claimed,
)
from tests.records.new_store import new_store
from trainer.errors import StartupError

T = TypeVar("T")
LEAK = "mention order 4711 and the red parcel"
WORDS = "say which parcel it was next time"


def a_run(folder: Path, work: Callable[[Store], Awaitable[T]], **judge: Any) -> T:
    """Make a run folder whose store was filled by `work`."""
    folder.mkdir()
    values = {
        "model": "some/model",
        "store": {"url": new_store(folder / "records.db").url},
        "policy": {"url": "http://127.0.0.1:1"},
        "frozen": {"url": "http://127.0.0.1:2"},
        "judge": {"base_url": "http://127.0.0.1:2/v1", "model": "m", "api_key": "x", **judge},
        "scoring": {"context_length": 4096},
    }
    config = run_config.build(values)
    run_config.save(config, folder / "config.toml")

    async def fill() -> T:
        async with await Store.open(config.store) as store:
            return await work(store)

    return asyncio.run(fill())


async def asked(store: Store, turn_id: str, **changes: Any) -> str:
    """A turn of the session `mine`, with a next state that names an order."""
    session_id = await store.ensure_session(scope=SCOPE, external_id="mine")
    prompt = {"role": "user", "content": f"Where is my parcel? ({changes.pop('number', turn_id)})"}
    reply = {"role": "user", "content": "I meant order 4711, the red one."}
    turn = a_turn(session_id, turn_id=turn_id, messages=[prompt], **changes)
    await store.record_turn(turn, scope=SCOPE)
    assert await store.set_next_state(turn_id, [reply])
    return turn_id


async def judged(store: Store, turn_id: str, hint: str | None, *votes: Vote) -> None:
    await claimed(store, TurnState.JUDGING)
    verdict = a_verdict(turn_id, hint, votes)
    drop = None if hint is not None else DropReason.NO_HINT
    assert await store.commit_verdict(OWNER, verdict, drop)


async def scored(store: Store, turn_id: str, hint: str, logprobs: list[float]) -> None:
    await claimed(store, TurnState.SCORING)
    score: Score = a_score(
        turn_id, hint=hint, teacher_logprobs=np.array(logprobs, dtype=np.float32)
    )
    assert await store.commit_scores(OWNER, [score])


def yes(index: int, hint: str = HINT, **changes: Any) -> Vote:
    return a_vote(index, hint=hint, **changes)


def no(index: int, **changes: Any) -> Vote:
    return a_vote(index, score=-1, hint="", **changes)


async def strict(store: Store) -> None:
    """Accepts `one` alone, with a hint that leaks; `three` waits for the judge."""
    for name in ("one", "two", "three", "only-a"):
        await asked(store, name)
    await judged(store, "one", LEAK, yes(0, LEAK), yes(1, LEAK))
    await judged(store, "two", None, no(0), yes(1, ""), a_vote(2, score=None, hint=""))
    await scored(store, "one", LEAK, [-0.5, -0.5, -0.5])


async def lenient(store: Store) -> None:
    """Accepts `one` and `two`; `three` waits for the judge. A side turn beside."""
    for name in ("one", "two", "three"):
        await asked(store, name)
    await asked(store, "side", turn_type=TurnType.SIDE, drop_reason=None)
    uncounted = yes(0, WORDS, prompt_tokens=None, completion_tokens=None)
    await judged(store, "one", WORDS, uncounted, yes(1, WORDS), yes(2, WORDS))
    await judged(store, "two", HINT, yes(0), no(1), no(2))
    await scored(store, "one", WORDS, [-0.25, -0.25, -0.25])


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    tmp_path = tmp_path_factory.mktemp("runs")
    a_run(tmp_path / "strict", strict, votes=2)
    a_run(tmp_path / "lenient", lenient, votes=3)
    return compare(tmp_path / "strict", tmp_path / "lenient", tmp_path / "out" / "page.html")


def test_turns_of_both_runs_are_matched_by_their_ids(compared: Comparison) -> None:
    matched = compared.matched
    assert [(a.turn_id, b.turn_id) for a, b in matched.pairs] == [
        (name, name) for name in ("one", "two", "three")
    ]
    assert (matched.only_a, matched.only_b, matched.num_by_content) == (1, 0, 0)


def test_decisions_and_votes_are_compared_where_both_decided(compared: Comparison) -> None:
    a, b = compared.a, compared.b
    assert (a.num_turns, a.num_decided, a.num_accepted, a.accept_rate) == (3, 2, 1, 0.5)
    assert (b.num_turns, b.num_decided, b.num_accepted, b.accept_rate) == (3, 2, 2, 1.0)
    assert compared.num_both_decided == 2
    assert compared.num_decisions_differ == 1
    assert (compared.accepted_by_a_alone, compared.accepted_by_b_alone) == (0, 1)
    assert compared.num_hints_differ == 1
    # One of five votes of A abstained, and does not count in what votes agree on.
    assert (a.abstained, a.unanimous, a.pair_agreement) == (0.2, 0.5, 0.5)
    assert (b.abstained, b.unanimous) == (0.0, 0.5)
    assert b.pair_agreement == pytest.approx((1 + 1 / 3) / 2)
    assert (a.positive_votes, b.positive_votes) == ({2: 1, 1: 1}, {3: 1, 1: 1})


def test_hints_are_measured_and_held_against_the_future(compared: Comparison) -> None:
    a, b = compared.a, compared.b
    assert (a.hint_chars, a.hint_words) == (len(LEAK), 7)
    # "order", "4711", "the" and "red" stand in the next state and nowhere before.
    assert a.leaked_words == pytest.approx(4 / 7)
    assert (a.leaking_hints, b.leaking_hints) == (1.0, 0.0)
    assert b.leaked_words == 0.0
    assert b.hint_chars == (len(WORDS) + len(HINT)) / 2


def test_advantages_are_the_teacher_minus_the_policy(compared: Comparison) -> None:
    # The policy's log-probs are -1, -0.55 and -0.1.
    assert compared.a.num_scored == compared.b.num_scored == 1
    assert compared.a.advantage_quantiles is not None
    assert compared.a.advantage_quantiles[2] == pytest.approx(0.05)
    assert compared.a.advantage_abs_mean == pytest.approx((0.5 + 0.05 + 0.4) / 3)
    assert compared.b.advantage_quantiles is not None
    assert compared.b.advantage_quantiles[2] == pytest.approx(0.3)


def test_tokens_are_those_of_all_votes_and_candidates(compared: Comparison) -> None:
    a, b = compared.a, compared.b
    assert (a.judge_tokens, a.num_uncounted_votes) == (5 * 120, 0)
    assert a.judge_tokens_per_accepted == 600
    assert (b.judge_tokens, b.num_uncounted_votes) == (5 * 120, 1)
    # Of the two turns that B accepted, one is scored.
    assert (a.teacher_tokens, b.teacher_tokens, b.teacher_tokens_per_scored) == (9, 9, 9.0)
    [told] = [line for line in lines(compared) if line.startswith("judge tokens per accepted")]
    assert told.endswith(" 600.0  at least 300.0")


def test_the_turns_that_differ_most_come_first(compared: Comparison) -> None:
    two, one = compared.differences
    assert (two.a.turn_id, two.decision_differs, two.advantage_gap) == ("two", True, None)
    assert (one.a.turn_id, one.decision_differs) == ("one", False)
    assert one.advantage_gap == pytest.approx(0.25)
    assert one.hint_distance == pytest.approx(12 / 13)


def test_settings_that_differ_are_named_and_secrets_are_not(compared: Comparison) -> None:
    assert compared.settings == (("judge.votes", "2", "3"),)


def test_the_port_of_a_runs_own_engine_is_no_setting(tmp_path: Path) -> None:
    def config(port: int) -> run_config.RunConfig:
        url = f"http://127.0.0.1:{port}"
        values = {
            "model": "some/model",
            "store": {"url": "sqlite:///x.db"},
            "frozen": {"url": url, "embedded": {"model": "some/model", "port": port}},
            "judge": {"base_url": f"{url}/v1", "model": "m"},
        }
        return run_config.build(values)

    assert differing_settings(config(1001), config(1002)) == []


def test_what_is_not_known_is_never_zero(tmp_path: Path) -> None:
    async def waiting(store: Store) -> None:
        await asked(store, "one")

    for name in ("a", "b"):
        a_run(tmp_path / name, waiting)
    compared = compare(tmp_path / "a", tmp_path / "b", tmp_path / "page.html")
    assert compared.a.accept_rate is compared.a.judge_tokens is compared.a.hint_chars is None
    assert compared.a.advantage_quantiles is compared.a.judge_tokens_per_accepted is None
    told = {line.split("  ")[0]: line.split()[-2:] for line in lines(compared) if "  " in line}
    for name in ("accept rate", "hint length, words", "judge tokens", "teacher tokens"):
        assert told[name] == ["-", "-"]
    assert "of these decided differently: 0 (-)" in lines(compared)
    assert compared.differences == ()


def test_a_turn_that_no_judge_saw_is_not_one_that_was_refused(tmp_path: Path) -> None:
    async def recorded_votes_only(store: Store) -> None:
        for name in ("one", "two"):
            await asked(store, name)
        await judged(store, "one", HINT, yes(0))
        await claimed(store, TurnState.JUDGING)
        reason = DropReason.NO_RECORDED_VOTES
        assert await store.commit_verdict(OWNER, a_verdict("two", None, ()), reason)

    a_run(tmp_path / "a", recorded_votes_only)
    a_run(tmp_path / "b", recorded_votes_only)
    compared = compare(tmp_path / "a", tmp_path / "b", tmp_path / "page.html")
    assert (compared.a.num_turns, compared.a.num_decided, compared.a.accept_rate) == (2, 1, 1.0)


def test_turns_with_other_ids_are_matched_by_what_they_say(tmp_path: Path) -> None:
    async def again(store: Store) -> None:
        await asked(store, "other", number="one")
        await asked(store, "new", number="five")

    async def before(store: Store) -> None:
        await asked(store, "one")
        # Equal to the first: the recording has it once.
        await asked(store, "copy", number="one")

    a_run(tmp_path / "a", before)
    a_run(tmp_path / "b", again)
    matched = compare(tmp_path / "a", tmp_path / "b", tmp_path / "page.html").matched
    assert [(a.turn_id, b.turn_id) for a, b in matched.pairs] == [("one", "other")]
    assert (matched.num_by_content, matched.only_a, matched.only_b) == (1, 1, 1)


def test_at_another_temperature_nothing_is_subtracted(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await asked(store, "one", sampling={"temperature": 0.5})
        await judged(store, "one", HINT, yes(0))
        await scored(store, "one", HINT, [-0.5, -0.5, -0.5])

    for name in ("a", "b"):
        a_run(tmp_path / name, work)
    compared = compare(tmp_path / "a", tmp_path / "b", tmp_path / "page.html")
    assert compared.a.num_scored == 0
    assert compared.a.advantage_quantiles is None
    assert compared.a.teacher_tokens == 9


def test_the_page_shows_hints_side_by_side(compared: Comparison) -> None:
    assert compared.report is not None
    page = compared.report.read_text(encoding="utf-8")
    for text in (LEAK, WORDS, "judge.votes", "strict against lenient", "no hint [-1 +1 0]"):
        assert text in page
    assert page.count("<svg") == 3
    assert "No turn was trained" not in page


def test_the_command_prints_and_refuses_in_one_line(tmp_path: Path) -> None:
    a_run(tmp_path / "strict", strict)
    a_run(tmp_path / "lenient", lenient)

    async def another(store: Store) -> None:
        await asked(store, "elsewhere")

    a_run(tmp_path / "other", another)
    app = typer.Typer()
    app.command()(compare_runs)

    def call(b: str, page: str = "page.html") -> Any:
        words = [tmp_path / "strict", tmp_path / b, "--out", tmp_path / page]
        return CliRunner().invoke(app, list(map(str, words)))

    good = call("lenient")
    assert good.exit_code == 0, good.output
    assert "of these decided differently: 1 (50.0%)" in good.output
    for folder, told in (("other", "have no turn in common"), ("nowhere", "is not a run folder")):
        refused = call(folder)
        assert refused.exit_code == 2
        assert told in refused.output
        assert len(refused.output.strip().splitlines()) == 1
    (tmp_path / "taken").write_text("")
    refused = call("lenient", "taken/page.html")
    assert refused.exit_code == 2
    assert refused.output.strip().splitlines() == [f"error: {tmp_path / 'taken'}: File exists"]


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    a_run(tmp_path / "strict", strict)
    (tmp_path / "strict" / "records.db").unlink()
    with pytest.raises(StartupError, match="nothing was recorded"):
        compare(tmp_path / "strict", tmp_path / "strict", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
