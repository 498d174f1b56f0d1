"""Turns sampled ids into what the client sees, as they arrive: text, reasoning, tool calls.

A `ReplyAssembler` is fed ids as the engine samples them and returns what may be sent now. It holds
back incomplete UTF-8, whitespace that may turn out to be trailing, the start of what may become a
stop string or a marker, and a tool call until its name is known; its arguments are then sent as
they are written. (Families that do not write calls as JSON: each call when it is complete.) The
rendering's own parse of all ids is authoritative: it decides where text begins and, at the end,
what the whole reply is. Between these moments text is decoded incrementally, and only what was not
sent yet is looked at, so that a long reply takes linear time. An unstreamed reply goes through the
same `finish`, so both are the same.

Independent of HTTP and the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Literal, Protocol
from uuid import uuid4

import numpy as np

from api_proxy.reply.incremental_text import REPLACEMENT, IncrementalText
from api_proxy.reply.reply import CallDelta, Delta, Reply, SentCall, call_id
from records.types import Ids
from rollout_bridge.rendering.call_text import CallReader

_MARKERS = ("<think>", "</think>", "<tool_call>")
"""Text that may open another part of a reply if the tokenizer has no single token for it."""
_PARSED_PER_ID, _PARSED_FREELY = 64, 4096
"""A growing reply is parsed again while no more ids than this (for each id, and in addition) have
been parsed.
"""


class Call(Protocol):
    """A parsed tool call (`rollout_bridge.rendering.parsed_reply.ParsedCall`)."""

    @property
    def name(self) -> str: ...
    @property
    def arguments_json(self) -> str: ...
    @property
    def ok(self) -> bool: ...
    @property
    def raw(self) -> str: ...
    @property
    def open_at(self) -> int | None: ...


class Parsed(Protocol):
    """A parsed reply (`rollout_bridge.rendering.parsed_reply.ParsedReply`)."""

    @property
    def content(self) -> str: ...
    @property
    def reasoning(self) -> str | None: ...
    @property
    def tool_calls(self) -> Sequence[Call]: ...


class Parser(Protocol):
    """What is needed from a `rollout_bridge.rendering.rendering.Rendering`."""

    tokenizer: Any
    stop_token_ids: tuple[int, ...]

    def decode(self, ids: Sequence[int]) -> str: ...
    def parse(
        self, response_ids: Ids, tools: Sequence[dict[str, Any]], prompt_ids: Ids | None
    ) -> Parsed: ...


class Detokenizer:
    """A parser, with a memory of what is slow to ask repeatedly; one serves all replies.

    `marker_ids` are tokens that are not plain text: each may open another part of a reply.
    """

    def __init__(self, parser: Parser) -> None:
        self.parser = parser
        self.stop_token_ids = frozenset(parser.stop_token_ids)
        self.marker_ids = frozenset(parser.tokenizer.added_tokens_decoder)
        self._token_texts: dict[int, str] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; that of a single token is remembered."""
        if len(ids) != 1:
            return self.parser.decode(ids) if ids else ""
        token = ids[0]
        if token not in self._token_texts:
            self._token_texts[token] = self.parser.decode(ids)
        return self._token_texts[token]


class _OpenCall:
    """The text of a call that is being written, from the id at `start` on."""

    def __init__(self, decode: Callable[[Sequence[int]], str], start: int) -> None:
        self.start = start
        self.reader = CallReader()
        self._text = IncrementalText(decode)

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; returns what is now certain of the arguments."""
        return self.reader.push(self._text.push(ids))


@dataclass(slots=True)
class _PartlySentCall:
    """The part of a call that was sent."""

    id: str
    name: str
    arguments: StringIO = field(default_factory=StringIO)

    def sent(self) -> SentCall:
        return SentCall(id=self.id, name=self.name, arguments=self.arguments.getvalue())


class ReplyAssembler:
    """One reply in the making.

    `forced_ids` open the reply without having been sampled; `prompt_ids` do not contain them.
    Without `allow_calls` (tool_choice "none") the text of a call is content. Calls are named after
    the turn, so that they lead back to it. After `finish`, `mismatched` tells whether text was sent
    that contradicts the final parse.

    A stop string ends the reply wherever the policy writes it, and is never shown. In a call, it
    discards the call; therefore, with stop strings, calls are held back until they are complete. A
    call that the policy left open when it ended by itself is text, unless a part of it was sent
    already: then it stays a call (`Reply.has_open_call`).
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        prompt_ids: Ids,
        tools: Sequence[dict[str, Any]] = (),
        stop: Sequence[str] = (),
        forced_ids: Sequence[int] = (),
        allow_calls: bool = True,
        turn_id: str | None = None,
    ) -> None:
        self.mismatched = False
        self._detokenizer = detokenizer
        self._prompt_ids = prompt_ids
        self._tools = tools
        self._stop = tuple(stop)
        self._forced_ids = tuple(forced_ids)
        self._allow_calls = allow_calls
        self._turn_id = turn_id or uuid4().hex
        self._ids: list[int] = []
        self._unseen: list[int] = []
        """Ids since the last parse, while another one is due."""
        self._num_parsed = 0
        self._text = IncrementalText(detokenizer.decode)
        self._mode: Literal["probe", "content", "reasoning", "calls"] = "probe"
        self._pending = ""
        """What follows the content or reasoning that was sent, while text is only decoded, not
        parsed.
        """
        self._is_stopped = False
        """Whether a stop string came: nothing after it is shown."""
        self._content = StringIO()
        self._reasoning = StringIO()
        self._calls: list[_PartlySentCall] = []
        self._open: _OpenCall | None = None
        if forced_ids:
            self.push(forced_ids)

    def push(self, ids: Sequence[int]) -> list[Delta]:
        """Add sampled ids; returns what may be sent now. Ids from a stop token on are ignored."""
        fresh = self._until_stop(ids)
        if not fresh or self._is_stopped:
            return []
        self._ids.extend(fresh)
        new = self._text.push(fresh)
        if self._mode in ("content", "reasoning") and not self._detokenizer.marker_ids.isdisjoint(
            fresh
        ):
            self._mode = "probe"
        if self._mode in ("content", "reasoning"):
            self._pending += new
            if self._mode == "content" or "</think>" not in self._pending:
                return self._go_on_with_text()
            self._mode = "probe"
        if self._mode == "calls" and not self._unseen and not self._may_end_a_call(fresh):
            return self._go_on_with_call(fresh)
        return self._probe_in_time(fresh)

    def finish(
        self, response_ids: Sequence[int], matched_stop: str | None = None
    ) -> tuple[list[Delta], Reply]:
        """What is left to send, and the whole reply. `response_ids` are all ids sampled.

        `matched_stop` is the stop string that ended the reply, if one did. Works without a push
        before it, too.
        """
        sampled = self._until_stop(response_ids)
        is_ended = len(sampled) < len(response_ids)
        self._ids = [*self._forced_ids, *sampled]
        parsed = self._parse()
        reasoning, is_cut = self._cut_reasoning(parsed, matched_stop)
        calls = [] if is_cut else self._calls_before_stop(parsed.tool_calls, matched_stop)
        sendable, shown = [], []
        for index, call in enumerate(calls):
            is_left_open = call.open_at is not None and is_ended and index >= len(self._calls)
            is_call = self._allow_calls and call.name and not is_left_open
            sendable += [call] if is_call else []
            shown += [] if is_call else [call.raw]
        content = "" if is_cut else "\n".join(text for text in (parsed.content, *shown) if text)
        end = self._stop_position(content, matched_stop)
        self.mismatched |= not content[:end].startswith(self._content.getvalue())
        deltas = self._send_reasoning(reasoning) + self._send_content(content[:end])
        if end is None:
            deltas += self._send_calls(sendable)
        self.mismatched |= len(self._calls) != (len(sendable) if end is None else 0)
        reply = Reply(
            content=self._content.getvalue(),
            reasoning=self._reasoning.getvalue() or None,
            tool_calls=tuple(call.sent() for call in self._calls),
            has_open_call=bool(self._calls and sendable and sendable[-1].open_at is not None),
        )
        return deltas, reply

    def _cut_reasoning(self, parsed: Parsed, matched_stop: str | None = None) -> tuple[str, bool]:
        """The reasoning up to a stop string, and whether there was one: the reply ends there."""
        reasoning = parsed.reasoning or ""
        is_last = not parsed.content and not parsed.tool_calls
        end = self._stop_position(reasoning, matched_stop if is_last else None)
        return reasoning[:end], end is not None

    def _calls_before_stop(self, calls: Sequence[Call], matched_stop: str | None) -> list[Call]:
        """The calls before a stop string, without the one that contains it."""
        kept: list[Call] = []
        for call in calls:
            is_cut = call.open_at is not None and matched_stop is not None
            if is_cut or any(stop in call.raw for stop in self._stop):
                break
            kept.append(call)
        return kept

    def _until_stop(self, ids: Sequence[int]) -> list[int]:
        stops = self._detokenizer.stop_token_ids
        for position, token in enumerate(ids):
            if token in stops:
                return list(ids[:position])
        return list(ids)

    def _parse(self) -> Parsed:
        ids = np.asarray(self._ids, dtype=np.int32)
        return self._detokenizer.parser.parse(ids, self._tools, self._prompt_ids)

    def _may_end_a_call(self, fresh: Sequence[int]) -> bool:
        """Whether the parser should look again: at a marker token if a call is open, else at a
        ">".
        """
        if self._open is not None:
            return not self._detokenizer.marker_ids.isdisjoint(fresh)
        return ">" in self._detokenizer.decode(fresh)

    def _probe_in_time(self, fresh: Sequence[int]) -> list[Delta]:
        """Probe, unless too much has been parsed: a reply full of markers would be parsed for each
        of them. The ids then wait for later ones.
        """
        self._unseen.extend(fresh)
        if self._num_parsed > _PARSED_PER_ID * len(self._ids) + _PARSED_FREELY:
            return []
        unseen, self._unseen = self._unseen, []
        self._num_parsed += len(self._ids)
        return self._probe(unseen)

    def _probe(self, fresh: Sequence[int]) -> list[Delta]:
        """Let the parser decide what the ids so far are, and which part of the reply continues."""
        parsed = self._parse()
        reasoning = parsed.reasoning or ""
        if parsed.tool_calls and reasoning and "</think>" not in self._text.text:
            # An end of thinking that is still to come would turn these calls into reasoning.
            self._mode = "probe"
            return []
        reasoning, is_cut = self._cut_reasoning(parsed)
        if is_cut:
            return self._send_reasoning(reasoning)
        if parsed.tool_calls:
            self._mode = "calls"
            end = self._stop_position(parsed.content)
            deltas = self._send_reasoning(reasoning) + self._send_content(parsed.content[:end])
            return deltas if end is not None else deltas + self._probed(parsed.tool_calls, fresh)
        if parsed.content:
            deltas = self._send_reasoning(reasoning)
            deltas += self._send_content(self._certain(parsed.content))
            self._follow("content", parsed.content, self._content.getvalue())
            return deltas
        if reasoning:
            deltas = self._send_reasoning(self._certain(reasoning))
            self._follow("reasoning", reasoning.lstrip(), self._reasoning.getvalue())
            return deltas
        return []

    def _follow(self, mode: Literal["content", "reasoning"], parsed: str, sent: str) -> None:
        """From here on decode instead of parsing, if the decoded text ends with the parsed text."""
        decoded = self._text.text
        tail = parsed.rstrip(REPLACEMENT).rstrip()
        if tail and decoded.rstrip().endswith(tail) and tail.startswith(sent):
            self._mode = mode
            self._pending = decoded[len(decoded.rstrip()) - len(tail) + len(sent) :]

    def _go_on_with_text(self) -> list[Delta]:
        """Send what is certain of `_pending`. A stop string or marker always begins in it, because
        the beginning of one is never sent.
        """
        new = self._certain(self._pending)
        if self._mode == "reasoning":
            new = new.rstrip()
        self._is_stopped = self._stop_position(self._pending) is not None
        self._pending = self._pending[len(new) :]
        if not new:
            return []
        if self._mode == "content":
            self._content.write(new)
            return [Delta(content=new)]
        self._reasoning.write(new)
        return [Delta(reasoning=new)]

    def _probed(self, calls: Sequence[Call], fresh: Sequence[int]) -> list[Delta]:
        """Send what more ids cannot change of `calls`: the last may still be incomplete."""
        last = calls[-1]
        settled = list(calls) if last.ok and last.open_at is None else list(calls[:-1])
        settled = self._calls_before_stop(settled, None)
        deltas = self._send_calls([call for call in settled if self._allow_calls and call.name])
        if last.open_at is None or not self._allow_calls or self._stop:
            self._open = None
            return deltas
        if self._open is None or self._open.start != last.open_at:
            self._open = _OpenCall(self._detokenizer.decode, last.open_at)
            fresh = self._ids[last.open_at :]
        return deltas + self._go_on_with_call(fresh)

    def _go_on_with_call(self, fresh: Sequence[int]) -> list[Delta]:
        """Send what `fresh` adds to the call that is being written."""
        if self._open is None:
            return []
        is_new = self._open.reader.name is None
        arguments = self._open.push(fresh)
        name = self._open.reader.name
        if name is None:
            return []
        deltas = [self._begin_call(name)] if is_new else []
        return deltas + self._send_arguments(len(self._calls) - 1, arguments)

    def _send_calls(self, calls: Sequence[Call]) -> list[Delta]:
        """Send what was not sent yet of `calls`, which are complete."""
        deltas = []
        for index, call in enumerate(calls):
            if index == len(self._calls):
                deltas.append(self._begin_call(call.name))
            name, arguments = self._calls[index].name, self._calls[index].arguments.getvalue()
            if call.name != name or not call.arguments_json.startswith(arguments):
                self.mismatched = True
                continue
            deltas += self._send_arguments(index, call.arguments_json[len(arguments) :])
        return deltas

    def _begin_call(self, name: str) -> Delta:
        call = _PartlySentCall(call_id(self._turn_id, len(self._calls)), name)
        self._calls.append(call)
        return Delta(call=CallDelta(index=len(self._calls) - 1, id=call.id, name=name))

    def _send_arguments(self, index: int, arguments: str) -> list[Delta]:
        if not arguments:
            return []
        self._calls[index].arguments.write(arguments)
        return [Delta(call=CallDelta(index=index, arguments=arguments))]

    def _send_reasoning(self, reasoning: str) -> list[Delta]:
        """Send what `reasoning` has beyond what was sent."""
        new = _beyond(self._reasoning, reasoning.strip())
        return [Delta(reasoning=new)] if new else []

    def _send_content(self, text: str) -> list[Delta]:
        """Send what `text` has beyond what was sent."""
        new = _beyond(self._content, text)
        return [Delta(content=new)] if new else []

    def _certain(self, content: str) -> str:
        """The part of unfinished content that more ids cannot change."""
        end = self._stop_position(content)
        return content[:end] if end is not None else held_back(content, (*_MARKERS, *self._stop))

    def _stop_position(self, content: str, matched_stop: str | None = None) -> int | None:
        """Where a stop string cuts `content`, or None.

        The parser strips the whitespace around content, and with it perhaps part of the stop string
        that the engine matched.
        """
        found = [at for stop in self._stop if (at := content.find(stop)) >= 0]
        if found:
            return min(found)
        if matched_stop and not self._calls:
            for text in (matched_stop.rstrip(), matched_stop.strip()):
                if text and content.endswith(text):
                    return len(content) - len(text)
        return None


def _beyond(sent: StringIO, text: str) -> str:
    """What `text` has beyond what was sent, noted as sent; "" if it does not begin with that."""
    known = sent.getvalue()
    if not text.startswith(known):
        return ""
    new = text[len(known) :]
    sent.write(new)
    return new


def held_back(text: str, markers: Sequence[str]) -> str:
    """`text` without an end that more text could change."""
    text = text.rstrip(REPLACEMENT)
    keep = len(text)
    for marker in markers:
        if marker[0] not in text[-len(marker) :]:
            continue
        for length in range(min(len(marker) - 1, len(text)), 0, -1):
            if text.endswith(marker[:length]):
                keep = min(keep, len(text) - length)
                break
    return text[:keep].rstrip()
