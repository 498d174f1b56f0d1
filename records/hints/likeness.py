"""How alike two texts are, by their words alone. It knows no hints and no store."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

_WORD = re.compile(r"\w+")


def likeness(text: str, others: Sequence[str]) -> list[float]:
    """How alike `text` is to each of `others`, in [0, 1]: the weight of the pieces of words that
    both have, over that of all pieces of either.

    Pieces are three letters, so that "temperatures" is like "temperature". Pieces that few texts
    have weigh more than those that most have, by log(1 + texts / texts that have it): "the" and
    "use" do not tell texts apart.
    """
    pieces = [_pieces(one) for one in (text, *others)]
    counts = Counter(piece for one in pieces for piece in one)
    weights = {piece: math.log(1 + len(pieces) / count) for piece, count in counts.items()}

    def weight(of: Iterable[str]) -> float:
        return sum(weights[piece] for piece in of)

    own = pieces[0]
    return [weight(own & one) / weight(own | one) if own or one else 0.0 for one in pieces[1:]]


def _pieces(text: str) -> frozenset[str]:
    words = (f" {word} " for word in words_of(text))
    return frozenset(word[at : at + 3] for word in words for at in range(len(word) - 2))


def words_of(text: str) -> frozenset[str]:
    """The words of a text, regardless of case."""
    return frozenset(_WORD.findall(text.casefold()))


def overlap(first: frozenset[str], second: frozenset[str]) -> float:
    """Words in both over words in either, in [0, 1]; 0 without any."""
    either = first | second
    return len(first & second) / len(either) if either else 0.0
