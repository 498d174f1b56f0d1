"""A text that is put together piece by piece."""

from __future__ import annotations


class GrowingText:
    """Adding takes time in the piece alone: `str` would be copied whole for each of its pieces."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        """Append a piece."""
        self._pieces.append(piece)

    @property
    def text(self) -> str:
        """All pieces."""
        if len(self._pieces) != 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]
