"""One answer token by token: the text of each id, and the numbers that show why it moved.

Pure functions. A number that is not known is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from api_proxy.pages.words import number, seen
from records.training.step_results import StoredSample
from records.types import UNSCORED, Ids, Logprobs, Score, TurnRecord, VersionSpan

Numbers = list[float | None]
Decode = Callable[[Sequence[int]], str]

MOST_SHOWN = 20_000
"""Tokens of an answer that a page shows."""
_STEPS = 4
"""Strengths of a colour."""
_NO_TEXT = "\u00b7"
_UNDECODED = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of UTF-8, and so the most ids that can share a character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """A number for each token [R], None where it is not known: what is farther from `nearest` is
    shown more strongly. `missing` says why none is known, where that is not plain.
    """

    name: str
    title: str
    says: str
    values: Numbers
    nearest: float = 0.0
    missing: str = ""

    @property
    def num_missing(self) -> int:
        """Tokens without a number."""
        return sum(value is None for value in self.values)

    @property
    def scale(self) -> float | None:
        """The distance that is shown at full strength: one token in fifty exceeds it, if fewer
        differ at all the farthest. None without a number.
        """
        known = [abs(value - self.nearest) for value in self.values if value is not None]
        return (float(np.quantile(known, 0.98)) or max(known)) if known else None

    @property
    def legend(self) -> list[tuple[str, str]]:
        """The scale as (class of a colour, what it stands for), for the sides that occur; empty
        without a number.
        """
        scale, nearest = self.scale, self.nearest
        if scale is None:
            return []
        known = [value for value in self.values if value is not None]
        shown = [("sp0", number(nearest))]
        if min(known) < nearest:
            shown = [("sm4", f"{number(nearest - scale)} and below"), ("sm2", "…"), *shown]
        if max(known) > nearest:
            shown += [("sp2", "…"), ("sp4", f"{number(nearest + scale)} and above")]
        if self.num_missing:
            shown.append(("no", f"not known ({self.num_missing})"))
        return shown


def signals_of(
    turn: TurnRecord, score: Score | None, sample: StoredSample | None, trained: int | None
) -> list[Signal]:
    """What is known about the tokens of an answer, under one candidate's score, from the newest
    step that trained it: that of version `trained`.
    """
    teacher: Logprobs | None = None
    if score is not None and score.teacher_version != UNSCORED:
        teacher = _fitting(score.teacher_logprobs, len(turn.response_ids))
    length = len(turn.response_ids)
    unknown = np.full(length, np.nan, dtype=np.float32)
    # Log-probs at a temperature other than the teacher's 1 cannot be subtracted from the teacher's.
    is_alike = turn.sampling.get("temperature") == 1.0
    gap = unknown if teacher is None or not is_alike else teacher - turn.rollout_logprobs
    return [
        *_of_step(sample, trained, unknown),
        Signal(
            name="gap",
            title="Teacher minus policy",
            says="log q(token | prompt + hint) - log pi(token | prompt) in nats: above 0 the "
            "teacher, which reads the hint, finds the token likelier than the policy did. Not "
            "known for an answer that was sampled at a temperature other than 1.",
            values=_numbers(gap),
        ),
        Signal(
            name="policy",
            title="Policy's log-prob",
            says="In nats, when it was sampled: the farther below 0, the more surprising.",
            values=_numbers(turn.rollout_logprobs),
        ),
        Signal(
            name="teacher",
            title="Teacher's log-prob",
            says="In nats, of the same token under the hinted prompt.",
            values=_numbers(unknown if teacher is None else teacher),
        ),
        Signal(
            name="version",
            title="Weights that sampled it",
            says="The version of the policy.",
            values=_versions(turn.version_spans, length),
            nearest=float(min((span.version for span in turn.version_spans), default=0)),
        ),
    ]


def _of_step(sample: StoredSample | None, trained: int | None, unknown: Logprobs) -> list[Signal]:
    """What a step reported about the tokens. The mask is that of the advantages: a token that is
    left out has none.
    """
    figures, advantages, mask = None, unknown, unknown
    # A damaged row has another number of them.
    if sample is not None and len(sample.advantages) == len(unknown):
        figures, advantages = sample.figures, sample.advantages
        mask = np.isfinite(advantages).astype(np.float32)
    when = "no step has trained it" if sample is None else f"as version {sample.version} trained it"
    whole, parts = _why_missing(sample, trained)
    return [
        Signal(
            name="advantage",
            title="Advantage",
            says=f"How far the step pushed the token ({when}): above 0 up, below 0 down. A token "
            "without a number was left out of the step.",
            values=_numbers(advantages),
            missing=whole,
        ),
        Signal(
            name="ratio",
            title="Ratio",
            says="Probability of the token in the last pass of the step over the one that the "
            "objective compares it with, mostly that before the step: 1 in a step's first pass, "
            "above 1 the passes before have pushed the token up. Clips cut what is far from 1.",
            values=_numbers(unknown if figures is None else np.exp(figures.log_ratios)),
            nearest=1.0,
            missing=parts,
        ),
        Signal(
            name="weight",
            title="Weight",
            says="What rollout correction multiplied the token's push by, because other weights or "
            "another engine sampled it: 1 where nothing was corrected. A token that was left out "
            "has none.",
            values=_numbers(unknown if figures is None else figures.weights),
            nearest=1.0,
            missing=parts,
        ),
        Signal(
            name="mask",
            title="Mask",
            says="1: the token trained. 0: the step left it out, since rollout correction rejected "
            "it or a log-prob was not finite. What clips cut is at 1.",
            values=_numbers(mask),
            nearest=1.0,
            missing=whole,
        ),
        Signal(
            name="entropy",
            title="Entropy",
            says="How open the policy found this token in the last pass of the step, in nats: 0 "
            "where only one was possible.",
            values=_numbers(unknown if figures is None else figures.entropies),
            missing=parts,
        ),
        Signal(
            name="engine",
            title="Engine against trainer",
            says="|Log-prob in the trainer - log-prob in the engine that sampled| in nats, as "
            "rollout correction compared them. It includes how far the policy has moved since; "
            "at equal weights it should be below 0.01.",
            values=_numbers(unknown if figures is None else figures.engine_gaps),
            missing=parts,
        ),
    ]


def _why_missing(sample: StoredSample | None, trained: int | None) -> tuple[str, str]:
    """Why nothing of a step is known, and why only some of it."""
    if sample is None:
        whole = "No step has trained this answer."
        if trained is not None:
            whole = (
                f"Version {trained} trained it, but the numbers of its tokens are not stored: "
                "slime's trainer does not report them, and a store that was restored from a backup "
                "lacks those of later steps."
            )
        return whole, whole
    if sample.figures is None:
        return "", "It was trained before this was stored."
    return "", ""


def _numbers(values: Logprobs) -> Numbers:
    return [None if math.isnan(value) else value for value in values.tolist()]


def _fitting(values: Logprobs, length: int) -> Logprobs:
    """The values [R], or as many NaN if what is stored does not fit the answer."""
    return values if len(values) == length else np.full(length, np.nan, dtype=np.float32)


def _versions(spans: Sequence[VersionSpan], length: int) -> Numbers:
    found: Numbers = [None] * length
    for span in spans:
        found[span.start : span.end] = [float(span.version)] * (span.end - span.start)
    return found


def token_texts(ids: Ids, decode: Decode) -> list[str]:
    """The text of each id. Ids that share a character have it at the first of them; the others are
    empty.
    """
    known: dict[int, str] = {}
    plain = ids.tolist()
    texts: list[str] = []
    at = 0
    while at < len(plain):
        token = plain[at]
        if token not in known:
            known[token] = decode([token])
        text, taken = known[token], 1
        if _UNDECODED in text:
            for together in range(2, _LONGEST_CHARACTER + 1):
                joined = decode(plain[at : at + together])
                if at + together <= len(plain) and _UNDECODED not in joined:
                    text, taken = joined, together
                    break
        texts += [text, *[""] * (taken - 1)]
        at += taken
    return texts


def strengths(signal: Signal) -> list[int | None]:
    """How strongly each token is coloured, from -4 to 4; None for one without a number."""
    scale = signal.scale
    return [
        None if value is None else _strength(value - signal.nearest, scale or 0.0)
        for value in signal.values
    ]


def _strength(distance: float, scale: float) -> int:
    if scale <= 0:
        return 0
    step = min(math.ceil(abs(distance) / scale * _STEPS - 0.5), _STEPS)
    return step if distance > 0 else -step


def coloured(
    texts: Sequence[str], ids: Sequence[int], signals: Sequence[Signal], chosen: Signal
) -> Markup:
    """The answer as HTML: a span for each token, coloured by `chosen`, that shows all its numbers
    when pointed at.
    """
    titles = [
        [f"{escape(signal.title)}: {_shown(value)}" for value in signal.values]
        for signal in signals
    ]
    parts: list[str] = []
    for at, (text, strength, *said) in enumerate(
        zip(texts, strengths(chosen), *titles, strict=False)
    ):
        colour = "no" if strength is None else f"s{'m' if strength < 0 else 'p'}{abs(strength)}"
        parts.append(
            f'<span class="t {colour}" title="Token {at + 1}, id {ids[at]}. {"; ".join(said)}">'
            f"{escape(seen(text) or _NO_TEXT)}</span>"
        )
    return Markup("".join(parts))  # each part was escaped


def _shown(value: float | None) -> str:
    if value is None:
        return "not known"
    return f"{value:.0f}" if value == int(value) and abs(value) >= 1 else f"{value:.4f}"


def hinted_part(prompt: Ids, hinted: Ids) -> tuple[int, int]:
    """How many ids two prompts share at the start, and how many of the rest at the end."""
    shared = min(len(prompt), len(hinted))
    differs = np.flatnonzero(prompt[:shared] != hinted[:shared])
    first = int(differs[0]) if len(differs) else shared
    rest = shared - first
    if rest == 0:
        return first, 0
    backwards = np.flatnonzero(prompt[::-1][:rest] != hinted[::-1][:rest])
    return first, int(backwards[0]) if len(backwards) else rest


def prompt_change(prompt: Ids, hinted: Ids, decode: Decode, around: int) -> dict[str, Any]:
    """What a hinted prompt has that the original has not, with `around` ids before and after."""
    first, last = hinted_part(prompt, hinted)
    end = len(prompt) - last
    return {
        "ids_before": first,
        "before": decode(prompt[max(first - around, 0) : first].tolist()),
        "removed": decode(prompt[first:end].tolist()),
        "added": decode(hinted[first : len(hinted) - last].tolist()),
        "behind": decode(prompt[end : end + around].tolist()),
        "ids_behind": last,
    }
