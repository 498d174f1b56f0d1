from opd.rehearsal.reported import learning_curves, objections_per_100
from opd.rehearsal.saying import LearningLine, Progress, shown_hints, shown_learning
from records.hints.types import HintStatus, RehearsalBlock
from records.lessons.names import LessonKind, LessonState
from rollout_bridge.rehearsal.figures import figures
from rollout_bridge.rehearsal.journal import Journal, ObedienceRow, PooledRow, RateRow
from rollout_bridge.stop_order import StopOrder, order_stop
from tests.opd.rehearsal.builders import a_hint
from tests.rollout_bridge.rehearsal.test_journal import a_row

POOLED = PooledRow(value=0.97, low=0.94, high=0.99, count=256, before=0.98, floor=0.93, passed=True)


def test_one_line_says_whether_a_run_learns():
    hints = [
        a_hint("a", first_gap=0.4, gap=0.1),
        a_hint("b", status=HintStatus.RESTING, first_gap=0.8, gap=0.02),
        a_hint("c", block=RehearsalBlock.NO_STATES),
    ]
    row = a_row(3).model_copy(update={"pooled": POOLED})
    assert shown_learning(hints, row) == (
        "hints: 1 active, 1 resting, 1 not practised; gap 0.6 -> 0.06 nats; "
        "open wishes done 0.97 (start 0.98); other states 0.5 nats from the start"
    )
    progress = Progress(objections=12.3, lessons=9, staleness=(0.5, 2.0))
    assert str(shown_learning(hints[2:], None, progress)) == (
        "hints: 1 not practised; 12 objections per 100 turns; 9 lessons of hints trained; "
        "last step 0.5 versions stale (at most 2)"
    )
    assert shown_learning(hints[2:], None) == "hints: 1 not practised"
    assert shown_learning([], None) is None


def test_objections_are_those_between_two_versions():
    rows = [
        a_row(version).model_copy(update={"turns": turns, "objections": objections})
        for version, (turns, objections) in enumerate([(50, 20), (150, 30), (150, 30), (250, 31)])
    ]
    assert objections_per_100(rows) == [40.0, 10.0, None, 1.0]


def test_what_was_measured_is_drawn(tmp_path):
    assert learning_curves(tmp_path) == []
    journal = Journal(tmp_path)
    journal.add(a_row(0))
    done = {"h0": ObedienceRow(followed=3, asked=4, abstained=0, before=4.0)}
    journal.add(a_row(1).model_copy(update={"pooled": POOLED, "obedience_of": done}))
    by_title = {curve.title: curve for curve in learning_curves(tmp_path)}
    assert by_title["Gap under each hint"].series == {"h0": [0.5, 0.5]}
    assert by_title["Obedience: open wishes done"].series["done"] == [None, 0.97]
    assert by_title["Uptake: what each hint asks, done unasked"].series == {}
    by_hint = by_title["Open wishes done, by the hint that they are against"]
    assert by_hint.series == {"h0": [None, 0.75]}
    assert by_title["Objections per 100 turns"].steps == [0, 1]


def test_uptake_is_drawn_next_to_what_the_start_does_with_the_hint(tmp_path):
    journal = Journal(tmp_path)
    rates = {name: RateRow(hits=2, count=8) for name in ("done", "done_start", "done_hinted")}
    taken_up = a_row(1).hints[0].model_copy(update=rates)
    journal.add(a_row(0))
    journal.add(a_row(1).model_copy(update={"hints": (taken_up,)}))
    by_title = {curve.title: curve for curve in learning_curves(tmp_path)}
    found = by_title["Uptake: what each hint asks, done unasked"].series
    assert found == {"h0": [None, 0.25], "h0, start with the hint": [None, 0.25]}


def test_what_is_practised_without_a_guard_says_what_it_costs():
    lost = ObedienceRow(followed=41, asked=100, abstained=0, before=98.0)
    row = a_row(3).model_copy(update={"keep": None, "unguarded_of": {"h0": lost}})
    assert shown_learning([], row) == "open wishes done 0.41 (start 0.98), not guarded"
    none = a_row(3).model_copy(update={"keep": None, "unmeasured": ("h0",)})
    assert shown_learning([], none) == "obedience cannot be measured: no usable open wish"
    both = row.model_copy(update={"unmeasured": ("h1", "h2")})
    assert str(shown_learning([], both)).endswith(
        "not guarded; obedience of 2 hints cannot be measured: no usable open wish"
    )


class Counted:
    """A store in which more is judged at each look."""

    judged, objections = 40, 10

    async def hints(self, **_):
        return [a_hint("a")]

    async def num_judged(self):
        return self.judged, self.objections

    async def lessons_trained_by_hint(self, hint_ids):
        return {"a": {LessonKind.HINT: 5, LessonKind.COUNTER: 3}}

    async def lesson_totals(self):
        return {(LessonKind.HINT, LessonState.TRAINED): 7, (LessonKind.KEEP, LessonState.READY): 1}


async def test_objections_are_those_since_the_line_before(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"staleness_mean": 1.0, "staleness_max": 3}\n')
    store = Counted()
    line = LearningLine(store, tmp_path)
    end = "7 lessons of hints trained; last step 1.0 versions stale (at most 3)"
    assert await line.said() == f"hints: 1 active; 25 objections per 100 turns; {end}"
    store.judged, store.objections = 60, 11
    assert await line.said() == f"hints: 1 active; 5 objections per 100 turns; {end}"
    assert await line.said() == f"hints: 1 active; {end}", "nobody was judged since"
    order_stop(tmp_path, StopOrder(reason="obedience fell"))
    assert str(await line.said()).startswith("training has stopped: obedience fell\nhints:")


def test_hints_that_are_practised_are_said_one_by_one():
    hints = [
        a_hint("a", text="Use  Celsius.", first_gap=0.45, gap=0.04),
        a_hint("b", text="x" * 80, first_gap=0.3),
        a_hint("c", status=HintStatus.RESTING, first_gap=0.3),
        a_hint("d"),
    ]
    trained = {"a": {LessonKind.HINT: 5, LessonKind.COUNTER: 3}}
    assert shown_hints(hints, trained) == [
        '  practised: "Use Celsius.": 5 lessons and 3 counter-lessons, gap 0.45 -> 0.04 nats',
        f'  practised: "{"x" * 59}…": 0 lessons and 0 counter-lessons',
    ]
    rates = {
        "done": RateRow(hits=5, count=16),
        "done_start": RateRow(hits=3, count=48),
        "done_hinted": RateRow(hits=27, count=48),
    }
    measured = a_row(3).hints[0].model_copy(update={"hint_id": "a", **rates})
    [first, _] = shown_hints(hints, trained, a_row(3).model_copy(update={"hints": (measured,)}))
    assert first.endswith("nats, done unasked in 5 of 16 answers (start 0.06, with the hint 0.56)")
    many = [a_hint(f"h{number}", first_gap=0.1) for number in range(5)]
    assert shown_hints(many, {})[-1] == "  and 2 more: opd hints list"


def test_figures_of_a_version_leave_out_what_was_not_measured():
    assert figures(None) == {}
    row = a_row(3).model_copy(update={"keep": None})
    assert figures(row) == {"measured_version": 3, "gap": 0.5, "turns": 10, "objections": 1}
    resting = row.hints[0].model_copy(update={"status": HintStatus.RESTING})
    known = figures(a_row(3).model_copy(update={"pooled": POOLED, "hints": (resting,)}))
    assert "gap" not in known, "the mean is over active hints"
    assert (known["obedience"], known["obedience_floor"], known["keep_gap"]) == (0.97, 0.93, 0.5)
