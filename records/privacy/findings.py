"""Finds what a configuration looks for in a text, and writes marks in its place.

Overlapping findings become one, in one sweep after sorting them by their start. Text is read as it
is and with its JSON escapes undone (records/privacy/escapes.py). It does not know messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from records.config import Mode, RedactionConfig
from records.privacy.detectors import SECRETS, TOO_LONG, detectors
from records.privacy.escapes import Readings
from records.privacy.personal_data import PERSONAL
from records.privacy.text_view import Detector, View

DIGEST = "sha256:"
"""The prefix of the digest of an allowed text that should not be written out itself."""
_STRETCH = 8192
"""Findings in this many characters are sorted at once."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding at [start, end) of a text; `text` is its text with the escapes undone."""

    start: int
    end: int
    kind: str
    text: str


def modes(config: RedactionConfig) -> dict[str, Mode]:
    """The kinds that are looked for, and their modes; of several kinds the first one names a
    finding.
    """
    found: dict[str, Mode] = {
        **dict.fromkeys(SECRETS, config.secrets),
        **dict.fromkeys(PERSONAL, config.personal),
        **dict.fromkeys(config.patterns, "redact"),
        **config.kinds,
    }
    looked_for: dict[str, Mode] = {kind: mode for kind, mode in found.items() if mode != "off"}
    return {**looked_for, TOO_LONG: "redact"} if looked_for else {}


def digest(text: str) -> str:
    """The form that represents a text in `store.redaction.allow`."""
    hashed = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{DIGEST}{hashed[:32]}"


_SAMPLE = "+1 650 253 0000, DE89370400440532013000, 4111 1111 1111 1111, 536-90-4399"
"""Numbers for which some detectors import packages."""


class Finder:
    """Searches texts as one configuration asks. May be used from several threads."""

    def __init__(self, config: RedactionConfig) -> None:
        self.modes = modes(config)
        self._config = config
        self._allowed = frozenset(config.allow)
        self._detectors: dict[str, Detector] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the detectors are made: the first search imports packages for that."""
        return self._detectors is not None

    def find(self, text: str, pause: Callable[[], None]) -> tuple[list[Finding], list[Finding]]:
        """What is to be redacted and what is to be marked, each in order and without overlaps.

        `pause` is called again and again: there others may come first.
        """
        found: list[Finding] = []
        readings = Readings(text)
        for reading in readings:
            for start, end, kind in self._spans(reading, pause):
                found.append(Finding(*readings.origin(start, end), kind, reading[start:end]))
                pause()
        order = list(self.modes)
        cut = [one for one in found if self.modes[one.kind] == "redact"]
        marked = [one for one in found if self.modes[one.kind] == "mark"]
        return merged(cut, order), merged(marked, order)

    def _spans(self, text: str, pause: Callable[[], None]) -> Iterable[tuple[int, int, str]]:
        if self._detectors is None:
            known = detectors(self._config.patterns, self._config.phone_region)
            made = {kind: known[kind] for kind in self.modes if kind in known}
            for detector in made.values():
                list(detector(View(_SAMPLE)))
            self._detectors = made
        view = View(text)
        found = []
        for kind, detector in self._detectors.items():
            pause()
            for start, end in detector(view):
                pause()
                if start < end and not self._is_allowed(text[start:end]):
                    found.append((start, end, kind))
        return found

    def _is_allowed(self, text: str) -> bool:
        return bool(self._allowed) and (text in self._allowed or digest(text) in self._allowed)


def merged(findings: Iterable[Finding], order: Sequence[str]) -> list[Finding]:
    """Merge overlapping findings; the first of their kinds in `order` names the result. One sweep
    over them in the order of their starts.
    """
    rank: Mapping[str, int] = {kind: number for number, kind in enumerate(order)}
    kept: list[Finding] = []
    for finding in _sorted(findings):
        last = kept[-1] if kept else None
        if last is None or finding.start >= last.end:
            kept.append(finding)
            continue
        name = finding if rank[finding.kind] < rank[last.kind] else last
        kept[-1] = replace(name, start=last.start, end=max(last.end, finding.end))
    return kept


def _sorted(findings: Iterable[Finding]) -> Iterator[Finding]:
    """By start, the longer first. Sorted stretch by stretch: one call for all of a long text would
    block the interpreter for half a second.
    """
    stretches: dict[int, list[Finding]] = {}
    for finding in findings:
        stretches.setdefault(finding.start // _STRETCH, []).append(finding)
    for number in sorted(stretches):
        yield from sorted(stretches[number], key=lambda one: (one.start, -one.end))


def without(text: str, findings: Collection[Finding]) -> str:
    """The text with `[kind]` in place of each finding."""
    parts, position = [], 0
    for finding in findings:
        parts += [text[position : finding.start], _mark(text, finding)]
        position = finding.end
    return "".join([*parts, text[position:]])


def _quote_before(text: str, position: int) -> str:
    """A quote with as many backslashes as the one before it: it may be JSON within JSON."""
    end = text.rfind('"', max(position - 256, 0), position)
    start = end
    while start > 0 and text[start - 1] == "\\":
        start -= 1
    return text[start : end + 1] if end >= 0 else '"'


def _mark(text: str, finding: Finding) -> str:
    """`[kind]`, in quotes if it replaces a JSON number, so that the text is still JSON."""
    mark = f"[{finding.kind}]"
    if not finding.text.isdecimal():
        return mark
    before = text[max(finding.start - 8, 0) : finding.start].rstrip()[-1:]
    after = text[finding.end : finding.end + 8].lstrip()[:1]
    is_json = text[:64].lstrip()[:1] in ("{", "[")
    if is_json and before and before in ":[," and after and after in ",]}":
        quote = _quote_before(text, finding.start)
        return f"{quote}{mark}{quote}"
    return mark
