"""A judge's answer as a decision and a hint (ALGORITHMS 1.3).

Decision and hint are parsed independently of each other: a hint can come with a negative decision,
and selection ignores it. Knows nothing of votes, tokens or HTTP.
"""

from __future__ import annotations

import re

# A backslash, an optional sign and exactly one digit, without inner spaces.
_DECISION = re.compile(r"\\boxed\{([-+]?[0-9])\}")
_HINT = re.compile(r"\[HINT_START\](.*?)\[HINT_END\]", re.DOTALL)


def parse_answer(text: str) -> tuple[int | None, str]:
    r"""(score, hint) of a judge's answer.

    The score is that of the LAST `\boxed{..}`: +1, -1, or None for anything else (no box, 0, 2,
    10): the vote abstains. The hint is the last `[HINT_START]..[HINT_END]` block, stripped, or "".
    """
    score = last_decision(text)
    hints = _HINT.findall(text)
    return (score if score in (1, -1) else None, hints[-1].strip() if hints else "")


def last_decision(text: str) -> int | None:
    r"""The digit of the last `\boxed{..}`, with its sign; None without one."""
    decisions = _DECISION.findall(text)
    return int(decisions[-1]) if decisions else None
