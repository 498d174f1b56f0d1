"""*Sessions*: a list with filters, and one session as a conversation with its branches; each turn
with its state and the reason.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, TypeVar
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from api_proxy.access.callers import caller_of, tenant_scope
from api_proxy.errors import ApiError, invalid
from api_proxy.pages.rendering import json_reply, page
from api_proxy.routes.hints_api import answered, page_size, scope_of
from api_proxy.turns import TurnService
from records.messages import Message, content_text
from records.names import DropReason, TurnState
from records.reading.browsing import ListedSession, Place, Said, Wanted
from records.reading.diagnosis import SessionFacts, TurnFacts
from records.reading.explaining import explain
from records.reading.waiting_limits import WaitingLimits
from records.search.words import Excerpt, phrases_of

router = APIRouter()
E = TypeVar("E", bound=StrEnum)

Text = Annotated[str, Query(max_length=300)]


def _filters(
    text: Text = "",
    state: Text = "",
    reason: Text = "",
    tenant: Text = "",
    version: Text = "",
    user: Text = "",
    teacher: Text = "",
    since: Text = "",
    until: Text = "",
) -> dict[str, str]:
    """The filters of a list of sessions, as given."""
    return {
        "text": text,
        "state": state,
        "reason": reason,
        "tenant": tenant,
        "version": version,
        "user": user,
        "teacher": teacher,
        "since": since,
        "until": until,
    }


Filters = Annotated[dict[str, str], Depends(_filters)]
_MOST_TEXT = 4000
"""Characters of a message that the page of a session shows; the rest is in the turn."""


@router.get("/ui/sessions")
async def sessions_page(
    request: Request, filters: Filters, after: Text = "", limit: Text = "50"
) -> Response:
    """The sessions, newest first."""
    found = await _sessions(request, filters, after, limit)
    more = {name: value for name, value in filters.items() if value} | {"limit": limit}
    return await page(
        request,
        "sessions.html.jinja",
        found=found,
        filters=filters,
        states=list(TurnState),
        reasons=list(DropReason),
        is_admin=caller_of(request).is_admin,
        next=urlencode({**more, "after": found["next"]}) if found["next"] else None,
    )


@router.get("/v1/runs/current/sessions")
async def sessions_json(
    request: Request, filters: Filters, after: Text = "", limit: Text = "50"
) -> Response:
    """The same as JSON."""
    return json_reply(await _sessions(request, filters, after, limit))


@router.get("/ui/sessions/{session_id}")
async def session_page(
    request: Request, session_id: str, after: Text = "", limit: Text = "50"
) -> Response:
    """A session, from its first turn on."""
    found = await _session(request, session_id, after, limit)
    more = urlencode({"after": found["next"], "limit": limit}) if found["next"] else None
    return await page(request, "session.html.jinja", session=found, after=after, next=more)


@router.get("/v1/runs/current/sessions/{session_id}")
async def session_json(
    request: Request, session_id: str, after: Text = "", limit: Text = "50"
) -> Response:
    """The same as JSON."""
    return json_reply(await _session(request, session_id, after, limit))


async def _sessions(
    request: Request, filters: dict[str, str], after: str, limit: str
) -> dict[str, Any]:
    service: TurnService = request.app.state.service
    scope = scope_of(request)
    if filters["tenant"]:
        # Another tenant's sessions look like those of a tenant that does not exist.
        wanted_scope = tenant_scope(filters["tenant"])
        if scope not in (None, wanted_scope):
            nothing = {"object": "list", "data": [], "examined": 0, "next": None}
            return nothing | ({"not_indexed": 0, "not_indexable": 0} if filters["text"] else {})
        scope = wanted_scope
    wanted = Wanted(
        state=_member(TurnState, "state", filters["state"]),
        reason=_member(DropReason, "reason", filters["reason"]),
        version=_version(filters["version"]),
        user=filters["user"] or None,
        teacher=filters["teacher"] or None,
        since=_time("since", filters["since"]),
        until=_time("until", filters["until"]),
    )
    if filters["text"]:
        return await _found(service, scope, wanted, filters["text"], after, limit)
    found = await answered(
        service,
        service.deps.store.sessions_page(
            scope, wanted=wanted, after=_place(after), limit=page_size(limit)
        ),
    )
    following = found.next
    return {
        "object": "list",
        "data": [_listed(one) for one in found.sessions],
        "examined": found.num_examined,
        "next": following and f"{following.created_at!r}_{following.session_id}",
    }


async def _found(
    service: TurnService, scope: str | None, wanted: Wanted, query: str, after: str, limit: str
) -> dict[str, Any]:
    """Sessions by the text of their turns, that of the newest match first."""
    phrases = phrases_of(query)
    if not phrases:
        raise invalid("'text' must contain a word.", "text")
    if after and not (after.isascii() and after.isdigit() and len(after) < 19):
        raise invalid("'after' must be the 'next' of a page.", "after")
    found = await answered(
        service,
        service.deps.store.found_page(
            scope,
            wanted=wanted,
            phrases=phrases,
            after=int(after) if after else None,
            limit=page_size(limit),
        ),
    )
    return {
        "object": "list",
        "data": [
            _listed(one.session)
            | {"match": {"turn_id": one.turn_id, "excerpt": one.excerpt and _shown(one.excerpt)}}
            for one in found.sessions
        ],
        "examined": found.num_examined,
        "next": None if found.next is None else str(found.next),
        "not_indexed": found.num_waiting,
        "not_indexable": found.num_refused,
    }


def _shown(found: Excerpt) -> dict[str, str]:
    return {"before": found.before, "found": found.found, "after": found.after}


def _listed(session: ListedSession) -> dict[str, Any]:
    return {
        "id": session.session_id,
        "object": "session",
        "scope": session.scope,
        "name": session.name,
        "created": session.created_at,
        "last_seen": session.last_seen,
        "closed": session.close_reason,
        "turns_shown": sum(session.states.values()),
        "has_more_turns": session.is_cut,
        "states": {state.value: number for state, number in session.states.items()},
        "reasons": {reason.value: number for reason, number in session.reasons.items()},
    }


async def _session(request: Request, session_id: str, after: str, limit: str) -> dict[str, Any]:
    service: TurnService = request.app.state.service
    store, number = service.deps.store, page_size(limit)
    found = await answered(
        service, store.session_part(session_id, after=after or None, limit=number + 1)
    )
    if found is None or scope_of(request) not in (None, found.scope):
        raise ApiError(
            404,
            "There is no such session, or no such turn in it. It may have been deleted.",
            param="session_id",
            code="session_not_found",
        )
    turns = found.turns[:number]
    said = await answered(service, store.said([one.turn_id for one in turns]))
    shown = [_turn(service, found, one, said[one.turn_id]) for one in turns if one.turn_id in said]
    _mark_branches(shown)
    return {
        "id": found.session_id,
        "object": "session",
        "scope": found.scope,
        "name": found.name,
        "last_seen": found.last_seen,
        "closed": found.close_reason if found.closed_at is not None else None,
        "outcome": None if found.outcome is None else asdict(found.outcome),
        "trained_versions": sorted({one["version"] for one in shown if one["version"] is not None}),
        "turns": shown,
        "not_shown": len(turns) - len(shown),
        "next": turns[-1].turn_id if len(found.turns) > number else None,
    }


def explained(service: TurnService, session: SessionFacts, turn: TurnFacts) -> dict[str, Any]:
    """A turn's state and the reason, as `doctor` shows it."""
    limits = service.deps.waiting or WaitingLimits(
        batch_size=None, idle_timeout_s=service.config.idle_timeout_s, hint_wait_s=None
    )
    found = asdict(explain(turn, session, None, limits, service.deps.clock()))
    del found["count"]  # of the whole run: doctor counts it
    return found


def _turn(
    service: TurnService, session: SessionFacts, turn: TurnFacts, said: Said
) -> dict[str, Any]:
    return {
        **explained(service, session, turn),
        "turn_type": turn.turn_type.value,
        "finish_reason": turn.finish_reason,
        "parent_turn_id": said.parent_turn_id,
        "earlier_messages": said.num_earlier if said.parent_turn_id is None else 0,
        "messages": [shown_message(one) for one in said.messages],
        "response": shown_message(said.response),
    }


def _mark_branches(turns: list[dict[str, Any]]) -> None:
    """Mark each turn that is another answer, or another continuation, after the same turn."""
    seen: set[str] = set()
    previous: str | None = None
    for turn in turns:
        parent = turn["parent_turn_id"]
        turn["is_branch"] = parent is not None and parent in seen
        turn["follows_previous"] = parent is not None and parent == previous
        if parent is not None:
            seen.add(parent)
        previous = turn["turn_id"]


def shown_message(message: Message) -> dict[str, Any]:
    """A message, cut to what a page shows of it."""
    text = content_text(message.get("content"))
    calls = [
        {"name": call["function"]["name"], "arguments": str(call["function"]["arguments"])}
        for call in message.get("tool_calls") or ()
    ]
    lengths = [len(text), *(len(call["arguments"]) for call in calls)]
    for call in calls:
        call["arguments"] = call["arguments"][:_MOST_TEXT]
    return {
        "role": message["role"],
        "text": text[:_MOST_TEXT],
        "cut_characters": sum(max(length - _MOST_TEXT, 0) for length in lengths),
        "tool_calls": calls,
    }


def _member(kind: type[E], name: str, value: str) -> E | None:
    try:
        return kind(value) if value else None
    except ValueError:
        known = ", ".join(kind)
        raise invalid(f"'{name}' must be one of {known}.", name) from None


def _version(value: str) -> int | None:
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 16):
        raise invalid("'version' must be a whole number.", "version")
    return int(value)


def _time(name: str, value: str) -> float | None:
    """Unix seconds of a time in a form. Raises ApiError 400."""
    if not value:
        return None
    try:
        found = datetime.fromisoformat(value)
        return found.replace(tzinfo=found.tzinfo or UTC).timestamp()
    except (ValueError, OverflowError):
        raise invalid(f"'{name}' must be a time (UTC) such as 2026-05-01T13:00.", name) from None


def _place(after: str) -> Place | None:
    if not after:
        return None
    created_at, _, session_id = after.partition("_")
    try:
        return Place(created_at=float(created_at), session_id=session_id)
    except ValueError:
        raise invalid("'after' must be the 'next' of a page.", "after") from None
