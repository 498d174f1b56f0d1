"""Which of a hint's texts train, and which measure obedience. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from records.hints.types import HintPrompt, PromptKind


def usable(prompts: Iterable[HintPrompt]) -> list[HintPrompt]:
    """Those that were tried on the start model, and that it followed."""
    return [one for one in prompts if one.dropped is None and one.asked]


def measuring_texts(prompts: Iterable[HintPrompt]) -> set[str]:
    """Ids of the texts that measure obedience and never train: the usable open wishes for the
    opposite that were held out, but at most a third of them, and at least one. A single wish
    trains.
    """
    wishes = [one for one in usable(prompts) if one.kind is PromptKind.OPPOSITE]
    if len(wishes) < 2:
        return set()
    ranked = sorted(wishes, key=lambda one: (not one.held_out, one.prompt_id))
    num_held = sum(one.held_out for one in wishes)
    return {one.prompt_id for one in ranked[: max(min(num_held, len(wishes) // 3), 1)]}
