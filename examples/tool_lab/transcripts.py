"""Judge transcripts: the judge's prompt for one turn of a scripted conversation, and the vote it
should give.

The words of the prompt come from `judge.prompts.judge_messages`; the labels come from what the user
or the tool actually reacted to.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.tool_lab.corpus import FIX_HINTS, Row, corpus_episode, random_requests
from examples.tool_lab.corruption import Corruption, complaint_hint, corrupted_reply
from examples.tool_lab.domain import TOOLS
from examples.tool_lab.episode import Episode
from examples.tool_lab.phrases import CORRECTIONS, phrase_wish, surface
from examples.tool_lab.preferences import PREFERENCES, preferences_of
from examples.tool_lab.script import scripted_reply, turn_site
from judge.votes.prompts import judge_messages

NEGATIVE = "\\boxed{-1}"
KIND_WEIGHTS = {
    "success": 1.5,
    "unavailable": 2.0,
    "tool_error": 3.0,
    "declined": 3.0,
    "corrected": 3.0,
    "complaint": 2.0,
    "content": 4.0,
    "moved_on": 4.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedTurn:
    """A turn with its next state and the right verdict: `hint` is None if nothing was wrong.

    `acceptable` are the hints that count as right (empty for a negative verdict).
    """

    kind: str
    messages: list[dict[str, Any]]
    response: dict[str, Any]
    next_state: list[dict[str, Any]]
    hint: str | None
    acceptable: tuple[str, ...]


def judged_turns(
    episode: Episode,
    rng: random.Random,
    *,
    corruption_share: float,
    heedless_share: float = 0.0,
) -> list[JudgedTurn]:
    """Play the episode with the scripted assistant and collect every turn that has a next state.

    In `heedless_share` of the turns the assistant picks either value, whatever the user has said,
    like a policy that has just learned what most users want.
    """
    turns = []
    while True:
        messages = list(episode.messages)
        values = None
        if heedless_share and rng.random() < heedless_share:
            values = {
                kind: rng.choice((preference.default, preference.alternative))
                for kind, preference in PREFERENCES.items()
            }
        response = scripted_reply(episode, rng, values)
        corruption = None
        fix_hint = None
        if turn_site(episode) == "call":
            fix_hint = complaint_hint(episode, rng)
            if rng.random() < corruption_share:
                response, corruption = corrupted_reply(response, episode, rng)
        request = episode.request
        following = episode.observe(response)
        if not following:
            return turns
        reaction = episode.last_reaction
        next_state = list(following)
        hint, acceptable = _verdict(reaction.kind, reaction.preference, reaction.wanted, rng)
        if reaction.kind in ("tool_error", "complaint"):
            assert fix_hint is not None
            hint, acceptable = _fix(corruption, fix_hint, rng)
        turn = JudgedTurn(
            kind=reaction.kind,
            messages=messages,
            response=response,
            next_state=next_state,
            hint=hint,
            acceptable=acceptable,
        )
        if reaction.kind == "success" and rng.random() < 0.15:
            turn = _with_user_message(turn, request.kind, rng)
        turns.append(turn)


def _verdict(
    kind: str, preference: str | None, wanted: str | None, rng: random.Random
) -> tuple[str | None, tuple[str, ...]]:
    if kind not in ("declined", "corrected"):
        return None, ()
    assert preference is not None
    assert wanted is not None
    hints = PREFERENCES[preference].hints[wanted]
    return rng.choice(hints), hints


def _fix(
    corruption: Corruption | None, fix_hint: str, rng: random.Random
) -> tuple[str, tuple[str, ...]]:
    if corruption is None or corruption.key is None:
        return fix_hint, (fix_hint,)
    hints = tuple(hint.format(key=corruption.key, value=corruption.value) for hint in FIX_HINTS)
    return rng.choice(hints), hints


def _with_user_message(turn: JudgedTurn, request_kind: str, rng: random.Random) -> JudgedTurn:
    """The same turn, with words of the user after the tool's result: an objection, or going on."""
    preferences = preferences_of(request_kind, "call")
    hint: str | None = None
    acceptable: tuple[str, ...] = ()
    kind = "moved_on"
    if preferences and rng.random() < 0.5:
        preference = preferences[0]
        shown = preference.default
        for value in (preference.default, preference.alternative):
            if f'"{value}"' in turn.response["tool_calls"][0]["function"]["arguments"]:
                shown = value
        wanted = preference.other(shown)
        words = phrase_wish(rng, CORRECTIONS, preference, wanted)
        acceptable = preference.hints[wanted]
        hint = rng.choice(acceptable)
        kind = "corrected"
    else:
        words = surface(rng, rng.choice(("Thanks.", "OK.", "What did you find?", "And?")))
    return JudgedTurn(
        kind=kind,
        messages=turn.messages,
        response=turn.response,
        next_state=[*turn.next_state, {"role": "user", "content": words}],
        hint=hint,
        acceptable=acceptable,
    )


def vote_text(hint: str | None) -> str:
    """The judge's answer with this verdict."""
    return NEGATIVE if hint is None else f"\\boxed{{1}}\n[HINT_START]{hint}[HINT_END]"


def judge_request(turn: JudgedTurn, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The chat messages that ask for one vote on `turn`."""
    return judge_messages(
        turn.messages, [dict(tool) for tool in tools], turn.response, turn.next_state
    )


def _either_way_episode(rng: random.Random) -> Episode:
    """An episode whose user wants either value of everything equally often, and often says so."""
    preferences = {
        kind: rng.choice((preference.default, preference.alternative))
        for kind, preference in PREFERENCES.items()
        if rng.random() < 0.6
    }
    return corpus_episode(
        rng,
        preferences=preferences,
        request_kinds=random_requests(rng, greet_share=0.9),
        state_probability=0.5,
    )


def judge_row(rng: random.Random, heedless_share: float = 0.0) -> Row:
    """One transcript; the turn is drawn so that reactions of all kinds are common."""
    while True:
        turns = judged_turns(
            _either_way_episode(rng) if heedless_share else corpus_episode(rng),
            rng,
            corruption_share=0.25,
            heedless_share=heedless_share,
        )
        if turns:
            break
    weights = [KIND_WEIGHTS[turn.kind] for turn in turns]
    turn = rng.choices(turns, weights)[0]
    messages: list[dict[str, Any]] = [*judge_request(turn, TOOLS)]
    messages.append({"role": "assistant", "content": vote_text(turn.hint)})
    return Row(family="judge", messages=messages, tools=[], weights={2: 1.0})
