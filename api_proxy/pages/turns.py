"""*Turn*: why each token of an answer was trained as it was. The prompt, the answer token by token,
votes and hints, the hinted prompt next to the original, and what the teacher would have said.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Any, cast

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from api_proxy.errors import ApiError, engine_unavailable, invalid
from api_proxy.pages.login_routes import checked_form
from api_proxy.pages.rendering import json_reply, page
from api_proxy.pages.sessions import explained, shown_message
from api_proxy.pages.tokens import (
    MOST_SHOWN,
    Signal,
    coloured,
    prompt_change,
    signals_of,
    token_texts,
)
from api_proxy.routes.hints_api import answered, scope_of
from api_proxy.turns import TurnService
from records.feedback.reviews import HintReview
from records.reading.diagnosis import SessionFacts
from records.reading.drop_words import REJECTION_WORDS
from records.reading.whole_turns import WholeTurn
from records.types import UNSCORED, Score, Verdict, Vote
from rollout_bridge.engine.errors import EngineError
from rollout_bridge.engine.types import Generation, SamplingParams

router = APIRouter()

Text = Annotated[str, Query(max_length=100)]

_MOST_PROMPT = 8_000
"""How many of a prompt's last ids are shown as text. Decoding does not let other threads run."""
_MOST_MESSAGES = 100
"""How many of a prompt's last messages are shown."""
_AROUND = 60
"""Ids that are shown before and after what a hint changes."""
_MOST_ANSWER = 512
"""Tokens that the teacher is asked for."""
_DEFAULT = "advantage"


@router.get("/ui/turns/{turn_id}")
async def turn_page(
    request: Request, turn_id: str, signal: Text = _DEFAULT, candidate: Text = "0"
) -> Response:
    """One turn."""
    return await _turn_page(request, turn_id, signal, candidate)


@router.post("/ui/turns/{turn_id}/teacher")
async def ask_teacher(request: Request, turn_id: str) -> Response:
    """The page of a turn, with an answer of the teacher under its hint."""
    fields = await checked_form(request)
    candidate = fields.get("candidate", "0")
    return await _turn_page(request, turn_id, _DEFAULT, candidate, asks_teacher=True)


@router.get("/v1/runs/current/turns/{turn_id}")
async def turn_json(request: Request, turn_id: str, candidate: Text = "0") -> Response:
    """The same as JSON."""
    session, whole = await _found(request, turn_id)
    service: TurnService = request.app.state.service
    review = await answered(service, service.deps.store.review_of(turn_id))
    score = _score(whole, candidate)

    def shown() -> Response:
        ids = whole.turn.response_ids
        tokens = {
            "ids": ids.tolist(),
            "texts": token_texts(ids, _decode(service)),
            "signals": {one.name: one.values for one in _signals(whole, score)},
        }
        turn = _turn(service, session, whole, score)
        return json_reply({**turn, "review": _review(review), "tokens": tokens})

    return await asyncio.to_thread(shown)


@router.post("/v1/runs/current/turns/{turn_id}/teacher")
async def ask_teacher_json(request: Request, turn_id: str, candidate: Text = "0") -> Response:
    """What the teacher answers now to the hinted prompt."""
    _, whole = await _found(request, turn_id)
    return json_reply(await _teacher_answer(request, whole, _score(whole, candidate)))


async def _turn_page(
    request: Request, turn_id: str, signal: str, candidate: str, *, asks_teacher: bool = False
) -> Response:
    session, whole = await _found(request, turn_id)
    service: TurnService = request.app.state.service
    review = await answered(service, service.deps.store.review_of(turn_id))
    score = _score(whole, candidate)
    signals = await asyncio.to_thread(_signals, whole, score)
    chosen = _chosen(signals, signal)
    answer = await _teacher_answer(request, whole, score) if asks_teacher else None

    def shown() -> dict[str, Any]:
        texts = token_texts(whole.turn.response_ids[:MOST_SHOWN], _decode(service))
        ids = whole.turn.response_ids[: len(texts)].tolist()
        return {
            "turn": _turn(service, session, whole, score),
            "tokens": coloured(texts, ids, signals, chosen),
            "cut_tokens": len(whole.turn.response_ids) - len(texts),
        }

    return await page(
        request,
        "turn.html.jinja",
        **await asyncio.to_thread(shown),
        review=_review(review),
        signals=signals,
        chosen=chosen,
        candidate=candidate,
        teacher_answer=answer,
        can_ask=service.deps.teacher is not None and score is not None,
    )


async def _found(request: Request, turn_id: str) -> tuple[SessionFacts, WholeTurn]:
    """Raises ApiError 404 for a turn that is not there, or is another tenant's."""
    service: TurnService = request.app.state.service
    found = await answered(service, service.deps.store.whole_turn(turn_id))
    if found is None or scope_of(request) not in (None, found[0].scope):
        raise ApiError(
            404,
            "There is no such turn. It may have been deleted.",
            param="turn_id",
            code="turn_not_found",
        )
    return found


def _turn(
    service: TurnService, session: SessionFacts, whole: WholeTurn, score: Score | None
) -> dict[str, Any]:
    """All that is shown about a turn besides its tokens."""
    turn, decode = whole.turn, _decode(service)
    [facts] = session.turns
    sampling = {name: value for name, value in turn.sampling.items() if value is not None}
    return {
        **explained(service, session, facts),
        "object": "turn",
        "session_id": session.session_id,
        "scope": session.scope,
        "turn_type": turn.turn_type.value,
        "parent_turn_id": turn.parent_turn_id,
        "finish_reason": turn.finish_reason,
        "sampling": sampling,
        "distribution_modified": turn.distribution_modified,
        "prompt_tokens": len(turn.prompt_ids),
        "response_tokens": len(turn.response_ids),
        "prompt": decode(turn.prompt_ids[-_MOST_PROMPT:].tolist()),
        "prompt_cut_tokens": max(len(turn.prompt_ids) - _MOST_PROMPT, 0),
        "earlier_messages": max(len(turn.messages) - _MOST_MESSAGES, 0),
        "messages": [shown_message(one) for one in turn.messages[-_MOST_MESSAGES:]],
        "tools": [_tool_name(one) for one in turn.tools],
        "response": shown_message(turn.response),
        "next_state": [shown_message(one) for one in turn.next_state],
        "verdict": None if whole.verdict is None else _verdict(whole.verdict),
        "candidates": [one.hint for one in whole.scores],
        "hinted": None if score is None else _hinted(whole, score, service),
        "samples": [
            {
                "version": one.version,
                "staleness": one.staleness,
                "advantage_mean": one.advantage_mean,
                "advantage_abs_max": one.advantage_abs_max,
                "created": one.created_at,
            }
            for one in whole.samples
        ],
        "weights": [asdict(span) for span in turn.version_spans],
    }


def _tool_name(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    return str(cast(dict[str, Any], function).get("name") if isinstance(function, dict) else tool)


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "hint": verdict.hint,
        "selection": verdict.selection,
        "judge": verdict.judge,
        "omitted_messages": verdict.num_omitted,
        "reward": verdict.reward,
        "votes": [_vote(one, verdict) for one in verdict.votes],
    }


def _review(review: HintReview | None) -> dict[str, Any] | None:
    return None if review is None else {**asdict(review), "decision": review.decision.value}


def _vote(vote: Vote, verdict: Verdict) -> dict[str, Any]:
    if vote.error is not None:
        said = f"failed: {vote.error}"
    elif vote.score is None:
        said = "abstained: its answer has no score"
    elif vote.score < 0:
        said = "against: nothing is learned in hindsight"
    elif vote.rejected is not None:
        said = f"for, but {REJECTION_WORDS[vote.rejected]}"
    elif verdict.hint is not None and vote.hint == verdict.hint:
        said = f"for, and its hint was selected ({verdict.selection})"
    else:
        said = "for"
    return {
        "index": vote.index,
        "score": vote.score,
        "said": said,
        "hint": vote.hint or None,
        "rejected": vote.rejected,
        "text": vote.text,
        "prompt_tokens": vote.prompt_tokens,
        "completion_tokens": vote.completion_tokens,
        "latency_s": vote.latency_s,
    }


def _hinted(whole: WholeTurn, score: Score, service: TurnService) -> dict[str, Any]:
    change = prompt_change(
        whole.turn.prompt_ids, score.hinted_prompt_ids, _decode(service), _AROUND
    )
    return {
        "hint": score.hint,
        "teacher": score.teacher,
        "teacher_version": None if score.teacher_version == UNSCORED else score.teacher_version,
        "prompt_tokens": len(score.hinted_prompt_ids),
        "change": change,
    }


async def _teacher_answer(
    request: Request, whole: WholeTurn, score: Score | None
) -> dict[str, Any]:
    """An answer to the hinted prompt, sampled now and stored nowhere."""
    service: TurnService = request.app.state.service
    teacher = service.deps.teacher
    if teacher is None or score is None:
        raise ApiError(
            409,
            "The teacher cannot be asked: "
            + (
                "this endpoint does not know it."
                if teacher is None
                else "no hinted prompt was made for this turn."
            ),
            code="no_teacher",
        )
    params = SamplingParams(
        temperature=1.0,  # the one at which it scores
        max_new_tokens=_MOST_ANSWER,
        stop_token_ids=tuple(service.deps.rendering.stop_token_ids),
    )
    try:
        said: Generation = await teacher.generate(score.hinted_prompt_ids, params)
    except EngineError as error:
        raise engine_unavailable(service.config.retry_after_s) from error
    return {
        "object": "teacher_answer",
        "hint": score.hint,
        "text": await asyncio.to_thread(_decode(service), said.output_ids.tolist()),
        "tokens": len(said.output_ids),
        "is_cut": said.finish_reason == "length",
    }


def _decode(service: TurnService) -> Any:
    return service.deps.rendering.decode


def _score(whole: WholeTurn, candidate: str) -> Score | None:
    """The score of the chosen candidate; None if nothing was scored."""
    if not (candidate.isascii() and candidate.isdigit() and len(candidate) < 4):
        raise invalid("'candidate' must be a whole number.", "candidate")
    if not whole.scores:
        return None
    if int(candidate) >= len(whole.scores):
        raise invalid(f"'candidate' must be below {len(whole.scores)}.", "candidate")
    return whole.scores[int(candidate)]


def _signals(whole: WholeTurn, score: Score | None) -> list[Signal]:
    sample = whole.samples[-1] if whole.samples else None
    return signals_of(whole.turn, score, sample, whole.trained_version)


def _chosen(signals: list[Signal], name: str) -> Signal:
    for one in signals:
        if one.name == name:
            return one
    raise invalid(f"'signal' must be one of {', '.join(one.name for one in signals)}.", "signal")
