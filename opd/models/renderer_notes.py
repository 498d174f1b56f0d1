"""What a user should know of a run's renderer: what it costs, and what it cannot show or read."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererNote:
    """A fact; with a remedy, if something can be done about it."""

    found: str
    remedy: str | None = None


def renderer_note(rendering: Rendering, config: RendererConfig) -> RendererNote:
    """How prompts are rendered and calls are read."""
    if config.name != "default":
        return RendererNote(found=config.name)
    found = "default, the model's own template: each prompt is rendered anew"
    if config.tool_parser is not None:
        return RendererNote(found=f"{found}; calls are read as {config.tool_parser} writes them")
    if rendering.tool_call_start_id is None:
        return RendererNote(
            found=f"{found}; the tokenizer has no token for calls, so they stay text"
        )
    return RendererNote(
        found=f"{found}; tool calls stay text",
        remedy="name the model's family with --renderer (qwen3, glm-4.5, ...) or the form of its "
        "calls with --set renderer.tool_parser=qwen3",
    )


def template_notes(rendering: Rendering) -> list[RendererNote]:
    """What the model's template does not show; empty if it shows everything."""
    if rendering.traits is None:
        return []
    remedy = (
        "put a chat_template.jinja that shows it into the model's folder, if the model was trained "
        "on one (docs/models.md)"
    )
    return [RendererNote(found=found, remedy=remedy) for found in rendering.traits.warnings]
