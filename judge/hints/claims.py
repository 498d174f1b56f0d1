"""Claims of hints to examine, in the form that the claim loop expects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from records.hints.types import Examination, Hint, RehearsalBlock
from records.names import DropReason


class ClaimStore(Protocol):
    """What claims need from the store."""

    async def claim_hints(self, *, owner: str, limit: int, ttl_s: float) -> list[Hint]: ...
    async def extend_hint_claims(
        self, owner: str, hint_ids: Sequence[str], ttl_s: float
    ) -> object: ...
    async def release_hints(self, owner: str, hint_ids: Sequence[str]) -> object: ...
    async def commit_examination(self, owner: str, examination: Examination) -> bool: ...


@dataclass(frozen=True, slots=True)
class ClaimedHint:
    """A hint in the form that the claim loop expects."""

    hint: Hint

    @property
    def turn_id(self) -> str:
        """The hint's id."""
        return self.hint.hint_id


class HintClaims:
    """The memory's hints, with the methods by which the claim loop claims turns."""

    def __init__(self, store: ClaimStore) -> None:
        self._store = store

    async def claim(self, state: None, *, owner: str, limit: int, ttl_s: float):
        """Claim up to `limit` hints that nobody has examined."""
        found = await self._store.claim_hints(owner=owner, limit=limit, ttl_s=ttl_s)
        return [ClaimedHint(hint) for hint in found]

    async def extend_claims(self, owner: str, turn_ids: Sequence[str], ttl_s: float) -> object:
        """Hold claims for longer."""
        return await self._store.extend_hint_claims(owner, turn_ids, ttl_s)

    async def release(self, owner: str, turn_ids: Sequence[str]) -> object:
        """Give claims back."""
        return await self._store.release_hints(owner, turn_ids)

    async def drop(self, owner: str, turn_id: str, reason: DropReason, detail: str = "") -> bool:
        """Give up a hint that cannot be examined: it is not rehearsed."""
        return await self._store.commit_examination(owner, not_examined(turn_id, detail))


def not_examined(hint_id: str, detail: str) -> Examination:
    """The outcome for a hint that cannot be examined."""
    return Examination(hint_id=hint_id, block=RehearsalBlock.NOT_EXAMINED, detail=detail)
