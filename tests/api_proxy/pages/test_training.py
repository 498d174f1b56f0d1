"""*Training*: which curves are shown to whom, how they are drawn, and the newest versions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from api_proxy.pages.measured import Curve, Curves
from api_proxy.pages.plots import HEIGHT, WIDTH, series_names, svg
from opd.report.curves import RunCurves
from records.store import Store
from rollout_bridge.rehearsal.journal import Journal
from tests.api_proxy.conftest import Door
from tests.api_proxy.pages.conftest import Login
from tests.api_proxy.pages.hostile import HOSTILE, assert_harmless
from tests.records.builders import a_version
from tests.rollout_bridge.rehearsal.test_journal import a_row

PATH = "/v1/runs/current/training"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The run's folder; other runs are beside it."""
    folder = tmp_path / "mine"
    folder.mkdir()
    return folder


@pytest.fixture
def curves(mine: Path) -> Curves:
    """As `opd proxy` hands them over."""
    return RunCurves(mine)


def steps(folder: Path, losses: list[float | None]) -> None:
    folder.mkdir(exist_ok=True)
    rows = [
        {"step": number, "version": number, "loss": loss}
        for number, loss in enumerate(losses, start=1)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


async def test_curves_with_a_value_are_shown_and_can_be_narrowed(door: Door, mine: Path) -> None:
    assert "No step has been trained yet." in (await door.client.get("/ui/training")).text
    steps(mine, [3.0, None, 1.0, 0.5])
    Journal(mine).add(a_row(3))
    found = {one["title"]: one for one in (await door.client.get(PATH)).json()["curves"]}
    assert found["Loss"]["series"]["total"] == [3.0, None, 1.0, 0.5]
    assert found["Gap under each hint"]["over"] == "version"
    assert "Gradient norm" not in found
    assert all(one["says"] for one in found.values())
    part = (await door.client.get(f"{PATH}?first=2&last=3")).json()["curves"]
    assert next(one for one in part if one["title"] == "Loss")["steps"] == [2, 3]
    page = (await door.client.get("/ui/training?first=2&last=3")).text
    assert "What a step minimises." in page
    assert 'aria-label="Loss, update 2 to 3"' in page
    assert (
        "No step has been trained there." in (await door.client.get("/ui/training?first=90")).text
    )
    assert (await door.client.get("/ui/training?first=x")).status_code == 400


async def test_other_runs_are_laid_over_this_one(door: Door, mine: Path) -> None:
    steps(mine, [3.0, 2.0])
    assert 'name="run"' not in (await door.client.get("/ui/training")).text
    steps(mine.parent / "faster", [1.5, 1.0, 0.5])
    steps(mine.parent / "<b>", [9.0])
    (mine.parent / "no run").mkdir()
    found = (await door.client.get(PATH)).json()
    assert sorted(found["runs"]) == ["<b>", "faster"]
    assert found["other_runs"] == {}
    found = (await door.client.get(f"{PATH}?run=faster&first=2")).json()
    assert [one["title"] for one in found["other_runs"]["faster"]] == ["Loss"]
    assert found["other_runs"]["faster"][0]["series"]["total"] == [1.0, 0.5]
    assert found["curves"][0]["series"]["total"] == [2.0]
    page = (await door.client.get("/ui/training?run=faster&run=%3Cb%3E")).text
    assert "<option selected>faster</option>" in page
    assert "<title>update 1, faster, total: 1.5</title>" in page
    assert page.count('<polyline class="c0 run1"') == 1
    assert "&lt;b&gt;, total: 9" in page
    assert "<b>" not in page


@pytest.mark.parametrize(
    "query", ["run=mine", "run=../mine", "run=no+run", "run=a&run=b&run=c&run=d&run=e"]
)
async def test_a_run_that_is_not_there_is_refused(door: Door, mine: Path, query: str) -> None:
    steps(mine, [3.0])
    reply = await door.client.get(f"{PATH}?{query}")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "run"


async def test_versions_say_what_became_of_them(door: Door, store: Store) -> None:
    assert "There is only the start model." in (await door.client.get("/ui/training")).text
    await store.commit_step(version=a_version(1), results=[])
    await store.commit_step(version=a_version(2, restores=0), results=[])
    found = (await door.client.get(PATH)).json()["versions"]
    assert [(one["version"], one["restores"]) for one in found] == [(2, 0), (1, None)]
    page = (await door.client.get("/ui/training")).text
    assert "restores version 0" in page
    assert '<a href="/ui/sessions?version=2">' in page


async def test_only_an_admin_sees_how_all_tenants_train(login: Login) -> None:
    mine, admin = await login("acme"), await login("admin")
    for path in (PATH, "/ui/training"):
        assert (await mine.get(path)).status_code == 403
        assert (await admin.get(path)).status_code == 200


def a_curve(**series: Sequence[float | None]) -> Curve:
    number = len(next(iter(series.values())))
    return Curve(title="T", unit="nats", steps=range(number), series=series)


def test_missing_values_are_gaps_and_points_stay_inside() -> None:
    drawn = svg(a_curve(a=[1.0, 2.0, None, 4.0, float("nan"), 9.0]))
    lines = re.findall(r'<polyline class="c0" points="([^"]*)"', drawn)
    assert [len(line.split()) for line in lines] == [2, 1, 1]
    for point in " ".join(lines).split():
        x, y = map(float, point.split(","))
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT


def test_equal_series_of_two_runs_have_one_colour_and_lines_of_their_own() -> None:
    own = a_curve(a=[1.0, 2.0], b=[3.0, 4.0])
    other = a_curve(b=[0.0, 1.0, 2.0, 3.0], c=[1.0] * 4)
    drawn = svg(own, {"other": other})
    assert re.findall(r'<polyline class="([^"]*)"', drawn) == ["c0", "c1", "c1 run0", "c2 run0"]
    assert 'aria-label="T, update 0 to 3"' in drawn
    assert series_names(own, {"other": other}) == ["a", "b", "c"]


def test_a_higher_value_stands_higher() -> None:
    drawn = svg(a_curve(a=[1.0, 2.0]))
    low, high = re.findall(r'cy="([\d.]+)"', drawn)
    assert float(high) < float(low)


def test_nothing_is_drawn_of_nothing() -> None:
    assert svg(a_curve(a=[None, None])) == ""
    assert svg(a_curve(a=[])) == ""
    assert "circle" in svg(a_curve(a=[5.0]))


@pytest.mark.parametrize("text", HOSTILE)
def test_names_stay_text(text: str) -> None:
    assert_harmless(
        svg(Curve(title=text, unit=text, steps=[1], series={text: [1.0]}, marks={text: 2.0}))
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.000319, 0.184], ["0", "0.05", "0.1", "0.15", "0.2"]),
        ([0.0, 0.0], ["0", "0.5", "1"]),
        ([1.0, 1.000001], ["0.9", "0.95", "1", "1.05", "1.1"]),
        ([-3.0, 7.0], ["-5", "0", "5", "10"]),
        ([5.94e-06, 7.08e-06], ["5.5e-06", "6e-06", "6.5e-06", "7e-06", "7.5e-06"]),
    ],
)
def test_axes_have_round_numbers(values: list[float], expected: list[str]) -> None:
    drawn = svg(Curve(title="t", unit="", steps=[1, 2], series={"a": values}))
    assert re.findall(r'text-anchor="end">([^<]*)</text>', drawn)[:-1] == expected
