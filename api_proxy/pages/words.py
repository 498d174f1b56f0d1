"""Values in words for people: times, numbers, and text in which every character is visible."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime
from typing import Any

from records.hints.types import RehearsalBlock
from records.reading.drop_words import BLOCK_WORDS

_UNSEEN = {
    number: f"⟨U+{number:04X}⟩"
    for number in (*range(0x3000), 0xFEFF, *range(0xFFF9, 0xFFFC), *range(0xE0000, 0xE0080))
    if unicodedata.category(chr(number)) in ("Cc", "Cf", "Zl", "Zp") and chr(number) not in "\n\t"
}
_UNSEEN.update({number: f"⟨U+{number:04X}⟩" for number in range(0xD800, 0xE000)})


def seen(value: Any) -> Any:
    """Text in which every character is visible; other values as they are. Half a surrogate pair,
    which cannot be sent, is spelled out too.
    """
    return value.translate(_UNSEEN) if isinstance(value, str) else value


def day_and_time(seconds: float | None) -> str:
    """Unix seconds in words (UTC); "never" for None."""
    if seconds is None:
        return "never"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def span(seconds: float | None) -> str:
    """A time span in the unit that fits; "" for None."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def number(value: float | None) -> str:
    """With four digits; "not measured" for None."""
    return "not measured" if value is None else f"{value:.4g}"


def not_practised(block: str) -> str:
    """Why a hint is not practised, with the name under which the documentation has it."""
    return f"{BLOCK_WORDS[RehearsalBlock(block)]} ({block})"
