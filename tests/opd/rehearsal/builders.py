"""Hints, texts and recorded states with sensible values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from records.hints.types import Hint, HintPrompt, HintSource, HintStatus, PromptKind
from records.names import TurnState, TurnType
from records.types import TurnRecord, VersionSpan
from rollout_bridge.rehearsal.estimates import Obedience
from rollout_bridge.rehearsal.journal import ObedienceRow, VersionRow

HINT_TEXT = "Give temperatures in Celsius."


def a_hint(hint_id: str = "h0", **changes: Any) -> Hint:
    """An active rule that nobody has practised yet."""
    values: dict[str, Any] = {
        "hint_id": hint_id,
        "scope": "key",
        "text": HINT_TEXT,
        "status": HintStatus.ACTIVE,
        "detail": None,
        "created_at": 1.0,
        "updated_at": 1.0,
        "num_confirmed": 1,
        "is_rule": True,
        "block": None,
        "opposed_by": None,
        "merged_into": None,
        "trained_since": None,
        "num_steps": 0,
        "first_gap": None,
        "gap": None,
        "gap_high": None,
    }
    return Hint(**{**values, **changes})


def a_prompt(prompt_id: str = "p0", **changes: Any) -> HintPrompt:
    """An open wish for the opposite that the start model follows."""
    values: dict[str, Any] = {
        "prompt_id": prompt_id,
        "hint_id": "h0",
        "kind": PromptKind.OPPOSITE,
        "text": "Use Fahrenheit, please.",
        "held_out": False,
        "asked": 8,
        "followed": 8,
        "dropped": None,
    }
    return HintPrompt(**{**values, **changes})


def a_source(turn_id: str = "t0", **changes: Any) -> HintSource:
    """A turn of a session of its own that gave the hint."""
    values: dict[str, Any] = {
        "hint_id": "h0",
        "turn_id": turn_id,
        "session_id": turn_id,
        "text": HINT_TEXT,
        "words": "I want Celsius.",
        "num_votes": 3,
        "num_positive": 3,
        "created_at": 1.0,
    }
    return HintSource(**{**values, **changes})


def a_state(turn_id: str, text: str, **changes: Any) -> TurnRecord:
    """A recorded turn whose user said `text` last."""
    values: dict[str, Any] = {
        "turn_id": turn_id,
        "session_id": turn_id,
        "parent_turn_id": None,
        "turn_type": TurnType.MAIN,
        "state": TurnState.TRAINED,
        "drop_reason": None,
        "messages": [{"role": "user", "content": text}],
        "tools": [],
        "response": {"role": "assistant", "content": "It is 70 F."},
        "next_state": [],
        "prompt_ids": np.array([1, 2, 3], dtype=np.int32),
        "response_ids": np.array([4, 5], dtype=np.int32),
        "rollout_logprobs": np.array([-0.1, -0.2], dtype=np.float32),
        "sampling": {"temperature": 1.0},
        "distribution_modified": None,
        "version_spans": (VersionSpan(version=0, start=0, end=2),),
        "finish_reason": "stop",
        "created_at": 1.0,
    }
    return TurnRecord(**{**values, **changes})


def asked(followed: int, count: int) -> Obedience:
    """Open wishes that the start did each time."""
    return Obedience(followed=followed, asked=count, abstained=0, before=float(count))


def a_version(
    version: int,
    obedience: Obedience | None = None,
    of_hints: Mapping[str, Obedience] | None = None,
) -> VersionRow:
    """What was measured of a version that practises nothing."""
    return VersionRow(
        time=0.0,
        version=version,
        turns=0,
        objections=0,
        hints=(),
        obedience=None if obedience is None else ObedienceRow.of(obedience),
        obedience_of={name: ObedienceRow.of(one) for name, one in (of_hints or {}).items()},
        pooled=None,
        keep=None,
        lessons={},
    )
