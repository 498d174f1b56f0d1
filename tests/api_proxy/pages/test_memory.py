"""*Memory*: whose hints are shown, what of them, and that stored text stays text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from markupsafe import escape

from api_proxy.access.callers import tenant_scope
from api_proxy.pages.measured import HintVersion
from opd.report.hint_versions import hint_versions
from records.hints.types import HintState, RehearsalBlock
from records.reading.drop_words import BLOCK_WORDS
from records.store import Store
from tests.api_proxy.conftest import Door
from tests.api_proxy.pages.conftest import Login
from tests.api_proxy.pages.hostile import HOSTILE, assert_harmless
from tests.api_proxy.pages.test_access import csrf_in
from tests.records.hints.test_memory import objected


async def test_a_tenant_sees_and_deletes_its_own_hints_alone(store: Store, login: Login) -> None:
    await objected(store, "use Celsius", scope=tenant_scope("acme"))
    await objected(store, "be brief", scope=tenant_scope("other"))
    mine, admin = await login("acme"), await login("admin")
    page = (await mine.get("/ui/memory")).text
    assert "use Celsius" in page
    assert "I wanted Celsius." in page
    assert "be brief" not in page
    assert "be brief" in (await admin.get("/ui/memory")).text
    listed = (await admin.get("/v1/runs/current/memory")).json()["data"]
    theirs = next(one["id"] for one in listed if one["text"] == "be brief")
    token = csrf_in(page)
    for reply in (
        await mine.get(f"/ui/memory/{theirs}"),
        await mine.get(f"/v1/runs/current/memory/{theirs}"),
        await mine.post(f"/ui/memory/{theirs}/delete", data={"csrf": token}),
    ):
        assert reply.status_code == 404
        assert "be brief" not in reply.text
    shown = await admin.get(f"/ui/memory/{theirs}")
    assert "does not know the run" in shown.text
    gone = await admin.post(f"/ui/memory/{theirs}/delete", data={"csrf": csrf_in(shown.text)})
    assert gone.status_code == 303
    assert "be brief" not in (await admin.get("/ui/memory")).text


async def test_hints_come_page_by_page_and_by_status(door: Door, store: Store) -> None:
    for number in range(3):
        await objected(store, f"hint {number}")
    first = (await door.client.get("/ui/memory?limit=2")).text
    assert "hint 2" in first
    assert "hint 0" not in first
    last_id = (await door.client.get("/v1/runs/current/memory?limit=2")).json()["last_id"]
    assert f"after={last_id}" in first
    rest = (await door.client.get(f"/ui/memory?limit=2&after={last_id}")).text
    assert "hint 0" in rest
    assert "Older hints" not in rest
    assert "No hint is stored" in (await door.client.get("/ui/memory?status=resting")).text
    wrong = await door.client.get("/ui/memory?status=%3Cb%3E")
    assert wrong.status_code == 400
    assert "text/html" in wrong.headers["content-type"]
    assert "&#39;status&#39; must be one of" in wrong.text


@pytest.mark.parametrize("block", RehearsalBlock)
async def test_every_page_with_a_hint_says_why_it_is_not_practised(
    door: Door, store: Store, block: RehearsalBlock
) -> None:
    await objected(store, "use Celsius")
    [hint] = await store.hints()
    pages = ("/ui/memory", f"/ui/memory/{hint.hint_id}", "/ui/now")
    before = [(await door.client.get(page)).text for page in pages[:2]]
    assert not any("ot practised" in page for page in before)
    await store.set_hint_block(hint.hint_id, block, None)
    why = f"{escape(BLOCK_WORDS[block])} ({block.value})"
    for page in pages:
        assert why in (await door.client.get(page)).text


async def test_a_hint_shows_its_uptake_next_to_the_starts(door: Door, store: Store) -> None:
    await objected(store, "use Celsius")
    [hint] = await store.hints()
    measured = HintVersion(
        version=3,
        gap=None,
        gap_low=None,
        gap_high=None,
        obeyed=(60, 64),
        done=(5, 16),
        done_start=(3, 48),
        done_hinted=(27, 48),
    )
    service = door.app.state.service
    service.deps = replace(service.deps, hint_versions=lambda _: [measured])
    page = (await door.client.get(f"/ui/memory/{hint.hint_id}")).text
    assert "done unasked in 5 of 16 answers at version 3; by the start model" in page
    assert "in 3 of 48, with the hint in 27 of 48" in page
    assert "<td>5 of 16</td><td>60 of 64</td>" in page


async def test_the_states_of_a_hint_lead_to_their_turns(door: Door, store: Store) -> None:
    turn_id = await objected(store, "use Celsius")
    [hint] = await store.hints()
    state = HintState(hint_id=hint.hint_id, turn_id=turn_id, held_out=True)
    await store.set_hint_states(hint.hint_id, [state])
    page = (await door.client.get(f"/ui/memory/{hint.hint_id}")).text
    [states] = re.findall(r"<summary>Show them</summary>(.*?)</details>", page, flags=re.DOTALL)
    assert f'<a href="/ui/turns/{turn_id}">' in states
    assert '<span class="tag">measures</span>' in states


@pytest.mark.parametrize("text", HOSTILE)
async def test_what_is_stored_stays_text(door: Door, store: Store, text: str) -> None:
    await objected(store, text, scope=text.replace("\x00", ""))
    [hint] = (await door.client.get("/v1/runs/current/memory")).json()["data"]
    for path in ("/ui/memory", f"/ui/memory/{hint['id']}"):
        page = await door.client.get(path)
        assert page.status_code == 200
        assert_harmless(page.text)


def test_what_was_measured_of_a_hint_is_read_from_the_runs_file(tmp_path: Path) -> None:
    assert hint_versions(tmp_path, "h1") == []
    hint = {
        "hint_id": "h1",
        "status": "active",
        "gap": {"value": 0.5, "low": 0.4, "high": 0.6, "num_samples": 8},
        "first_gap": 0.9,
        "held_back": True,
        "num_steps": 2,
        "active_from": 0,
    }
    row = {"time": 1.0, "version": 7, "turns": 9, "objections": 1, "hints": [hint], "lessons": {}}
    wish = {"followed": 3, "asked": 4, "abstained": 0, "before": 1.0}
    row |= {"obedience": None, "obedience_of": {"h1": wish}, "pooled": None, "keep": None}
    line = json.dumps(row) + "\n"
    (tmp_path / "rehearsal.jsonl").write_text(line + line[:40])
    [found] = hint_versions(tmp_path, "h1")
    assert (found.version, found.gap, found.obeyed, found.done) == (7, 0.5, (3, 4), None)
    hint |= {"done": {"hits": 5, "count": 16}, "done_hinted": {"hits": 27, "count": 48}}
    (tmp_path / "rehearsal.jsonl").write_text(json.dumps(row) + "\n")
    [found] = hint_versions(tmp_path, "h1")
    assert (found.done, found.done_start, found.done_hinted) == ((5, 16), None, (27, 48))
    assert hint_versions(tmp_path, "h2") == []
