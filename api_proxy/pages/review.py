"""*Review*: hints of the judge that wait for a person, who approves, edits or rejects them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from api_proxy.access.admission import body_of
from api_proxy.access.callers import caller_of
from api_proxy.errors import ApiError, body_too_large, invalid
from api_proxy.pages.login_routes import checked_form
from api_proxy.pages.rendering import json_reply, page
from api_proxy.pages.sessions import shown_message
from api_proxy.routes.hints_api import answered, committed, page_size, scope_of
from api_proxy.turns import TurnService
from records.errors import StoreConflict
from records.feedback.reviews import HintDecision, HintReview, Proposal

router = APIRouter()

Cursor = Annotated[str | None, Query()]

_MOST_CHARS = 4000
"""For a hint that a person writes."""
_MOST_BYTES = 12 * _MOST_CHARS + 1024
_NOBODY = "Somebody without a key"
"""The author if there are no keys."""


_TEXT = StringConstraints(strip_whitespace=True, min_length=1, max_length=_MOST_CHARS)


class DecisionRequest(BaseModel):
    """What a person decides; `judged_at` is that of the hint that they saw. `hint` is its new text,
    if any.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    approve: bool
    judged_at: float
    hint: Annotated[str, _TEXT] | None = None


@router.get("/ui/review")
async def review_page(request: Request, after: Cursor = None, limit: str = "10") -> Response:
    """The hints that wait, those of the newest turns first."""
    found = await _waiting(request, after, limit)
    more = {"after": found["last_id"], "limit": limit}
    return await page(
        request,
        "review.html.jinja",
        hints=found["data"],
        decisions=found["decisions"],
        next=urlencode(more) if found["has_more"] else None,
        most_chars=_MOST_CHARS,
    )


@router.get("/v1/runs/current/review")
async def review_json(request: Request, after: Cursor = None, limit: str = "10") -> Response:
    """The same as JSON."""
    return json_reply(await _waiting(request, after, limit))


@router.post("/ui/review/{turn_id}")
async def decide_by_form(request: Request, turn_id: str) -> Response:
    """Approve or reject through the page's form. Text that equals what was shown approves the hint
    unchanged: a page shows invisible characters by their names.
    """
    fields = await checked_form(request, 2 * _MOST_BYTES)  # the text as it was shown, and as it is
    text, shown = (fields.get(name, "").replace("\r\n", "\n") for name in ("hint", "shown"))
    answers = {"approve": True, "reject": False}
    if (answer := fields.get("decision", "")) not in answers:
        raise invalid("'decision' must be approve or reject.", "decision")
    decision = _checked(
        {
            "approve": answers[answer],
            "judged_at": _number(fields.get("judged_at", "")),
            "hint": None if text == shown or not answers[answer] else text,
        }
    )
    await _decide(request, turn_id, decision)
    return RedirectResponse("/ui/review", status_code=303)


@router.post("/v1/runs/current/review/{turn_id}")
async def decide(request: Request, turn_id: str) -> dict[str, Any]:
    """Approve or reject: `{"approve": true, "judged_at": ..., "hint": "other words"}`."""
    service: TurnService = request.app.state.service

    def check(num_bytes: int) -> None:
        if num_bytes > _MOST_BYTES:
            raise body_too_large(_MOST_BYTES)

    raw = await body_of(request, check, service.config.body_timeout_s)
    review = await _decide(request, turn_id, _checked(service.request_limits.read(raw)))
    return {
        "object": "review",
        "turn_id": review.turn_id,
        "decision": review.decision.value,
        "proposed": review.proposed,
        "hint": review.hint,
        "author": review.author,
        "created": int(review.created_at),
    }


async def _waiting(request: Request, after: str | None, limit: str) -> dict[str, Any]:
    service: TurnService = request.app.state.service
    store, scope, number = service.deps.store, scope_of(request), page_size(limit)
    found = await answered(service, store.proposals(scope=scope, limit=number + 1, after=after))
    made = await answered(service, store.review_decisions(scope))
    shown = found[:number]
    return {
        "object": "list",
        "data": [_shown(one) for one in shown],
        "last_id": shown[-1].turn_id if shown else None,
        "has_more": len(found) > number,
        "decisions": {decision.value: times for decision, times in made.items()},
    }


def _shown(one: Proposal) -> dict[str, Any]:
    """A hint that waits, as JSON."""
    return {
        **asdict(one),
        "asked": shown_message(one.asked),
        "answer": shown_message(one.answer),
    }


async def _decide(request: Request, turn_id: str, decision: DecisionRequest) -> HintReview:
    """Store the decision. Raises ApiError 404, 409 or 503."""
    service: TurnService = request.app.state.service
    store, key = service.deps.store, caller_of(request).key
    hint = decision.hint
    if hint is not None:
        written = [{"role": "user", "content": hint}]
        [clean] = await answered(service, store.redacted_messages(written))
        hint = str(clean["content"])
    decided = HintDecision(
        turn_id=turn_id,
        judged_at=decision.judged_at,
        is_approved=decision.approve,
        hint=hint,
        author=_NOBODY if key is None else key.name or key.key_id,
    )

    async def stored() -> HintReview | None:
        try:
            return await store.review(decided, scope_of(request))
        except StoreConflict as error:
            raise ApiError(409, str(error), code="not_reviewable") from error

    review = await committed(service, stored())
    if review is None:
        message = f"No turn with id {turn_id[:100]!r} was found."
        raise ApiError(404, message, param="turn_id", code="turn_not_found")
    service.metrics.reviews.labels(review.decision.value).inc()
    return review


def _checked(fields: dict[str, Any]) -> DecisionRequest:
    """Raises ApiError 400."""
    try:
        return DecisionRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])[:100] if first["loc"] else None
        raise invalid(f"'{name}': {first['msg']}.", name) from None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
