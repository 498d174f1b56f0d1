"""The report of any run: its curves, drops and trained turns, from folder and store."""

from __future__ import annotations

import json

from records.config import StoreConfig
from records.names import DropReason
from records.store import Store
from tests.trainer.tiny import conversation, make_ready
from trainer.run_report import write_run_report


class Letters:
    """A rendering that shows ids as they are."""

    def decode(self, ids: list[int]) -> str:
        return f"<{ids[0]}>"


async def test_a_run_is_drawn_from_what_it_left(tmp_path):
    rows = [
        {"step": 1, "skipped": None, "loss": 0.5, "rollout_corr/rollout_is_mean": 1.1},
        {"step": 1, "skipped": "below_noise", "loss": 0.4},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with await Store.open(StoreConfig(url=f"sqlite:///{tmp_path}/records.db")) as store:
        samples = conversation("a", [(5, 3), (2, 4)], seed=1)
        await make_ready(store, samples)
        leased = await store.lease(owner="one", count=2, ttl_s=60)
        await store.drop("one", leased[0].turn_id, DropReason.STALE)
        path = await write_run_report(tmp_path, "A <run>", store, Letters())  # type: ignore[arg-type]
    page = path.read_text()
    assert "A &lt;run&gt;" in page
    assert "stale" in page
    assert page.count("<svg") >= 15
    assert "Mean importance weight" in page
    assert "No turn was trained" in page


async def test_a_run_that_has_only_begun_has_a_report_too(tmp_path):
    async with await Store.open(StoreConfig(url=f"sqlite:///{tmp_path}/records.db")) as store:
        path = await write_run_report(tmp_path, "New", store, Letters())  # type: ignore[arg-type]
    assert "New" in path.read_text()
