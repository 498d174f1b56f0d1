"""Sends the endpoint whatever its schemas allow and more: no 5xx, no hang, nothing unrecorded.

    python -m tests.reliability.fuzz --requests 20000 [--postgresql]

The real application over a real store, served as it is deployed; behind it an engine that answers
anything with texts, calls and broken ids in turn. After the last request every answered turn must
be in the store, and the store must be sound. Where keys are needed, a request without one that is
let in must change nothing: no commit, no other row, no question to the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from hypothesis import HealthCheck, Phase, given, seed, settings
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from api_proxy.access.gate import LOGIN_PATH, OPEN_PATHS, PAGES
from records.care.verify import verify_database
from records.config import StoreConfig
from records.store import Store
from tests.records.conftest import SERVER, new_database
from tests.records.looking import list_turns
from tests.reliability.fuzz_keys import Headers, watch
from tests.reliability.fuzz_requests import ROUTES, FuzzRequest, requests
from tests.reliability.fuzz_server import Served, served

PART = 500
HANG_S = 120.0
"""A request that has no answer after so long hangs. Generous: the machine may be busy."""


@dataclass
class Outcome:
    """What was answered, and what should not have been."""

    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    turn_ids: set[str] = field(default_factory=set)
    response_ids: list[str] = field(default_factory=list)

    def note(self, request: FuzzRequest, response: httpx.Response) -> None:
        """Look at one answer."""
        self.statuses[response.status_code] += 1
        if response.status_code >= 500:
            self.problem(request, f"{response.status_code} {response.text[:300]}")
        elif response.status_code >= 400 and request.path.startswith("/v1/"):
            self._check_refusal(request, response)
        if response.status_code == 200 and "x-turn-id" in response.headers:
            self._check_answer(request, response)

    def problem(self, request: FuzzRequest, what: str) -> None:
        """Keep what is needed to send it again."""
        sent = f"{request.method} {request.path} {request.headers} {request.query} "
        self.problems.append(f"{what}\n  {sent}{request.body[:2000]!r}")

    def _check_refusal(self, request: FuzzRequest, response: httpx.Response) -> None:
        if request.method == "HEAD":
            return
        try:
            is_worded = bool(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            is_worded = False
        if not is_worded:
            self.problem(request, f"{response.status_code} without words: {response.text[:300]}")

    def _check_answer(self, request: FuzzRequest, response: httpx.Response) -> None:
        self.turn_ids.add(response.headers["x-turn-id"])
        if response.headers["content-type"].startswith("text/event-stream"):
            if "error" in response.text.rpartition("data: ")[2]:
                self.problem(request, f"a stream ended in an error: {response.text[-300:]}")
            return
        self.response_ids.append(str(response.json().get("id")))
        del self.response_ids[:-200]


class Refused(Outcome):
    """What was answered to requests without a key that is let in."""

    def note(self, request: FuzzRequest, response: httpx.Response) -> None:
        """401 is what they get, and to a page the way to the login; but for what needs no key."""
        super().note(request, response)
        path, status = request.path.rstrip("/"), response.status_code
        is_led_away = path.startswith(PAGES) and (
            status == 303 and response.headers["location"] == LOGIN_PATH
        )
        needs_none = path in (*OPEN_PATHS, LOGIN_PATH) or path.startswith(f"{PAGES}/static/")
        if not (needs_none or is_led_away or status == 401 or status >= 500):
            self.problem(request, f"{response.status_code} without a key: {response.text[:300]}")


def fuzz(
    database: StoreConfig, number: int, start: int, tell: Callable[[], None], workers: int = 1
) -> Outcome:
    """Send `number` requests, the same for the same `start`, where nobody needs a key. With several
    `workers`, each request has a connection of its own, which any of them may accept.
    """
    outcome = Outcome()
    limits = httpx.Limits(max_keepalive_connections=None if workers == 1 else 0)
    with (
        served(database, workers=workers) as app,
        httpx.Client(base_url=app.url, timeout=HANG_S, limits=limits) as client,
    ):
        _check_routes(app, outcome)
        _send_all(number, start, lambda request: _send(client, request, {}, outcome), tell)
        _check_ready(client, outcome)
    outcome.problems += asyncio.run(_records_problems(database, outcome))
    return outcome


def fuzz_with_keys(
    database: StoreConfig, number: int, start: int, tell: Callable[[], None]
) -> tuple[Outcome, Refused]:
    """Send `number` requests where keys are needed: one half has them, then another half has none
    that is let in, and must have no effect at all.
    """
    known, unknown = Outcome(), Refused()
    with (
        served(database, with_keys=True) as app,
        httpx.Client(base_url=app.url, timeout=HANG_S) as client,
        closing(watch(app.database)) as watched,
    ):
        keys = app.keys
        assert keys is not None

        def send_known(request: FuzzRequest) -> None:
            _send(client, request, _one_of(keys.accepted, request), known)

        def send_unknown(request: FuzzRequest) -> None:
            before = watched.version(), len(app.engine.prompts)
            _send(client, request, _one_of(keys.refused, request), unknown)
            if (watched.version(), len(app.engine.prompts)) != before:
                unknown.problem(request, "the store changed, or the engine was asked")

        _send_all(number // 2, start, send_known, tell)
        before = watched.settled(quiet_s=2.0, patience_s=60.0)
        unknown.response_ids = known.response_ids
        _send_all(number - number // 2, start + 1, send_unknown, tell)
        after = watched.settled(quiet_s=2.0, patience_s=60.0)
        changed = [
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        ]
        unknown.problems += [f"table {name} changed without a key" for name in sorted(changed)]
        _check_ready(client, known)
    known.problems += asyncio.run(_records_problems(database, known))
    return known, unknown


def _one_of(credentials: list[Headers], request: FuzzRequest) -> Headers:
    return credentials[request.earlier % len(credentials)]


def _check_routes(app: Served, outcome: Outcome) -> None:
    unknown = {route for route in app.routes if route[0] != "HEAD"} - {
        (route.method, route.path) for route in ROUTES
    }
    if unknown:
        outcome.problems.append(f"routes that are not fuzzed: {sorted(unknown)}")


def _check_ready(client: httpx.Client, outcome: Outcome) -> None:
    ready = client.get("/readyz")
    if ready.status_code != 200:
        outcome.problems.append(f"not ready afterwards: {ready.text}")


def _send_all(
    number: int, start: int, send: Callable[[FuzzRequest], None], tell: Callable[[], None]
) -> None:
    # Hypothesis remembers each value that it made, and slows down with their number.
    for part, done in enumerate(range(0, number, PART)):

        @seed(1000 * start + part)
        @settings(
            max_examples=min(PART, number - done),
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(requests())
        def one(request: FuzzRequest) -> None:
            send(request)
            tell()

        one()


def _send(
    client: httpx.Client, request: FuzzRequest, credentials: Headers, outcome: Outcome
) -> None:
    known = outcome.response_ids or ["resp_unknown"]
    chosen = known[request.earlier % len(known)]
    path = request.path.replace("{response_id}", chosen)
    headers = {name: value.strip() for name, value in request.headers.items()}
    if credentials:
        headers.pop("authorization", None)
        request.headers = headers = {**headers, **credentials}
    try:
        prepared = client.build_request(
            request.method,
            httpx.URL(client.base_url.join("/"), path=path, params=request.query or None),
            content=request.body.replace(b"{response_id}", chosen.encode()),
            headers=[
                (name.encode(), value.encode("latin-1"))
                for name, value in {"content-type": "application/json", **headers}.items()
            ],
        )
    except (httpx.InvalidURL, UnicodeError):
        return  # no client could send it
    try:
        response = client.send(prepared)
    except httpx.LocalProtocolError:
        return  # likewise
    except httpx.TimeoutException:
        outcome.problem(request, f"no answer within {HANG_S:.0f} s")
    except httpx.TransportError as error:
        outcome.problem(request, f"{type(error).__name__}: {error}")
    else:
        outcome.note(request, response)


async def _records_problems(config: StoreConfig, outcome: Outcome) -> list[str]:
    """Answered turns that are not in the store, and what is wrong with the store."""
    async with await Store.open(config) as store:
        stored = {turn.turn_id for turn in await list_turns(store, limit=10_000_000)}
    problems = await verify_database(config)
    lost = sorted(outcome.turn_ids - stored)
    return [*(f"answered and not recorded: turn {one}" for one in lost), *problems]


@contextmanager
def _databases(folder: Path, postgresql: bool) -> Iterator[tuple[StoreConfig, StoreConfig]]:
    """Two empty stores."""
    if not postgresql:
        yield StoreConfig.sqlite(folder / "open.db"), StoreConfig.sqlite(folder / "keys.db")
        return
    with new_database() as first, new_database() as second:
        # What the server does not take is kept in files.
        yield (
            StoreConfig(url=first, spill_folder=folder / "open"),
            StoreConfig(url=second, spill_folder=folder / "keys"),
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Send the endpoint anything.")
    parser.add_argument(
        "--requests", type=int, default=20_000, help="half of them with keys needed"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="where nobody needs a key")
    parser.add_argument(
        "--postgresql", action="store_true", help=f"databases of their own at {SERVER}"
    )
    options = parser.parse_args()
    half = options.requests // 2
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with (
        tempfile.TemporaryDirectory() as temporary,
        _databases(Path(temporary), options.postgresql) as (open_store, keyed_store),
        Progress(*columns) as progress,
    ):
        task = progress.add_task("requests", total=options.requests)

        def tell() -> None:
            progress.advance(task)
            done = progress.tasks[0].completed
            if done % 500 == 0 and not progress.console.is_terminal:
                seconds = progress.tasks[0].elapsed or 0.0
                print(f"{done:.0f} requests after {seconds:.0f} s", flush=True)

        outcomes = {"no keys needed": fuzz(open_store, half, options.seed, tell, options.workers)}
        known, unknown = fuzz_with_keys(keyed_store, options.requests - half, options.seed, tell)
        outcomes |= {"with a key": known, "without a key": unknown}
    for name, outcome in outcomes.items():
        for problem in outcome.problems:
            print(problem)
        shown = ", ".join(
            f"{status}: {count}" for status, count in sorted(outcome.statuses.items())
        )
        number = sum(outcome.statuses.values())
        print(f"{name}: {number} answers ({shown}); {len(outcome.problems)} problems")
    sys.exit(1 if any(outcome.problems for outcome in outcomes.values()) else 0)


if __name__ == "__main__":
    main()
