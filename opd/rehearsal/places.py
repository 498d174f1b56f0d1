"""The prompts of a lesson: what the policy reads at a recorded state, and what the teacher reads.

hint       policy: the state's own prompt            teacher: the same, with the hint
counter    policy: the state's, with open words      teacher: the same
keep       policy: the state's own prompt            teacher: the same
"""

from __future__ import annotations

from dataclasses import dataclass

from records.messages import Message
from records.names import DropReason
from records.types import Ids, TurnRecord
from rollout_bridge.rendering.rendering import Rendering
from rollout_bridge.scoring.hinting import HintingError, hinted_prompt_ids, with_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A recorded state as the policy reads it: `prompt_ids` [P] of `messages`."""

    turn: TurnRecord
    messages: list[Message]
    prompt_ids: Ids

    @property
    def enable_thinking(self) -> bool | None:
        """The template's switch, as in the state's request."""
        return self.turn.sampling.get("enable_thinking")


def place_at(rendering: Rendering, turn: TurnRecord, words: str | None, max_tokens: int) -> Place:
    """The state of `turn`, with `words` after its last user message. Raises HintingError if they
    have no place, or if the prompt leaves no room for an answer.
    """
    if words is None:
        if len(turn.prompt_ids) >= max_tokens:
            raise HintingError(
                DropReason.HINTED_PROMPT_TOO_LONG,
                f"{len(turn.prompt_ids)} ids, fewer than {max_tokens} fit",
            )
        return Place(turn=turn, messages=turn.messages, prompt_ids=turn.prompt_ids)
    own = rendering.with_thinking(turn.sampling.get("enable_thinking"))
    messages, ids = with_words(
        own, turn.messages, turn.tools, turn.prompt_ids, words, max_tokens - 1
    )
    return Place(turn=turn, messages=messages, prompt_ids=ids)


def teacher_prompt(rendering: Rendering, place: Place, hint: str | None, max_tokens: int) -> Ids:
    """What the teacher reads before the answer: with `hint` if it teaches one. At most `max_tokens`
    ids. Raises HintingError.
    """
    if hint is None:
        return place.prompt_ids
    own = rendering.with_thinking(place.enable_thinking)
    return hinted_prompt_ids(
        own, place.messages, place.turn.tools, place.prompt_ids, hint, max_tokens
    )
