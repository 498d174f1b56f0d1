"""The proxy's cost of a streamed token, in replies of different lengths.

    python -m benchmarks.stream_cost [--lengths 500,4000,16000] [--pace-ms 5] [--out FILE.json]

One agent reads streams through the proxy, from a scripted engine whose events carry everything so
far (SGLang's without `--incremental-streaming-output`), and from one whose events carry only what
is new. For each length both are used in turn. Engine, proxy and agent are processes of their own.
It prints the proxy's processor time per token, including the start and end of requests, and how
many tokens went into one piece: a proxy that lags behind reads several events at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson
import uvloop
from rich.progress import track

from benchmarks.proxy_processes import HEADERS, LAB_MODEL, MODEL_NAME, Served, cpu_s, served
from benchmarks.scripted_engine import Script
from rollout_bridge.config import RendererConfig
from rollout_bridge.rendering.rendering import Rendering

TOKENS_AT_LEAST = 4000
"""For each figure: short replies are requested several times."""
KINDS = ("cumulative", "incremental")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Microseconds of the proxy's processor time per token; tokens per piece of the stream."""

    us: float
    tokens_per_piece: float


async def num_pieces(session: aiohttp.ClientSession, url: str, length: int, number: int) -> int:
    """Read one reply of `length` tokens; returns its pieces of text. Raises RuntimeError."""
    messages = [{"role": "user", "content": f"Question {number} for {length} tokens."}]
    body = {"model": MODEL_NAME, "messages": messages, "stream": True, "max_tokens": length}
    body["stream_options"] = {"include_usage": True}
    pieces, tokens = 0, None
    async with session.post(
        f"{url}/v1/chat/completions", data=orjson.dumps(body), headers=HEADERS
    ) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = orjson.loads(line[6:])
            pieces += any(choice["delta"].get("content") for choice in event["choices"])
            tokens = (event["usage"] or {}).get("completion_tokens", tokens)
    if tokens != length:
        raise RuntimeError(f"a reply had {tokens} tokens instead of {length}")
    return pieces


async def measure(where: Served, length: int) -> Cost:
    """Measure streams one after another."""
    number = max(TOKENS_AT_LEAST // length, 1)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        # Do not count work that only a proxy's first request does.
        await num_pieces(session, where.proxy_url, 2, 0)
        before = cpu_s(where.proxy_pid)
        pieces = 0
        for place in range(number):
            pieces += await num_pieces(session, where.proxy_url, length, place)
        taken_s = cpu_s(where.proxy_pid) - before
    tokens = number * length
    return Cost(us=1e6 * taken_s / tokens, tokens_per_piece=tokens / pieces)


def report(lengths: Sequence[int], costs: dict[tuple[str, int], Cost]) -> str:
    """The figures as a table."""
    lines = ["processor time of the proxy per streamed token (tokens per piece)"]
    lines.append(f"{'tokens':>8} {'cumulative':>20} {'incremental':>20} {'ratio':>7}")
    for length in lengths:
        one, other = (costs[kind, length] for kind in KINDS)
        cells = [f"{cost.us:.0f} us ({cost.tokens_per_piece:.1f})" for cost in (one, other)]
        lines.append(f"{length:>8} {cells[0]:>20} {cells[1]:>20} {one.us / other.us:>6.1f}x")
    first, last = lengths[0], lengths[-1]
    for kind in KINDS:
        ratio = costs[kind, last].us / costs[kind, first].us
        lines.append(f"{kind}: a token of {last} costs {ratio:.2f} of one of {first}")
    return "\n".join(lines)


def run(lengths: Sequence[int], pace_s: float) -> dict[tuple[str, int], Cost]:
    """Start the processes, measure, stop them."""
    renderer = RendererConfig(name="qwen3", enable_thinking=False)
    rendering = Rendering.load(str(LAB_MODEL), renderer)
    word = rendering.tokenizer.encode("sun", add_special_tokens=False)
    longest = max(lengths)
    ids = (*(word * longest)[:longest], rendering.stop_token_ids[0])
    costs: dict[tuple[str, int], Cost] = {}
    with ExitStack() as stack:
        places = {}
        for kind in KINDS:
            incremental = kind == "incremental"
            script = Script(reply_ids=ids, first_s=pace_s, pace_s=pace_s, incremental=incremental)
            places[kind] = stack.enter_context(
                served(script, str(LAB_MODEL), renderer, max_output_tokens=longest)
            )
        todo = [(kind, length) for length in lengths for kind in KINDS]
        for kind, length in track(todo, description="streaming"):
            costs[kind, length] = uvloop.run(measure(places[kind], length))
    return costs


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="What a streamed token costs the proxy.")
    parser.add_argument("--lengths", default="500,4000,16000", help="tokens of a reply")
    parser.add_argument("--pace-ms", type=float, default=5.0, help="engine's time per token")
    parser.add_argument("--out", type=Path, help="also write the figures here, as JSON")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    costs = run(lengths, options.pace_ms / 1000)
    if options.out is not None:
        found = {kind: [costs[kind, length].us for length in lengths] for kind in KINDS}
        options.out.write_bytes(orjson.dumps({"lengths": lengths, **found}))
    print(report(lengths, costs))


if __name__ == "__main__":
    main()
