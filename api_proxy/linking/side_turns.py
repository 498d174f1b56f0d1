"""Main or side: what the agent declares, else what the first matching rule says, else main."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from api_proxy.config import ProxyConfig, SideRule
from api_proxy.linking.side_presets import PRESETS
from api_proxy.request.completion import Completion
from records.messages import content_text
from records.names import TurnType

DECLARED = "declared"
"""In place of a rule's name: the agent declared it itself."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What sort of turn a request is; `rule` names what made it a side turn."""

    turn_type: TurnType
    rule: str | None = None
    is_summary: bool = False


def rules_of(config: ProxyConfig) -> list[SideRule]:
    """All rules in the order in which they are tried."""
    ready = [rule for preset in config.side_presets for rule in PRESETS[preset]]
    return [*config.side_rules, *ready]


def kind_of(completion: Completion, rules: Sequence[SideRule]) -> Kind:
    """The kind of a request's turn."""
    if completion.turn_type is TurnType.SIDE:
        return Kind(TurnType.SIDE, DECLARED)
    if completion.turn_type is not None:
        return Kind(completion.turn_type)
    rule = next((rule for rule in rules if matches(rule, completion)), None)
    if rule is None:
        return Kind(TurnType.MAIN)
    return Kind(TurnType.SIDE, rule.name, rule.is_summary)


def matches(rule: SideRule, completion: Completion) -> bool:
    """Whether every condition that the rule sets holds; a rule without conditions never matches."""
    results = []
    first, last = completion.messages[0], completion.messages[-1]
    if rule.system_contains is not None:
        is_system = first["role"] in ("system", "developer")
        results.append(is_system and rule.system_contains in content_text(first.get("content")))
    text = content_text(last.get("content")).strip()
    if rule.last_message_contains is not None:
        results.append(rule.last_message_contains in text)
    if rule.last_message_begins is not None:
        results.append(text.startswith(rule.last_message_begins))
    if rule.last_message_is is not None:
        results.append(text == rule.last_message_is)
    if rule.max_tokens_at_most is not None:
        budget = completion.requested_tokens
        results.append(budget is not None and budget <= rule.max_tokens_at_most)
    return bool(results) and all(results)
