"""Contests at recorded states: who wins, and which states are drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from opd.evaluation.recorded import check_states, contest, hinted_turns, win_rate
from records.config import StoreConfig
from records.names import TurnState
from records.store import Store
from tests.records.builders import recorded, turn_in
from trainer.errors import StartupError

IDS = [np.array([1, 2, 3], dtype=np.int32), np.array([4], dtype=np.int32)]


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    return StoreConfig(url=f"sqlite:///{tmp_path / 'records.db'}")


async def test_hinted_turns_are_drawn_by_the_seed(config: StoreConfig) -> None:
    async with await Store.open(config) as store:
        with pytest.raises(StartupError, match="no recorded turn has a hint"):
            await hinted_turns(store, 4, 0)
        hinted = [await turn_in(store, TurnState.SCORING) for _ in range(6)]
        await recorded(store)
        assert await store.hinted_turn_ids() == hinted
        drawn = [turn.turn_id for turn in await hinted_turns(store, 4, 0)]
        assert len(set(drawn)) == 4
        assert set(drawn) <= set(hinted)
        assert drawn == [turn.turn_id for turn in await hinted_turns(store, 4, 0)]
        orders = {
            tuple(turn.turn_id for turn in await hinted_turns(store, 4, seed)) for seed in range(5)
        }
        assert len(orders) > 1


async def test_answers_meet_in_pairs_and_a_tie_is_half_a_win(config: StoreConfig) -> None:
    async with await Store.open(config) as store:
        turn = await store.turn(await turn_in(store, TurnState.TRAINED))
    assert turn is not None
    one = contest(turn, [-1.0, -2.0], [-1.0, -4.0], IDS, IDS[::-1])
    assert (one.wins, one.difference, one.was_trained) == (0.75, 1.0, True)
    assert (one.tokens, one.tokens_against) == (2.0, 2.0)
    other = contest(turn, [-4.0, -2.0], [-1.0, -1.0], IDS, IDS)
    assert (other.wins, other.difference) == (0.0, -2.0)
    with pytest.raises(ValueError, match="zip"):
        contest(turn, [-1.0], [-1.0, -2.0], IDS, IDS)
    found = win_rate([one, other], {}, seed=0)
    assert (found.wins.value, found.difference.value) == (0.375, -0.5)
    assert found.wins.interval is None, "one session says nothing of others"


def test_no_state_left_says_why() -> None:
    with pytest.raises(StartupError, match=r"\(hinted_prompt_mismatch: 3, unknown_teacher: 1\)"):
        check_states([], {"hinted_prompt_mismatch": 3, "unknown_teacher": 1})
