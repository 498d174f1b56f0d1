"""The message for an unknown name: what it was and what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown_name(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """A ValueError that names the nearest valid name, or all of them where none is near."""
    names = sorted(known)
    close = get_close_matches(str(name), names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
    return ValueError(f"unknown {kind} {name!r}; {hint}")
