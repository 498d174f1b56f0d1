"""API keys in the store: made, rotated, revoked, each change noted; no secret is kept."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from sqlalchemy import Connection, text

from records.errors import UnknownKey
from records.keys import ApiKey, KeyLimits, Keys, parsed
from records.names import Consent
from records.store import Store
from tests.records.conftest import Clock

ACTOR = "operator@host"


@pytest.fixture
def keys(store: Store, clock: Clock) -> Keys:
    return Keys(store, clock)


def secret_of(key_text: str) -> str:
    named = parsed(key_text)
    assert named is not None
    return named[1]


async def the_key(keys: Keys) -> ApiKey:
    [key] = await keys.all()
    return key


async def test_a_key_is_known_by_its_secret_alone(keys: Keys, clock: Clock) -> None:
    made, key_text = await keys.create(actor=ACTOR, name="ci")
    assert parsed(key_text) == (made.key_id, secret_of(key_text))
    found = await the_key(keys)
    assert found == made
    assert (found.tenant, found.consent, found.is_admin) == (made.key_id, Consent.TRAIN, False)
    assert found.accepts(secret_of(key_text), clock())
    _, other = await keys.create(actor=ACTOR)
    assert not found.accepts(secret_of(other), clock())
    assert not found.accepts("", clock())


async def test_a_key_is_what_it_was_made_as(keys: Keys) -> None:
    await keys.create(actor=ACTOR, name="n", tenant="acme", is_admin=True, consent=Consent.RECORD)
    key = await the_key(keys)
    assert (key.name, key.tenant, key.is_admin, key.consent) == ("n", "acme", True, Consent.RECORD)


async def test_no_secret_is_stored(keys: Keys, store: Store) -> None:
    def every_value(connection: Connection) -> str:
        rows = [*connection.execute(text("SELECT * FROM api_keys"))]
        return repr([*rows, *connection.execute(text("SELECT * FROM key_events"))])

    made, first = await keys.create(actor=ACTOR)
    second = await keys.rotate(made.key_id, actor=ACTOR, overlap_s=60.0)
    stored = await store.writer.run(every_value)
    assert made.key_id in stored
    assert secret_of(first) not in stored
    assert secret_of(second) not in stored


async def test_a_rotated_key_ends_its_old_secret(keys: Keys, clock: Clock) -> None:
    made, first = await keys.create(actor=ACTOR, tenant="acme", consent=Consent.NONE)
    second = await keys.rotate(made.key_id, actor=ACTOR)
    key = await the_key(keys)
    assert key.accepts(secret_of(second), clock())
    assert not key.accepts(secret_of(first), clock())
    assert (key.tenant, key.consent) == ("acme", Consent.NONE)


async def test_an_overlap_ends_by_itself(keys: Keys, clock: Clock) -> None:
    made, first = await keys.create(actor=ACTOR)
    second = await keys.rotate(made.key_id, actor=ACTOR, overlap_s=60.0)
    key = await the_key(keys)
    assert key.accepts(secret_of(first), clock())
    clock.now += 61.0
    assert not key.accepts(secret_of(first), clock())
    assert key.accepts(secret_of(second), clock())


async def test_a_revoked_key_accepts_nothing_and_stays_so(keys: Keys, clock: Clock) -> None:
    made, first = await keys.create(actor=ACTOR)
    second = await keys.rotate(made.key_id, actor=ACTOR, overlap_s=60.0)
    await keys.revoke(made.key_id, actor=ACTOR)
    key = await the_key(keys)
    assert not key.accepts(secret_of(first), clock())
    assert not key.accepts(secret_of(second), clock())
    with pytest.raises(UnknownKey, match="was revoked"):
        await keys.rotate(made.key_id, actor=ACTOR)
    with pytest.raises(UnknownKey, match="was revoked"):
        await keys.revoke(made.key_id, actor=ACTOR)
    assert asdict(await the_key(keys)) == asdict(key)


async def test_an_unknown_key_is_named(keys: Keys) -> None:
    with pytest.raises(UnknownKey, match="no API key '0123'"):
        await keys.revoke("0123", actor=ACTOR)
    assert await keys.events() == []


async def test_each_change_is_noted_with_who_made_it(keys: Keys) -> None:
    made, _ = await keys.create(actor="ann@a")
    await keys.rotate(made.key_id, actor="bob@b")
    await keys.revoke(made.key_id, actor="cy@c")
    events = await keys.events()
    assert [(one.action, one.actor) for one in events] == [
        ("create", "ann@a"),
        ("rotate", "bob@b"),
        ("revoke", "cy@c"),
    ]
    assert {one.key_id for one in events} == {made.key_id}
    key = await the_key(keys)
    assert [one.at for one in events] == [key.created_at, key.rotated_at, key.revoked_at]


async def test_limits_are_what_they_were_made_as(keys: Keys) -> None:
    limits = KeyLimits(requests_per_minute=1, tokens_per_day=2**40)
    made, _ = await keys.create(actor=ACTOR, limits=limits)
    await keys.rotate(made.key_id, actor=ACTOR)
    assert (await the_key(keys)).limits == limits


async def test_use_adds_up_by_key_and_day(keys: Keys) -> None:
    await keys.add_usage({("a", 1): 10, ("b", 1): 1, ("a", 2): 5})
    await keys.add_usage({("a", 1): 2**40})
    assert await keys.usage(1) == {"a": 2**40 + 10, "b": 1}
    assert await keys.usage(2) == {"a": 5}
    assert await keys.usage(3) == {}


@pytest.mark.parametrize("given", ["", "key", "opd_0123456789ab_short", "sk-" + "a" * 43])
def test_other_texts_are_no_keys(given: str) -> None:
    assert parsed(given) is None
