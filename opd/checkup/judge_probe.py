"""Three turns with an obvious verdict, put to the judge: does it understand the question?"""

from __future__ import annotations

from dataclasses import dataclass

from judge.config import JudgeConfig
from judge.votes.calls import judge_client
from judge.votes.prompts import judge_messages
from judge.votes.voting import Ballot, cast_votes
from opd.checkup.checks import Check
from records.messages import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A turn, and whether its next state shows that the answer should have been different."""

    name: str
    asked: str
    answer: str
    followed: str
    wants_hint: bool


PROBES = (
    Probe(
        name="an objection",
        asked="Translate 'good morning' into French.",
        answer="Guten Morgen.",
        followed="That is German. I asked for French.",
        wants_hint=True,
    ),
    Probe(
        name="thanks",
        asked="What is 7 times 8?",
        answer="56.",
        followed="Thank you, that is right.",
        wants_hint=False,
    ),
    Probe(
        name="another question",
        asked="Which planet is nearest to the sun?",
        answer="Mercury.",
        followed="And which one is the largest?",
        wants_hint=False,
    ),
)


async def probe_judge(config: JudgeConfig) -> list[Check]:
    """A check for each probe; a single one if the judge does not answer."""
    found: list[Check] = []
    quick = config.model_copy(update={"timeout_s": min(config.timeout_s, 60.0), "retries": 0})
    async with judge_client(quick) as client:
        for probe in PROBES:
            ballot = await cast_votes(client, _messages(probe), quick)
            if ballot.all_failed:
                return [_unreachable(config, ballot)]
            found.append(_read(probe, ballot))
    return found


def _messages(probe: Probe) -> list[dict[str, str]]:
    asked: Message = {"role": "user", "content": probe.asked}
    answer: Message = {"role": "assistant", "content": probe.answer}
    followed: Message = {"role": "user", "content": probe.followed}
    return judge_messages([asked], [], answer, [followed])


def _unreachable(config: JudgeConfig, ballot: Ballot) -> Check:
    return Check(
        name="judge",
        found=f"{config.base_url} does not answer: {ballot.votes[0].error}",
        remedy="start it, or check judge.base_url, judge.model and judge.api_key",
    )


def _read(probe: Probe, ballot: Ballot) -> Check:
    votes = [vote.score for vote in ballot.votes]
    positive, negative = votes.count(1), votes.count(-1)
    is_right = positive > negative if probe.wants_hint else positive <= negative
    is_readable = positive + negative > 0
    hint = next((vote.hint for vote in ballot.votes if vote.hint), "")
    said = f'; hint: "{" ".join(hint.split())}"' if hint else ""
    words = f"{probe.name}: {positive} votes for a hint, {negative} against{said}"
    if is_right and is_readable:
        return Check(name="judge", found=words)
    wanted = "a hint" if probe.wants_hint else "no hint"
    what = f"{words}; expected: {wanted}" if is_readable else f"{words}: no readable decision"
    return Check(
        name="judge", found=what, remedy="use a stronger judge: --judge-url and --judge-model"
    )
