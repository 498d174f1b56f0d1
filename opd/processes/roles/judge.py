"""The judge of a run: its settings completed, and its texts counted and made harmless for its
tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

from opd.run.config import RunConfig

if TYPE_CHECKING:
    from judge.config import JudgeConfig
    from rollout_bridge.rendering.control_text import ControlTexts
    from rollout_bridge.rendering.rendering import Rendering


def judge_counter(config: RunConfig, rendering: Rendering) -> Callable[[str], int]:
    """Counts a text's tokens for the judge: exactly if the judge is the run's own model, whose
    tokenizer is here, else by an estimate on the high side.
    """
    from judge.votes.context import estimate_tokens

    return rendering.count_tokens if config.judge.model == config.model else estimate_tokens


def judge_control_texts(config: RunConfig, rendering: Rendering) -> ControlTexts:
    """Control texts of the judge's tokenizer, if it is the run's own model or a local folder."""
    from rollout_bridge.rendering.control_text import ControlTexts
    from rollout_bridge.rendering.tokenizer import control_texts, load_tokenizer

    if config.judge.model == config.model:
        return ControlTexts(rendering.control_texts, with_blanks=True)
    if Path(config.judge.model).is_dir():
        texts = control_texts(load_tokenizer(config.judge.model))
        return ControlTexts(texts, with_blanks=True)
    return ControlTexts((), with_blanks=True)


def judge_config(config: RunConfig) -> JudgeConfig:
    """The judge's settings, with the key of the run's own engine if that is the judge and no other
    key was given.
    """
    judge = config.judge
    if "api_key" in judge.model_fields_set and judge.api_key.get_secret_value() != "none":
        return judge
    for engine in (config.frozen, config.policy):
        is_named = engine.url is not None or engine.embedded is not None
        if is_named and judge.base_url == f"{engine.base_url}/v1" and engine.keys.api is not None:
            return judge.model_copy(update={"api_key": SecretStr(engine.keys.api)})
    return judge
