"""A reply in the format of the Responses API: the response object around its items. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api_proxy.reply.wire import Usage
from api_proxy.responses_api.items import Body
from api_proxy.responses_api.tools import Namespaces, response_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A response apart from its reply.

    `tools` and `instructions` are those in the prompt; `echo` has the fields of the request that
    are repeated (`request.echo_of`).
    """

    turn_id: str
    model: str
    instructions: str | None
    tools: Sequence[Mapping[str, Any]]
    echo: Mapping[str, Any]

    @property
    def namespaces(self) -> Namespaces:
        """Those of the tools."""
        return self.echo.get("namespaces", {})

    def body(
        self,
        status: str,
        output: Sequence[Body] = (),
        usage: Body | None = None,
        error: Body | None = None,
    ) -> Body:
        """A `response`; `status` is in_progress, completed, incomplete or failed."""
        echo = self.echo
        text = dict(echo.get("text") or {})
        text["format"] = text.get("format") or {"type": "text"}
        return {
            "id": f"resp_{self.turn_id}",
            "object": "response",
            "created_at": echo["created_at"],
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": _incomplete(status),
            "instructions": self.instructions,
            "max_output_tokens": echo.get("max_output_tokens"),
            "metadata": echo.get("metadata") or {},
            "model": self.model,
            "output": list(output),
            "parallel_tool_calls": echo.get("parallel_tool_calls", True),
            "previous_response_id": echo.get("previous_response_id"),
            "prompt_cache_key": echo.get("prompt_cache_key"),
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": echo.get("safety_identifier"),
            "temperature": echo.get("temperature", 1.0),
            "text": text,
            "tool_choice": echo.get("tool_choice", "auto"),
            "tools": response_tools(self.tools, self.namespaces),
            "top_logprobs": echo.get("top_logprobs", 0),
            "top_p": echo.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": usage,
            "user": echo.get("user"),
        }


def _incomplete(status: str) -> Body | None:
    return {"reason": "max_output_tokens"} if status == "incomplete" else None


def status_of(finish_reason: str) -> str:
    """The status of a reply that ended for this reason."""
    return {"length": "incomplete", "abort": "failed"}.get(finish_reason, "completed")


def usage_body(usage: Usage, num_reasoning_tokens: int) -> Body:
    """Token counts. Nothing is charged for writing to a cache."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def page_of(items: Sequence[Body], limit: int, order: str, after: str | None) -> Body | None:
    """A list of at most `limit` items in this order, from the one after `after` on; None if there
    is no such item.
    """
    ordered = list(items) if order == "asc" else list(items)[::-1]
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            return None
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }
