"""The hinted prompt: a turn's own prompt, with a hint appended to its last user message.

Other words are added in the same way, as if the user had said them (`with_words`).

`hinted_messages` is the rule on messages (ALGORITHMS 1.6). `hinted_prompt_ids` applies it to token
ids: the teacher must read the STORED prompt, changed in one contiguous span and nowhere else,
because any other difference (stripped reasoning, re-serialised arguments, a date) would show up as
advantage. Nothing is ever searched for by text: the span is located by aligning the stored ids with
a fresh render of the same messages, and whatever does not align is dropped with a reason. It knows
neither engines nor the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from records.messages import Message, content_text
from records.names import DropReason
from records.types import Ids
from rollout_bridge.rendering.rendering import RenderedPrompt, Rendering, Tools
from rollout_bridge.scoring.alignment import AlignmentError, locate_span

HINT_HEADER = "[user's hint / instruction]\n"
# A forced prefix (tool_choice "required") may follow the generation prompt in the stored ids.
MAX_FORCED_IDS = 64


class HintingError(Exception):
    """The hint cannot be placed; the turn is dropped for `reason`."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


def as_requested(rendering: Rendering, sampling: Mapping[str, Any]) -> Rendering:
    """`rendering` with the template's switch as a stored turn's request set it.

    Raises HintingError if the template has no such switch.
    """
    try:
        return rendering.with_thinking(sampling.get("enable_thinking"))
    except ValueError as error:
        raise HintingError(DropReason.HINTED_PROMPT_MISMATCH, str(error)) from error


def last_user_index(messages: Sequence[Message]) -> int | None:
    """Index of the last message with role user; tool results never count, whatever the template."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "user":
            return index
    return None


def hinted_messages(messages: Sequence[Message], hint: str) -> list[Message]:
    """The messages with `hint` appended to the last user message (else the last, else a new one).

    That message's content becomes text, and `developer` becomes `system` (ALGORITHMS 1.6). The
    given messages are not changed.
    """
    hinted = [
        {**message, "role": "system"} if message["role"] == "developer" else dict(message)
        for message in messages
    ]
    if not hinted:
        return [{"role": "user", "content": HINT_HEADER + hint}]
    index = last_user_index(hinted)
    target = hinted[len(hinted) - 1 if index is None else index]
    text = content_text(target.get("content"))
    target["content"] = f"{text}\n\n{HINT_HEADER}{hint.strip()}".strip()
    return hinted


def hinted_prompt_ids(
    rendering: Rendering,
    messages: Sequence[Message],
    tools: Tools,
    stored_prompt_ids: Ids,
    hint: str,
    max_tokens: int,
) -> Ids:
    """`stored_prompt_ids` [P] with the last user message's tokens replaced by the hinted message's.

    Returns int32 ids [P']; all of them before and after one contiguous span equal the stored ones.
    Raises HintingError: `no_user_message`, `hinted_prompt_mismatch` (the stored ids do not match
    these messages, or the place is ambiguous), `hinted_prompt_too_long` (P' > max_tokens); and
    ValueError for an empty hint.
    """
    if not hint.strip():
        raise ValueError("an empty hint would score the original prompt")
    changed = hinted_messages(messages, hint)
    return _changed_prompt_ids(rendering, messages, changed, tools, stored_prompt_ids, max_tokens)


def with_words(
    rendering: Rendering,
    messages: Sequence[Message],
    tools: Tools,
    stored_prompt_ids: Ids,
    words: str,
    max_tokens: int,
) -> tuple[list[Message], Ids]:
    """The prompt as if the user had also said `words`: at the end of the last user message, without
    a header, on a line of their own if that message has several.

    Returns the messages and int32 ids [P'], which differ from `stored_prompt_ids` [P] in that one
    message. Raises like `hinted_prompt_ids`; ValueError for empty words.
    """
    if not words.strip():
        raise ValueError("empty words would leave the prompt as it is")
    index = last_user_index(messages)
    if index is None:
        raise _no_user_message()
    text = content_text(messages[index].get("content"))
    joint = "\n" if "\n" in text else " "
    changed = [dict(message) for message in messages]
    changed[index]["content"] = f"{text.rstrip()}{joint}{words.strip()}".strip()
    ids = _changed_prompt_ids(rendering, messages, changed, tools, stored_prompt_ids, max_tokens)
    return changed, ids


def _changed_prompt_ids(
    rendering: Rendering,
    messages: Sequence[Message],
    changed: Sequence[Message],
    tools: Tools,
    stored_prompt_ids: Ids,
    max_tokens: int,
) -> Ids:
    """The stored ids with those of the last user message replaced by the ones from `changed`."""
    user_index = last_user_index(messages)
    if user_index is None:
        raise _no_user_message()
    try:
        fresh = rendering.rendered_prompt(messages, tools)
        new = rendering.rendered_prompt(changed, tools)
    except ValueError as error:
        raise HintingError(DropReason.HINTED_PROMPT_MISMATCH, str(error)) from error
    if fresh.message_indices is None:
        _check_texts(
            rendering.prompt_text(messages, tools),
            rendering.prompt_text(changed, tools),
            content_text(messages[user_index].get("content")),
            changed[user_index]["content"],
        )
        ids = _with_forced_tail(rendering, fresh.ids, new.ids, stored_prompt_ids)
    else:
        ids = _replace_message(rendering, messages, fresh, new, stored_prompt_ids, user_index)
    if len(ids) > max_tokens:
        raise HintingError(
            DropReason.HINTED_PROMPT_TOO_LONG, f"{len(ids)} ids, at most {max_tokens} fit"
        )
    return ids


def _no_user_message() -> HintingError:
    return HintingError(DropReason.NO_USER_MESSAGE, "no message with role user in the prompt")


def _mismatch(detail: str) -> HintingError:
    return HintingError(DropReason.HINTED_PROMPT_MISMATCH, detail)


def _check_texts(before: str, after: str, content: str, hinted_content: str) -> None:
    """Raise unless `after` is `before` with `content` replaced by `hinted_content` in one place."""
    start = after.find(hinted_content)
    while start >= 0:
        head, tail = after[:start], after[start + len(hinted_content) :]
        if (
            len(head) + len(tail) <= len(before)
            and before.startswith(head)
            and before.endswith(tail)
            and before[len(head) : len(before) - len(tail)].strip() == content.strip()
        ):
            return
        start = after.find(hinted_content, start + 1)
    raise _mismatch("the template shows the hint elsewhere than in the last user message")


def _with_forced_tail(rendering: Rendering, fresh: Ids, hinted: Ids, stored: Ids) -> Ids:
    """The hinted render, if the stored ids are the fresh render and perhaps a forced prefix."""
    tail = stored[len(fresh) :]
    if not np.array_equal(stored[: len(fresh)], fresh) or not _may_be_forced(rendering, tail):
        raise _mismatch("the stored prompt is not what the template makes of its messages")
    return np.concatenate([hinted, tail])


def _may_be_forced(rendering: Rendering, tail: Ids) -> bool:
    return len(tail) <= MAX_FORCED_IDS and not np.isin(tail, rendering.stop_token_ids).any()


def _replace_message(
    rendering: Rendering,
    messages: Sequence[Message],
    fresh: RenderedPrompt,
    hinted: RenderedPrompt,
    stored: Ids,
    user_index: int,
) -> Ids:
    """Stored ids with the user message's ids (those of the fresh render) replaced by those of the
    hinted render.
    """
    start, end = _message_span(fresh, user_index)
    hinted_start, hinted_end = _message_span(hinted, user_index)
    replacement = hinted.ids[hinted_start:hinted_end]
    if not (
        np.array_equal(fresh.ids[:start], hinted.ids[:hinted_start])
        and np.array_equal(fresh.ids[end:], hinted.ids[hinted_end:])
    ):
        raise _mismatch("the hint changes how the template shows other messages")
    if _num_control(rendering, replacement) != _num_control(rendering, fresh.ids[start:end]):
        raise _mismatch("the hint changes the structure of the user message")
    at = start
    if not np.array_equal(stored, fresh.ids):
        _check_number_of_messages(rendering, fresh.ids, int(fresh.ids[start]), stored)
        try:
            at = locate_span(
                fresh.ids,
                _free_mask(messages, fresh),
                stored,
                (start, end),
                lambda tail: _may_be_forced(rendering, tail),
            )
        except AlignmentError as error:
            raise _mismatch(str(error)) from error
    return np.concatenate([stored[:at], replacement, stored[at + end - start :]])


def _num_control(rendering: Rendering, ids: Ids) -> int:
    return int(np.isin(ids, list(rendering.control_ids)).sum())


def _check_number_of_messages(rendering: Rendering, fresh: Ids, opener: int, stored: Ids) -> None:
    """Raise if a reply sampled the special token that opens a message: it could pass for one."""
    if opener in rendering.control_ids and np.count_nonzero(stored == opener) != np.count_nonzero(
        fresh == opener
    ):
        raise _mismatch("the stored prompt has a different number of messages than the turn")


def _message_span(prompt: RenderedPrompt, index: int) -> tuple[int, int]:
    positions = np.flatnonzero(prompt.message_indices == index)
    if len(positions) == 0 or positions[-1] - positions[0] + 1 != len(positions):
        raise _mismatch("the template does not show the last user message in one piece")
    return int(positions[0]), int(positions[-1]) + 1


def _free_mask(messages: Sequence[Message], prompt: RenderedPrompt) -> np.ndarray:
    """[P] True where stored ids may differ from a fresh render: what assistants sampled."""
    assert prompt.message_indices is not None
    assert prompt.is_sampled is not None
    is_assistant = np.array([m["role"] == "assistant" for m in messages] + [False])
    return is_assistant[prompt.message_indices] & prompt.is_sampled
