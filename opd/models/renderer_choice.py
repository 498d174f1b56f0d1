"""Chooses the renderer of a model that was given without one, by proof and not by guessing.

A renderer of the model's family is used only if it gives exactly the ids of the model's own chat
template on conversations with tools, tool results and several turns; else `default`, which applies
that template and cannot extend prompts. It loads the tokenizer and nothing else of the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from records.messages import Message
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.calibration_texts import CONVERSATIONS, TOOL_CONVERSATION, TOOLS
from rollout_bridge.rendering.rendering import Rendering

FAMILIES = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "glm4_moe": "glm-4.5",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
}
"""transformers' `model_type` -> renderer of that family."""


def choose_renderer(model: str, model_type: str) -> RendererConfig:
    """The family's renderer if it agrees with the model's own template, else `default`."""
    plain = RendererConfig(name="default")
    name = FAMILIES.get(model_type)
    if name is None:
        return plain
    template = Rendering.load(model, plain)
    # The second is for a model whose template always closes an empty thought.
    for enable_thinking in (None, False):
        config = RendererConfig(name=name, enable_thinking=enable_thinking)
        if _agree(Rendering.load(model, config), template):
            return config
    return plain


def _agree(family: Rendering, template: Rendering) -> bool:
    probes: list[tuple[list[Message], list[dict[str, Any]]]] = [
        *((list(messages), []) for messages in CONVERSATIONS),
        (list(TOOL_CONVERSATION), TOOLS),
    ]
    try:
        return all(
            np.array_equal(family.prompt_ids(messages, tools), template.prompt_ids(messages, tools))
            for messages, tools in probes
        )
    except ValueError:
        # One of the two cannot render a probe at all.
        return False
