"""Names made letter by letter, in two disjoint parts: one to train on, one held out.

They have random letters, not syllables: a model that must copy names it has never seen must not get
by with a table of a few pieces. A name's part depends only on its letters, so no list has to be
kept.
"""

from __future__ import annotations

import random
import zlib

CONSONANTS = "bcdfghjklmnpqrstvwxz"
VOWELS = "aeiouy"
CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def is_held_out(name: str) -> bool:
    """Whether `name` belongs to the held-out quarter of all names."""
    return zlib.crc32(name.encode()) % 4 == 0


def random_name(rng: random.Random, *, held_out: bool) -> str:
    """A capitalised name of 4 to 7 letters from the wanted part."""
    while True:
        letters = []
        vowel = rng.random() < 0.4
        for _ in range(rng.randint(4, 7)):
            letters.append(rng.choice(VOWELS if vowel else CONSONANTS))
            vowel = rng.random() < (0.2 if vowel else 0.65)
        name = "".join(letters).capitalize()
        if is_held_out(name) == held_out:
            return name


def random_currency(rng: random.Random, *, held_out: bool) -> str:
    """Three capital letters from the wanted part."""
    while True:
        code = "".join(rng.choice(CAPITALS) for _ in range(3))
        if is_held_out(code) == held_out:
            return code


def random_code(rng: random.Random) -> str:
    """A booking code: a digit, two capital letters and a digit."""
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(2))
    return f"{rng.randint(1, 9)}{letters}{rng.randint(1, 9)}"
