"""A task suite's results: as JSON values, as rows of tables, as the plot of a page.

Numbers in, words out; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api_proxy.pages.measured import Curve
from opd.evaluation.figures.beta_binomial import Fit
from opd.evaluation.figures.estimates import AdaptivePasses, Paired, Passes
from opd.evaluation.figures.pass_at_k import mean_pass_at_k
from opd.evaluation.ranking import Ranking, rankings
from opd.report.page import Table
from rollout_bridge.bootstrap import Estimate

NO_INTERVAL = "no interval"
_FITTED_BEYOND = (2, 4)
"""The plot extends to these multiples of the samples, by the fitted model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResults:
    """Every metric of each version, the requested version first, and of the first minus each other
    one, by the other. `adaptive` contains the headline metrics of each version after further tries
    of hard tasks, if there were any.
    """

    passes: Mapping[int, Mapping[str, Passes]]
    paired: Mapping[int, Mapping[str, Paired]]
    headline: Sequence[str]
    samples: int
    adaptive: Mapping[int, Mapping[str, AdaptivePasses]] | None = None


def as_json(results: TaskResults) -> dict[str, Any]:
    """Everything, counts by task included; an interval that does not exist is null."""
    return {
        "versions": {
            str(version): {metric: _passes_json(one) for metric, one in passes.items()}
            for version, passes in results.passes.items()
        },
        "comparisons": {
            str(other): {metric: _paired_json(one) for metric, one in paired.items()}
            for other, paired in results.paired.items()
        },
        "rankings": [
            {
                "metric": one.metric,
                "k": one.k,
                "versions": [
                    {"version": version, "pass_at_k": value} for version, value in one.versions
                ],
                "is_fitted": one.is_fitted,
                "at_the_edge": list(one.at_the_edge),
            }
            for one in _rankings(results)
        ],
        "adaptive": None
        if results.adaptive is None
        else {
            str(version): {metric: _adaptive_json(one) for metric, one in found.items()}
            for version, found in results.adaptive.items()
        },
    }


def tables(results: TaskResults) -> list[Table]:
    """pass@k by metric and version; differences and ranks, if there are several versions."""
    found = [_passes_table(results)]
    found += [_paired_table(results, other) for other in results.paired]
    if results.paired:
        found.append(_ranking_table(results))
    if results.adaptive is not None:
        found.append(_adaptive_table(results, results.adaptive))
    return found


def curves(results: TaskResults) -> list[Curve]:
    """pass@k over k for the headline's metrics: measured up to the samples, then as fitted."""
    samples = results.samples
    beyond = [samples * factor for factor in _FITTED_BEYOND]
    steps = [*range(1, samples + 1), *beyond]
    series: dict[str, Sequence[float | None]] = {}
    for version, passes in results.passes.items():
        for metric in results.headline:
            one = passes[metric]
            label = f"{metric}, version {version}"
            counts = list(one.counts.values())
            measured = [mean_pass_at_k(counts, k) for k in range(1, samples + 1)]
            fitted = [one.fit.model.pass_at_k(k) if one.fit.converged else None for k in beyond]
            series[label] = [*measured, *fitted]
    return [
        Curve(
            title=f"pass@k (beyond k = {samples}: as fitted)",
            unit="share of tasks",
            steps=steps,
            series=series,
            step_unit="k",
        )
    ]


def shown(estimate: Estimate, *, sign: bool = False) -> str:
    """A mean and its interval for a table."""
    value = f"{estimate.value:+.3f}" if sign else f"{estimate.value:.3f}"
    if estimate.interval is None:
        return f"{value} ({NO_INTERVAL})"
    return f"{value} [{estimate.interval.low:.3f}, {estimate.interval.high:.3f}]"


def estimate_json(estimate: Estimate) -> dict[str, float | None]:
    """A mean and its interval for a file."""
    interval = estimate.interval
    return {
        "value": estimate.value,
        "low": interval.low if interval is not None else None,
        "high": interval.high if interval is not None else None,
    }


def _passes_json(passes: Passes) -> dict[str, Any]:
    return {
        "tasks": len(passes.counts),
        "pass_at": {str(k): estimate_json(one) for k, one in passes.pass_at.items()},
        "beta_binomial": _fit_json(passes.fit),
        "counts": {task: list(count) for task, count in passes.counts.items()},
    }


def _adaptive_json(found: AdaptivePasses) -> dict[str, Any]:
    return {
        "unsolved": found.unsolved,
        "expected_at": {
            str(k): None if one is None else estimate_json(one)
            for k, one in found.expected_at.items()
        },
        "beta_binomial": _fit_json(found.fit),
        "counts": {task: list(count) for task, count in found.counts.items()},
    }


def _fit_json(fit: Fit) -> dict[str, Any]:
    return {"alpha": fit.model.alpha, "beta": fit.model.beta, "converged": fit.converged}


def _paired_json(paired: Paired) -> dict[str, Any]:
    return {
        "difference_at": {str(k): estimate_json(one) for k, one in paired.difference_at.items()},
        "better": paired.better,
        "worse": paired.worse,
        "equal": paired.equal,
        "p_value": paired.p_value,
    }


def _passes_table(results: TaskResults) -> Table:
    """A row for each version, and for the difference; a cell's interval is on its second line."""
    first = next(iter(results.passes.values()))
    ks = list(next(iter(first.values())).pass_at)
    rows: list[Sequence[str]] = []
    for metric in first:
        rows += [
            [metric, str(version), *(_cell(passes[metric].pass_at[k]) for k in ks)]
            for version, passes in results.passes.items()
        ]
        for other, paired in results.paired.items():
            differences = paired[metric].difference_at
            name = f"{next(iter(results.passes))} - {other}"
            rows.append([metric, name, *(_cell(differences[k], sign=True) for k in ks)])
    sizes = sorted({len(one.counts) for one in first.values()})
    title = (
        f"{' to '.join(map(str, {sizes[0]: 0, sizes[-1]: 0}))} tasks for each metric, "
        f"{results.samples} samples of each, 95% intervals over tasks"
    )
    return title, ["metric", "version", *(f"pass@{k}" for k in ks)], rows


def _cell(estimate: Estimate, *, sign: bool = False) -> str:
    return shown(estimate, sign=sign).replace(" ", "\n", 1)


def _paired_table(results: TaskResults, against: int) -> Table:
    version = next(iter(results.passes))
    rows = [
        [metric, str(one.better), str(one.worse), str(one.equal), f"{one.p_value:.2g}"]
        for metric, one in results.paired[against].items()
    ]
    return (
        f"version {version} against version {against}: on how many tasks it passes more often",
        ["metric", "better", "worse", "equal", "p (sign test)"],
        rows,
    )


def _rankings(results: TaskResults) -> list[Ranking]:
    if len(results.passes) < 2:
        return []
    return rankings(results.passes, results.headline, results.samples, results.adaptive)


def _ranking_table(results: TaskResults) -> Table:
    found = _rankings(results)
    at_one = {one.metric: one.order for one in found if one.k == 1}
    rows = [
        [
            one.metric,
            f"{one.k}{' (fitted)' if one.is_fitted else ''}",
            ", ".join(f"{version}: {value:.3f}" for version, value in one.versions),
            "; ".join(_remarks(one, at_one[one.metric])),
        ]
        for one in found
    ]
    return "versions by pass@k, best first", ["metric", "k", "version: pass@k", "remarks"], rows


def _remarks(ranking: Ranking, at_one: Sequence[int]) -> Iterator[str]:
    if ranking.order != at_one:
        yield "other order than at k = 1"
    if ranking.at_the_edge:
        yield f"no fit: {', '.join(map(str, ranking.at_the_edge))}"


def _adaptive_table(
    results: TaskResults, adaptive: Mapping[int, Mapping[str, AdaptivePasses]]
) -> Table:
    ks = list(next(iter(next(iter(adaptive.values())).values())).expected_at)
    rows = []
    for metric in results.headline:
        for version, found in adaptive.items():
            one, first = found[metric], results.passes[version][metric].counts
            further = [task for task, (_, n) in one.counts.items() if n > first[task][1]]
            row = [metric, str(version), str(len(further)), str(one.unsolved)]
            values = one.expected_at.values()
            rows.append([*row, *("no fit" if x is None else _cell(x) for x in values)])
    return (
        "tasks that had further tries, and what each one's posterior expects of k",
        ["metric", "version", "tried on", "never passed", *(f"pass@{k}" for k in ks)],
        rows,
    )
