"""What a hint and a user's own words change of an answer, as the lab's model sees it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import numpy as np
import pytest

from examples.tool_lab.cases import evaluation_episode
from examples.tool_lab.domain import TOOLS
from examples.tool_lab.script import scripted_reply
from judge.hints.said import SPOKEN_PART
from opd.rehearsal.desk import Desk
from opd.rehearsal.preparing.effect import fall_at, part_of_fall, part_of_words
from records.types import Logprobs, TurnRecord
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.teachers import FrozenTeacher
from tests.opd.rehearsal.builders import a_state

CELSIUS = "Give temperatures in Celsius."


def logprobs(*values: float) -> Logprobs:
    return np.asarray(values, dtype=np.float32)


@pytest.mark.parametrize(
    ("said", "expected"),
    [((-1.0, -5.0, -9.0), 1.0), ((-9.0, -2.0, -1.0), 0.25), ((-1.0, -0.5, -1.0), -0.125)],
)
def test_the_token_that_the_hint_lowers_most_decides(
    said: tuple[float, ...], expected: float
) -> None:
    plain, hinted = logprobs(-1.0, -1.0, -1.0), logprobs(-2.0, -5.0, -0.5)
    assert part_of_fall(plain, hinted, logprobs(*said)) == pytest.approx(expected)


@pytest.mark.parametrize("hinted", [(-1.0, -1.0), (-0.5, -0.9), (float("nan"), -1.0)])
def test_a_hint_that_lowers_nothing_has_no_parts(hinted: tuple[float, ...]) -> None:
    assert part_of_fall(logprobs(-1.0, -1.0), logprobs(*hinted), logprobs(-3.0, -3.0)) is None


@pytest.fixture
async def desk(lab_engine: str, rendering: Rendering) -> AsyncIterator[Desk]:
    async with EngineClient(lab_engine, vocab_size=rendering.vocab_size) as client:
        yield Desk(rendering, FrozenTeacher("start", client, expected_version=None))


def told_in_fahrenheit(rendering: Rendering) -> TurnRecord:
    """An answer about the weather, as the lab's agent gives it."""
    rng = random.Random(1)
    episode = evaluation_episode(rng, "weather", "answer")
    response = scripted_reply(episode, rng, {"unit": "Fahrenheit"})
    ids = rendering.tokenizer(response["content"])["input_ids"]
    return a_state(
        "told",
        "",
        messages=list(episode.messages),
        tools=TOOLS,
        response=response,
        prompt_ids=rendering.prompt_ids(episode.messages, TOOLS),
        response_ids=np.asarray(ids, dtype=np.int32),
    )


@pytest.mark.parametrize(
    ("words", "speaks"),
    [
        ("We always want Celsius.", True),
        ("I would rather have Celsius.", True),
        ("Can you book 12 nights at Iseil?", False),
        ("Please find me hotels in Nutc.", False),
        ("Thank you.", False),
    ],
)
async def test_words_that_ask_for_what_the_hint_asks_speak_of_it(
    desk: Desk, rendering: Rendering, words: str, speaks: bool
) -> None:
    turn = told_in_fahrenheit(rendering)
    fall = await fall_at(desk, turn, CELSIUS)
    assert fall is not None
    assert fall > 1
    part = await part_of_words(desk, turn, CELSIUS, words)
    assert part is not None
    assert (part >= SPOKEN_PART) is speaks
