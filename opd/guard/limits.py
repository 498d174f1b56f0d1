"""Which limits a version breaks, compared with the start model. Numbers in, sentences out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from opd.guard.config import GuardConfig
from rollout_bridge.guard.checks import Checked, Figures
from rollout_bridge.rehearsal.estimates import Rate

_NGRAM = 4
_MOST_UNDECIDED = 0.5
"""A version fails if more than this share of its answers is undecided."""


def breaches(config: GuardConfig, start: Checked, now: Checked) -> list[str]:
    """What is wrong with a version, in sentences; empty for one that may serve."""
    found = [*_passed(config, start, now), *_drift(config, start, now, "answers to canaries")]
    found += [*_entropy(config, start, now), *_jump(config, now), *_gap(config, now)]
    if now.recorded is not None and now.recorded_start is not None:
        where = "answers to recorded requests"
        found += _drift(config, now.recorded_start, now.recorded, where)
    return found


def _passed(config: GuardConfig, start: Checked, now: Checked) -> Iterator[str]:
    if not start.asked:
        return
    if now.undecided > _MOST_UNDECIDED * (now.asked + now.undecided):
        yield (
            f"{now.undecided} of {now.asked + now.undecided} answers to canaries could not be "
            "checked: the judge had no majority, or a function failed (see the log)"
        )
    if not now.asked:
        return
    wanted = config.least_passed * start.passed / start.asked
    if Rate(hits=now.passed, count=now.asked).interval[1] < wanted:
        worst = sorted(now.failed.items(), key=lambda one: -one[1])[:3]
        names = ", ".join(f"{name} ({number})" for name, number in worst)
        yield (
            f"{now.passed} of {now.asked} answers to canaries are right, at least {wanted:.0%} are "
            f"required (guard.least_passed); wrong most often: {names}"
        )


def _jump(config: GuardConfig, now: Checked) -> Iterator[str]:
    if now.kl_last is not None and now.kl_last > config.max_kl_last:
        yield (
            f"answers of version {now.last_good}, the last good one, are {now.kl_last:.2f} nats "
            f"per token from this version, at most {config.max_kl_last:g} are allowed "
            "(guard.max_kl_last)"
        )


def _gap(config: GuardConfig, now: Checked) -> Iterator[str]:
    if now.gap is None or now.gap_start is None:
        return
    if now.gap.low - now.gap_start.value > config.max_gap_rise:
        yield (
            f"at turns that trained, answers are {now.gap.value:.2f} nats per token "
            f"({now.gap.low:.2f} to {now.gap.high:.2f}) from the hinted start model, the start's "
            f"own {now.gap_start.value:.2f}: the gap is to fall, and may grow by at most "
            f"{config.max_gap_rise:g} (guard.max_gap_rise)"
        )


def _entropy(config: GuardConfig, start: Checked, now: Checked) -> Iterator[str]:
    """Of canaries alone: at recorded requests, training is to make the wanted answer certain."""
    if not start.surprise or now.surprise is None:
        return
    most = now.surprise if now.surprise_most is None else now.surprise_most
    if most < config.least_entropy * start.surprise:
        yield (
            f"answers to canaries have {now.surprise / start.surprise:.0%} of the start's entropy "
            f"(at most {most / start.surprise:.0%}), at least {config.least_entropy:.0%} are "
            "required (guard.least_entropy)"
        )


def _drift(config: GuardConfig, start: Figures, now: Figures, of: str) -> Iterator[str]:
    if now.kl is not None and now.kl > config.max_kl:
        yield (
            f"{of} are {now.kl:.2f} nats per token from the start model, at most "
            f"{config.max_kl:g} are allowed (guard.max_kl)"
        )
    if start.tokens and now.tokens is not None:
        ratio = now.tokens / start.tokens
        if not 1 / config.max_longer <= ratio <= config.max_longer:
            yield (
                f"{of} have {now.tokens:.0f} tokens, the start's {start.tokens:.0f}: more than "
                f"{config.max_longer:g} times as many, or as few (guard.max_longer)"
            )
    if (
        now.repeated is not None
        and start.repeated is not None
        and now.repeated - start.repeated > config.max_repeated
    ):
        yield (
            f"{of} repeat {now.repeated:.0%} of themselves, the start's {start.repeated:.0%}; at "
            f"most {config.max_repeated:.0%} more is allowed (guard.max_repeated)"
        )


def repeated_share(ids: Sequence[int]) -> float:
    """Share of the sequences of four ids in `ids` that repeat an earlier one."""
    grams = Counter(zip(*(ids[at:] for at in range(_NGRAM)), strict=False))
    total = grams.total()
    return 1 - len(grams) / total if total else 0.0
