from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from opd.rehearsal.losses import TextLosses
from opd.rehearsal.planning import (
    KeptState,
    Rehearsed,
    Rota,
    missing,
    taking_part,
    targets_of,
    targets_of_return,
)
from records.hints.types import HintStatus
from records.lessons.names import LessonKind, LessonState
from tests.opd.rehearsal.builders import a_hint

HINT, COUNTER, KEEP = LessonKind.HINT, LessonKind.COUNTER, LessonKind.KEEP


def rehearsed(hint_id, scope="a", states=("s0", "s1", "s2"), prompts=("p0", "p1")):
    return Rehearsed(hint=a_hint(hint_id, scope=scope), states=states, prompts=prompts)


def test_what_is_under_way_counts():
    counts = {
        (HINT, LessonState.SAMPLING): 2,
        (HINT, LessonState.READY): 3,
        (HINT, LessonState.LEASED): 6,
        (KEEP, LessonState.SCORING): 9,
    }
    assert missing({HINT: 6, COUNTER: 6, KEEP: 4}, counts) == {HINT: 1, COUNTER: 6, KEEP: 0}


def test_no_more_than_a_pool_is_held_ready():
    parts = {HINT: 7, COUNTER: 6, KEEP: 3}
    assert targets_of(parts, 1.5, is_rehearsing=True) == {HINT: 11, COUNTER: 9, KEEP: 5}
    assert set(targets_of(parts, 1.5, is_rehearsing=False).values()) == {0}


def test_turns_whose_hint_rests_get_everything_but_its_lessons():
    parts = {HINT: 7, COUNTER: 6, KEEP: 3}
    found = targets_of(parts, 1.0, is_rehearsing=False, has_turns=True)
    assert found == {HINT: 0, COUNTER: 6, KEEP: 3}


def test_what_ended_is_brought_back_by_keep_lessons_alone():
    assert targets_of_return(16, 1.5) == {HINT: 0, COUNTER: 0, KEEP: 24}


def test_a_hint_that_rests_takes_part_where_its_open_wishes_are_lost():
    resting = {"status": HintStatus.RESTING}
    lost, learned, has_turns, active = (
        Rehearsed(hint=a_hint("h0", **resting), states=(), prompts=(), is_disobeyed=True),
        Rehearsed(hint=a_hint("h1", **resting), states=(), prompts=()),
        Rehearsed(hint=a_hint("h2", **resting), states=(), prompts=()),
        Rehearsed(hint=a_hint("h3"), states=(), prompts=()),
    )
    assert taking_part([lost, learned, has_turns, active], {"h2"}) == [lost, has_turns, active]
    assert taking_part([lost, learned, has_turns], {"h2"}) == [lost, has_turns]
    assert taking_part([lost, learned], set()) == [], "no step is taken for what rests"


@pytest.mark.parametrize("num_states", [2, 3])
def test_every_pair_of_state_and_text_comes(num_states):
    states, number = tuple(f"s{at}" for at in range(num_states)), 2 * num_states
    made = Rota(TextLosses()).of_hints(COUNTER, [rehearsed("h0", states=states)], number)
    assert len({(one.state_turn_id, one.prompt_id) for one in made}) == number
    assert len({one.lesson_id for one in made}) == number


def lost(prompt_id: str, by: float) -> TextLosses:
    losses = TextLosses()
    losses.add(prompt_id, np.array([-0.1, -by], np.float32), np.array([-0.1, 0.0], np.float32))
    return losses


def test_the_text_that_loses_most_gets_half_of_the_counter_lessons():
    texts = tuple(f"p{number}" for number in range(4))
    hint = rehearsed("h0", states=("s0", "s1", "s2"), prompts=texts)
    made = Rota(lost("p3", 1.0)).of_hints(COUNTER, [hint], 24)
    found = Counter(one.prompt_id for one in made)
    assert found == {"p3": 15, "p0": 3, "p1": 3, "p2": 3}
    assert {one.state_turn_id for one in made if one.prompt_id == "p3"} == set(hint.states)
    nothing = Rota(lost("p3", 0.05)).of_hints(COUNTER, [hint], 24)
    assert set(Counter(one.prompt_id for one in nothing).values()) == {6}


def test_newer_answers_say_more_of_what_a_text_loses():
    losses = lost("p0", 2.0)
    losses.add("p1", np.array([-1.5], np.float32), np.array([-0.3], np.float32))
    assert losses.most_lost(["p0", "p1"]) == "p0"
    for _ in range(2):
        losses.add("p0", np.array([-0.2], np.float32), np.array([-0.2], np.float32))
    assert losses.most_lost(["p0", "p1"]) == "p1"
    for policy in ([-np.inf], [-0.1, -0.2]):
        with pytest.raises(ValueError, match=r"not finite|of the teacher"):
            losses.add("p1", np.array(policy, np.float32), np.array([-0.3], np.float32))
    assert losses.most_lost(["p2"]) is None


def test_hint_lessons_carry_no_words():
    made = Rota(TextLosses()).of_hints(HINT, [rehearsed("h0")], 6)
    assert {one.prompt_id for one in made} == {None}
    assert Counter(one.state_turn_id for one in made) == {"s0": 2, "s1": 2, "s2": 2}


def test_lessons_that_hold_what_hints_taught_are_for_all_of_them_and_carry_no_words():
    hints = [rehearsed("h0"), replace(rehearsed("h1", prompts=()), is_disobeyed=True)]
    rota = Rota(TextLosses())
    made = rota.of_hints(KEEP, hints, 6)
    assert Counter((one.kind, one.hint_id) for one in made) == {(KEEP, "h0"): 3, (KEEP, "h1"): 3}
    assert {one.prompt_id for one in made} == {None}
    kept = [KeptState(turn_id=f"k{number}", scope="a") for number in range(6)]
    assert [one.state_turn_id for one in rota.of_kept(kept, 2)] == ["k0", "k1"]


def test_scopes_take_turns():
    hints = [rehearsed(f"a{number}") for number in range(3)] + [rehearsed("b0", scope="b")]
    made = Rota(TextLosses()).of_hints(HINT, hints, 12)
    assert Counter(one.scope for one in made) == {"a": 6, "b": 6}
    assert Counter(one.hint_id for one in made)["a1"] == 2


def test_a_hint_without_texts_gets_no_counter_lessons():
    hints = [rehearsed("h0", prompts=()), rehearsed("h1")]
    assert {one.hint_id for one in Rota(TextLosses()).of_hints(COUNTER, hints, 4)} == {"h1"}
    assert Rota(TextLosses()).of_hints(COUNTER, hints[:1], 4) == []
    assert Rota(TextLosses()).of_hints(HINT, [rehearsed("h2", states=())], 4) == []


def test_the_rota_goes_on_where_it_stopped():
    rota, kept = (
        Rota(TextLosses()),
        [KeptState(turn_id=f"k{number}", scope="a") for number in range(3)],
    )
    first, second = rota.of_kept(kept, 2), rota.of_kept(kept, 2)
    assert [one.state_turn_id for one in (*first, *second)] == ["k0", "k1", "k2", "k0"]
    assert first[0].hint_id is None
    assert rota.of_kept([], 2) == []


def test_counter_lessons_go_where_open_wishes_are_lost():
    hints = [rehearsed("h0"), replace(rehearsed("h1"), is_disobeyed=True)]
    made = Rota(TextLosses()).of_hints(COUNTER, hints, 8)
    assert Counter(one.hint_id for one in made) == {"h0": 2, "h1": 6}
    made = Rota(TextLosses()).of_hints(HINT, hints, 8)
    assert Counter(one.hint_id for one in made) == {"h0": 8}
    lost = [replace(one, is_disobeyed=True) for one in hints]
    made = Rota(TextLosses()).of_hints(HINT, lost, 8)
    assert Counter(one.hint_id for one in made) == {"h0": 4, "h1": 4}
