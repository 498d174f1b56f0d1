"""What is known about a run now: read once, from its store, its folder and its endpoint. Nothing is
computed here that another module computes; what was not measured is None.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from opd.commands.doctor_overview import told_streaks
from opd.report.metrics.metrics_file import FOLDER
from opd.report.metrics.run_figures import RunFigures, read_figures
from opd.report.terminal.log_notices import LogNotices
from opd.run.config import RunConfig
from opd.run.recorded_run import load_recorded
from records.hints.types import HintStatus, RehearsalBlock
from records.names import DropReason, TurnState
from records.reading.queues import QUEUES
from records.reading.summary import VoteSummary
from records.store import Store
from rollout_bridge.engine.served import STAGED_FILE, ServedFile
from rollout_bridge.guard.checks import Checked, last_check
from rollout_bridge.rehearsal.figures import figures
from rollout_bridge.stop_order import why_stopped

RATE_OVER_S = 300.0
"""Turns per minute are the mean over this time."""
WARNINGS_OF_S = 3600.0
"""Warnings of this time are shown."""
_NEWEST_HINTS = 3
# The sources of a merged hint are those of the hint that it was merged into.
_SHOWN_STATUSES = [one for one in HintStatus if one not in (HintStatus.MERGED, HintStatus.DELETED)]
_PROBE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Turns in one state; `oldest_s`: age of the oldest live one."""

    turns: int
    oldest_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedFrom:
    """A hint, and the words of the user that it came from; None once they were deleted."""

    hint_id: str
    hint: str
    status: str
    block: RehearsalBlock | None
    """Why it is not practised."""
    words: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What answers at the endpoint's address: `ready` is the reply of `/readyz`, None if nothing
    answers.
    """

    url: str
    ready: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """A run's status. Times are unix seconds.

    `served_version`: what the adapter file says, or the newest version that was published.
    `processes`: seconds since each process last wrote its metrics. `counted`: what the judge's
    process has counted since it started, by name.
    """

    time: float
    run: str
    served_version: int
    version_made_at: float | None
    staged_version: int | None
    """Loaded, and asked by the guard only; None: there is none."""
    turns_per_minute: float
    queues: dict[TurnState, Queue]
    finished: dict[TurnState, int]
    drops: dict[DropReason, int]
    votes: VoteSummary
    figures: RunFigures
    learned_from: tuple[LearnedFrom, ...]
    why_stopped: str | None
    check: Checked | None
    """The canary results of the newest version that was checked; None: there are none."""
    endpoint: Endpoint
    processes: dict[str, float]
    counted: dict[str, float]
    always_dropped: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def agreement(self) -> float | None:
        """Share of the pairs of decided votes that agree, mean over turns since the judge started;
        None before two votes on a turn were decided.
        """
        turns = self.counted.get("hint_agreement_turns_total")
        return self.counted["hint_agreement_total"] / turns if turns else None

    @property
    def kl_to_start(self) -> float | None:
        """Nats per token, as the last step found it; None without `trainer.beta_kl`."""
        found = self.figures.step.get("kl_loss")
        return found if found is not None and math.isfinite(found) else None

    @property
    def teacher_tokens_per_scored(self) -> float | None:
        """Tokens that teachers read (hinted prompts and answers) for each turn that they scored,
        since the judge's process started; None before one was scored by an engine.
        """
        turns = self.counted.get("teacher_scored_total")
        tokens = self.counted.get("teacher_tokens_total")
        if not turns or not tokens:
            return None
        return (tokens + self.counted["teacher_prompt_tokens_total"]) / turns


def read_run(config_file: Path) -> Now:
    """The status of the run of `config_file`. Raises StartupError if nothing was recorded."""
    config = load_recorded(config_file)
    return asyncio.run(_read(config, config_file.parent))


async def _read(config: RunConfig, folder: Path) -> Now:
    async with await Store.open(config.store) as store:
        return await read_now(config, folder, store)


async def read_now(config: RunConfig, folder: Path, store: Store) -> Now:
    """The status of the run in `folder`, from an open store. Raises StoreError."""
    endpoint, in_folder, found, streaks = await asyncio.gather(
        _endpoint(config),
        asyncio.to_thread(_of_folder, folder),
        _of_store(store, folder),
        told_streaks(store, folder / "config.toml"),
    )
    return Now(
        time=time.time(),
        run=str(folder),
        endpoint=endpoint,
        always_dropped=tuple(one["words"] for one in streaks),
        **in_folder,
        **found,
    )


def _of_folder(folder: Path) -> dict[str, Any]:
    since = datetime.fromtimestamp(time.time() - WARNINGS_OF_S)
    return {
        "why_stopped": why_stopped(folder),
        "check": last_check(folder),
        "processes": _ages(folder / FOLDER),
        "counted": _counted(folder / FOLDER / "judge.prom"),
        "warnings": tuple(LogNotices.since(folder / "logs", since).new()),
    }


async def _of_store(store: Store, folder: Path) -> dict[str, Any]:
    counts, latest = await store.counts(), await store.latest_version()
    version = 0 if latest is None else latest.version
    served, staged = ServedFile(folder).current(), ServedFile(folder, STAGED_FILE).current()
    if served is not None:
        version = int(served.label)
    is_newest = latest is not None and latest.version == version
    return {
        "served_version": version,
        "staged_version": None if staged is None else int(staged.label),
        "version_made_at": latest.created_at if latest is not None and is_newest else None,
        "turns_per_minute": await store.turns_within(RATE_OVER_S) * 60.0 / RATE_OVER_S,
        "queues": {
            state: Queue(turns=counts[state], oldest_s=await store.waiting_for_s(state))
            for state in QUEUES
        },
        "finished": {state: n for state, n in counts.items() if state not in QUEUES},
        "drops": await store.drops(),
        "votes": await store.vote_summary(),
        "figures": await read_figures(store, folder),
        "learned_from": tuple(await _learned_from(store)),
    }


async def _learned_from(store: Store) -> list[LearnedFrom]:
    found: list[LearnedFrom] = []
    for hint in await store.hints(statuses=_SHOWN_STATUSES, limit=_NEWEST_HINTS):
        sources = await store.hint_sources(hint.hint_id, limit=1)
        words = sources[0].words if sources else None
        found.append(
            LearnedFrom(
                hint_id=hint.hint_id,
                hint=hint.text,
                status=hint.status.value,
                block=hint.block,
                words=words,
            )
        )
    return found


async def _endpoint(config: RunConfig) -> Endpoint:
    url = f"http://{config.proxy.host}:{config.proxy.port}"
    timeout = aiohttp.ClientTimeout(total=_PROBE_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/readyz") as reply,
        ):
            said = await reply.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return Endpoint(url=url, ready=None)
    return Endpoint(url=url, ready=said if isinstance(said, dict) and "status" in said else None)


def _ages(folder: Path) -> dict[str, float]:
    files = sorted(folder.glob("*.prom")) if folder.is_dir() else []
    return {path.stem: max(time.time() - path.stat().st_mtime, 0.0) for path in files}


def _counted(path: Path) -> dict[str, float]:
    """Samples without labels, by name; empty without a file."""
    if not path.is_file():
        return {}
    families = text_string_to_metric_families(path.read_text(encoding="utf-8"))
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if not sample.labels
    }


def as_values(now: Now) -> dict[str, Any]:
    """The facts, ready for JSON; what was not measured is null."""
    row, step = now.figures.row, now.figures.step
    pooled = None if row is None else row.pooled
    return {
        "time": now.time,
        "run": now.run,
        "served_version": now.served_version,
        "staged_version": now.staged_version,
        "version_age_s": None if now.version_made_at is None else now.time - now.version_made_at,
        "turns": now.figures.turns,
        "turns_per_minute": now.turns_per_minute,
        "queues": {
            state.value: {"turns": one.turns, "oldest_s": one.oldest_s}
            for state, one in now.queues.items()
        },
        "finished": _plain(now.finished),
        "drops": _plain(now.drops),
        "judged_share": now.figures.judged_share,
        "accept_rate": now.votes.accept_rate,
        "vote_agreement": now.agreement,
        "judge_tokens": {
            "prompt": now.votes.prompt_tokens,
            "completion": now.votes.completion_tokens,
        },
        "judge_tokens_per_accepted": tokens_per_accepted(now.votes),
        "teacher_tokens_per_scored": now.teacher_tokens_per_scored,
        "last_step": {
            "version": step.get("version"),
            "age_s": None if "time" not in step else now.time - step["time"],
        },
        "staleness": {"mean": step.get("staleness_mean"), "max": step.get("staleness_max")},
        "kl_to_start": now.kl_to_start,
        "gap": figures(row).get("gap"),
        "gap_where_trained": figures(row).get("gap_where_trained"),
        "obedience": None
        if pooled is None
        else {"value": pooled.value, "start": pooled.before, "floor": pooled.floor},
        "canaries": None
        if now.check is None
        else {
            "version": now.check.version,
            "passed": now.check.passed,
            "asked": now.check.asked,
            "kl": now.check.kl,
            "kl_last": now.check.kl_last,
            "last_good": now.check.last_good,
            "gap": None if now.check.gap is None else now.check.gap.value,
            "gap_start": None if now.check.gap_start is None else now.check.gap_start.value,
            "breaches": now.check.breaches,
        },
        "learned_from": [
            {
                "hint_id": one.hint_id,
                "hint": one.hint,
                "status": one.status,
                "not_rehearsed": None if one.block is None else one.block.value,
                "words": one.words,
            }
            for one in now.learned_from
        ],
        "training_stopped": now.why_stopped,
        "endpoint": {"url": now.endpoint.url, "ready": now.endpoint.ready},
        "processes": now.processes,
        "warnings": list(now.warnings),
    }


def _plain(counts: Mapping[TurnState, int] | Mapping[DropReason, int]) -> dict[str, int]:
    return {name.value: number for name, number in counts.items()}


def tokens_per_accepted(votes: VoteSummary) -> float | None:
    """Tokens of the judge for each hint that it accepted; None without one, or without figures."""
    if not votes.accepted or votes.prompt_tokens is None:
        return None
    return (votes.prompt_tokens + (votes.completion_tokens or 0)) / votes.accepted
