"""`/v1/feedback`: what somebody says about a response, linked to its turn by the response's id, or
a session's outcome.

It reads and checks feedback and reports what became of it, which the store decides
(records/feedback/feedback_writes.py). Nothing is kept here: if the store does not answer, the reply
is 503, and the client may send the same again.
"""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from api_proxy.access.admission import body_of, count_refusal
from api_proxy.access.callers import caller_of
from api_proxy.config import ProxyConfig
from api_proxy.errors import ApiError, body_too_large, invalid, store_unavailable
from api_proxy.turns import TurnService
from records.errors import StoreConflict, StoreError
from records.feedback.feedback import Feedback, KeptFeedback
from records.feedback.feedback_writes import TooMuchFeedback
from records.names import Consent

router = APIRouter()
logger = logging.getLogger(__name__)

_OTHER_BYTES = 16_384
"""Bytes of a body besides its texts."""
_RESPONSE_ID = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)?([0-9a-f]{32})")


class FeedbackRequest(BaseModel):
    """The body; unknown fields are refused, since feedback in one would be lost unnoticed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    response_id: str | None = None
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    session_outcome: Annotated[float, Field(ge=0, le=1)] | None = None
    id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    text: str | None = None
    correction: str | None = None
    score: float | None = None
    range: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    thumbs: Literal["up", "down"] | None = None


@router.post("/v1/feedback")
async def add(request: Request) -> dict[str, Any]:
    """Link feedback to a turn; the reply tells what became of it."""
    service: TurnService = request.app.state.service
    try:
        config = service.config
        raw = await body_of(request, partial(_check_length, config), config.body_timeout_s)
        fields = parsed(service.request_limits.read(raw), config.max_feedback_chars)
        caller = caller_of(request)
        if caller.consent is not Consent.TRAIN:
            raise _no_consent()
        if fields.session_outcome is not None:
            return await _outcome(service, caller.scope, fields)
        kept = await _add(service, caller.scope, fields)
    except ApiError as error:
        count_refusal(service, error)
        if error.status in (404, 409) and error.code is not None:
            service.metrics.feedback.labels(error.code).inc()
            logger.warning("feedback was refused: %s", error.code)
        raise
    service.metrics.requests.labels("200").inc()
    service.metrics.feedback.labels(kept.outcome.value if kept.is_new else "duplicate").inc()
    return {
        "id": f"fb_{kept.feedback_id}",
        "object": "feedback",
        "created": int(kept.created_at),
        "response_id": fields.response_id,
        "outcome": kept.outcome.value,
        "reason": kept.reason,
        "duplicate": not kept.is_new,
    }


def _check_length(config: ProxyConfig, num_bytes: int) -> None:
    """Two texts are read, and each of their characters may be escaped. Raises ApiError 413."""
    most = min(config.max_body_bytes, 2 * 12 * config.max_feedback_chars + _OTHER_BYTES)
    if num_bytes > most:
        raise body_too_large(most)


def parsed(body: dict[str, Any], max_chars: int) -> FeedbackRequest:
    """The request whose fields are `body`. Raises ApiError 400."""
    for name in body:
        if name not in FeedbackRequest.model_fields:
            raise invalid(f"Unknown field '{name[:100]}'.", name[:100], "unknown_field")
    try:
        fields = FeedbackRequest.model_validate(body)
    except ValidationError as error:
        fault = error.errors(include_input=False, include_context=False, include_url=False)[0]
        param = str(fault["loc"][0])
        code = "missing_required_parameter" if fault["type"] == "missing" else "invalid_value"
        raise invalid(f"Invalid value for '{param}': {fault['msg']}.", param, code) from None
    for name in ("text", "correction"):
        value: str | None = getattr(fields, name)
        if value is not None and len(value) > max_chars:
            message = f"'{name}' has {len(value)} characters; at most {max_chars} are read."
            raise invalid(message, name, "feedback_too_long")
    if fields.session_outcome is not None:
        _check_outcome(fields)
        return fields
    if fields.session_id is not None:
        raise invalid("'session_id' goes with 'session_outcome'.", "session_id")
    if fields.response_id is None:
        message = "Field 'response_id' is required."
        raise invalid(message, "response_id", "missing_required_parameter")
    _check_score(fields)
    has_score = fields.score is not None or fields.thumbs is not None
    if not (_said(fields.text) or _said(fields.correction) or has_score):
        message = "The feedback is empty: give 'text', 'correction', 'score' or 'thumbs'."
        raise invalid(message, "text", "empty_feedback")
    return fields


def _check_outcome(fields: FeedbackRequest) -> None:
    if (fields.response_id is None) == (fields.session_id is None):
        message = "Give 'session_id', or the 'response_id' of one of its responses."
        raise invalid(message, "session_id", "missing_required_parameter")
    for name in ("correction", "score", "range", "thumbs", "id"):
        if getattr(fields, name) is not None:
            message = f"'{name}' is about a response, 'session_outcome' about a session: send two."
            raise invalid(message, name)


def _check_score(fields: FeedbackRequest) -> None:
    if fields.score is not None and fields.thumbs is not None:
        raise invalid("Give 'score' or 'thumbs', not both.", "thumbs")
    if (fields.score is None) != (fields.range is None):
        message = "'score' and 'range' belong together; 'range' is [lowest, highest]."
        raise invalid(message, "range")
    if fields.score is None or fields.range is None:
        return
    low, high = fields.range
    # Written so that infinite bounds, which leave no scale, fail too.
    if not 0 < high - low < float("inf"):
        raise invalid("'range' must be [lowest, highest], the first one smaller.", "range")
    if not low <= fields.score <= high:
        raise invalid("'score' lies outside its 'range'.", "score")


def _no_consent() -> ApiError:
    message = "This key's requests are not trained on, so feedback changes nothing; none was kept."
    return ApiError(403, message, code="no_consent")


def _said(text: str | None) -> str | None:
    """The text without blanks around it; None if nothing is left."""
    return (text or "").strip() or None


def feedback_of(fields: FeedbackRequest) -> Feedback:
    """A checked request in the form that the store takes."""
    score, score_range = fields.score, fields.range
    if fields.thumbs is not None:
        score, score_range = (1.0 if fields.thumbs == "up" else -1.0), [-1.0, 1.0]
    return Feedback(
        text=_said(fields.text),
        correction=_said(fields.correction),
        score=score,
        score_range=None if score_range is None else (score_range[0], score_range[1]),
        is_thumb=fields.thumbs is not None,
        external_id=fields.id,
    )


async def _outcome(service: TurnService, scope: str, fields: FeedbackRequest) -> dict[str, Any]:
    """Store a session's outcome."""
    assert fields.session_outcome is not None
    turn_id = None
    if fields.response_id is not None:
        match = _RESPONSE_ID.fullmatch(fields.response_id)
        if match is None:
            raise _unknown(fields.response_id)
        turn_id = match[1]
    store = service.deps.store
    try:
        session_id = await store.session_of(scope, session=fields.session_id, turn_id=turn_id)
        _check_complete(service, scope, session_id, turn_id)
        kept = await store.add_outcome(
            scope,
            fields.session_outcome,
            _said(fields.text),
            session=fields.session_id,
            turn_id=turn_id,
        )
    except StoreConflict as error:
        message = f"Another outcome was given before: {error}."
        raise ApiError(409, message, param="session_outcome", code="outcome_known") from None
    except StoreError as error:
        raise store_unavailable(service.config.retry_after_s) from error
    if kept is None:
        if fields.response_id is not None:
            raise _unknown(fields.response_id)
        message = f"No session {(fields.session_id or '')[:100]!r} was found."
        raise ApiError(404, message, param="session_id", code="session_not_found")
    service.metrics.requests.labels("200").inc()
    service.metrics.feedback.labels("session_outcome" if kept.is_new else "duplicate").inc()
    return {
        "object": "feedback",
        "created": int(kept.created_at),
        "session_id": kept.session_id,
        "session_outcome": kept.value,
        "outcome": "kept",
        "reason": None,
        "duplicate": not kept.is_new,
    }


def _check_complete(
    service: TurnService, scope: str, session_id: str | None, turn_id: str | None
) -> None:
    """An outcome covers all turns of its session: each must be stored already. Raises ApiError."""
    for turn in service.in_flight.values():
        if turn.scope == scope and (turn.turn_id == turn_id or turn.session_id == session_id):
            message = "A response of the session is not complete yet; send its outcome after that."
            raise ApiError(409, message, param="session_outcome", code="response_in_progress")
    if service.spool.is_waiting:
        # Its last turn may still be waiting to be stored.
        raise store_unavailable(service.config.retry_after_s)


async def _add(service: TurnService, scope: str, fields: FeedbackRequest) -> KeptFeedback:
    assert fields.response_id is not None, "checked with the body"
    match = _RESPONSE_ID.fullmatch(fields.response_id)
    if match is None:
        raise _unknown(fields.response_id)
    try:
        kept = await service.deps.store.add_feedback(scope, match[1], feedback_of(fields))
    except StoreConflict:
        message = "This 'id' was used for other feedback; give each feedback its own."
        raise ApiError(409, message, param="id", code="feedback_id_taken") from None
    except TooMuchFeedback as error:
        raise invalid(f"No more feedback is accepted: {error}.", code="too_much_feedback") from None
    except StoreError as error:
        raise store_unavailable(service.config.retry_after_s) from error
    if kept is None:
        turn = service.in_flight.get(match[1])
        if turn is not None and turn.scope == scope:
            message = "The response is not complete yet; send the feedback after its end."
            raise ApiError(409, message, param="response_id", code="response_in_progress")
        if service.spool.is_waiting:
            # Its turn may still be waiting to be stored.
            raise store_unavailable(service.config.retry_after_s)
        raise _unknown(fields.response_id)
    return kept


def _unknown(response_id: str) -> ApiError:
    message = f"No response with id {response_id[:100]!r} was found."
    return ApiError(404, message, param="response_id", code="response_not_found")
