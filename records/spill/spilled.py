"""What one request adds to the store, as bytes of a spill file and back, and how it is taken in.

A request adds its turn, the next state that it carries for an earlier turn, or both. They are
taken in together, in one transaction that may be repeated: nothing is written twice.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from sqlalchemy import Connection, select

from records.messages import EchoChange, Message
from records.names import DropReason, TurnType
from records.privacy.redaction import Redactor
from records.tables.arrays import (
    experts_from_bytes,
    experts_to_bytes,
    ids_from_bytes,
    ids_to_bytes,
    logprobs_from_bytes,
    logprobs_to_bytes,
)
from records.tables.columns import dump_json
from records.tables.models import TurnRow
from records.turns import sessions
from records.turns import turn_writes as turns
from records.turns.turn_writes import NextState, PreparedTurn
from records.types import CapturedTurn, TurnIdentity, VersionSpan

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """What one request adds. `next_state` belongs to the turn `answers`; `echo_changes` is what the
    client changed in that turn's answer (`records.messages.EchoChange`).

    `session_name` is what the client calls its session, `continues` the turn that it says it
    continues. With `is_deferred` the request was answered without asking the store where it
    belongs: that has yet to be determined.
    """

    scope: str
    created_at: float
    turn: CapturedTurn | None = None
    answers: str | None = None
    next_state: tuple[Message, ...] = ()
    echo_changes: tuple[EchoChange, ...] = ()
    session_name: str | None = None
    continues: str | None = None
    is_deferred: bool = False

    @property
    def what(self) -> str:
        """Its most important part, for counters: `turn` or `next_state`."""
        return "next_state" if self.turn is None else "turn"


_ARRAYS = {
    "prompt_ids": (ids_to_bytes, ids_from_bytes),
    "response_ids": (ids_to_bytes, ids_from_bytes),
    "rollout_logprobs": (logprobs_to_bytes, logprobs_from_bytes),
    "routed_experts": (experts_to_bytes, experts_from_bytes),
}


def encode(addition: Addition) -> bytes:
    """As bytes. The turn keeps its whole prompt: its token parent may never be stored."""
    values: dict[str, Any] = {
        field.name: getattr(addition, field.name) for field in fields(addition)
    }
    if addition.turn is not None:
        values["turn"] = _turn_values(addition.turn)
    return dump_json({"format": FORMAT, **values}).encode()


def _turn_values(turn: CapturedTurn) -> dict[str, Any]:
    values: dict[str, Any] = {field.name: getattr(turn, field.name) for field in fields(turn)}
    values |= {"token_parent_id": None, "num_shared_ids": 0}
    if turn.identity is not None:
        values["identity"] = [list(turn.identity.node_ids), turn.identity.fingerprint]
    values["version_spans"] = [[span.version, span.start, span.end] for span in turn.version_spans]
    for name, (to_bytes, _) in _ARRAYS.items():
        if values[name] is not None:
            values[name] = base64.b64encode(to_bytes(values[name])).decode()
    return values


def decode(payload: bytes) -> Addition:
    """Bytes of `encode`. Raises ValueError for those of another program."""
    try:
        values: dict[str, Any] = json.loads(payload)
        if values.pop("format") != FORMAT:
            raise ValueError("unknown format")
        turn = values.pop("turn")
        values["next_state"] = tuple(values["next_state"])
        values["echo_changes"] = tuple(values.get("echo_changes", ()))
        return Addition(turn=None if turn is None else _turn(turn), **values)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a spilled request: {type(error).__name__}") from error


def _turn(values: dict[str, Any]) -> CapturedTurn:
    reason, identity = values["drop_reason"], values.get("identity")
    for name, (_, from_bytes) in _ARRAYS.items():
        if values[name] is not None:
            values[name] = from_bytes(base64.b64decode(values[name]))
    spans = tuple(
        VersionSpan(version=version, start=start, end=end)
        for version, start, end in values["version_spans"]
    )
    changed = {
        "turn_type": TurnType(values["turn_type"]),
        "version_spans": spans,
        "drop_reason": None if reason is None else DropReason(reason),
        "identity": None if identity is None else _identity(*identity),
    }
    return CapturedTurn(**{**values, **changed})


def _identity(node_ids: list[str], fingerprint: str) -> TurnIdentity:
    return TurnIdentity(node_ids=tuple(node_ids), fingerprint=fingerprint)


def redacted(addition: Addition, redactor: Redactor) -> Addition:
    """The addition as it may be stored or spilled."""
    turn = addition.turn
    return replace(
        addition,
        turn=None if turn is None else redactor.turn(turn, addition.scope),
        next_state=tuple(redactor.messages(addition.next_state)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedAddition:
    """An addition with its turn as rows."""

    addition: Addition
    turn: PreparedTurn | None


def prepare(addition: Addition) -> PreparedAddition:
    """Raises ValueError as `turn_writes.prepare` does."""
    prepared = None
    if addition.turn is not None:
        prepared = turns.prepare(addition.turn, scope=addition.scope, now=addition.created_at)
    return PreparedAddition(addition=addition, turn=prepared)


def take_in_op(connection: Connection, added: Sequence[PreparedAddition]) -> list[bool]:
    """Write session, next state and turn of each; returns whether its turn is new.

    Raises ValueError and StoreConflict as `record_op` does.
    """
    return [_take_in(connection, one) for one in added]


def _take_in(connection: Connection, prepared: PreparedAddition) -> bool:
    addition, turn = prepared.addition, prepared.turn
    is_stored = turn is not None and _is_stored(connection, turn.turn["turn_id"])
    if is_stored and addition.is_deferred:
        # It was linked when it was stored; if it were linked again, it might answer another turn.
        return False
    if addition.answers is not None and addition.next_state:
        wanted = NextState(
            turn_id=addition.answers,
            messages=list(addition.next_state),
            now=addition.created_at,
            echo_changes=",".join(addition.echo_changes) or None,
        )
        turns.set_next_state_op(connection, [wanted])
    if turn is None or is_stored:
        return False
    row = turn.turn
    sessions.ensure_op(connection, row["scope"], None, row["session_id"], addition.created_at)
    parent = row["parent_turn_id"]
    if parent is not None and not _is_stored(connection, parent):
        turn = replace(turn, turn={**row, "parent_turn_id": None})
    turns.record_op(connection, [turn])
    return True


def _is_stored(connection: Connection, turn_id: str) -> bool:
    found = connection.scalar(select(TurnRow.turn_id).where(TurnRow.turn_id == turn_id))
    return found is not None
