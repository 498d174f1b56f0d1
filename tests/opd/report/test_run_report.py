"""The report of any run: its curves, drops and trained turns, from folder and store."""

from __future__ import annotations

import json
from typing import Any

from opd.report.health import health_tables, said_warnings
from opd.report.run_report import write_run_report
from opd.report.story import before_and_after, verdict
from records.names import DropReason
from records.reading.drop_words import DROP_WORDS
from records.store import Store
from rollout_bridge.guard.checks import add_check
from rollout_bridge.rehearsal.journal import GapRow, Journal, PooledRow, VersionRow
from rollout_bridge.stop_order import StopOrder, order_stop
from tests.records.hints.test_memory import objected
from tests.records.new_store import new_store
from tests.rollout_bridge.guard.test_checks import moved
from tests.rollout_bridge.rehearsal.test_journal import a_row
from tests.trainer.tiny import conversation, make_ready


class Letters:
    """A rendering that shows ids as they are."""

    def decode(self, ids: list[int]) -> str:
        return f"<{ids[0]}>"


async def test_a_run_is_drawn_from_what_it_left(tmp_path):
    rows = [
        {
            "step": 1,
            "skipped": None,
            "loss": 0.5,
            "lessons/hint": 9.0,
            "rollout_corr/rollout_is_mean": 1.1,
            "ratio_max": 1.2,
            "pg_clipfrac": 0.01,
            "time": 1e9,
        },
        {"step": 1, "skipped": "below_noise", "loss": 0.4},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with await Store.open(new_store(tmp_path / "records.db")) as store:
        samples = conversation("a", [(5, 3), (2, 4)], seed=1)
        await make_ready(store, samples)
        leased = await store.lease(owner="one", count=2, ttl_s=60)
        await store.drop("one", leased[0].turn_id, DropReason.STALE)
        path = await write_run_report(tmp_path, "A <run>", store, Letters())  # type: ignore[arg-type]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"]["lessons"] == {"hint": 9, "counter": 0, "keep": 0}
    assert summary["steps"]["trained"] == summary["steps"]["skipped"] == 1
    assert {state: n for state, n in summary["turns"].items() if n} == {"dropped": 1, "leased": 1}
    dropped = summary["turns_dropped"]["stale"]
    assert (dropped["turns"], dropped["why"]) == (1, DROP_WORDS[DropReason.STALE])
    assert summary["measured"] is summary["training_stopped"] is None
    page = path.read_text()
    assert "A &lt;run&gt;" in page
    assert "stale" in page
    assert "the weights that sampled it were too old" in page, "each reason says why"
    assert page.count("<svg") == 4, "curves without a value are left out"
    for title in ("Loss", "Ratios", "Clipped tokens", "Mean importance weight"):
        assert f"<figcaption>{title}</figcaption>" in page
    assert "2 requests in 1 session of users were answered by the policy; the first step" in page
    assert "The judge read what followed 2 answers. After 2 of them it found an objection" in page
    assert "1 step trained 0 of these turns" in page
    assert "Before and after" not in page
    assert "Health warnings" not in page
    assert "No turn was trained" in page


def test_warnings_are_said_once_for_each_kind_with_the_newest():
    def row(step: int, **figures: float | None) -> dict[str, Any]:
        return {"step": step, "skipped": None} | {
            f"rollout_corr/{name}": value for name, value in figures.items()
        }

    rows = [row(1, kl=0.3), row(2, kl=None), row(3, kl=0.5, chi2_token=2.0), row(4, kl=0.0)]
    assert said_warnings(rows) == [
        "step 3: rollout_corr/kl = 0.5: the policy has moved since it sampled these (2 times since "
        "the last line)",
        "step 3: rollout_corr/chi2_token = 2: the distribution has shifted severely",
    ]
    [(title, _, content)] = health_tables(rows)
    assert "opd advise" in title
    assert [one[1:] for one in content] == [("2", "3"), ("1", "3")]
    assert health_tables([row(1, kl=0.05)]) == []


async def test_a_run_that_has_only_begun_has_a_report_too(tmp_path):
    async with await Store.open(new_store(tmp_path / "records.db")) as store:
        path = await write_run_report(tmp_path, "New", store, Letters())  # type: ignore[arg-type]
    assert "New" in path.read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["policy_version"], summary["hints"]) == (0, [])
    assert not any(summary["turns"].values())


async def test_the_summary_tells_hints_and_what_was_measured(tmp_path):
    row = VersionRow(
        time=1.0,
        version=3,
        turns=50,
        objections=2,
        hints=(),
        obedience=None,
        pooled=None,
        keep=GapRow(value=0.01, low=0.0, high=0.02, num_samples=16),
        lessons={"hint": 8},
    )
    Journal(tmp_path).add(row)
    order_stop(tmp_path, StopOrder(reason="obedience fell"))
    async with await Store.open(new_store(tmp_path / "records.db")) as store:
        await objected(store, "use Celsius")
        path = await write_run_report(tmp_path, "Learns", store, Letters())  # type: ignore[arg-type]
    page = path.read_text()
    assert (
        "The newest hint is “use Celsius”. It came from these words after an answer: “I wanted"
        in page
    )
    assert "Training has stopped: obedience fell" in page
    assert page.index("Training has stopped") < page.index("<table"), "the story comes first"
    assert "Hints, by status and why they are not practised" in page
    assert "answer to whether each is a rule" in page
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["training_stopped"] == "obedience fell"
    [hint] = summary["hints"]
    assert hint["lessons_trained"] == {"hint": 0, "counter": 0}
    assert summary["hints_asked_whether_a_rule"] == {"yes": 0, "no": 0, "not_asked_yet": 1}
    assert summary["hints_counted"] == [{"status": "active", "not_rehearsed": None, "hints": 1}]
    assert (hint["text"], hint["status"], hint["gap"]) == ("use Celsius", "active", None)
    measured = summary["measured"]
    assert measured["objections_per_100_turns"] == [{"version": 3, "objections": 4.0}]
    assert measured["gap_at_other_states"]["value"] == 0.01
    assert measured["obedience"] is None


def a_gap(version: int, value: float, half: float, **changes: Any) -> VersionRow:
    gap = GapRow(value=value, low=value - half, high=value + half, num_samples=16)
    row = a_row(version)
    [hint] = row.hints
    return row.model_copy(update={"hints": (hint.model_copy(update={"gap": gap}),), **changes})


def test_before_and_after_have_intervals_and_a_verdict(tmp_path):
    pooled = PooledRow(value=0.9, low=0.8, high=0.95, count=64, before=0.9, floor=0.8, passed=True)
    journal = Journal(tmp_path)
    journal.add(a_gap(1, 1.0, 0.1, turns=100, objections=60))
    journal.add(a_gap(2, 0.5, 0.1, turns=200, objections=90))
    journal.add(a_gap(3, 0.2, 0.1, turns=300, objections=92, pooled=pooled))
    for version, passed in ((0, 64), (3, 63)):
        add_check(tmp_path, moved(version).model_copy(update={"passed": passed, "asked": 64}))
    [(title, header, lines)] = before_and_after(tmp_path, [])
    assert "intervals" in title
    assert header == ("measured", "before", "after", "verdict")
    found = {name: (before, after, said) for name, before, after, said in lines}
    objected = found["share of turns that users object to"]
    assert objected[0].startswith("0.600 [0.50")
    assert objected[1].startswith("0.020 [0.00")
    assert objected[2] == "better"
    gap = found["gap to the teacher that reads “h0”"]
    assert gap == ("1.000 [0.900, 1.100]", "0.200 [0.100, 0.300]", "better")
    obeyed = found["open wishes for the opposite that are done"]
    assert obeyed == ("0.900", "0.900 [0.800, 0.950]", "kept")
    assert found["right answers to canaries"][2] == "no clear difference"


def test_a_verdict_needs_intervals_apart():
    low, high = (0.1, 0.05, 0.2), (0.5, 0.3, 0.7)
    assert verdict(low, high, more_is_better=True) == "better"
    assert verdict(low, high, more_is_better=False) == "worse"
    assert verdict(high, low, more_is_better=True) == "worse"
    assert verdict(high, low, more_is_better=False) == "better"
    assert verdict(low, (0.3, 0.2, 0.4), more_is_better=True) == "no clear difference"
    assert verdict(None, high, more_is_better=True) == "not measured"
