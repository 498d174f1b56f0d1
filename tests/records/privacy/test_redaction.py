"""What is found, what becomes of it, and that a redacted turn neither trains nor gets lost."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest

from records.care.verify import verify_database
from records.config import RedactionConfig, StoreConfig
from records.messages import fingerprint, path_ids
from records.names import DropReason, TurnState
from records.privacy.findings import digest
from records.privacy.redaction import Redactor
from records.spill.spilled import Addition, decode, encode, redacted
from records.store import Store
from records.store.base import REDACTION_THREADS
from tests.linear_time import growth
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
    "email": "ann.lee+x@mail.kestrel-freight.com",
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


def test_parts_calls_and_tools_are_looked_at_and_ids_too() -> None:
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
    assert clean["tool_calls"][0]["id"] == "[email]"


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
        ({"patterns": {"email": "x"}}, "is already a kind"),
        ({"phone_region": "Germany"}, "phone_region"),
    ],
)
def test_a_wrong_configuration_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RedactionConfig(**values)


@pytest.mark.parametrize(
    "unit",
    [
        *("4", "1-1 ", "5 ", "@", "a@", "a@b.", ".", "aB3/", '"', "\\", "\\u0040", "-", "=", " "),
        *("sk-", "eyJ", "eyJ.", "://", "://a:", "DE89 ", "-----BEGIN ", "+1 ", "+1234567 ", "\0"),
        *("token=", "API_KEY=a1", "aws", "Bearer ", "Basic ", "xoxb-1-", "hvs.", "123456789:"),
        *("-----BEGIN PRIVATE KEY-----", "ann@kestrel-freight.com ", "4111 1111 1111 1111 "),
        *("+49 30 901820 ", "DE89370400440532013000 ", "536-90-4399 ", "hooks.slack.com/", "Q~"),
    ],
)
def test_a_text_of_twice_the_length_takes_twice_the_time(unit: str) -> None:
    def read(length: int) -> None:
        a_redactor().messages([said((unit * (length // len(unit) + 1))[:length])])

    a_redactor().messages([said("+49 30 901820, " + FOUND["jwt"] + FOUND["iban"])])
    assert growth(lambda: read(4_000), lambda: read(16_000), below=6.6) < 6.6


@pytest.mark.parametrize(
    "unit",
    [
        *("650-253-0000 ", "(650) 253-0000 ", "1/1/", "1 ", "(1", "((650", "6 5 0 2 5 3 ", "1\n"),
        *(
            "(6)(5)(0)",
            "650 253 0000;ext=",
            "650-253-0000 x",
            "+1",
            "0(",
            "1-",
            "[1](2)",
            "(",
            "1) ",
        ),
    ],
)
def test_numbers_of_a_region_take_linear_time(unit: str) -> None:
    def read(length: int) -> None:
        redactor = a_redactor(phone_region="US")
        redactor.messages([said((unit * (length // len(unit) + 1))[:length])])

    read(5_000)
    assert growth(lambda: read(10_000), lambda: read(40_000), below=6.6) < 6.6


def test_sixteen_thousand_addresses_are_read_in_linear_time() -> None:
    def read(number: int) -> None:
        text = " ".join(f"user{one}@kestrel-freight.com" for one in range(number))
        [message] = a_redactor().messages([said(text)])
        assert message["content"] == " ".join(["[email]"] * number)

    read(10)
    assert growth(lambda: read(4_000), lambda: read(16_000), below=6.6) < 6.6


def test_a_text_that_is_too_long_is_not_stored_unread() -> None:
    redactor = a_redactor(max_chars=1000)
    found: Counter[str] = Counter()
    redactor.on_found = lambda kind, mode, number: found.update({kind: number})
    long = said("x" * 1001)
    assert redactor.messages([long]) == [{"role": "user", "content": "[too_long]"}]
    assert found == {"too_long": 1}
    turn = redactor.turn(a_turn("session", messages=[long]), SCOPE)
    assert (turn.drop_reason, turn.findings) == (DropReason.SENSITIVE, {"too_long": 1})
    assert len(turn.prompt_ids) == 0
    assert redactor.refused_length([long], []) == 1000
    assert redactor.refused_length([said("x" * 900)], []) is None
    picture = "data:image/png;base64," + "A" * 4000
    assert redactor.refused_length([said(picture)], []) is None
    assert a_redactor(secrets="off", personal="off").refused_length(["x" * 10**7]) is None


async def test_what_is_cancelled_before_it_began_never_begins(store: Store) -> None:
    began, go_on = [], threading.Event()

    def work(number: int) -> None:
        began.append(number)
        assert go_on.wait(30)

    tasks = [
        asyncio.create_task(store.redact(work, number)) for number in range(REDACTION_THREADS + 4)
    ]
    *begun, one, two, three, last = tasks
    while len(began) < REDACTION_THREADS:
        await asyncio.sleep(0.01)
    cancelled = [one, two, three]
    for task in cancelled:
        task.cancel()
    await asyncio.wait(cancelled)
    go_on.set()
    await asyncio.gather(*begun, last)
    assert sorted(began) == [*range(REDACTION_THREADS), REDACTION_THREADS + 3]


def test_finders_may_overlap_and_are_one() -> None:
    [message] = a_redactor().messages([said("https://bob:hunter2@kestrel-freight.com/x")])
    assert message["content"] == "https://bob:[basic_auth]/x"


def test_an_allowed_text_is_no_finding() -> None:
    mail = "bot@kestrel-freight.com"
    other = "ann@kestrel-freight.com"
    for allowed in (other, digest(other)):
        [message] = a_redactor(allow=[allowed]).messages([said(f"{other} and x{other}")])
        assert message["content"] == f"{other} and [email]"
    assert a_redactor().messages([said(f"From {mail}, CC {other}")]) == [
        said(f"From {mail}, CC [email]")
    ]


@pytest.mark.parametrize(
    "address",
    [
        *("noreply@anthropic.com", "no-reply@x.io", "do_not_reply@x.io", "support+42@x.io"),
        *("Info@X.io", "hello@x.io", "git@github.com", "ann@example.com", "ann@mail.example.org"),
        *("ann@host.test", "ann@site.invalid", "ann@machine.localhost", "ann@firm.example"),
    ],
)
def test_addresses_of_nobody_are_no_findings(address: str) -> None:
    assert a_redactor().messages([said(f"Co-Authored-By: <{address}>")]) == [
        said(f"Co-Authored-By: <{address}>")
    ]


def test_a_drop_says_what_was_found_and_where() -> None:
    tools = [{"type": "function", "function": {"name": "a", "description": "ok"}}]
    tools += [{"type": "function", "function": {"name": "b", "description": FOUND["email"]}}]
    redactor = a_redactor()
    turn = redactor.turn(a_turn("session", tools=tools), SCOPE)
    where = "email in tools[1].function.description"
    assert turn.drop_detail == f"{where} {digest(FOUND['email'])}"
    system = {"role": "system", "content": f"You are {AWS_KEY}"}
    turn = redactor.turn(a_turn("session", messages=[system, said("Hi")]), SCOPE)
    assert turn.drop_detail == f"aws_key in messages[0].content {digest(AWS_KEY)}"
    # What somebody said is not to be guessed from a digest.
    turn = redactor.turn(a_turn("session", messages=[said("Hi"), said(FOUND["email"])]), SCOPE)
    assert turn.drop_detail == "email in messages[1].content"
    content = [{"type": "text", "text": "x", AWS_KEY: 1}]
    turn = redactor.turn(a_turn("session", messages=[{"role": "user", "content": content}]), SCOPE)
    assert turn.drop_detail == "aws_key in messages[0].content[0].(key)"


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
    assert await store.turns_by_fingerprint(SCOPE, print_, since=0.0, limit=8)
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
