"""One question to the judge: fitted into its context, shortened if the judge refuses it, m votes.

Sits between the workers that ask (about turns, `judge.worker`; about hints,
`judge.hints.questions`) and the single call of a vote. Independent of the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from openai import AsyncOpenAI

from judge.config import JudgeConfig
from judge.votes.context import CountTokens, JudgePrompt, JudgePromptTooLong
from judge.votes.voting import Ballot, IsDecided, cast_votes
from rollout_bridge.worker import ServiceUnavailable


class JudgeUnavailable(ServiceUnavailable):
    """Every vote's call failed; `ballot` has the failed votes, `num_omitted` is their prompt's."""

    def __init__(self, ballot: Ballot, num_omitted: int) -> None:
        errors = dict.fromkeys(vote.error for vote in ballot.votes if vote.error)
        super().__init__(
            f"no vote got an answer: {'; '.join(errors)}", retry_after_s=ballot.retry_after_s
        )
        self.ballot = ballot
        self.num_omitted = num_omitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The votes on a question; `num_omitted` messages of the conversation were not shown.

    `too_long` says why a question that does not fit was not decided. `ballot` then contains the
    votes that the judge refused, or is None if it was not asked at all.
    """

    ballot: Ballot | None
    num_omitted: int
    too_long: str | None = None


async def ask(
    client: AsyncOpenAI,
    config: JudgeConfig,
    fit: Callable[[int], JudgePrompt],
    count_tokens: CountTokens,
    routing_key: str | None = None,
    is_decided: IsDecided | None = None,
) -> Asked:
    """Ask for `config.votes` votes on the prompt that `fit` makes for a limit in tokens; for fewer
    if the first ones decide (see `cast_votes`).

    `fit` raises JudgePromptTooLong; it runs in a thread, since counting the tokens of a long
    conversation would hold up all others. Raises JudgeUnavailable if no vote got an answer.
    """
    max_tokens = config.max_prompt_tokens
    ballot, num_omitted = None, 0
    while ballot is None or ballot.too_long:
        try:
            prompt = await asyncio.to_thread(fit, max_tokens)
        except JudgePromptTooLong as error:
            return Asked(ballot=ballot, num_omitted=num_omitted, too_long=str(error))
        num_omitted = prompt.num_omitted
        ballot = await cast_votes(
            client, prompt.messages, config, routing_key=routing_key, is_decided=is_decided
        )
        # The judge's context may be smaller than configured, or the estimate was too low.
        max_tokens = prompt.num_tokens(count_tokens) // 2
    if ballot.all_failed:
        raise JudgeUnavailable(ballot, num_omitted)
    return Asked(ballot=ballot, num_omitted=num_omitted)
