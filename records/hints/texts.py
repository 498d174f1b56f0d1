"""Which of a hint's texts train, and which measure obedience. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from records.hints.likeness import likeness
from records.hints.types import HintPrompt, PromptKind

_HELD_OUT_OF = 3
"""One in this many open wishes for the opposite is kept out of training."""


def split_wishes(hint: str, wishes: Sequence[str]) -> list[tuple[str, bool]]:
    """Each new open wish for the opposite, and whether it is held out.

    The likest to the hint come first: a text that names what it declines ("No code, please.") is
    lost before one that does not ("Tell me in sentences."), so some of them train and some measure.
    """
    ranked = sorted(zip(likeness(hint, wishes), wishes, strict=True), key=lambda one: -one[0])
    most = max(len(wishes) // _HELD_OUT_OF, 1)
    held = set(range(1, len(wishes), _HELD_OUT_OF)[:most])
    return [(text, at in held) for at, (_, text) in enumerate(ranked)]


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
