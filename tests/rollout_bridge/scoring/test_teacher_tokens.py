"""A teacher that scores given tokens must stay the frozen one, too."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_bridge.engine.errors import EngineUnavailable, ForeignTokens
from rollout_bridge.engine.types import ModelInfo
from rollout_bridge.scoring.teachers import FrozenTeacher, TeacherChanged

IDS = np.arange(1, 6, dtype=np.int32)
TOKENS = np.array([[3, 4], [5, 6]], dtype=np.int32)


class Engine:
    """Says a log-prob of -1, and which weights it has."""

    def __init__(self) -> None:
        self.version = "0"
        self.largest = 100

    async def score_tokens(self, input_ids, start, token_ids, *, routing_key=None):
        if token_ids.max() > self.largest:
            raise ValueError(f"id {token_ids.max()} is outside of the vocabulary")
        return np.full(token_ids.shape, -1.0, dtype=np.float32)

    async def model_info(self) -> ModelInfo:
        return ModelInfo(
            model_path="m", weight_version=self.version, vocab_size=None, context_length=None
        )


async def test_other_weights_end_it() -> None:
    engine = Engine()
    teacher = FrozenTeacher("big", engine)
    assert (await teacher.score_tokens(IDS, 3, TOKENS)).tolist() == [[-1.0, -1.0], [-1.0, -1.0]]
    engine.version = "1"
    with pytest.raises(TeacherChanged, match="big: the teacher must stay at weight version '0'"):
        await teacher.score_tokens(IDS, 3, TOKENS)


async def test_ids_that_it_does_not_have_are_its_fault() -> None:
    engine = Engine()
    engine.largest = 5
    with pytest.raises(ForeignTokens, match="cannot be scored: id 6"):
        await FrozenTeacher("big", engine).score_tokens(IDS, 3, TOKENS)


async def test_another_engine_scores_while_one_is_down() -> None:
    down, other = Engine(), Engine()

    async def gone(*_: object, **__: object) -> None:
        raise EngineUnavailable("gone")

    down.score_tokens = gone  # type: ignore[method-assign, assignment]
    teacher = FrozenTeacher("big", down, other)
    assert (await teacher.score_tokens(IDS, 3, TOKENS)).tolist() == [[-1.0, -1.0], [-1.0, -1.0]]
    other.version = "1"
    with pytest.raises(TeacherChanged, match="reports '1'"):
        await teacher.score_tokens(IDS, 3, TOKENS)
