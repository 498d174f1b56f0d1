from records.hints.types import HintStatus, RehearsalBlock
from tests.trainer.rehearsal.builders import a_hint
from tests.trainer.rehearsal.test_journal import a_row
from trainer.rehearsal.journal import Journal, ObedienceRow, PooledRow
from trainer.rehearsal.reported import learning_curves, objections_per_100
from trainer.rehearsal.saying import shown_learning

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
    by_hint = by_title["Open wishes done, by the hint that they are against"]
    assert by_hint.series == {"h0": [None, 0.75]}
    assert by_title["Objections per 100 turns"].steps == [0, 1]
