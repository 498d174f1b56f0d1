"""Reads what a comparison needs of one run: the votes, hint and scores of each main turn.

The only part of a comparison that reads stores.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sqlalchemy import Connection

from judge.votes.prompts import message_text
from judge.votes.screening import Evidence, values_in, words
from opd.replay.comparison.values import HintFacts, ReplayedTurn
from opd.run.config import RunConfig
from opd.run.recorded_run import load_recorded
from records.names import UNJUDGED, TurnType
from records.reading.exporting import SessionHeader, Wanted, places, read_sessions
from records.reading.whole_turns import TURNS_AT_A_TIME, WholeTurn, whole_turns
from records.store import Store
from records.tables.sql import chunks
from records.types import UNSCORED, Logprobs, TurnRecord
from trainer.errors import StartupError

_SHOWN_CHARS = 400
"""Most characters of a response or a next state in a report."""


def run_config_of(folder: Path) -> RunConfig:
    """The configuration of a run's folder. Raises StartupError if it is none, or has no records."""
    path = folder / "config.toml"
    if not path.is_file():
        raise StartupError(f"{folder} is not a run folder: it has no config.toml")
    return load_recorded(path)


async def read_run(config: RunConfig) -> list[ReplayedTurn]:
    """The main turns of a run, sessions in the order in which they began."""
    found: list[ReplayedTurn] = []

    def read(connection: Connection, session: SessionHeader) -> None:
        names = [place.turn_id for place in places(connection, session.session_id)]
        for part in chunks(names, TURNS_AT_A_TIME):
            wholes = whole_turns(connection, part)
            found.extend(
                replayed(whole, session.name)
                for whole in wholes
                if whole.turn.turn_type is TurnType.MAIN
            )

    async with await Store.open(config.store) as store:
        async for _ in read_sessions(store, Wanted(), read):
            pass
    return found


def replayed(whole: WholeTurn, session_name: str | None) -> ReplayedTurn:
    """A stored turn as a comparison sees it."""
    turn, verdict = whole.turn, whole.verdict
    votes = verdict.votes if verdict is not None else ()
    counts = [
        vote.prompt_tokens + vote.completion_tokens
        for vote in votes
        if vote.prompt_tokens is not None and vote.completion_tokens is not None
    ]
    hint = verdict.hint if verdict is not None else None
    return ReplayedTurn(
        turn_id=turn.turn_id,
        content=(session_name, whole.prompt_node_id, whole.response_node_id),
        accepted=None if verdict is None or turn.drop_reason in UNJUDGED else hint is not None,
        votes=tuple(vote.score for vote in votes),
        hint=None if hint is None else hint_facts(hint, turn),
        judge_tokens=sum(counts) if counts else None,
        num_counted=len(counts),
        teacher_tokens=_teacher_tokens(whole),
        advantages=_advantages(whole),
        response=_shown(message_text(turn.response)),
        next_state=_shown("\n".join(message_text(message) for message in turn.next_state)),
    )


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def hint_facts(hint: str, turn: TurnRecord) -> HintFacts:
    """A hint compared with its turn."""
    evidence = Evidence.of_turn(turn)
    before = [message_text(message) for message in (*turn.messages, turn.response)]
    known = {word for text in (*before, *map(str, turn.tools)) for word in words(text)}
    new = {word for message in evidence.next_words for word in message} - known
    said = words(hint)
    return HintFacts(
        text=hint,
        num_words=len(said),
        leaked_words=len(set(said) & new) / len(set(said)) if said else None,
        leaks_value=bool(values_in([hint]) & evidence.new_values),
    )


def _teacher_tokens(whole: WholeTurn) -> int | None:
    counts = [
        len(score.hinted_prompt_ids) + len(score.teacher_logprobs)
        for score in whole.scores
        if score.teacher_version != UNSCORED
    ]
    return sum(counts) if counts else None


def _advantages(whole: WholeTurn) -> Logprobs | None:
    """Teacher minus policy if both are at temperature 1; else what the last step used, if any.

    A teacher's log-prob at temperature 1 minus the policy's at another is not an advantage.
    """
    score, turn = whole.score, whole.turn
    if (
        score is not None
        and score.teacher_version != UNSCORED
        and turn.sampling.get("temperature") == 1.0
        # A recorded answer gets its log-probs when the policy has scored it.
        and np.isfinite(turn.rollout_logprobs).all()
    ):
        return score.teacher_logprobs - turn.rollout_logprobs
    if not whole.samples:
        return None
    used = whole.samples[-1].advantages
    return used if np.isfinite(used).all() else None
