"""The models of this endpoint: one policy under its own name and its aliases.

Listed in OpenAI's shape, or in Anthropic's for clients that send `anthropic-version`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request

from api_proxy.config import ProxyConfig
from api_proxy.errors import model_not_found
from api_proxy.request.schemas import MAX_CHOICES, MAX_STOPS
from api_proxy.turns import TurnService

router = APIRouter()
ANY_NAME = "*"
"""An alias that stands for every name that is not too long."""
_MAX_NAME = 256
"""Characters of a name: each chunk of a stream repeats it."""


def names_of(config: ProxyConfig) -> list[str]:
    """The names that can be listed, the model's own first."""
    aliases = [name for name in config.model_aliases if name != ANY_NAME]
    return list(dict.fromkeys([config.model_name, *aliases]))


def check_name(config: ProxyConfig, name: str) -> None:
    """Raises ApiError 404 unless the model is served under this name."""
    names = names_of(config)
    is_any = ANY_NAME in config.model_aliases and len(name) <= _MAX_NAME
    if name not in names and not is_any:
        raise model_not_found(name, names)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The one model served here, once for each of its names."""
    service: TurnService = request.app.state.service
    names = names_of(service.config)
    listed = [await _model(request, name) for name in names]
    if not is_anthropic(request.headers):
        return {"object": "list", "data": listed}
    return {"data": listed, "has_more": False, "first_id": names[0], "last_id": names[-1]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """The model by name."""
    service: TurnService = request.app.state.service
    check_name(service.config, name)
    return await _model(request, name)


def is_anthropic(headers: Mapping[str, str]) -> bool:
    """Whether the client speaks Anthropic's API."""
    return "anthropic-version" in headers


async def _model(request: Request, name: str) -> dict[str, Any]:
    """A model, and the limits of requests for it; the context is null until it is known."""
    service: TurnService = request.app.state.service
    started = request.app.state.started
    if is_anthropic(request.headers):
        created = datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds")
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": created.replace("+00:00", "Z"),
            "max_input_tokens": await service.context_length(),
            "max_tokens": service.config.max_output_tokens,
        }
    config = service.config
    context_length = await service.context_length()
    return {
        "id": name,
        "object": "model",
        "created": int(started),
        "owned_by": "policy",
        # SGLang's and vLLM's name for it, in addition to our own.
        "max_model_len": context_length,
        "limits": {
            "context_length": context_length,
            "max_output_tokens": config.max_output_tokens,
            "max_messages": config.max_messages,
            "max_tools": config.max_tools,
            "max_parts": config.max_parts,
            "max_tool_calls": config.max_tool_calls,
            "max_text_bytes": service.request_limits.max_text_bytes,
            "max_schema_bytes": config.max_schema_bytes,
            "max_json_values": config.max_json_values,
            "max_json_depth": config.max_json_depth,
            "max_body_bytes": config.max_body_bytes,
            "max_choices": MAX_CHOICES,
            "max_stops": MAX_STOPS,
        },
    }
