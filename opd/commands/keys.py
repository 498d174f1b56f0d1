"""What `opd keys` does, and the check that no endpoint is open to others without a key.

Composition only: `records.keys` implements the keys. Each command returns the lines to print.
"""

from __future__ import annotations

import asyncio
import getpass
import re
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from opd.commands.records import Outcome
from opd.run import config as run_config
from opd.run.config import RunConfig
from opd.run.start_checks import check_store
from records.keys import ApiKey, KeyLimits, Keys
from records.names import Consent
from records.store import Store
from trainer.errors import StartupError

T = TypeVar("T")

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


def create(
    config_file: Path,
    name: str,
    tenant: str | None,
    consent: str,
    is_admin: bool,
    limits: dict[str, int | None],
) -> Outcome:
    """A new key; its text is the last line."""
    if tenant is not None and not _TENANT.fullmatch(tenant):
        raise StartupError(f"--tenant {tenant!r}: 1 to 64 letters, digits, '.', '_' and '-'")
    made, text = _with_keys(
        config_file,
        lambda keys: keys.create(
            actor=_actor(),
            name=name,
            tenant=tenant,
            is_admin=is_admin,
            consent=Consent(consent),
            limits=KeyLimits(**limits),
        ),
    )
    return Outcome([_line(made), "keep it, it is not shown again:", text])


def list_keys(config_file: Path) -> Outcome:
    """A line for each key."""
    known = _with_keys(config_file, lambda keys: keys.all())
    return Outcome([_line(key) for key in known] or ["no API keys: `opd keys create` creates one"])


def rotate(config_file: Path, key_id: str, overlap_h: float) -> Outcome:
    """A new secret; the key's text is the last line."""
    overlap_s = overlap_h * 3600
    text = _with_keys(
        config_file, lambda keys: keys.rotate(key_id, actor=_actor(), overlap_s=overlap_s)
    )
    old = f"works for {overlap_h:g} more hours" if overlap_h else "no longer works"
    return Outcome([f"the old secret {old}; keep the new one, it is not shown again:", text])


def revoke(config_file: Path, key_id: str) -> Outcome:
    """No more requests with this key."""
    _with_keys(config_file, lambda keys: keys.revoke(key_id, actor=_actor()))
    refresh_s = run_config.load(config_file).proxy.key_refresh_s
    return Outcome([f"revoked: {key_id}; running proxies refuse it within {refresh_s:g} s"])


def log(config_file: Path) -> Outcome:
    """A line for each change of a key."""
    events = _with_keys(config_file, lambda keys: keys.events())
    return Outcome([f"{_when(one.at)} {one.action} {one.key_id} by {one.actor}" for one in events])


async def refuse_open_door(config: RunConfig, store: Store, config_file: Path) -> None:
    """Raises StartupError if other machines can reach the endpoint and it has no keys."""
    if config.proxy.is_loopback or await Keys(store, time.time).all():
        return
    raise StartupError(
        f"proxy.host: others can reach the endpoint on {config.proxy.host!r}, and there is no API "
        f"key: create one with `opd keys create --run {config_file.parent}`, or listen on 127.0.0.1"
    )


def _with_keys(config_file: Path, work: Callable[[Keys], Awaitable[T]]) -> T:
    config = run_config.load(config_file)
    check_store(config.store)

    async def run() -> T:
        async with await Store.open(config.store) as store:
            return await work(Keys(store, time.time))

    return asyncio.run(run())


def _line(key: ApiKey) -> str:
    words = [key.key_id, f"tenant={key.tenant}", f"consent={key.consent}"]
    words += ["admin"] if key.is_admin else []
    limits = asdict(key.limits).items()
    words += [f"{name}={limit}" for name, limit in limits if limit is not None]
    words += [f"created {_when(key.created_at)}"]
    if key.rotated_at is not None:
        words.append(f"rotated {_when(key.rotated_at)}")
    if key.old_until is not None and key.old_until > time.time():
        words.append(f"old secret until {_when(key.old_until)}")
    if key.revoked_at is not None:
        words.append(f"REVOKED {_when(key.revoked_at)}")
    return "  ".join([*words, key.name] if key.name else words)


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat("T", "seconds")


def _actor() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"
