"""Control texts inside content, and how they stay text.

A tokenizer takes `<|im_end|>` for the end of a message wherever it stands. Whoever writes it into a
user's message, a tool's result or a tool's description could change the prompt's structure.
Therefore, before rendering, a break is inserted into each such text after its first character, and
the rendered text is split at the breaks before it is encoded. Neither half is a control text, so
both become ordinary ids that spell what was written. The template's own control texts have no break
and stay tokens.

The break is a character that Unicode reserves for uses like this one. If somebody wrote it anyway,
it is marked as written and restored. Pure functions on text; they know no tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from records.messages import Message

BREAK = "\ufdd0"
_WRITTEN = "\ufdd1"
"""After a break: the character of the break itself was written here."""

_HTML_NAMES = (
    "a|abbr|address|article|aside|audio|b|blockquote|body|br|button|canvas|caption|center|cite|code"
    "|col|colgroup|dd|del|details|div|dl|dt|em|figcaption|figure|font|footer|form|h[1-6]|head"
    "|header|hr|html|i|iframe|img|input|ins|kbd|label|legend|li|link|main|mark|meta|nav|ol|option"
    "|p|pre|q|s|samp|script|section|select|small|span|strike|strong|style|sub|summary|sup|svg"
    "|table|tbody|td|textarea|tfoot|th|thead|title|tr|tt|u|ul|var|video|wbr"
)
_HTML_TAG = re.compile(rf"</?(?:{_HTML_NAMES})/?>", re.IGNORECASE)
_THOUGHT = re.compile(r"(\s*<think>)(.*?)(</think>)", re.DOTALL)


def is_control_text(text: str, *, is_special: bool) -> bool:
    """Whether an added token of this text is structure.

    Special ones are, and those in brackets (`<tool_call>`, which many tokenizers do not call
    special). Words, runs of blanks and HTML tags, which some vocabularies add, are not.
    """
    if len(text) < 2 or text.isspace():
        return False
    if is_special:
        return True
    return text[0] + text[-1] in ("<>", "[]") and len(text) > 2 and not _HTML_TAG.fullmatch(text)


def pieces(text: str) -> list[str]:
    """The pieces between breaks; none may be joined with its neighbours into one token."""
    first, *others = text.split(BREAK)
    return [first, *(BREAK + piece[1:] if piece[:1] == _WRITTEN else piece for piece in others)]


def unbroken(text: str) -> str:
    """What was written, without breaks."""
    return "".join(pieces(text)) if BREAK in text else text


class ControlTexts:
    """The control texts of one tokenizer; `kept_in_replies` stay tokens in an assistant's text.

    `with_blanks` is for text that another library encodes: breaks are blanks, and stay visible.
    """

    def __init__(
        self,
        texts: Iterable[str],
        kept_in_replies: Iterable[str] = (),
        *,
        with_blanks: bool = False,
    ) -> None:
        self._marks = (" ", "") if with_blanks else (BREAK, _WRITTEN)
        self.texts = frozenset(texts)
        self._starts = _start_pattern(self.texts)
        self._starts_in_replies = _start_pattern(self.texts - frozenset(kept_in_replies))

    def stand_in(self, value: Any) -> bool:
        """Whether any string in a JSON value, keys included, needs a break."""
        search = self._starts.search
        return any(search(text) for text in _strings(value))

    def broken(self, text: str) -> str:
        """`text` with a break in each control text, even in one that may begin at its end."""
        return _broken(self._starts, text, *self._marks)

    def broken_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Messages from `template_messages`, with breaks; the same ones if none is needed."""
        return [
            self._message(message) if self.stand_in(message) else message for message in messages
        ]

    def broken_value(self, value: Any) -> Any:
        """A JSON value with breaks in its strings, keys included."""
        if isinstance(value, str):
            return self.broken(value)
        if isinstance(value, dict):
            return {self.broken(key): self.broken_value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.broken_value(item) for item in value]
        return value

    def _message(self, message: Message) -> Message:
        shown = self.broken_value({**message, "content": "", "role": ""})
        content = message["content"]
        is_reply = message["role"] == "assistant"
        broken = self._reply(message) if is_reply else self.broken(content)
        return {**shown, "role": message["role"], "content": broken}

    def _reply(self, message: Message) -> str:
        """An assistant's text: a thought that opens it stays one, for templates that split it."""
        content = message["content"]
        thought = _THOUGHT.match(content)
        if thought is None or "reasoning_content" in message:
            return _broken(self._starts_in_replies, content, *self._marks)
        opening, inside, closing = thought.groups()
        rest = _broken(self._starts_in_replies, content[thought.end() :], *self._marks)
        return opening + self.broken(inside) + closing + rest


def _strings(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            yield from item
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)


def _broken(starts: re.Pattern[str], text: str, mark: str = BREAK, written: str = _WRITTEN) -> str:
    parts, done = [], 0
    # The search continues one character after a start: one such text may begin inside another.
    while (found := starts.search(text, done)) is not None:
        cut = found.start() + 1
        parts.append(text[done:cut])
        parts.append(mark if text[cut - 1] != BREAK else written)
        done = cut
    return "".join((*parts, text[done:])) if parts else text


def _start_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches where one of `texts` begins, or two characters of one at the end of the text.

    Built as a tree, so that a search takes as long for ten thousand texts as for ten.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile("|".join((BREAK, *_branches(tree, 0))))


def _branches(tree: dict[str, Any], depth: int) -> list[str]:
    branches = []
    for character, below in tree.items():
        rest = "" if "" in below else "|".join(_branches(below, depth + 1))
        branches.append(re.escape(character) + (f"(?:{rest})" if rest else ""))
    return [r"\Z", *branches] if depth >= 2 else branches
