"""Fitting a judge prompt into the judge's context.

The judge decides about the response and the next state, so they are always shown whole, and so are
the tools. Of the conversation before them, the oldest middle messages are left out first: the head
(system messages, or else the first message: the task) and the newest messages stay. Prompts say how
much was left out. Needs no tokenizer: the counting function is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

from judge.votes.prompts import judge_messages, message_text
from records.messages import Message, content_text
from rollout_bridge.rendering.control_text import ControlTexts

CountTokens: TypeAlias = Callable[[str], int]

NO_CONTROL_TEXTS = ControlTexts((), with_blanks=True)
"""For a judge whose tokenizer is not available."""


class Reads(TypedDict):
    """How the judge's tokenizer reads texts."""

    count_tokens: CountTokens
    control_texts: ControlTexts


# Role markers, turn ends and generation prompt that a chat template puts around the two messages.
TEMPLATE_TOKENS = 32

_LIGHT_BYTES = bytes(range(ord("a"), ord("z") + 1)) + bytes(range(ord("A"), ord("Z") + 1)) + b" "
_HALF_BYTES = _LIGHT_BYTES + bytes(range(0x80, 0x100))


class JudgePromptTooLong(ValueError):
    """Response and next state alone do not fit into the judge's context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePrompt:
    """The chat messages of one vote; `num_omitted` conversation messages were left out to fit."""

    messages: list[dict[str, str]]
    num_omitted: int

    def num_tokens(self, count_tokens: CountTokens) -> int:
        """Its size in tokens, including what a chat template adds."""
        return TEMPLATE_TOKENS + sum(count_tokens(message["content"]) for message in self.messages)


def estimate_tokens(text: str) -> int:
    """Tokens of `text` without a tokenizer: on the high side for everyday text, but no strict
    bound.

    The only strict bound of byte-level BPE is one token per UTF-8 byte, three to four times the
    truth for prose and so a waste of most of the context. Prose and code words run at 3 to 5 bytes
    a token, other scripts at 2 to 4, digits and punctuation often at one. So letters, spaces and
    non-ASCII bytes count 1/2, all else 1. A judge that still refuses a prompt as too long is sent a
    shorter one (asking.py).
    """
    data = text.encode("utf-8", "surrogatepass")
    num_full = len(data.translate(None, _HALF_BYTES))
    return num_full + (len(data) - num_full + 1) // 2


Shown: TypeAlias = Callable[[Sequence[Message], int, int], list[dict[str, str]]]
"""Makes the chat messages of a question from the conversation's messages to show, the index after
which messages are left out, and the number of those.
"""


def fit_judge_prompt(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    response: Message,
    next_state: Sequence[Message],
    max_tokens: int,
    count_tokens: CountTokens = estimate_tokens,
    control_texts: ControlTexts = NO_CONTROL_TEXTS,
) -> JudgePrompt:
    """The prompt of a vote; see `fitted`. Raises JudgePromptTooLong."""

    def shown(part: Sequence[Message], omitted_after: int, num_omitted: int):
        return judge_messages(part, tools, response, next_state, omitted_after, num_omitted)

    return fitted(shown, messages, max_tokens, count_tokens, control_texts)


def fitted(
    ask: Shown,
    messages: Sequence[Message],
    max_tokens: int,
    count_tokens: CountTokens = estimate_tokens,
    control_texts: ControlTexts = NO_CONTROL_TEXTS,
) -> JudgePrompt:
    """What `ask` makes of a conversation, leaving out as few of the oldest middle messages as
    `max_tokens` allows.

    Text that the judge's own vocabulary reads as a structural token (`control_texts`) gets a blank
    inside, like the markers that `fencing` knows for every judge.

    If only the head is left and it still does not fit, the text of the head is replaced by a note
    of its length. Raises JudgePromptTooLong if what is asked about does not fit even then.
    """
    num_head = _num_head_messages(messages)
    head, middle = messages[:num_head], messages[num_head:]

    def build(head: Sequence[Message], num_omitted: int) -> JudgePrompt:
        shown = [*head, *middle[num_omitted:]]
        texts = ask(shown, num_head - 1, num_omitted)
        texts = [{**text, "content": control_texts.broken(text["content"])} for text in texts]
        return JudgePrompt(messages=[_sendable(text) for text in texts], num_omitted=num_omitted)

    prompt = build(head, 0)
    # No text has more tokens than bytes, so a short prompt needs no tokenizer.
    if prompt.num_tokens(_num_bytes) <= max_tokens:
        return prompt
    num_omitted, excess = 0, prompt.num_tokens(count_tokens) - max_tokens
    while excess > 0 and num_omitted < len(middle):
        # Leave messages out by their own counts, then count the whole prompt again: tokens at the
        # seams, and the note of the omission, can make another round necessary.
        while excess > 0 and num_omitted < len(middle):
            excess -= count_tokens(message_text(middle[num_omitted]))
            num_omitted += 1
        prompt = build(head, num_omitted)
        excess = prompt.num_tokens(count_tokens) - max_tokens
    if excess > 0:
        prompt = build([_without_text(message) for message in head], num_omitted)
        excess = prompt.num_tokens(count_tokens) - max_tokens
    if excess > 0:
        raise JudgePromptTooLong(
            f"what must be shown exceeds the judge's prompt limit of {max_tokens} tokens by "
            f"{excess}"
        )
    return prompt


def _num_head_messages(messages: Sequence[Message]) -> int:
    num_system = 0
    while num_system < len(messages) and messages[num_system]["role"] in ("system", "developer"):
        num_system += 1
    return min(max(num_system, 1), len(messages))


def _without_text(message: Message) -> Message:
    num_chars = len(content_text(message.get("content")))
    return {"role": message["role"], "content": f"[{num_chars} characters left out]"}


def _sendable(message: dict[str, str]) -> dict[str, str]:
    """The message with unpaired surrogates, which no request can carry, replaced by "?"."""
    return {
        **message,
        "content": message["content"].encode("utf-8", "replace").decode("utf-8"),
    }


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8"))
