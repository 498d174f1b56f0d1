"""The plots that show whether a run learns and stays healthy, from its metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from api_proxy.pages.measured import Curve
from opd.rehearsal.reported import learning_curves
from rollout_bridge.guard.checks import read_checks
from rollout_bridge.rehearsal.last_line import METRICS_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plot:
    """`names` maps keys of a row to labels."""

    title: str
    unit: str
    names: Mapping[str, str]
    says: str
    marks: Mapping[str, float] = field(default_factory=dict)


_PLOTS = (
    _Plot(
        title="Teacher minus student",
        unit="nats",
        names={"opd/adv_mean": "mean", "opd/adv_std": "standard deviation"},
        says="How far the teacher, which reads the hint, is from the policy on the policy's "
        "answers, per token. Healthy: it approaches 0 while a hint is practised.",
    ),
    _Plot(
        title="|teacher - student|",
        unit="nats",
        names={"teacher_student_absdiff": "mean"},
        says="The same without its sign: what is left to learn. Healthy: it falls.",
    ),
    _Plot(
        title="Advantages",
        unit="nats",
        names={
            "opd/adv_q05": "5 in 100 below",
            "opd/adv_q25": "25 below",
            "opd/adv_q50": "median",
            "opd/adv_q75": "75 below",
            "opd/adv_q95": "95 below",
        },
        says="How the advantages of a step's tokens are spread. Healthy: the middle half lies "
        "close to 0, since most tokens need no change, and the outer lines move towards it while "
        "something is learned.",
    ),
    _Plot(
        title="Largest advantage",
        unit="nats",
        names={"opd/adv_abs_max": "|advantage|"},
        says="Of all tokens of a step. Healthy: a single token does not stand out for many steps.",
    ),
    _Plot(
        title="Advantages above 0",
        unit="share",
        names={"opd/adv_pos_frac": "tokens that are pushed up"},
        says="Healthy: neither near 0 nor near 1; a policy that is pushed down almost everywhere "
        "forgets.",
    ),
    _Plot(
        title="Ratios",
        unit="",
        names={
            "ratio_max": "largest, policy over the step's start",
            "rollout_corr/ratio_p99": "99th percentile, trainer over engine",
        },
        marks={"ideal": 1.0},
        says="How much more probable tokens became. Healthy: near 1.",
    ),
    _Plot(
        title="Clipped tokens",
        unit="share",
        names={
            "pg_clipfrac": "by the surrogate",
            "tis_clipfrac": "weights that differ from their ratio",
        },
        says="Tokens whose push was cut because their ratio left its bounds. Healthy: a few in a "
        "hundred; many mean that steps are too large, or samples too old.",
    ),
    _Plot(
        title="Loss",
        unit="",
        names={"loss": "total", "pg_loss": "policy gradient", "kl_loss": "KL to start"},
        says="What a step minimises. Samples differ from step to step, so look for jumps, not for "
        "a decrease.",
    ),
    _Plot(
        title="KL to the frozen start",
        unit="nats",
        names={"kl_loss": "KL"},
        says="How far the policy has moved, per token. Healthy: it rises while something is "
        "learned, and levels off.",
    ),
    _Plot(
        title="Staleness",
        unit="versions",
        names={"staleness_mean": "mean", "staleness_max": "max"},
        says="How many versions older than the policy the samples of a step are. Healthy: below "
        "trainer.max_staleness.",
    ),
    _Plot(
        title="Engine against trainer",
        unit="nats",
        names={"train_rollout_logprob_abs_diff": "mean |difference|"},
        says="Log-probs of the engine that sampled, against the trainer's. This includes how far "
        "the policy has moved since; at staleness 0 it should be below 0.01.",
    ),
    _Plot(
        title="Gradient norm",
        unit="",
        names={"grad_norm": "before clipping"},
        says="Healthy: no jumps by a factor of ten.",
    ),
    _Plot(
        title="Entropy",
        unit="nats",
        names={"entropy_loss": "mean"},
        says="How open the next token is. Healthy: it does not collapse towards 0.",
    ),
    _Plot(
        title="Seconds of a step",
        unit="s",
        names={
            "seconds/step": "all",
            "seconds/checkpoint": "checkpoint",
            "seconds/publish": "publish",
        },
        says="Where the time of a step goes.",
    ),
)
_CORRECTION = (
    _Plot(
        title="Mean importance weight",
        unit="",
        names={
            "rollout_corr/rollout_is_mean": "applied",
            "rollout_corr/rollout_is_mean_raw": "before the cap",
        },
        marks={"ideal": 1.0},
        says="Weights that correct for samples of an older policy. Healthy: near 1.",
    ),
    _Plot(
        title="Effective sample size of the weights",
        unit="share",
        names={
            "rollout_corr/rollout_is_eff_sample_size": "applied",
            "rollout_corr/rollout_is_eff_sample_size_raw": "before the cap",
        },
        marks={"good above": 0.5, "too few below": 0.3},
        says="The share of the samples that effectively counts. Healthy: above 0.5.",
    ),
    _Plot(
        title="Turns vetoed",
        unit="share",
        names={"rollout_corr/rollout_is_veto_fraction": "vetoed"},
        marks={"too many above": 0.1},
        says="Turns left out because one of their tokens had become almost impossible. Healthy: "
        "below 0.1.",
    ),
    _Plot(
        title="KL of engine and trainer",
        unit="nats",
        names={"rollout_corr/kl": "KL", "rollout_corr/k3_kl": "K3"},
        marks={"ideal": 0.0},
        says="How far the policy that sampled is from the one that learns, per token. Healthy: "
        "near 0.",
    ),
    _Plot(
        title="Perplexity, trainer over engine",
        unit="",
        names={"rollout_corr/ppl_ratio": "ratio"},
        marks={"ideal": 1.0},
        says="The same as a ratio of perplexities. Healthy: near 1.",
    ),
    _Plot(
        title="Chi-squared of engine and trainer",
        unit="",
        names={"rollout_corr/chi2_token": "tokens", "rollout_corr/chi2_seq": "turns"},
        marks={"too far above": 1.0},
        says="How much the weights spread. Healthy: below 1.",
    ),
)


_LENGTH = _Plot(
    title="Length of answers",
    unit="tokens",
    names={"length/mean": "mean", "length/p90": "nine of ten below"},
    says="Healthy: it changes only where a hint or a penalty asks for it.",
)
_LENGTH_BY_REWARD = _Plot(
    title="Length by difficulty",
    unit="tokens",
    names={
        "length/easy_mean": "prompts that mostly pass",
        "length/hard_mean": "prompts that mostly fail",
        "length/correct_mean": "right answers",
        "length/wrong_mean": "wrong answers",
    },
    says="Hard prompts may take longer answers. Healthy: answers to easy ones do not grow too.",
)


def metric_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, oldest first; none if nothing was trained yet.

    A last line that a killed process left unfinished is not a row.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def run_curves(rows: Sequence[dict[str, Any]]) -> list[Curve]:
    """The plots that show at a glance whether a run learns and stays healthy."""
    trained = [row for row in rows if row.get("skipped") is None]
    plots = [*_PLOTS, _LENGTH]
    # Right and wrong exist only with rewards.
    if any(name in row for row in trained for name in _LENGTH_BY_REWARD.names):
        plots.append(_LENGTH_BY_REWARD)
    return [_curve(plot, trained) for plot in plots] + correction_curves(trained)


def correction_curves(rows: Sequence[dict[str, Any]]) -> list[Curve]:
    """The six diagnostic plots of rollout correction, with the bounds of its health warnings."""
    return [_curve(plot, rows) for plot in _CORRECTION]


def _curve(plot: _Plot, rows: Sequence[dict[str, Any]]) -> Curve:
    return Curve(
        title=plot.title,
        unit=plot.unit,
        steps=[row["step"] for row in rows],
        series={label: [row.get(key) for row in rows] for key, label in plot.names.items()},
        marks=plot.marks,
        says=plot.says,
    )


def training_curves(folder: Path) -> list[Curve]:
    """All plots of a run."""
    of_guard = _guard_curves(folder)
    return [*learning_curves(folder), *of_guard, *run_curves(metric_rows(folder))]


MOST_OTHERS = 100


@dataclass(frozen=True, slots=True)
class RunCurves:
    """Curves of the run in `folder`, and of those in the folders beside it."""

    folder: Path

    def own(self) -> list[Curve]:
        """Of this run."""
        return training_curves(self.folder)

    def others(self) -> list[str]:
        """Names of the folders, those that trained last first; at most MOST_OTHERS."""
        own = self.folder.resolve()
        found = [
            (path.stat().st_mtime, path.parent.name)
            for path in own.parent.glob(f"*/{METRICS_FILE}")
            if path.parent != own
        ]
        return [name for _, name in sorted(found, reverse=True)[:MOST_OTHERS]]

    def of(self, name: str) -> list[Curve]:
        """Of another run. Raises KeyError for a name that is not among `others`."""
        if name not in self.others():
            raise KeyError(name)
        return training_curves(self.folder.resolve().parent / name)


def _guard_curves(folder: Path) -> list[Curve]:
    rows = read_checks(folder)
    if not rows:
        return []
    plots: list[tuple[str, str, dict[str, list[float | None]], str]] = [
        (
            "Canaries",
            "share",
            {"right": [row.passed / row.asked if row.asked else None for row in rows]},
            "Right answers to the run's canaries. Healthy: as high as at the start, version 0.",
        ),
        (
            "Canaries: distance from the start",
            "nats",
            {
                "KL": [row.kl for row in rows],
                "KL of the last good version to it": [row.kl_last for row in rows],
                "surprise": [row.surprise for row in rows],
            },
            "How far answers have moved, and how open they are, per token. Healthy: KL stays "
            "below guard.max_kl, that of the last good version below guard.max_kl_last, and "
            "surprise does not collapse.",
        ),
    ]
    if any(row.gap is not None for row in rows):
        plots.append(
            (
                "Gap at turns that trained",
                "nats",
                {
                    "policy": [None if row.gap is None else row.gap.value for row in rows],
                    "start": [
                        None if row.gap_start is None else row.gap_start.value for row in rows
                    ],
                },
                "How far answers to the newest turns that trained under a hint are from the hinted "
                "start model, per token. Healthy: below the start's own, and falling.",
            )
        )
    versions = [row.version for row in rows]
    return [
        Curve(title=title, unit=unit, steps=versions, series=series, step_unit="version", says=says)
        for title, unit, series, says in plots
    ]
