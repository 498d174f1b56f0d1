"""*Training*: which curves are shown to whom, how they are drawn, and the newest versions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from api_proxy.measured import Curve
from api_proxy.pages.plots import HEIGHT, WIDTH, svg
from opd.report.curves import training_curves
from records.store import Store
from rollout_bridge.rehearsal.journal import Journal
from tests.api_proxy.conftest import Curves, Door
from tests.api_proxy.pages.conftest import Login
from tests.api_proxy.pages.hostile import HOSTILE, assert_harmless
from tests.records.builders import a_version
from tests.rollout_bridge.rehearsal.test_journal import a_row

PATH = "/v1/runs/current/training"


@pytest.fixture
def curves(tmp_path: Path) -> Curves:
    """As `opd proxy` hands them over."""
    return partial(training_curves, tmp_path)


def steps(folder: Path, losses: list[float | None]) -> None:
    rows = [
        {"step": number, "version": number, "loss": loss}
        for number, loss in enumerate(losses, start=1)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


async def test_curves_with_a_value_are_shown_and_can_be_narrowed(
    door: Door, tmp_path: Path
) -> None:
    assert "No step has been trained yet." in (await door.client.get("/ui/training")).text
    steps(tmp_path, [3.0, None, 1.0, 0.5])
    Journal(tmp_path).add(a_row(3))
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
