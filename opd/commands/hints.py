"""What `opd hints` does. Each command returns the lines to print."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from api_proxy.access.callers import tenant_scope
from opd.commands.records import Outcome
from opd.rehearsal.saying import MEASURED_WHERE_IT_TRAINS, shown_uptake, unguarded
from opd.run import config as run_config
from opd.run.start_checks import check_store
from records.hints.texts import measuring_texts, usable
from records.hints.types import Hint, HintPrompt, HintSource, HintState, HintStatus, PromptKind
from records.reading.drop_words import BLOCK_WORDS
from records.store import Store
from rollout_bridge.rehearsal.journal import last_row
from trainer.errors import StartupError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    hint: Hint | None
    sources: list[HintSource]
    prompts: list[HintPrompt]
    states: list[HintState]


def list_hints(config_file: Path, status: str | None, tenant: str | None, limit: int) -> Outcome:
    """A line for each hint, the newest first."""
    if status is not None and status not in list(HintStatus):
        raise StartupError(f"--status {status!r}: one of {', '.join(HintStatus)}")
    statuses = None if status is None else [HintStatus(status)]
    scope = None if tenant is None else tenant_scope(tenant)
    found = _with_store(
        config_file, lambda store: store.hints(scope=scope, statuses=statuses, limit=limit)
    )
    return Outcome([line(one) for one in found] or ["no hints: nobody has objected yet"])


def show(config_file: Path, hint_id: str) -> Outcome:
    """All that is known about a hint."""

    async def look(store: Store) -> _Known:
        return _Known(
            hint=await store.hint(hint_id),
            sources=await store.hint_sources(hint_id),
            prompts=await store.hint_prompts(hint_id),
            states=await store.hint_states(hint_id),
        )

    known = _with_store(config_file, look)
    hint, sources, prompts = known.hint, known.sources, known.prompts
    if hint is None:
        raise _unknown(hint_id)
    uptake = shown_uptake(hint_id, last_row(config_file.parent))
    lines = [line(hint), *_measured(hint, known.states), *([uptake] if uptake else [])]
    if run_config.load(config_file).rehearsal.without_counter and hint.first_gap is not None:
        lines += _obedience(hint, prompts, config_file.parent)
    lines += [f"opposed by {hint.opposed_by}"] if hint.opposed_by else []
    lines += [f"merged into {hint.merged_into}"] if hint.merged_into else []
    for one in sources:
        votes = f"{one.num_positive} of {one.num_votes} votes"
        lines.append(f"from turn {one.turn_id} ({_when(one.created_at)}, {votes}): {one.text}")
        lines += [f"    {said}" for said in one.words.splitlines()]
    measuring = measuring_texts(prompts)
    for prompt in prompts:
        use = prompt.dropped or ("measures" if prompt.prompt_id in measuring else "trains")
        tried = f"followed {prompt.followed} of {prompt.asked}" if prompt.asked else "not tried yet"
        lines.append(f"{prompt.kind.value}: {prompt.text} ({tried}; {use})")
    return Outcome(lines)


def delete(config_file: Path, hint_id: str) -> Outcome:
    """Delete the hint's texts; its row stays."""
    gone = _with_store(config_file, lambda store: store.delete_hint(hint_id))
    if gone is None:
        raise _unknown(hint_id)
    if not gone.versions:
        return Outcome([f"deleted: {hint_id}; no version of the policy was trained on it"])
    versions = ", ".join(map(str, gone.versions))
    return Outcome([f"deleted: {hint_id}; versions that were trained on it: {versions}"])


def line(hint: Hint) -> str:
    """One line for a hint."""
    asked = f"asked for {hint.num_confirmed} time{'s' * (hint.num_confirmed != 1)}"
    words = [hint.hint_id, hint.scope, hint.status.value, asked]
    if hint.is_rule is None and hint.status is HintStatus.ACTIVE:
        words.append("not examined yet")
    if hint.block is not None:
        words.append(f"not practised: {BLOCK_WORDS[hint.block]} ({hint.block.value})")
    if hint.trained_since is not None:
        words.append(f"trained since version {hint.trained_since}, {hint.num_steps} steps")
    return "  ".join([*words, hint.text or "(deleted)"])


def _measured(hint: Hint, states: Sequence[HintState]) -> list[str]:
    if hint.gap is None or hint.gap_high is None:
        return ["gap: not measured"]
    first = "" if hint.first_gap is None else f", at first {hint.first_gap:.3f}"
    where = "" if any(one.held_out for one in states) else f" ({MEASURED_WHERE_IT_TRAINS})"
    return [f"gap: {hint.gap:.3f} nats per token, at most {hint.gap_high:.3f}{first}{where}"]


def _obedience(hint: Hint, prompts: Sequence[HintPrompt], folder: Path) -> list[str]:
    """What `rehearsal.without_counter` cost, for a hint without a text that only measures."""
    if measuring_texts(prompts):
        return []
    if not any(one.kind is PromptKind.OPPOSITE for one in usable(prompts)):
        return unguarded([], 1)
    row = last_row(folder)
    found = None if row is None else row.unguarded_of.get(hint.hint_id)
    return (
        ["open wishes: not measured yet, not guarded"] if found is None else unguarded([found], 0)
    )


def _with_store(config_file: Path, work: Callable[[Store], Awaitable[T]]) -> T:
    config = run_config.load(config_file)
    check_store(config.store)

    async def run() -> T:
        async with await Store.open(config.store) as store:
            return await work(store)

    return asyncio.run(run())


def _unknown(hint_id: str) -> StartupError:
    return StartupError(f"no hint {hint_id!r} in this run: `opd hints list` shows them")


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
