"""Characters that are not seen, or that turn text around, are spelled out."""

from __future__ import annotations

import unicodedata
from typing import Any

_UNSEEN = {
    number: f"⟨U+{number:04X}⟩"
    for number in (*range(0x3000), 0xFEFF, *range(0xFFF9, 0xFFFC), *range(0xE0000, 0xE0080))
    if unicodedata.category(chr(number)) in ("Cc", "Cf", "Zl", "Zp") and chr(number) not in "\n\t"
}
_UNSEEN.update({number: f"⟨U+{number:04X}⟩" for number in range(0xD800, 0xE000)})


def seen(value: Any) -> Any:
    """Text in which every character is seen; other values as they are. Half a surrogate pair, which
    cannot be sent, is spelled out too.
    """
    return value.translate(_UNSEEN) if isinstance(value, str) else value
