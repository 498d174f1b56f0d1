"""Where a reasoning turns: the episodes of a response (ALGORITHMS 8.5).

An episode begins where a sentence begins with a discourse marker; long ones are cut at the ends of
sentences. It knows the texts of tokens, no tokenizer and no values.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_EPISODE_TOKENS = 256
DISCOURSE_MARKERS = (
    "wait",
    "hmm",
    "but",
    "however",
    "alternatively",
    "so",
    "therefore",
    "thus",
    "now",
    "next",
    "first",
    "second",
    "finally",
    "let me",
    "let's",
)
_WIDE_ENDS = ("。", "！", "？")
_ENDS = (".", "!", "?")


def episode_ends(
    pieces: Sequence[str],
    *,
    markers: Sequence[str] = DISCOURSE_MARKERS,
    max_tokens: int = MAX_EPISODE_TOKENS,
) -> list[int]:
    """Exclusive ends of the episodes of a response, given the text of each of its tokens [T].

    An episode of more than `max_tokens` tokens is cut after the last sentence that fits, or at
    `max_tokens` where none does. The last end is T; no tokens, no ends. Raises ValueError for
    `max_tokens` below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens of an episode must be at least 1, got {max_tokens}")
    sentences = sentence_starts(pieces)
    lowered = tuple(marker.lower() for marker in markers)
    turns = [i for i in sentences if i > 0 and _begins_with(pieces, i, lowered)]
    ends: list[int] = []
    start = 0
    for end in [*turns, len(pieces)]:
        while end - start > max_tokens:
            fitting = [i for i in sentences if start < i <= start + max_tokens]
            start = fitting[-1] if fitting else start + max_tokens
            ends.append(start)
        if end > start:
            ends.append(end)
        start = end
    return ends


def sentence_starts(pieces: Sequence[str]) -> list[int]:
    """The tokens with which a sentence or a line begins; white space belongs to what precedes."""
    starts: list[int] = []
    text = ""
    for index, piece in enumerate(pieces):
        if piece.strip() and (not text.strip() or _is_ended(text, piece)):
            starts.append(index)
        # Enough of the past to see an end behind white space.
        text = piece if piece.strip() else text + piece
    return starts


def _is_ended(before: str, piece: str) -> bool:
    stripped = before.rstrip()
    if "\n" in before[len(stripped) :] or stripped.endswith(_WIDE_ENDS):
        return True
    # A full stop inside a number or a name is followed by no space.
    return stripped.endswith(_ENDS) and (before != stripped or piece[0].isspace())


def _begins_with(pieces: Sequence[str], index: int, markers: Sequence[str]) -> bool:
    longest = max(map(len, markers), default=0)
    text = ""
    # One character more than the marker says whether its word ends there.
    while index < len(pieces) and len(text) <= longest:
        text = (text + pieces[index]).lstrip().lower()
        index += 1
    return any(
        text.startswith(marker) and not text[len(marker) : len(marker) + 1].isalnum()
        for marker in markers
    )
