"""Which recorded states a hint is practised at, and which of them measure instead. Pure functions.

States with the same last user message stay together: half of them in training would show the policy
what the other half measures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest

from records.hints.types import HintSource, HintState
from records.messages import Message, content_text
from records.types import TurnRecord
from rollout_bridge.scoring.hinting import last_user_index

_FEWEST_TO_MEASURE = 4


def last_user_text(messages: Sequence[Message]) -> str:
    """The last user message, in lower case, with single blanks; "" if there is none."""
    index = last_user_index(messages)
    if index is None:
        return ""
    return " ".join(content_text(messages[index].get("content")).casefold().split())


def was_said_before(turn: TurnRecord, sources: Iterable[HintSource]) -> bool:
    """Whether the user of a state had given the hint earlier in the session: what the hint teaches
    is already asked for there, and an open wish for the opposite contradicts it.
    """
    return any(
        source.session_id == turn.session_id and source.created_at < turn.created_at
        for source in sources
    )


def was_accepted_since(
    turn: TurnRecord, accepted: Collection[str], sources: Sequence[HintSource]
) -> bool:
    """Whether the user of a state accepted its answer silently (`accepted` turns, by the judge)
    when the hint had already been given. A tool's result is not a user's acceptance.
    """
    was_answered = any(message["role"] == "user" for message in turn.next_state or ())
    if not was_answered or turn.turn_id not in accepted or not sources:
        return False
    # The verdict came later: what counts is when the answer that was objected to was given.
    return turn.created_at > min(source.created_at for source in sources)


def answers_objection(turn: TurnRecord, parents: Mapping[str, TurnRecord]) -> bool:
    """Whether a state's user objects there to the previous answer, whatever hint the judge made of
    it: the wish is stated openly there. `parents`: turns by id.
    """
    parent = parents.get(turn.parent_turn_id or "")
    return parent is not None and bool(parent.candidates)


def called_tools(turn: TurnRecord) -> frozenset[str]:
    """Names of the tools that were called since the last user message, by the answer too."""
    index = last_user_index(turn.messages)
    since = turn.messages[0 if index is None else index :]
    calls = [
        call for message in (*since, turn.response) for call in message.get("tool_calls") or ()
    ]
    return frozenset(call["function"]["name"] for call in calls if "function" in call)


def choose_states(
    hint_id: str,
    turns: Sequence[TurnRecord],
    known: Sequence[HintState],
    *,
    max_states: int,
    min_messages: int,
    held_back: float,
) -> list[HintState]:
    """The states of a hint, from `turns` (the best first); [] if too few last user messages differ.
    `known` ones stay, each in its role.
    """
    role = {state.turn_id: state.held_out for state in known}
    groups: dict[str, list[str]] = {}
    roles: dict[str, bool] = {}
    for turn in turns:
        text = last_user_text(turn.messages)
        groups.setdefault(text, []).append(turn.turn_id)
        if turn.turn_id in role:
            roles[text] = role[turn.turn_id]
    if len(groups) < min_messages:
        return []
    in_turn = [one for row in zip_longest(*groups.values()) for one in row if one is not None]
    chosen = sorted(in_turn, key=lambda turn_id: turn_id not in role)[:max_states]
    kept = {text: [one for one in ids if one in chosen] for text, ids in groups.items()}
    kept = {text: ids for text, ids in kept.items() if ids}
    roles = _roles(hint_id, list(kept), roles, len(chosen), held_back)
    return [
        HintState(hint_id=hint_id, turn_id=turn_id, held_out=roles[text])
        for text, ids in kept.items()
        for turn_id in ids
    ]


def _roles(
    hint_id: str,
    texts: Sequence[str],
    known: Mapping[str, bool],
    num_states: int,
    held_back: float,
) -> dict[str, bool]:
    """Whether the states of each message are held back. A hash decides, so that the choice is
    always the same.
    """
    wanted = 0
    if held_back > 0 and num_states >= _FEWEST_TO_MEASURE:
        wanted = min(max(round(held_back * len(texts)), 1), len(texts) - 1)
    roles = {text: known[text] for text in texts if text in known}
    missing = wanted - sum(roles.values())
    for text in sorted(set(texts) - known.keys(), key=lambda text: _rank(hint_id, text)):
        roles[text] = missing > 0
        missing -= 1
    return roles


def _rank(hint_id: str, text: str) -> str:
    return hashlib.sha256(f"{hint_id}\n{text}".encode()).hexdigest()
