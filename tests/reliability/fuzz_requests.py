"""Requests to every route: mostly what its schema allows, often with one thing wrong, some no JSON.

The schemas are those of the models that parse the requests. Fields that decide whether a request
gets any further (the model's name, the first message) are mostly right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import urlencode

from hypothesis import strategies as st
from pydantic import BaseModel

from api_proxy.messages_api.schemas import MessagesRequest
from api_proxy.request.schemas import ChatRequest
from api_proxy.responses_api.schemas import ResponsesRequest
from api_proxy.routes.feedback_api import FeedbackRequest
from api_proxy.routes.text_api import TextRequest
from tests.reliability.json_strategies import encoded, spoiled, strategy, texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One route, and what its body is parsed as; `is_form`: as a form of a page."""

    method: str
    path: str
    model: type[BaseModel] | None = None
    is_form: bool = False


ROUTES = (
    Route(method="POST", path="/v1/chat/completions", model=ChatRequest),
    Route(method="POST", path="/v1/completions", model=TextRequest),
    Route(method="POST", path="/v1/messages", model=MessagesRequest),
    Route(method="POST", path="/v1/messages/count_tokens", model=MessagesRequest),
    Route(method="POST", path="/v1/responses", model=ResponsesRequest),
    Route(method="POST", path="/v1/responses/input_tokens", model=ResponsesRequest),
    Route(method="POST", path="/v1/feedback", model=FeedbackRequest),
    Route(method="GET", path="/v1/responses/{response_id}"),
    Route(method="DELETE", path="/v1/responses/{response_id}"),
    Route(method="GET", path="/v1/responses/{response_id}/input_items"),
    Route(method="POST", path="/v1/responses/{response_id}/cancel"),
    Route(method="GET", path="/v1/hints"),
    Route(method="GET", path="/v1/hints/{hint_id}"),
    Route(method="DELETE", path="/v1/hints/{hint_id}"),
    Route(method="GET", path="/v1/models"),
    Route(method="GET", path="/v1/models/{name:path}"),
    Route(method="GET", path="/health"),
    Route(method="GET", path="/healthz"),
    Route(method="GET", path="/readyz"),
    Route(method="GET", path="/metrics"),
    Route(method="GET", path="/ui"),
    Route(method="GET", path="/ui/login"),
    Route(method="POST", path="/ui/login", is_form=True),
    Route(method="POST", path="/ui/logout", is_form=True),
    Route(method="GET", path="/ui/static/{name}"),
    Route(method="GET", path="/ui/now"),
    Route(method="GET", path="/ui/now/events"),
    Route(method="GET", path="/ui/sessions"),
    Route(method="GET", path="/ui/sessions/{session_id}"),
    Route(method="GET", path="/ui/training"),
    Route(method="GET", path="/ui/turns/{turn_id}"),
    Route(method="POST", path="/ui/turns/{turn_id}/teacher", is_form=True),
    Route(method="GET", path="/ui/review"),
    Route(method="POST", path="/ui/review/{turn_id}", is_form=True),
    Route(method="GET", path="/v1/runs/current/review"),
    Route(method="POST", path="/v1/runs/current/review/{turn_id}"),
    Route(method="GET", path="/ui/memory"),
    Route(method="GET", path="/ui/memory/{hint_id}"),
    Route(method="POST", path="/ui/memory/{hint_id}/delete", is_form=True),
    Route(method="GET", path="/v1/runs/current/sessions"),
    Route(method="GET", path="/v1/runs/current/sessions/{session_id}"),
    Route(method="GET", path="/v1/runs/current/now"),
    Route(method="GET", path="/v1/runs/current/training"),
    Route(method="GET", path="/v1/runs/current/turns/{turn_id}"),
    Route(method="POST", path="/v1/runs/current/turns/{turn_id}/teacher"),
    Route(method="GET", path="/v1/runs/current/memory"),
    Route(method="GET", path="/v1/runs/current/memory/{hint_id}"),
)
_WITH_BODY = tuple(route for route in ROUTES if route.model is not None)
_GOOD_START = {"role": "user", "content": "What is the weather in Karo?"}
_HEADERS = ("x-session-id", "x-turn-type", "x-session-done", "x-teacher", "authorization", "accept")
_QUERY = (
    *("limit", "after", "order", "include", "stream", "starting_after"),
    *("state", "reason", "tenant", "version", "user", "teacher", "since", "until", "status"),
    *("signal", "candidate", "first", "last"),
)
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


@dataclass(slots=True, kw_only=True)
class FuzzRequest:
    """One request. `earlier` chooses among the responses so far where an id is wanted."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)
    earlier: int = 0


@cache
def _bodies(model: type[BaseModel]) -> st.SearchStrategy[Any]:
    bodies = strategy(model.model_json_schema(by_alias=True))
    return st.one_of(bodies, bodies, spoiled(bodies))


def _likely(body: Any, name: str, value: Any, roll: int) -> None:
    if isinstance(body, dict) and roll:
        body[name] = value


@st.composite
def _json_body(draw: st.DrawFn, model: type[BaseModel]) -> bytes:
    body = draw(_bodies(model))
    if model is FeedbackRequest:
        _likely(body, "response_id", "{response_id}", draw(st.integers(0, 9)))
    else:
        _likely(body, "model", "policy", draw(st.integers(0, 9)))
    if isinstance(body, dict):
        if isinstance(body.get("messages"), list) and draw(st.booleans()):
            body["messages"] = [_GOOD_START, *body["messages"]]
        for name in ("audio", "prediction", "suffix", "echo", "best_of", "functions"):
            if draw(st.integers(0, 30)) == 0:
                body[name] = draw(texts)
    return encoded(body)


_form_body = st.one_of(
    st.dictionaries(st.sampled_from(["key", "csrf", "candidate", "other"]), texts, max_size=3).map(
        lambda fields: urlencode(fields, errors="surrogatepass").encode()
    ),
    st.binary(max_size=100),
)


@st.composite
def requests(draw: st.DrawFn) -> FuzzRequest:
    """Any request."""
    route = draw(st.one_of(st.sampled_from(_WITH_BODY), st.sampled_from(ROUTES)))
    path = route.path.replace("{name:path}", draw(st.sampled_from(["policy", "other/one", "%00"])))
    path = path.replace("{name}", draw(st.sampled_from(["pages.css", "pages.js", "%00", "..%2fx"])))
    for part in ("{hint_id}", "{session_id}"):
        path = path.replace(part, draw(st.sampled_from(["hint_1", "%00", "é" * 300])))
    request = FuzzRequest(method=route.method, path=path, earlier=draw(st.integers(0, 10**6)))
    if route.model is not None:
        request.body = draw(_json_body(route.model))
    if route.is_form:
        request.body = draw(_form_body)
        request.headers["content-type"] = "application/x-www-form-urlencoded"
    roll = draw(st.integers(0, 19))
    if roll == 0:
        request.body = draw(st.binary(max_size=200))
    elif roll == 1:
        request.method = draw(st.sampled_from(_METHODS))
    elif roll == 2:
        request.path += draw(st.sampled_from(["/", "//", "/../x", "?a=b", "%2e%2e"]))
    for name in _HEADERS:
        if draw(st.integers(0, 9)) == 0:
            request.headers[name] = draw(
                st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=300)
            )
    if draw(st.integers(0, 9)) == 0:
        request.query = draw(st.dictionaries(st.sampled_from(_QUERY), texts, max_size=3))
    return request
