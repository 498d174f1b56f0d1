"""Votes through the real `openai` client, against a server that fails in every planned way."""

from __future__ import annotations

import time

import pytest
from openai import AsyncOpenAI

from judge.voting import Ballot, cast_votes, retry_after_s

MESSAGES = [{"role": "system", "content": "judge"}, {"role": "user", "content": "this"}]
POSITIVE = "\\boxed{1}\n[HINT_START]Give temperatures in Celsius.[HINT_END]"


async def ask(config) -> Ballot:
    async with AsyncOpenAI(
        base_url=config.base_url, api_key="none", max_retries=0, timeout=config.timeout_s
    ) as client:
        return await cast_votes(client, MESSAGES, config)


async def test_votes_are_asked_at_the_same_time_and_kept_whole(judge_server, judge_config, reply):
    judge_server.behave = lambda _n, _body: reply.answer(POSITIVE, delay_s=0.05)
    config = judge_config(votes=3, temperature=0.6, max_tokens=77, extra_body={"min_p": 0.1})
    ballot = await ask(config)
    assert judge_server.most_in_flight == 3
    assert [vote.index for vote in ballot.votes] == [0, 1, 2]
    for vote in ballot.votes:
        assert (vote.score, vote.hint, vote.text) == (1, "Give temperatures in Celsius.", POSITIVE)
        assert (vote.prompt_tokens, vote.completion_tokens, vote.error) == (11, 3, None)
        assert vote.latency_s >= 0.05
    for body in judge_server.requests:
        assert body == {
            "model": "judge",
            "messages": MESSAGES,
            "temperature": 0.6,
            "top_p": 1.0,
            "max_tokens": 77,
            "min_p": 0.1,
        }


@pytest.mark.parametrize("text", ["bananas \\boxed{7}", "", None, "\\boxed{0} [HINT_START]x"])
async def test_an_answer_without_a_decision_abstains(judge_server, judge_config, reply, text):
    judge_server.replies(reply.answer(text))
    ballot = await ask(judge_config())
    assert [(vote.score, vote.error) for vote in ballot.votes] == [(None, None)] * 3
    assert not ballot.all_failed


@pytest.mark.parametrize("status", [429, 500, 502, 503])
async def test_a_status_that_may_pass_is_retried(judge_server, judge_config, reply, status):
    judge_server.replies(reply.error(status, "busy"), reply.answer("\\boxed{-1}"))
    ballot = await ask(judge_config(votes=1, retries=1))
    assert [vote.score for vote in ballot.votes] == [-1]
    assert len(judge_server.requests) == 2


async def test_a_connection_reset_is_retried(judge_server, judge_config, reply):
    judge_server.replies(reply(reset=True), reply.answer("\\boxed{-1}"))
    ballot = await ask(judge_config(votes=1, retries=1))
    assert [vote.score for vote in ballot.votes] == [-1]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_a_refusal_is_not_retried(judge_server, judge_config, reply, status):
    judge_server.replies(reply.error(status, "no such thing"))
    ballot = await ask(judge_config(votes=1, retries=3))
    assert len(judge_server.requests) == 1
    assert ballot.all_failed
    assert not ballot.too_long
    assert f"status {status}: " in (ballot.votes[0].error or "")
    assert "no such thing" in (ballot.votes[0].error or "")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "This model's maximum context length is 4096 tokens."),
        (400, "The input (5000 tokens) is longer than the model's context length (4096 tokens)."),
        (413, "no"),
    ],
)
async def test_a_prompt_that_the_server_finds_too_long_is_recognised(
    judge_server, judge_config, reply, status, message
):
    judge_server.replies(reply.error(status, message))
    ballot = await ask(judge_config())
    assert ballot.all_failed
    assert ballot.too_long


async def test_retries_end_and_the_failed_vote_says_why(judge_server, judge_config, reply):
    judge_server.replies(reply.error(503, "overloaded"))
    ballot = await ask(judge_config(votes=2, retries=2))
    assert len(judge_server.requests) == 6
    for vote in ballot.votes:
        assert (vote.score, vote.hint, vote.text) == (None, "", "")
        assert (vote.prompt_tokens, vote.completion_tokens) == (None, None)
        assert "status 503" in (vote.error or "")
        assert "overloaded" in (vote.error or "")


async def test_one_failed_vote_leaves_the_others(judge_server, judge_config, reply):
    judge_server.behave = lambda number, _body: (
        reply.answer(POSITIVE) if number else reply.error(400, "bad luck")
    )
    ballot = await ask(judge_config())
    assert sorted((vote.error is None) for vote in ballot.votes) == [False, True, True]
    assert not ballot.all_failed


async def test_a_server_that_hangs_is_left_after_the_timeout(judge_server, judge_config, reply):
    judge_server.replies(reply(hang=True))
    ballot = await ask(judge_config(votes=1, retries=0, timeout_s=0.1))
    assert ballot.all_failed
    assert "no reply within 0.1 s" in (ballot.votes[0].error or "") or "timed out" in (
        ballot.votes[0].error or ""
    )


async def test_a_server_that_drips_bytes_is_left_after_the_timeout(
    judge_server, judge_config, reply
):
    judge_server.replies(reply(drip=True))
    ballot = await ask(judge_config(votes=1, retries=0, timeout_s=0.2))
    assert "no reply within 0.2 s" in (ballot.votes[0].error or "")


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ("{not json", "application/json"),
        ("<html>Welcome to the guest network</html>", "text/html"),
        ('"a string"', "application/json"),
        ("[]", "application/json"),
        ("{}", "application/json"),
        ('{"choices": []}', "application/json"),
        ('{"choices": null}', "application/json"),
        ('{"choices": [{"index": 0}]}', "application/json"),
        ('{"choices": [{"message": {"content": 5}}]}', "application/json"),
        ('{"choices": [null]}', "application/json"),
        ('{"choices": "none"}', "application/json"),
        ('{"choices": [{"message": {"content": "x"}}], "usage": "none"}', "application/json"),
    ],
)
async def test_garbage_is_a_failed_vote(judge_server, judge_config, reply, body, content_type):
    judge_server.replies(reply(body=body, content_type=content_type))
    ballot = await ask(judge_config(votes=1, retries=2))
    assert ballot.all_failed
    assert ballot.votes[0].error
    assert len(judge_server.requests) == 1


async def test_a_server_that_is_not_there_is_named_in_the_error(judge_config):
    config = judge_config(votes=1, retries=0).model_copy(
        update={"base_url": "http://127.0.0.1:9/v1"}
    )
    ballot = await ask(config)
    assert "connection failed" in (ballot.votes[0].error or "")


async def test_retry_after_is_waited_for(judge_server, judge_config, reply):
    judge_server.replies(
        reply.error(429, "slow down", retry_after="0.3"), reply.answer("\\boxed{-1}")
    )
    started = time.monotonic()
    ballot = await ask(judge_config(votes=1, retries=1, retry_wait_s=0.0, retry_wait_max_s=0.5))
    assert [vote.score for vote in ballot.votes] == [-1]
    assert time.monotonic() - started >= 0.3


async def test_a_long_retry_after_is_passed_on_instead(judge_server, judge_config, reply):
    judge_server.replies(reply.error(429, "come back tomorrow", retry_after="3600"))
    ballot = await ask(judge_config(votes=1, retries=5))
    assert len(judge_server.requests) == 1
    assert ballot.retry_after_s == 3600


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("2", 2.0),
        ("-5", 0.0),
        ("Thu, 01 Jan 1970 00:01:00 GMT", 50.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("soon", None),
        ("nan", None),
        ("inf", None),
    ],
)
def test_retry_after_header(header, expected):
    assert retry_after_s(header, now=10.0) == expected
