"""The bytes of single tokens, also of those that are only a part of a character.

Decoding such a token alone gives the replacement character, whose bytes are not its own. Byte-level
vocabularies write each byte as a character of their own, those with byte fallback as `<0xE2>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Decoder(Protocol):
    """What is needed from a `rollout_bridge.rendering.rendering.Rendering`."""

    tokenizer: Any

    def decode(self, ids: Sequence[int]) -> str: ...


class TokenBytes:
    """The bytes of the tokens of one tokenizer."""

    def __init__(self, decoder: Decoder) -> None:
        self.decode = decoder.decode
        self._tokenizer = decoder.tokenizer

    def bytes_of(self, token: int) -> bytes | None:
        """A token's own bytes; None if its vocabulary does not show them."""
        text = self.decode([token])
        if _REPLACEMENT not in text:
            return text.encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return None
        if found := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(found[1], 16)])
        table = _byte_of_character()
        if not all(character in table for character in piece):
            return None
        return bytes(table[character] for character in piece)


@cache
def _byte_of_character() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable ones as they are, the others from U+0100
    on, in their order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}
