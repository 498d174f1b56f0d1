"""Requests beside the conversation: marked with their rule, never trained, nobody's next state."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select

from api_proxy.access.request_limits import RequestLimits
from api_proxy.config import ProxyConfig, SideRule
from api_proxy.linking.side_presets import PRESETS
from api_proxy.linking.side_turns import kind_of, matches, rules_of
from api_proxy.request.completion import completion_of
from records.names import DropReason, TurnState, TurnType
from records.store import Store
from records.tables.models import TurnRow
from records.types import TurnRecord
from tests.api_proxy.conftest import Door

RULES = rules_of(ProxyConfig())
LIMITS = RequestLimits(config=ProxyConfig(), context_length=None)
HI = {"role": "user", "content": "hi"}
SUMMARY_TASK = (
    "Your task is to create a detailed summary of the conversation so far, paying close "
    "attention to the user's explicit requests."
)


def rule_of(messages: list[dict], **fields: Any) -> str | None:
    completion = completion_of({"model": "policy", "messages": messages, **fields}, {}, LIMITS)
    return kind_of(completion, RULES).rule


def asked(text: Any) -> list[dict]:
    return [{"role": "user", "content": text}]


def with_system(text: str) -> list[dict]:
    return [{"role": "system", "content": text}, HI]


async def detail(store: Store, turn: TurnRecord) -> str | None:
    statement = select(TurnRow.drop_detail).where(TurnRow.turn_id == turn.turn_id)
    return await store.read(lambda connection: connection.scalar(statement))


@pytest.mark.parametrize(
    ("messages", "rule"),
    [
        (
            with_system(
                "You are Claude Code, Anthropic's official CLI for Claude. Analyze if this message "
                "indicates a new conversation topic. If it does, extract a 2-3 word title"
            ),
            "claude_code_title",
        ),
        (
            with_system(
                "Your task is to process Bash commands that an AI coding agent wants to run.\n\n"
                "This policy spec defines how to determine the prefix of a Bash command:"
            ),
            "claude_code_command",
        ),
        (
            asked("[SUGGESTION MODE: Suggest what the user might type next]"),
            "claude_code_suggestion",
        ),
        (asked([{"type": "text", "text": "Warmup"}]), "claude_code_warmup"),
        (asked(f"CRITICAL: Respond with TEXT ONLY.\n\n{SUMMARY_TASK}"), "claude_code_summary"),
        (
            asked("### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the"),
            "open_webui_title",
        ),
        (
            asked("\n### Task:\nSuggest 3-5 relevant follow-up questions or prompts that"),
            "open_webui_follow_ups",
        ),
        (
            asked(
                "Provide a concise, 5-word-or-less title for the conversation, using title case "
                "conventions. Only return the title itself."
            ),
            "librechat_title",
        ),
        (
            asked("You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary"),
            "codex_summary",
        ),
        (
            with_system("You are a title generator. You output ONLY a thread title. Nothing else."),
            "opencode_title",
        ),
        (asked("Write a short title for my essay about Claude Code."), None),
        (asked("Warmup exercises for runners?"), None),
        (asked("Explain '### Task:\nGenerate a concise, 3-5 word title'"), None),
    ],
)
def test_known_agents(messages: list[dict], rule: str | None) -> None:
    assert rule_of(messages) == rule


def test_pings_ask_for_one_token() -> None:
    assert rule_of(asked("quota"), max_tokens=1) == "ping"
    assert rule_of(asked("quota"), max_tokens=2) is None


def test_every_rule_has_a_condition_and_can_hold() -> None:
    nothing = completion_of({"model": "policy", "messages": [HI]}, {}, LIMITS)
    for rules in PRESETS.values():
        for rule in rules:
            text = rule.last_message_is or rule.last_message_begins or rule.last_message_contains
            messages = [
                {"role": "system", "content": rule.system_contains or "Be brief."},
                {"role": "user", "content": text or "hi"},
            ]
            body = {"model": "policy", "messages": messages, "max_tokens": rule.max_tokens_at_most}
            assert matches(rule, completion_of(body, {}, LIMITS)), rule.name
            assert not matches(rule, nothing), rule.name


@pytest.mark.parametrize("settings", [{"side_presets": []}])
async def test_presets_can_be_switched_off(door: Door) -> None:
    door.will_say("Weather")
    _, turn = await door.say(asked("[SUGGESTION MODE: x]"))
    assert turn.turn_type is TurnType.MAIN


@pytest.mark.parametrize(
    "settings", [{"side_rules": [SideRule(name="own", last_message_begins="Rate this")]}]
)
async def test_a_side_request_is_nobodys_next_state(door: Door, store: Store) -> None:
    door.will_say("Hello.", "5", "Title", "Fine.")
    message, first = await door.say([HI])
    rating = {"role": "user", "content": "Rate this answer."}
    _, side = await door.say([HI, message, rating])
    _, declared = await door.say([HI, message, rating], turn_type="side")
    for turn, rule in ((side, "own"), (declared, "declared")):
        assert turn.drop_reason is DropReason.SIDE_TURN
        assert turn.session_id == first.session_id
        assert await detail(store, turn) == rule
    assert (await door.turn(first.turn_id)).state is TurnState.AWAITING_NEXT_STATE
    follow = {"role": "user", "content": "how are you?"}
    _, second = await door.say([HI, message, follow])
    assert (await door.turn(first.turn_id)).next_state == [follow]
    assert second.parent_turn_id == first.turn_id
    metrics = (await door.client.get("/metrics")).text
    assert 'opd_side_turns_total{rule="own"} 1.0' in metrics
    assert 'opd_side_turns_total{rule="declared"} 1.0' in metrics


async def test_a_summary_takes_the_place_of_the_history(door: Door) -> None:
    summary = "1. The user greeted us.\n2. We were asked about the weather in Paris."
    door.will_say("Hello.", f"<analysis>hm</analysis>\n<summary>\n{summary}\n</summary>", "Warm.")
    message, first = await door.say([HI])
    _, side = await door.say([HI, message, {"role": "user", "content": SUMMARY_TASK}])
    assert side.turn_type is TurnType.SIDE
    compacted = "This session is being continued from another one.\nSummary:\n" + summary
    _, after = await door.say([{"role": "user", "content": compacted}])
    assert after.session_id == side.session_id == first.session_id
    assert after.parent_turn_id is None
    assert (await door.turn(first.turn_id)).state is TurnState.AWAITING_NEXT_STATE
    door.will_say("Who?", "What?")
    other = {"Authorization": "Bearer other"}
    _, stranger = await door.say([{"role": "user", "content": compacted}], other)
    _, unrelated = await door.say([{"role": "user", "content": "A long message of its own " * 9}])
    assert len({first.session_id, stranger.session_id, unrelated.session_id}) == 3
