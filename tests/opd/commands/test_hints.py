"""`opd hints` as it is called."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from opd.cli.app import app
from opd.run import config as run_config
from records.hints.types import Examination, HintPrompt, HintState, RehearsalBlock
from records.store import Store
from rollout_bridge.rehearsal.journal import Journal, ObedienceRow
from tests.opd.rehearsal.builders import a_prompt
from tests.records.hints.test_memory import objected
from tests.rollout_bridge.rehearsal.test_journal import a_row


def opd(config_file: Path, command: str, *arguments: object) -> Result:
    words = ["hints", command, "--run", str(config_file.parent), *map(str, arguments)]
    return CliRunner().invoke(app, words)


def object_to_something(config_file: Path) -> None:
    async def run() -> None:
        async with await Store.open(run_config.load(config_file).store) as store:
            await objected(store, "use Celsius", scope="tenant:acme")

    asyncio.run(run())


def test_a_hint_is_listed_shown_and_deleted(config_file: Path) -> None:
    assert "nobody has objected" in opd(config_file, "list").output
    object_to_something(config_file)
    [line] = opd(config_file, "list").output.splitlines()
    assert line.endswith("use Celsius")
    assert "not examined yet" in line
    hint_id = line.split()[0]
    shown = opd(config_file, "show", hint_id)
    assert shown.exit_code == 0
    assert "gap: not measured" in shown.output
    assert "3 of 3 votes" in shown.output
    assert "    I wanted Celsius." in shown.output
    assert opd(config_file, "list", "--tenant", "acme").output.splitlines() == [line]
    assert opd(config_file, "list", "--tenant", "other").output.startswith("no hints")
    deleted = opd(config_file, "delete", hint_id)
    assert "no version of the policy was trained on it" in deleted.output
    assert opd(config_file, "list", "--status", "deleted").output.startswith(hint_id)


def test_a_hint_that_is_not_practised_says_why_in_words(config_file: Path) -> None:
    object_to_something(config_file)

    async def block() -> None:
        async with await Store.open(run_config.load(config_file).store) as store:
            [hint] = await store.hints()
            await store.set_hint_block(hint.hint_id, RehearsalBlock.UNCONFIRMED, None)

    asyncio.run(block())
    listed = opd(config_file, "list").output
    assert "asked for 1 time  not" in listed
    assert "another session has to ask for it (unconfirmed)" in listed


def practise(config_file: Path, *, held_out: bool, prompts: tuple[HintPrompt, ...] = ()) -> str:
    """A measured hint with one state."""

    async def run() -> str:
        async with await Store.open(run_config.load(config_file).store) as store:
            turn_id = await objected(store, "use Celsius", scope="tenant:acme")
            [hint] = await store.claim_hints(owner="examiner", limit=1, ttl_s=60)
            written = tuple(replace(one, hint_id=hint.hint_id) for one in prompts)
            found = Examination(hint_id=hint.hint_id, is_rule=True, prompts=written)
            assert await store.commit_examination("examiner", found)
            for one in written:
                await store.set_prompt_check(one.prompt_id, asked=8, followed=8, dropped=None)
            state = HintState(hint_id=hint.hint_id, turn_id=turn_id, held_out=held_out)
            await store.set_hint_states(hint.hint_id, [state])
            await store.set_hint_gap(hint.hint_id, gap=0.5, gap_high=0.6, first=True)
            return hint.hint_id

    return asyncio.run(run())


def without_counter(config_file: Path) -> None:
    config = run_config.load(config_file, ["rehearsal.without_counter=true"])
    run_config.save(config, config_file)


@pytest.mark.parametrize("held_out", [True, False])
def test_a_hint_that_is_measured_where_it_trains_says_so(config_file: Path, held_out: bool) -> None:
    shown = opd(config_file, "show", practise(config_file, held_out=held_out)).output
    assert "gap: 0.500 nats per token" in shown
    assert ("measured where it trains: fewer than four states" in shown) is not held_out
    assert "open wish" not in shown


def test_without_a_guard_it_says_what_open_wishes_lost(config_file: Path) -> None:
    without_counter(config_file)
    hint_id = practise(config_file, held_out=True, prompts=(a_prompt(),))
    assert "open wishes: not measured yet, not guarded" in opd(config_file, "show", hint_id).output
    lost = ObedienceRow(followed=41, asked=100, abstained=0, before=98.0)
    row = a_row(1).model_copy(update={"unguarded_of": {hint_id: lost}})
    Journal(config_file.parent).add(row)
    shown = opd(config_file, "show", hint_id).output
    assert "open wishes done 0.41 (start 0.98), not guarded" in shown


def test_without_a_usable_open_wish_it_says_that_nothing_can_be_measured(config_file: Path) -> None:
    without_counter(config_file)
    shown = opd(config_file, "show", practise(config_file, held_out=True)).output
    assert "obedience cannot be measured: no usable open wish" in shown


def test_what_is_not_there_is_said_in_a_line(config_file: Path) -> None:
    for command in ("show", "delete"):
        refused = opd(config_file, command, "hint_x")
        assert refused.exit_code == 2
        assert "no hint 'hint_x' in this run" in refused.output
    refused = opd(config_file, "list", "--status", "gone")
    assert refused.exit_code == 2
    assert "--status 'gone': one of active" in refused.output
