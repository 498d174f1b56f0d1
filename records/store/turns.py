"""The store's methods for turns: what is recorded of a request and of what follows it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from records.errors import StoreUnavailable, UnknownTurn
from records.feedback import feedback_writes
from records.feedback.feedback import Feedback, KeptFeedback
from records.messages import EchoChange, Message
from records.search import indexing
from records.search.indexing import RefusedText, WaitingTurn
from records.spill import spilled
from records.spill.spilled import Addition
from records.store.base import StoreBase
from records.tables import loading
from records.turns import echoes
from records.turns import turn_writes as turns
from records.types import CapturedTurn, Ids, TurnRecord

logger = logging.getLogger(__name__)

_SHORT_PROMPT = 4_096
"""Ids of a prompt that is made into rows without a thread."""


def say_refused(refused: RefusedText) -> None:
    """Log that the text of a turn cannot be indexed."""
    logger.error(
        "turn %s is not searched: its text cannot be indexed (%s: %s)",
        refused.turn_id,
        refused.reason.value,
        refused.detail,
    )


class TurnStore(StoreBase):
    """Storing turns, and loading them by id."""

    async def turn_tokens(self, turn_id: str) -> tuple[Ids, Ids]:
        """(prompt ids [P], response ids [R]). Raises UnknownTurn."""
        return await self.read(loading.turn_tokens, turn_id=turn_id)

    async def record_turn(
        self, turn: CapturedTurn, *, scope: str, parent_length: int | None = None
    ) -> None:
        """Store a turn as awaiting_next_state, or as dropped with its reason; durable on return.

        `parent_length` is how many ids prompt and response of its token parent have, if the caller
        knows: that saves a look-up. Raises ValueError if the turn is not dropped but cannot train
        (no temperature, tokens or version, or a non-finite log-prob), names an unknown session or
        token parent, or does not share the ids that it claims; StoreConflict if its id is taken.
        """
        turn = await self.redacted_turn(turn, scope)
        now = self._clock()
        if len(turn.prompt_ids) <= _SHORT_PROMPT and self.redactor.is_short(turn.messages):
            prepared = turns.prepare(turn, scope=scope, now=now)
        else:
            # For a long history, this would block the event loop for too long.
            prepared = await asyncio.to_thread(turns.prepare, turn, scope=scope, now=now)
        if turn.token_parent_id is not None and turn.num_shared_ids != parent_length:
            await self._check_shared(turn, turn.token_parent_id)
            prepared = replace(prepared, is_compared=True)
        await self.writer.run_bulk(turns.record_op, prepared, "record")

    async def _check_shared(self, turn: CapturedTurn, parent_id: str) -> None:
        """Compare ids if only part of the parent is shared (else the checksum is compared)."""
        total = await self.read(turns.token_count, turn_id=parent_id)
        if total is None or turn.num_shared_ids == total:
            return
        prompt_ids, response_ids = await self.turn_tokens(parent_id)
        turns.check_shared_part(turn, prompt_ids, response_ids)

    async def take_in(self, addition: Addition) -> bool:
        """Store what a request adds (turn, next state, session), all or nothing.

        Returns whether its turn is new; adding it again changes nothing. Raises as `record_turn`.
        """
        addition = await self.redact(spilled.redacted, addition, self.redactor)
        prepared = await asyncio.to_thread(spilled.prepare, addition)
        return await self.writer.run_bulk(spilled.take_in_op, prepared, "take_in")

    async def request_echo(self, scope: str, turn_id: str) -> dict[str, Any] | None:
        """The part of its request that a client of this scope may read again; None if nothing."""
        return await self.read(echoes.load, scope=scope, turn_id=turn_id)

    async def erase_request_echo(self, scope: str, turn_id: str) -> bool:
        """Keep clients from reading this request again; False if none could."""
        return await self.write(echoes.erase_op, scope=scope, turn_id=turn_id)

    async def set_next_state(
        self, turn_id: str, next_state: list[Message], echo_changes: Sequence[EchoChange] = ()
    ) -> bool:
        """Give a turn its next state: awaiting_next_state or dropped(no_next_state) -> judging.
        `echo_changes` is what the client had changed in its answer.

        A turn that was judged by feedback alone is judged again, unless the trainer has it. False,
        and nothing changes, for any other turn: a turn gets one next state.
        """
        if not next_state:
            raise ValueError(f"turn {turn_id}: a next state has at least one message")
        next_state = await self.redacted_messages(next_state)
        wanted = turns.NextState(
            turn_id=turn_id,
            messages=next_state,
            now=self._clock(),
            echo_changes=",".join(echo_changes) or None,
        )
        return await self.writer.run_bulk(turns.set_next_state_op, wanted, "set_next_state")

    async def add_feedback(self, scope: str, turn_id: str, said: Feedback) -> KeptFeedback | None:
        """Add feedback to a turn; None if this scope has no such turn.

        The same feedback again (by its external id, or by equal content) changes nothing. Raises
        StoreConflict if its external id names other feedback, TooMuchFeedback.
        """
        [message] = await self.redacted_messages([said.message()])
        new = feedback_writes.NewFeedback(
            scope=scope,
            turn_id=turn_id,
            external_id=said.external_id,
            message=message,
            reward=said.reward,
            now=self._clock(),
        )
        return await self.write(feedback_writes.add_op, new=new)

    async def turn(self, turn_id: str) -> TurnRecord | None:
        """A turn by id."""
        try:
            return (await self.turns([turn_id]))[0]
        except UnknownTurn:
            return None

    async def has_turn(self, turn_id: str) -> bool:
        """Whether a turn is stored."""
        return await self.read(turns.token_count, turn_id=turn_id) is not None

    async def turns(self, turn_ids: Sequence[str]) -> list[TurnRecord]:
        """Turns by id, in this order. Raises UnknownTurn."""
        return await self.read(loading.load_turns, turn_ids=turn_ids)

    async def index_texts(
        self, limit: int, on_refused: Callable[[RefusedText], None] = say_refused
    ) -> int:
        """Make the texts of up to `limit` turns findable; returns how many were waiting. A text
        that cannot be indexed is left out for good, and `on_refused` is called. Raises StoreError
        if the database itself is in trouble; then all of them go on waiting.
        """
        try:
            texts = await self.read(indexing.waiting_texts, limit=limit)
            if texts:
                await self.write(indexing.index_op, texts=texts)
            return len(texts)
        except Exception as error:
            if indexing.refusal_of(error, "") is None:
                raise
        turns = await self.read(indexing.waiting_turns, limit=limit)
        for one in turns:
            await self._index_alone(one, on_refused)
        return len(turns)

    async def _index_alone(
        self, turn: WaitingTurn, on_refused: Callable[[RefusedText], None]
    ) -> None:
        try:
            texts = await self.read(indexing.words_of_turns, waiting=[turn])
            await self.write(indexing.index_op, texts=texts)
        except Exception as error:
            refused = indexing.refusal_of(error, turn.turn_id)
            if refused is None:
                raise
            if await self._refuse(turn):
                on_refused(refused)

    async def _refuse(self, turn: WaitingTurn) -> bool:
        try:
            return await self.write(indexing.refuse_op, turn=turn)
        except SQLAlchemyError as error:
            raise StoreUnavailable(
                "no text can be indexed, not even a single word: are the tables turn_words* as the "
                "migrations made it?"
            ) from error
