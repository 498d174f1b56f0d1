"""Votes through the real `openai` client, against a server that fails in every planned way."""

from __future__ import annotations

import asyncio
import json
import re
import time

import pytest
from openai import AsyncOpenAI

from judge.votes.calls import retry_after_s
from judge.votes.voting import Ballot, cast_votes

MESSAGES = [{"role": "system", "content": "judge"}, {"role": "user", "content": "this"}]
POSITIVE = "\\boxed{1}\n[HINT_START]Give temperatures in Celsius.[HINT_END]"


async def ask(config, **options) -> Ballot:
    async with AsyncOpenAI(
        base_url=config.base_url, api_key="none", max_retries=0, timeout=config.timeout_s
    ) as client:
        return await cast_votes(client, MESSAGES, config, **options)


async def test_votes_are_kept_whole(judge_server, judge_config, reply):
    judge_server.behave = lambda _n, _body: reply.answer(POSITIVE, delay_s=0.05)
    config = judge_config(votes=3, temperature=0.6, max_tokens=77, extra_body={"min_p": 0.1})
    ballot = await ask(config)
    # A server that does not stream shows no first token: the first vote is waited for.
    assert judge_server.most_in_flight == 2
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
            "stream": True,
            "stream_options": {"include_usage": True},
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


def event(delta: dict | None = None, finish_reason: str | None = None, **fields) -> str:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish_reason}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "judge"}
    body |= {"choices": [] if fields else [choice]} | fields
    return f"data: {json.dumps(body)}\n\n"


ROLE = event({"role": "assistant", "content": ""})
END = event(finish_reason="stop")
USAGE = event(
    usage={
        "prompt_tokens": 40,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 32},
    }
)
DONE = "data: [DONE]\n\n"


async def test_votes_follow_once_the_first_has_a_token(judge_server, judge_config, reply):
    first_goes_on = asyncio.Event()

    async def first():
        yield ROLE
        await asyncio.sleep(0.05)
        assert len(judge_server.requests) == 1
        yield event({"reasoning_content": "Hm."})
        # The others are asked while the first goes on: it ends after they are all there.
        await asyncio.wait_for(first_goes_on.wait(), 20)
        yield event({"content": "\\boxed{1}\n[HINT_START]Celsius"}) + event(
            {"content": "[HINT_END]"}
        )
        yield END + USAGE + DONE

    def behave(number, _body):
        if number == 0:
            return reply(events=first())
        if number == 2:
            first_goes_on.set()
        return reply.answer("\\boxed{-1}")

    judge_server.behave = behave
    ballot = await ask(judge_config(votes=3), routing_key="session-7")
    assert [(vote.score, vote.hint) for vote in ballot.votes] == [
        (1, "Celsius"),
        (-1, ""),
        (-1, ""),
    ]
    assert ballot.votes[0].text == "\\boxed{1}\n[HINT_START]Celsius[HINT_END]"
    assert (ballot.votes[0].prompt_tokens, ballot.votes[0].completion_tokens) == (40, 3)
    assert ballot.cached_tokens == 32
    assert judge_server.routing_keys == ["session-7"] * 3


@pytest.mark.parametrize("wait_s", [0.0, 0.05])
async def test_votes_do_not_wait_for_ever(judge_server, judge_config, reply, wait_s):
    judge_server.behave = lambda number, _body: (
        reply(hang=True) if number == 0 else reply.answer("\\boxed{-1}")
    )
    ballot = await ask(judge_config(votes=3, retries=0, shared_prefill_wait_s=wait_s))
    assert [vote.score for vote in ballot.votes] == [None, -1, -1]
    assert all(vote.latency_s < ballot.votes[0].latency_s for vote in ballot.votes[1:])


async def test_votes_do_not_wait_for_a_first_that_fails(judge_server, judge_config, reply):
    judge_server.behave = lambda number, _body: (
        reply.error(400, "no") if number == 0 else reply.answer("\\boxed{-1}")
    )
    ballot = await ask(judge_config(votes=3))
    assert [vote.score for vote in ballot.votes] == [None, -1, -1]
    assert judge_server.routing_keys == [None] * 3


async def _broken(*events: str):
    for one in events:
        yield one


@pytest.mark.parametrize(
    ("events", "error", "num_requests", "too_long"),
    [
        ((ROLE, event({"content": "\\boxed"})), "broke off", 2, False),
        (("data: [1]\n\n",), "unreadable", 1, False),
        ((event({"content": 3}, choices=[{"delta": 3}]),), "unreadable", 1, False),
        (('data: {"error": {"message": "gone", "code": 500}}\n\n',), "gone", 2, False),
        (('data: {"error": {"message": "no", "code": 400}}\n\n',), "no", 1, False),
        (('data: {"error": {"message": "it is too long", "code": 400}}\n\n',), "too", 1, True),
    ],
)
async def test_a_stream_that_breaks_off_is_no_answer(
    judge_server, judge_config, reply, events, error, num_requests, too_long
):
    judge_server.behave = lambda _n, _body: reply(events=_broken(*events))
    ballot = await ask(judge_config(votes=1, retries=1))
    assert re.search(error, ballot.votes[0].error or "")
    assert len(judge_server.requests) == num_requests
    assert ballot.too_long is too_long
