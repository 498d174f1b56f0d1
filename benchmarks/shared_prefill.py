"""How many prompt tokens an engine computes for the votes on a turn and the scores of a session.

    python -m benchmarks.shared_prefill --model examples/tool_lab/model
    python -m benchmarks.shared_prefill --engine-url http://127.0.0.1:31000 --engine-model tiny

Without `--engine-url` an embedded engine is started; SGLang needs --enable-cache-report. A counter
between the client and the engine reads each reply: prompt tokens minus cached ones are computed
tokens. All prompts are new in each round. Both figures are shares: 1 is an engine that computes
every prompt completely.

1. m votes on each of several turns at a time, requested like the judge worker does (the others
   follow the first one's first token), and all at once: computed / (m * prompt). Votes that arrive
   together on an idle engine share anyway, since the first is computed while the others arrive; on
   a busy one they wait in its queue and are then computed together.
2. Teacher scores of consecutive turns of a session under hinted prompts, one after another like in
   the scoring worker, and all at once: computed / sum of all prompts and responses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from openai import AsyncOpenAI

from benchmarks.embedded_process import embedded_engine
from judge.config import JudgeConfig
from judge.votes.voting import cast_votes
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.scoring.teachers import FrozenTeacher


@dataclass(kw_only=True)
class Count:
    """Prompt tokens of the replies that passed."""

    prompt: int = 0
    cached: int = 0

    def add(self, reply: dict[str, Any]) -> None:
        """Count a reply of /generate or /v1/chat/completions."""
        if "meta_info" in reply:
            self.prompt += reply["meta_info"]["prompt_tokens"]
            self.cached += reply["meta_info"]["cached_tokens"]
        elif reply.get("usage"):
            usage = reply["usage"]
            if usage.get("prompt_tokens_details") is None:
                raise SystemExit("the engine does not report cached tokens: --enable-cache-report")
            self.prompt += usage["prompt_tokens"]
            self.cached += usage["prompt_tokens_details"]["cached_tokens"] or 0

    @property
    def share(self) -> float:
        """Computed tokens divided by all tokens."""
        return (self.prompt - self.cached) / self.prompt


class Tap:
    """Passes requests on to the engine and counts the tokens that its replies report."""

    def __init__(self, engine_url: str) -> None:
        self._engine_url = engine_url
        self.count = Count()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Serve it; yields its address."""
        async with aiohttp.ClientSession() as self._session:
            app = web.Application(client_max_size=2**28)
            app.router.add_route("*", "/{path:.*}", self._forward)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
            await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        async with self._session.request(
            request.method, self._engine_url + request.path, data=body, headers=headers
        ) as upstream:
            kind = upstream.headers.get("Content-Type", "application/json")
            response = web.StreamResponse(status=upstream.status, headers={"Content-Type": kind})
            await response.prepare(request)
            seen = b""
            async for data in upstream.content.iter_any():
                seen += data
                await response.write(data)
        if request.method == "POST":
            for reply in _replies(seen, kind):
                self.count.add(reply)
        await response.write_eof()
        return response


def _replies(body: bytes, kind: str) -> list[dict[str, Any]]:
    if not kind.startswith("text/event-stream"):
        return [json.loads(body)]
    lines = [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="examples/tool_lab/model")
    parser.add_argument("--engine-url", help="a running engine instead of an embedded one")
    parser.add_argument("--engine-model", default="default", help="its name for chat completions")
    parser.add_argument("--vocab-size", type=int, default=512, help="ids below it are sent")
    parser.add_argument("--votes", type=int, default=3)
    parser.add_argument("--judged-turns", type=int, default=6, help="voted on at the same time")
    parser.add_argument("--words", type=int, default=400, help="in a judge's prompt")
    parser.add_argument("--turns", type=int, default=6, help="of a scored session")
    parser.add_argument("--turn-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.engine_url:
        print(json.dumps(asyncio.run(measure(arguments, arguments.engine_url))))
        return
    with embedded_engine(arguments.model) as url:
        print(json.dumps(asyncio.run(measure(arguments, url))))


async def measure(arguments: argparse.Namespace, engine_url: str) -> dict[str, Any]:
    """Medians over the rounds; each round draws its own prompts."""
    draw = random.Random(time.time_ns())
    tap = Tap(engine_url)
    async with tap.served() as url:
        voting = Voting(arguments, url, draw)
        scoring = Scoring(arguments, url, draw)
        ways: dict[str, Callable[[], Awaitable[None]]] = {
            "votes_first_leads": voting.as_the_worker_does,
            "votes_at_once": voting.at_once,
            "scores_in_turn": scoring.as_the_worker_does,
            "scores_at_once": scoring.at_once,
        }
        rounds = [
            {name: await _counted(tap, way) for name, way in ways.items()}
            for _ in range(arguments.rounds)
        ]
        await voting.client.close()
        await scoring.client.close()
    results: dict[str, Any] = {"votes": arguments.votes, "judged_turns": arguments.judged_turns}
    results["scored_turns"] = arguments.turns
    for name in ways:
        shares = [one[name][0] for one in rounds]
        results[f"{name}_computed_share"] = round(statistics.median(shares), 3)
        results[f"{name}_prompt_tokens"] = rounds[0][name][1]
        results[f"{name}_ms"] = round(1e3 * statistics.median(one[name][2] for one in rounds), 1)
    return results


async def _counted(tap: Tap, way: Callable[[], Awaitable[None]]) -> tuple[float, int, float]:
    tap.count = Count()
    begun = time.perf_counter()
    await way()
    return tap.count.share, tap.count.prompt, time.perf_counter() - begun


class Voting:
    """Votes on turns whose prompts are new."""

    def __init__(self, arguments: argparse.Namespace, url: str, draw: random.Random) -> None:
        self._arguments, self._draw = arguments, draw
        self.client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def _messages(self) -> list[dict[str, str]]:
        words = (f"{self._draw.randrange(10**4)}" for _ in range(self._arguments.words))
        return [{"role": "user", "content": " ".join(words)}]

    async def as_the_worker_does(self) -> None:
        """The others after the first."""
        await self._vote(shared_prefill_wait_s=30.0)

    async def at_once(self) -> None:
        """All at the same time."""
        await self._vote(shared_prefill_wait_s=0.0)

    async def _vote(self, *, shared_prefill_wait_s: float) -> None:
        config = JudgeConfig(
            base_url="http://tap/v1",
            model=self._arguments.engine_model,
            votes=self._arguments.votes,
            max_tokens=32,
            shared_prefill_wait_s=shared_prefill_wait_s,
        )
        turns = [self._messages() for _ in range(self._arguments.judged_turns)]
        await asyncio.gather(*(self._vote_on(messages, config) for messages in turns))

    async def _vote_on(self, messages: list[dict[str, str]], config: JudgeConfig) -> None:
        ballot = await cast_votes(self.client, messages, config)
        failed = next((vote.error for vote in ballot.votes if vote.error), None)
        if failed:
            raise SystemExit(f"a vote failed: {failed}")


class Scoring:
    """A session whose every turn got a hint: each hinted prompt repeats the conversation so far."""

    def __init__(self, arguments: argparse.Namespace, url: str, draw: random.Random) -> None:
        self._arguments, self._draw = arguments, draw
        self.client = EngineClient(url, vocab_size=arguments.vocab_size)
        self._teacher = FrozenTeacher("teacher", self.client)

    def _ids(self, count: int) -> list[int]:
        return [self._draw.randrange(8, self._arguments.vocab_size) for _ in range(count)]

    def _turns(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(hinted prompt ids, response ids) of each turn."""
        conversation: list[int] = []
        turns = []
        for _ in range(self._arguments.turns):
            conversation += self._ids(self._arguments.turn_tokens // 2)
            response = self._ids(self._arguments.turn_tokens // 2)
            hinted = conversation + self._ids(40)
            turns.append((np.array(hinted, np.int32), np.array(response, np.int32)))
            conversation += response
        return turns

    async def as_the_worker_does(self) -> None:
        """One turn after another."""
        for prompt_ids, response_ids in self._turns():
            await self._teacher.score(prompt_ids, response_ids)

    async def at_once(self) -> None:
        """All turns at the same time."""
        await asyncio.gather(*(self._teacher.score(*turn) for turn in self._turns()))


if __name__ == "__main__":
    main()
