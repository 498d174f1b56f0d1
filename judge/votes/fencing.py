r"""Text of a conversation as data inside a judge prompt.

Users and tools will write `\boxed{1} [HINT_START]...`, the headers of the prompt's own sections, or
the tokens by which a chat template ends a message. A judge that quotes such text must not thereby
cast a vote, and no text may end the section that it is in. So each such place gets one blank inside
(`\ boxed{1}`), and a line that looks like the prompt's own structure is quoted (`> [user] ...`).
All other text, which is nearly all there is, stays as it is: small judges are trained on it. If the
judge's tokenizer is available, its own control texts get a blank as well (`context`).
"""

from __future__ import annotations

import re

ANSWER_MARKERS = (r"\\boxed\{", r"\[HINT_START\]", r"\[HINT_END\]")
"""What `judge.votes.parsing` looks for in an answer."""
TURN_TOKENS = (
    r"<\|[^|>\n]{1,40}\|>",  # ChatML, Llama 3, Harmony, GLM, Phi, Kimi, Command
    r"<\|[a-z_]{1,20}>|<[a-z_]{1,20}\|>",  # Gemma 4
    r"<｜[^｜>\n]{1,40}｜>|｜DSML｜|〈\|[^|\n]{1,20}\|〉",  # DeepSeek, Hunyuan, Laguna
    r"</?s>",
    r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT)\]",  # Mistral
    r"(?-i:\[/?(?:ARGS|CALL_ID|THINK|IMG|IMG_BREAK|IMG_END|PREFIX|MIDDLE|SUFFIX)\])",
    r"(?-i:<SPECIAL_\d{1,4}>|\[(?:[gs]?MASK|BOS|EOS|EOT|UNK|PAD)\])",  # Mistral, GLM, Kimi
    r"<</?SYS>>",
    r"<(?:start|end)_of_(?:turn|image)>|<image_soft_token>|<unused\d{1,4}>",  # Gemma
    r"<(?:bos|eos|sop|eop|pad|unk|mask)>",
    r"</?(?:seed|minimax):[a-z_]{1,30}>|<\[[^\]\n]{1,40}\]>",  # Seed, MiniMax
    r"\[\|[^|\]\n]{1,40}\|\]",  # Exaone
    r"\]~!?b[\[\]]|\[e~\[|\]![pd]~\[|\]<\][^\[\]\n]{1,30}\[>\[",  # MiniMax
    r"</?(?:think|tool_calls?|tool_responses?|tool_result|function_call|arg_key|arg_value)"
    r"(?::[a-z]{1,20})?>",  # what a reply is made of: Qwen, GLM, Hunyuan
)
"""Tokens by which chat templates begin and end messages, thoughts and calls."""

_MARKER = re.compile("|".join((*ANSWER_MARKERS, *TURN_TOKENS)), re.IGNORECASE)
# Only looks ahead: a marker may begin inside another, as in <|\boxed{1}|>.
_MARKER_START = re.compile(rf"(?=(?:{_MARKER.pattern}))(.)", re.IGNORECASE)
# Every character that some reader takes for the start of a new line.
_LINE_START = re.compile(
    r"(^|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029])"
    r"(?=[^\S\n\r\v\f\x1c-\x1e\x85\u2028\u2029]*"
    r"(?:#+\s*(?:tools|conversation|response|next\s+state|instruction|said|first|second)\b"
    r"|\[(?:system|developer|user|assistant|tool|feedback|\d+\s+earlier\s+messages)\b[^\]\n]*\]"
    r"|call\s+[\w.-]+\())",
    re.IGNORECASE,
)


def has_marker(text: str) -> bool:
    """Whether `text` contains a marker of an answer, or a token that begins or ends a message."""
    return _MARKER.search(text) is not None


def fenced(text: str) -> str:
    """`text` without anything that could be read as an answer or as the prompt's structure.

    It only inserts characters, so two halves cannot become a new marker. The first line is quoted
    as well if it looks like structure; the caller may put something before it.
    """
    separated = _MARKER_START.sub(r"\1 ", text)
    return _LINE_START.sub(r"\g<1>> ", separated)
