"""The proxy's cost of a turn, with histories of different lengths.

    python -m benchmarks.history_cost [--lengths 1000,8000,64000] [--turns 12] [--out FILE.json]

A conversation begins with a message of about so many tokens. Then each turn adds a message of
about 200 tokens, and the proxy extends the ids of the turn before. Beside it, in another
conversation, the agent changes its system prompt with each turn (a clock), so the proxy renders and
stores all of it again. Turns of both alternate; engine, proxy and agent are processes of their own.
The figure is the proxy's processor time per turn, parsing the request and writing the store
included. What parsing alone costs is that of the same request with a temperature that is refused:
it is read and checked, and goes no further.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop
from rich.progress import track

from benchmarks.proxy_processes import HEADERS, LAB_MODEL, MODEL_NAME, Served, cpu_s, served
from benchmarks.scripted_engine import Script
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering

NEW_TOKENS = 200
REPLY_TOKENS = 16
KINDS = ("extended", "whole")
PARSED = "parsed"
_AT_A_TIME = 4
"""Turns between two looks at the clock: what follows an answer may fall into the next turn."""


@dataclass(slots=True, kw_only=True)
class Conversation:
    """One agent's messages; with `has_clock`, its system prompt differs in each request."""

    has_clock: bool
    messages: list[dict[str, Any]] = field(default_factory=list)
    num_turns: int = 0

    async def turn(self, session: aiohttp.ClientSession, url: str, text: str) -> None:
        """Send `text` after everything so far, and keep the reply. Raises RuntimeError."""
        self.num_turns += 1
        self.messages.append({"role": "user", "content": text})
        said = await self._post(session, url, expected=200)
        self.messages.append(said["choices"][0]["message"])

    async def refused(self, session: aiohttp.ClientSession, url: str) -> None:
        """Send everything so far with a temperature that no model has. Raises RuntimeError."""
        await self._post(session, url, expected=400, temperature=9.0)

    async def _post(
        self, session: aiohttp.ClientSession, url: str, *, expected: int, **more: Any
    ) -> Any:
        clock = f" It is {self.num_turns} o'clock." if self.has_clock else ""
        system = {"role": "system", "content": f"You are helpful.{clock}"}
        body = {
            "model": MODEL_NAME,
            "messages": [system, *self.messages],
            "max_tokens": REPLY_TOKENS + 1,
        }
        async with session.post(
            f"{url}/v1/chat/completions", data=orjson.dumps(body | more), headers=HEADERS
        ) as response:
            said = orjson.loads(await response.read())
            if response.status != expected:
                raise RuntimeError(f"{response.status}: {said}")
        return said


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="What a turn costs the proxy.")
    parser.add_argument("--lengths", default="1000,8000,64000", help="tokens of the history")
    parser.add_argument("--turns", type=int, default=12, help="measured for each figure")
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    costs = run(lengths, options.turns)
    if options.out is not None:
        options.out.write_bytes(orjson.dumps({"lengths": lengths, **costs}))
    print(report(lengths, costs))


def run(lengths: Sequence[int], turns: int) -> dict[str, list[float]]:
    """Milliseconds per turn of each kind, by length."""
    renderer = RendererConfig(name="qwen3", enable_thinking=False)
    rendering = Rendering.load(str(LAB_MODEL), renderer)
    word = rendering.tokenizer.encode("sun", add_special_tokens=False)
    ids = (*(word * REPLY_TOKENS)[:REPLY_TOKENS], rendering.stop_token_ids[0])
    per_word = rendering.count_tokens(" ".join(["sun"] * 1000)) / 1000
    script = Script(reply_ids=ids, first_s=0.005, pace_s=0.001)
    costs: dict[str, list[float]] = {kind: [] for kind in (*KINDS, PARSED)}
    with served(script, str(LAB_MODEL), renderer) as where:
        for length in track(lengths, description="histories"):
            found = uvloop.run(_measure(where, round(length / per_word), per_word, turns))
            for kind, cost_ms in found.items():
                costs[kind].append(cost_ms)
    return costs


async def _measure(where: Served, words: int, per_word: float, turns: int) -> dict[str, float]:
    new = " ".join(["moon"] * round(NEW_TOKENS / per_word))
    taken: dict[str, list[float]] = {kind: [] for kind in (*KINDS, PARSED)}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        talks = {kind: Conversation(has_clock=kind == "whole") for kind in KINDS}

        async def take(kind: str, number: int) -> None:
            for part in range(_AT_A_TIME):
                if kind == PARSED:
                    await talks["extended"].refused(session, where.proxy_url)
                else:
                    text = f"{kind} {words} {number} {part} {new}"
                    await talks[kind].turn(session, where.proxy_url, text)

        for kind, talk in talks.items():
            await talk.turn(session, where.proxy_url, f"{kind} {words} " + "sun " * words)
            await talk.turn(session, where.proxy_url, "What of it?")
        for number in range(turns):
            for kind, found in taken.items():
                before = cpu_s(where.proxy_pid)
                await take(kind, number)
                found.append(1000 * (cpu_s(where.proxy_pid) - before) / _AT_A_TIME)
    return {kind: statistics.median(found) for kind, found in taken.items()}


def report(lengths: Sequence[int], costs: dict[str, list[float]]) -> str:
    """The figures as a table."""
    lines = ["processor time of the proxy per turn of 200 new tokens, in milliseconds"]
    names = ("extended", "rendered whole", "parsed alone")
    lines.append(f"{'history':>8} " + " ".join(f"{name:>15}" for name in (*names, "of whole")))
    for place, length in enumerate(lengths):
        found = [costs[kind][place] for kind in (*KINDS, PARSED)]
        shown = " ".join(f"{cost:>15.1f}" for cost in found)
        lines.append(f"{length:>8} {shown} {found[0] / found[1]:>15.2f}")
    extended, parsed = costs["extended"], costs[PARSED]
    ratio = extended[-1] / extended[0]
    beyond = (extended[-1] - parsed[-1]) / (extended[0] - parsed[0])
    lines.append(
        f"a turn after {lengths[-1]} tokens costs {ratio:.2f} of one after {lengths[0]}, "
        f"{beyond:.2f} beyond parsing the request"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
