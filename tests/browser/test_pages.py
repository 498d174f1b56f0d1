"""What people see at /ui, in a browser: each page shows what the store holds, works by keyboard, on
a phone and in the dark, loads nothing from elsewhere, and runs nothing that is stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from openai import OpenAI
from PIL import Image
from playwright.sync_api import Dialog, Page, expect

from api_proxy.access.callers import tenant_scope
from records.names import TurnState
from records.reading.browsing import Wanted
from records.reading.summary import ExampleTurn
from records.store import Store
from tests.api_proxy.pages.hostile import HOSTILE
from tests.browser.conftest import Looker, Served, serious

pytestmark = pytest.mark.timeout(600)
Looking = Callable[..., Looker]
PATHS = ("/ui/now", "/ui/sessions", "/ui/memory", "/ui/review", "/ui/training")
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.fixture(scope="session")
def example(served: Served) -> ExampleTurn:
    """The newest turn that trained."""

    async def newest(store: Store) -> ExampleTurn:
        return (await store.example_turns(1))[0]

    return served.read(newest)


@pytest.fixture(scope="session")
def paths(served: Served, example: ExampleTurn) -> list[str]:
    """One page of each kind."""

    async def a_hint(store: Store) -> str:
        found = await store.hints(limit=50)
        return next((one for one in found if one.first_gap is not None), found[0]).hint_id

    return [
        *PATHS,
        f"/ui/sessions/{example.turn.session_id}",
        f"/ui/turns/{example.turn.turn_id}",
        f"/ui/memory/{served.read(a_hint)}",
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", [{}, PHONE], ids=["desk", "phone"])
def test_pages_are_accessible_and_fit(
    looking: Looking, paths: list[str], scheme: str, device: dict[str, object]
) -> None:
    one = looking(color_scheme=scheme, **device)
    for path in paths:
        page = one.open(path)
        expect(page.locator("h1")).to_be_visible()
        assert serious(page) == [], path
        too_wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(too_wide) <= 0, path


def test_now_shows_the_store_and_updates_itself(served: Served, looking: Looking) -> None:
    async def turns(store: Store) -> int:
        return sum((await store.counts()).values())

    page = looking().open("/ui/now")
    before = served.read(turns)
    shown = page.locator("dt", has_text="Turns").locator("+ dd")
    expect(shown).to_contain_text(f"{before} (")
    ask(served, "Hello.")
    expect(shown).to_contain_text(f"{before + 1} (", timeout=60_000)


def test_sessions_lead_to_turns(served: Served, looking: Looking, example: ExampleTurn) -> None:
    async def newest(store: Store) -> list[str]:
        page = await store.sessions_page(None, wanted=Wanted(), after=None, limit=50)
        return [one.session_id for one in page.sessions]

    page = looking().open("/ui/sessions")
    assert session_ids(page) == served.read(newest)
    page.get_by_label("State of a turn").select_option(TurnState.TRAINED)
    page.get_by_role("button", name="Show").click()
    expect(page.locator("tbody tr").first).to_contain_text("trained")
    page = looking().open(f"/ui/sessions/{example.turn.session_id}")
    turn = page.locator(f"#turn-{example.turn.turn_id}")
    expect(turn).to_contain_text("trained")
    expect(turn.locator("blockquote")).to_contain_text(example.score.hint or "")
    turn.get_by_role("link", name="Token by token").click()
    page.wait_for_url(f"**/ui/turns/{example.turn.turn_id}")


def test_sessions_are_found_by_text(looking: Looking) -> None:
    page = looking().open("/ui/sessions")
    page.get_by_role("searchbox", name="Text").fill("Celsius")
    page.keyboard.press("Enter")
    page.wait_for_url("**text=Celsius**")
    found = page.locator("tbody mark")
    expect(found.first).to_have_text(re.compile("celsius", re.IGNORECASE))
    assert found.count() == page.locator("tbody tr").count()
    assert serious(page) == []
    found.first.click()
    page.wait_for_url("**/ui/turns/**")
    expect(page.locator("main")).to_contain_text(re.compile("celsius", re.IGNORECASE))


def test_a_turn_shows_each_token_with_its_numbers(looking: Looking, example: ExampleTurn) -> None:
    page = looking().open(f"/ui/turns/{example.turn.turn_id}")
    tokens = page.locator(".tokens .t")
    assert tokens.count() == len(example.turn.response_ids)
    largest = max(range(tokens.count()), key=lambda at: abs(example.sample.advantages[at]))
    said = page.locator("output.token")
    tokens.nth(largest).click()
    number = re.search(r"Advantage: (-?[\d.]+)", said.inner_text())
    assert number is not None
    shown = float(number[1])
    assert shown == pytest.approx(float(example.sample.advantages[largest]), rel=0.01)
    page.locator(".tokens").focus()
    before = said.inner_text()
    page.keyboard.press("ArrowLeft" if largest else "ArrowRight")
    expect(said).not_to_have_text(before)
    page.get_by_label("Colour").select_option("teacher")
    page.wait_for_url("**signal=teacher**")
    assert example.verdict is not None
    expect(page.locator("summary", has_text="Vote")).to_have_count(len(example.verdict.votes))
    expect(page.locator("ins")).to_contain_text(example.score.hint or "")


def test_the_teacher_answers_when_asked(looking: Looking, example: ExampleTurn) -> None:
    page = looking().open(f"/ui/turns/{example.turn.turn_id}")
    page.get_by_role("button", name="Ask what the teacher would have said").click()
    expect(page.get_by_role("heading", name="What the teacher says")).to_be_visible(timeout=60_000)


def test_memory_leads_to_a_hint_and_its_source(served: Served, looking: Looking) -> None:
    async def texts(store: Store) -> list[str]:
        return [one.text for one in await store.hints(limit=50)]

    page = looking().open("/ui/memory")
    assert page.locator("article h2").all_inner_texts() == served.read(texts)
    page.locator("article", has=page.locator("blockquote")).locator("h2 a").first.click()
    expect(page.get_by_role("heading", name="Where it came from")).to_be_visible()
    page.locator("article a", has_text="turn").first.click()
    page.wait_for_url("**/ui/turns/**")


def test_training_draws_curves_and_lays_another_run_over_them(looking: Looking) -> None:
    page = looking().open("/ui/training")
    assert page.locator("figure").count() >= 8
    assert page.locator("figure svg.plot polyline.run0").count() == 0
    page.get_by_label("Runs to lay over it").select_option("other")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**run=other**")
    assert page.locator("figure svg.plot polyline.run0").count() >= 8


def test_a_person_decides_on_a_hint(served: Served, looking: Looking) -> None:
    async def waiting(store: Store) -> int:
        return (await store.counts())[TurnState.REVIEWING]

    before = served.read(waiting)
    assert before > 0
    page = looking().open("/ui/review")
    article = page.locator("article").first
    turn = article.locator("h2 a").get_attribute("href")
    hint = article.get_by_label("The hint, as the policy should learn it")
    edited = hint.input_value().rstrip(".") + ", always."
    hint.fill(edited)
    article.get_by_role("button", name="Approve").click()
    expect(page.locator("main")).to_contain_text("1 edited")
    assert served.read(waiting) == before - 1
    assert turn is not None
    page.goto(served.url + turn)
    expect(page.locator("main")).to_contain_text("edited it on")
    expect(page.locator("main")).to_contain_text(f"Hint: {edited}")


def test_stored_text_runs_nothing(served: Served, looking: Looking) -> None:
    ask(served, " ".join(HOSTILE))
    tab = looking()
    page = tab.open("/ui/sessions")
    dialogs: list[str] = []

    def noted(dialog: Dialog) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("dialog", noted)
    page.locator("tbody th a").first.click()
    expect(page.locator("pre", has_text="<script>alert(1)</script>").first).to_be_visible()
    assert page.locator("pre script, pre img").count() == 0
    assert dialogs == []


def test_a_tenant_sees_its_own_and_logs_out(served: Served, looking: Looking) -> None:
    async def own(store: Store) -> list[str]:
        scope = tenant_scope("acme")
        page = await store.sessions_page(scope, wanted=Wanted(), after=None, limit=50)
        return [one.session_id for one in page.sessions]

    ask(served, "Hello again.")
    tab = looking("acme")
    page = tab.open("/ui/sessions")
    assert session_ids(page) == served.read(own) != []
    expect(page.get_by_label("Tenant")).to_have_count(0)
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/ui/login**")
    page.goto(served.url + "/ui/sessions")
    page.wait_for_url("**/ui/login**")
    tab.problems = [one for one in tab.problems if not one.startswith(("401", "console: Failed"))]


def test_the_keyboard_reaches_everything(looking: Looking) -> None:
    page = looking().open("/ui/sessions")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        where = page.evaluate("document.activeElement.tagName")
        if where == "BODY":
            break
        reached.add(page.evaluate("document.activeElement.textContent.trim()"))
        ring = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(ring) != "none", where
    assert {"Now", "Memory", "Review", "Training", "Show"} <= reached


def test_pictures_of_the_documentation(
    looking: Looking, paths: list[str], pictures: Path | None
) -> None:
    if pictures is None:
        pytest.skip("./run.sh browser --pictures FOLDER takes those that the folder has")
    one = looking(viewport={"width": 1100, "height": 800}, device_scale_factor=1.5)
    names = ("now", "sessions", "memory", "review", "training", "session", "turn", "hint")
    found = dict(zip(names, paths, strict=True)) | {"sessions": "/ui/sessions?text=celsius"}
    for name, path in found.items():
        if not (pictures / f"{name}.png").exists():
            continue
        page = one.open(path)
        settle(page)
        page.screenshot(path=pictures / f"{name}.png")
        with Image.open(pictures / f"{name}.png") as taken:
            taken.convert("RGB").quantize(64).save(pictures / f"{name}.png", optimize=True)


def session_ids(page: Page) -> list[str]:
    """Of the sessions that a list shows."""
    links = page.locator("tbody th a")
    found = links.evaluate_all("found => found.map(one => one.getAttribute('href'))")
    return [address.rpartition("/")[2] for address in found]


def settle(page: Page) -> None:
    """Fonts and layout are there."""
    page.evaluate("document.fonts.ready")


def ask(served: Served, text: str) -> None:
    """One turn of the tenant `acme`."""
    client = OpenAI(base_url=f"{served.url}/v1", api_key=served.keys["acme"])
    client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": text}], max_tokens=8
    )
