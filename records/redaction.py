"""Takes secrets and personal data out of what is stored, so that nothing is judged or trained on.

Every message is looked at once on its way into the store. Sampled ids can not be redacted: other
ids would be tokens that the policy never saw. So a turn whose prompt, tools or response hold a
finding is stored without its tokens, its text redacted, as dropped (`sensitive`), while a next
state is redacted and judged. Conversations are told apart by the ids of their original messages
(hashes), so that the next request finds its turn all the same. The agent's own reply is untouched.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np

from records.columns import content_hash
from records.config import Mode, RedactionConfig
from records.detectors import PERSONAL, SECRETS, Detector, detectors
from records.messages import Message, fingerprint, path_ids
from records.names import DropReason
from records.types import CapturedTurn, TurnIdentity

_REMEMBERED = 20_000
"""Messages whose findings are known; a history is sent again with each request."""
_NO_TEXT = frozenset({"role", "type", "id", "tool_call_id"})
_NOTHING: Counter[str] = Counter()


class Redactor:
    """Finds and replaces by one configuration. May be used from several threads.

    `on_found(kind, mode, number)` is told of each finding, once for each distinct message.
    """

    def __init__(self, config: RedactionConfig) -> None:
        self._modes = _modes(config)
        self._config = config
        self._detectors: dict[str, Detector] | None = None
        self._known: OrderedDict[str, tuple[Any, Counter[str]]] = OrderedDict()
        self._lock = Lock()
        self.on_found: Callable[[str, Mode, int], None] = lambda kind, mode, number: None

    @property
    def is_active(self) -> bool:
        """Whether anything is looked for."""
        return bool(self._modes)

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """The messages without what is to be redacted; those without findings as they are."""
        return [self._looked_at(message)[0] for message in messages]

    def turn(self, turn: CapturedTurn, scope: str) -> CapturedTurn:
        """The turn as it may be stored, with its findings; one looked at before stays as it is."""
        if not self.is_active or turn.identity is not None or turn.findings is not None:
            return turn
        looked = [self._looked_at(message) for message in (*turn.messages, turn.response)]
        tools, in_tools = self._looked_at(turn.tools)
        echo, in_echo = self._looked_at(turn.request_echo)
        findings = sum((found for _, found in looked), in_tools + in_echo)
        if not any(self._modes[kind] == "redact" for kind in findings):
            return replace(turn, findings=dict(findings))
        nothing = np.empty(0, dtype=np.int32)
        return replace(
            turn,
            messages=[message for message, _ in looked[:-1]],
            response=looked[-1][0],
            tools=tools,
            request_echo=echo,
            prompt_ids=nothing,
            response_ids=nothing,
            rollout_logprobs=np.empty(0, dtype=np.float32),
            token_parent_id=None,
            num_shared_ids=0,
            routed_experts=None,
            drop_reason=turn.drop_reason or DropReason.SENSITIVE,
            findings=dict(findings),
            identity=TurnIdentity(
                node_ids=tuple(path_ids(scope, [*turn.messages, turn.response])),
                fingerprint=fingerprint(turn.response),
            ),
        )

    def _looked_at(self, value: Any) -> tuple[Any, Counter[str]]:
        if not self.is_active or not value:
            return value, _NOTHING
        key = content_hash(value)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is not None:
            clean, found = known
            return (value if clean is None else clean), found
        found: Counter[str] = Counter()
        clean = self._replaced(value, found)
        is_changed = any(self._modes[kind] == "redact" for kind in found)
        with self._lock:
            self._known[key] = (clean if is_changed else None, found)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        for kind, number in found.items():
            self.on_found(kind, self._modes[kind], number)
        return (clean if is_changed else value), found

    def _replaced(self, value: Any, found: Counter[str]) -> Any:
        if isinstance(value, str):
            return self._text(value, found)
        if isinstance(value, list):
            return [self._replaced(item, found) for item in value]
        if isinstance(value, dict):
            return {
                key: item if key in _NO_TEXT else self._replaced(item, found)
                for key, item in value.items()
            }
        return value

    def _text(self, text: str, found: Counter[str]) -> str:
        if text.startswith("data:"):  # an image: its letters say nothing
            return text
        spans = self._spans(text)
        for _, _, kind in spans:
            found[kind] += 1
        cut = [span for span in spans if self._modes[span[2]] == "redact"]
        return _without(text, cut) if cut else text

    def _spans(self, text: str) -> list[tuple[int, int, str]]:
        """Findings in their order; of two that overlap, the longer or earlier one."""
        if self._detectors is None:
            known = detectors(self._config.patterns, self._config.phone_region)
            self._detectors = {kind: known[kind] for kind in self._modes}
        spans = {
            (*span, kind) for kind, detector in self._detectors.items() for span in detector(text)
        }
        kept: list[tuple[int, int, str]] = []
        for span in sorted(spans, key=lambda span: (span[0] - span[1], span)):
            if all(span[1] <= other[0] or other[1] <= span[0] for other in kept):
                kept.append(span)
        return sorted(kept)


def _modes(config: RedactionConfig) -> dict[str, Mode]:
    """What is looked for, and what becomes of it."""
    modes: dict[str, Mode] = {
        **dict.fromkeys(SECRETS, config.secrets),
        **dict.fromkeys(PERSONAL, config.personal),
        **dict.fromkeys(config.patterns, "redact"),
        **config.kinds,
    }
    return {kind: mode for kind, mode in modes.items() if mode != "off"}


def _without(text: str, spans: list[tuple[int, int, str]]) -> str:
    parts, position = [], 0
    for start, end, kind in spans:
        parts += [text[position:start], f"[{kind}]"]
        position = end
    return "".join([*parts, text[position:]])
