"""Main or side: what the agent says, else what a named rule says, else main."""

from __future__ import annotations

from collections.abc import Sequence

from api_proxy.config import SideRule
from api_proxy.schemas import Completion
from records.messages import content_text
from records.types import TurnType


def turn_type_of(completion: Completion, rules: Sequence[SideRule]) -> TurnType:
    """The type of a request's turn."""
    if completion.turn_type is not None:
        return completion.turn_type
    return TurnType.SIDE if any(matches(rule, completion) for rule in rules) else TurnType.MAIN


def matches(rule: SideRule, completion: Completion) -> bool:
    """Whether every condition that the rule sets holds; a rule without conditions never matches."""
    results = []
    first, last = completion.messages[0], completion.messages[-1]
    if rule.system_contains is not None:
        is_system = first["role"] in ("system", "developer")
        results.append(is_system and rule.system_contains in content_text(first.get("content")))
    if rule.last_message_contains is not None:
        results.append(rule.last_message_contains in content_text(last.get("content")))
    if rule.max_tokens_at_most is not None:
        budget = completion.requested_tokens
        results.append(budget is not None and budget <= rule.max_tokens_at_most)
    return bool(results) and all(results)
