"""Rules for the requests that known agents make outside the conversation.

Each rule names the agent and the purpose. The texts are the beginnings (or, in system prompts, the
parts) of the prompts that these agents send; an agent whose prompts were changed by its owner needs
rules of its own (`proxy.side_rules`). `is_summary`: the reply replaces a history.
"""

from __future__ import annotations

from api_proxy.config import SidePreset, SideRule


def _system(name: str, *texts: str, is_summary: bool = False) -> list[SideRule]:
    return [SideRule(name=name, system_contains=text, is_summary=is_summary) for text in texts]


def _asks(name: str, *texts: str, is_summary: bool = False) -> list[SideRule]:
    return [SideRule(name=name, last_message_begins=text, is_summary=is_summary) for text in texts]


def _contains(name: str, *texts: str, is_summary: bool = False) -> list[SideRule]:
    return [
        SideRule(name=name, last_message_contains=text, is_summary=is_summary) for text in texts
    ]


PRESETS: dict[SidePreset, list[SideRule]] = {
    "pings": [SideRule(name="ping", max_tokens_at_most=1)],
    "claude_code": [
        *_system(
            "claude_code_title",
            "Analyze if this message indicates a new conversation topic",
            "Summarize this coding conversation in under 50 characters",
            "Generate a concise, sentence-case title",
        ),
        *_asks(
            "claude_code_title", "Please write a 5-10 word title for the following conversation"
        ),
        *_system(
            "claude_code_command",
            "Your task is to process Bash commands that an AI coding agent wants to run",
            "Extract any file paths that this command reads or modifies",
        ),
        *_asks("claude_code_suggestion", "[SUGGESTION MODE:"),
        SideRule(name="claude_code_warmup", last_message_is="Warmup"),
        *_contains(
            "claude_code_summary",
            "Your task is to create a detailed summary of the conversation so far, paying close",
            is_summary=True,
        ),
    ],
    "open_webui": [
        *_asks("open_webui_title", "### Task:\nGenerate a concise, 3-5 word title"),
        *_asks("open_webui_tags", "### Task:\nGenerate 1-3 broad tags categorizing"),
        *_asks("open_webui_follow_ups", "### Task:\nSuggest 3-5 relevant follow-up questions"),
        *_asks("open_webui_queries", "### Task:\nAnalyze the chat history to determine the necess"),
        *_asks("open_webui_autocomplete", "### Task:\nYou are an autocompletion system"),
    ],
    "librechat": [
        *_contains(
            "librechat_title",
            "rovide a concise, 5-word-or-less title for the conversation, using",
            "lease generate a concise, 5-word-or-less title for the conversation",
            "A concise title in the detected language (5 words or less, no punctuation",
        ),
    ],
    "codex": [
        *_asks(
            "codex_summary", "You are performing a CONTEXT CHECKPOINT COMPACTION", is_summary=True
        ),
    ],
    "opencode": [
        *_system("opencode_title", "You are a title generator. You output ONLY a thread title"),
    ],
    "gemini_and_qwen_cli": [
        *_system(
            "cli_summary",
            "You are the component that summarizes internal chat history into a given structure",
            is_summary=True,
        ),
    ],
}
"""Preset -> its rules, tried in order."""
