"""What is found, what becomes of it, and that a redacted turn neither trains nor gets lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from records.config import RedactionConfig, StoreConfig
from records.messages import fingerprint, path_ids
from records.names import DropReason, TurnState
from records.redaction import Redactor
from records.spilled import Addition, decode, encode, redacted
from records.store import Store
from records.verify import verify_database
from tests.records.builders import SCOPE, a_session, a_turn, following

AWS_KEY = "AKIA" + "IOSFODNN7EXAMPLE"
FOUND = {
    "aws_key": AWS_KEY,
    "basic_auth": "hunter2",
    "github_token": "ghp_" + "a1B2" * 9,
    "gitlab_token": "glpat-" + "x" * 20,
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.c2lnbmF0dXJlX29mX2l0",
    "npm_token": "npm_" + "a" * 36,
    "private_key": "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nAAA=\n-----END RSA PRIVATE KEY-----",
    "slack_token": "xox" + "b-123456789012-abcdef",
    "stripe_key": "sk_" + "live_" + "a1" * 12,
    "email": "ann.lee+x@mail.example.org",
    "phone": "+49 30 901820",
    "iban": "DE89 3704 0044 0532 0130 00",
    "credit_card": "4111 1111 1111 1111",
    "us_ssn": "536-90-4399",
}
AROUND = {"basic_auth": "postgres://bob:{}@host/db"}


def a_redactor(**values: Any) -> Redactor:
    return Redactor(RedactionConfig(**values))


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("kind", FOUND)
def test_each_kind_is_found_and_taken_out_whole(kind: str) -> None:
    text = AROUND.get(kind, "Here: {} and THAT is it.").format(FOUND[kind])
    [message] = a_redactor().messages([said(text)])
    assert message["content"] == text.replace(FOUND[kind], f"[{kind}]")


@pytest.mark.parametrize(
    "text",
    [
        "Order 4111 1111 1111 1112 of 2026-11-21, version 1.2.3, call_1234567890",
        "DE00 3704 0044 0532 0130 00 is no account",
        "000-12-3456 and @everyone and user@localhost",
        "-----BEGIN CERTIFICATE-----",
        "eyJhbGciOi.not.one",
        "30 901820 without a country",
    ],
)
def test_what_only_looks_like_it_stays(text: str) -> None:
    message = said(text)
    assert a_redactor().messages([message]) == [message]


def test_parts_calls_and_tools_are_looked_at_and_ids_are_not() -> None:
    mail = FOUND["email"]
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": f"to {mail}"}],
        "tool_calls": [
            {
                "id": mail,
                "type": "function",
                "function": {"name": "send", "arguments": f'{{"to": "{mail}"}}'},
            }
        ],
    }
    [clean] = a_redactor().messages([message])
    assert clean["content"] == [{"type": "text", "text": "to [email]"}]
    assert clean["tool_calls"][0]["function"]["arguments"] == '{"to": "[email]"}'
    assert clean["tool_calls"][0]["id"] == mail


def test_modes_kinds_and_own_patterns() -> None:
    text = f"{AWS_KEY} {FOUND['email']} {FOUND['phone']} case-123"
    redactor = a_redactor(secrets="mark", kinds={"phone": "off"}, patterns={"case": r"case-\d+"})
    found: Counter[tuple[str, str]] = Counter()
    redactor.on_found = lambda kind, mode, number: found.update({(kind, mode): number})
    for _ in range(2):  # a history is sent again: counted once
        [message] = redactor.messages([said(text)])
        assert message["content"] == f"{AWS_KEY} [email] {FOUND['phone']} [case]"
    assert found == {("aws_key", "mark"): 1, ("email", "redact"): 1, ("case", "redact"): 1}
    assert a_redactor(secrets="off", personal="off").messages([said(text)]) == [said(text)]


def test_a_local_number_is_found_where_its_country_is_known() -> None:
    [message] = a_redactor(phone_region="DE").messages([said("Call 030 901820.")])
    assert message["content"] == "Call [phone]."


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kinds": {"emial": "off"}}, "did you mean 'email'"),
        ({"patterns": {"x": "("}}, r"patterns\.x: not a regular expression"),
        ({"patterns": {"email": "x"}}, "is a kind already"),
        ({"phone_region": "Germany"}, "phone_region"),
    ],
)
def test_a_wrong_configuration_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RedactionConfig(**values)


def test_a_hostile_text_is_read_in_time() -> None:
    for unit in ("sk-", "a@", "://a:", "DE89", "-----BEGIN ", "eyJ.", "eyJ", "1-2", "+1 "):
        a_redactor().messages([said(unit * (60_000 // len(unit)))])


async def test_a_turn_with_a_secret_is_stored_without_it_and_never_trains(store: Store) -> None:
    earlier = a_turn(await a_session(store))
    await store.record_turn(earlier, scope=SCOPE)
    turn = following(earlier, said(f"My key is {AWS_KEY}"))
    await store.record_turn(turn, scope=SCOPE)
    stored = await store.turn(turn.turn_id)
    assert stored is not None
    assert (stored.state, stored.drop_reason) == (TurnState.DROPPED, DropReason.SENSITIVE)
    assert stored.messages[-1] == said("My key is [aws_key]")
    assert stored.findings == {"aws_key": 1}
    assert len(stored.prompt_ids) == len(stored.response_ids) == 0
    # The next request finds it by what the client sends.
    path = path_ids(SCOPE, [*turn.messages, turn.response])
    [ref] = await store.turns_by_response_node(SCOPE, [path[-1]])
    assert ref.turn_id == turn.turn_id
    print_ = fingerprint(turn.response)
    assert await store.turns_by_fingerprint(SCOPE, print_, since=0.0)
    # So does the one after that, whose history holds the key as well.
    third = following(turn, said("Well?"))
    await store.record_turn(third, scope=SCOPE)
    assert await verify_database(store.config) == []
    await store.record_turn(turn, scope=SCOPE)  # again: nothing changes


@pytest.mark.parametrize("where", ["response", "tools"])
async def test_a_secret_in_response_or_tools_counts_too(store: Store, where: str) -> None:
    changes: dict[str, Any] = {
        "response": {"response": {"role": "assistant", "content": f"It is {AWS_KEY}"}},
        "tools": {"tools": [{"type": "function", "function": {"description": AWS_KEY}}]},
    }[where]
    turn = a_turn(await a_session(store), **changes)
    await store.record_turn(turn, scope=SCOPE)
    stored = await store.turn(turn.turn_id)
    assert stored is not None
    assert stored.drop_reason is DropReason.SENSITIVE
    assert AWS_KEY not in str((stored.response, stored.tools))


async def test_an_earlier_reason_to_drop_stays(store: Store) -> None:
    turn = a_turn(
        await a_session(store), messages=[said(AWS_KEY)], drop_reason=DropReason.SIDE_TURN
    )
    await store.record_turn(turn, scope=SCOPE)
    stored = await store.turn(turn.turn_id)
    assert stored is not None
    assert stored.drop_reason is DropReason.SIDE_TURN


async def test_a_next_state_is_redacted_and_judged(store: Store) -> None:
    turn = a_turn(await a_session(store))
    await store.record_turn(turn, scope=SCOPE)
    assert await store.set_next_state(turn.turn_id, [said(f"No, write to {FOUND['email']}.")])
    [claimed] = await store.claim(TurnState.JUDGING, owner="judge", limit=1, ttl_s=60.0)
    assert claimed.next_state == [said("No, write to [email].")]
    assert claimed.response_ids.tolist() == turn.response_ids.tolist()


async def test_marked_turns_train_and_say_what_they_hold(config: StoreConfig) -> None:
    marking = config.model_copy(update={"redaction": RedactionConfig(personal="mark")})
    async with await Store.open(marking) as store:
        turn = a_turn(await a_session(store), messages=[said(FOUND["email"])])
        await store.record_turn(turn, scope=SCOPE)
        stored = await store.turn(turn.turn_id)
        assert stored is not None
        assert (stored.state, stored.findings) == (TurnState.AWAITING_NEXT_STATE, {"email": 1})
        assert stored.messages == turn.messages
        assert stored.prompt_ids.tolist() == turn.prompt_ids.tolist()


def test_a_spilled_request_holds_no_secret() -> None:
    turn = a_turn("session", messages=[said(AWS_KEY)])
    addition = Addition(
        scope=SCOPE, created_at=1.0, turn=turn, answers="x", next_state=(said(AWS_KEY),)
    )
    payload = encode(redacted(addition, a_redactor()))
    assert AWS_KEY.encode() not in payload
    back = decode(payload)
    assert back.turn is not None
    assert back.turn.identity is not None
    assert list(back.turn.identity.node_ids) == path_ids(SCOPE, [said(AWS_KEY), turn.response])
