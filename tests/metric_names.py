"""docs/metrics.md from the code: `python -m tests.metric_names` writes it anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from prometheus_client.core import Metric

from api_proxy.metrics import ProxyMetrics
from api_proxy.recording.drop_watch import DropWatch
from judge.hints.metrics import QuestionMetrics
from judge.metrics import HintMetrics
from judge.verifier.worker import VerifierMetrics
from judge.votes.capacity import Capacity
from opd.guard.metrics import GuardMetrics
from opd.report.run_figures import RunFigures, _families
from opd.report.trainer_metrics import TrainerMetrics
from records.hints.types import HintStatus
from records.lessons.names import LessonDrop, LessonKind, LessonState
from records.store import Store
from rollout_bridge.scoring.scoring_metrics import ScoringMetrics
from tests.trainer.rehearsal.test_journal import GAP, a_row
from trainer.rehearsal.journal import PooledRow

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
INTRODUCTION = """# Metrics

`GET /metrics` of the endpoint has the metrics of all processes of a run, in Prometheus' text
format. Judge and trainer write theirs into `RUN/metrics/NAME.prom` every 5 s, and the endpoint
adds them to its own. `opd_process_metrics_age_seconds{process}` says how old each file is, so that
a process that died is noticed. Once a key exists, `/metrics` needs an admin key.

[grafana.json](grafana.json) is a dashboard to import, and [alerts.yml](alerts.yml) has rules for
Prometheus. A counter has `_total` after its name, a histogram `_bucket`, `_sum` and `_count`. What
was not measured has no sample. Counters and histograms begin again when their process does; `run_*`
and `rehearsal_*` are of the whole run.

This page is written by `.venv/bin/python -m tests.metric_names`, and a test compares it with the
code.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A metric of one process; `name` is without the suffix of its samples."""

    process: str
    name: str
    kind: str
    text: str

    @property
    def samples(self) -> tuple[str, ...]:
        """The names under which Prometheus has it."""
        if self.kind == "counter":
            return (f"{self.name}_total",)
        if self.kind == "histogram":
            return tuple(f"{self.name}_{end}" for end in ("bucket", "sum", "count"))
        return (self.name,)


def families() -> list[Family]:
    """All that the processes of a run expose."""
    return [
        *_of("endpoint", _endpoint()),
        Family(
            process="endpoint",
            name="opd_process_metrics_age_seconds",
            kind="gauge",
            text="Since the process wrote its metrics.",
        ),
        *_of("judge", _judge()),
        *_of("judge", _run()),
        *_of("judge", GuardMetrics().registry.collect()),
        *_of("judge", VerifierMetrics().registry.collect()),
        *_of("trainer", TrainerMetrics().registry.collect()),
    ]


def _of(process: str, found: Iterable[Metric]) -> Iterator[Family]:
    for one in found:
        yield Family(process=process, name=one.name, kind=one.type, text=one.documentation)


def _endpoint() -> Iterable[Metric]:
    metrics = ProxyMetrics()
    # It asks its store nothing before `watch`.
    DropWatch(cast(Store, None), metrics, 1.0)
    return metrics.registry.collect()


def _judge() -> Iterator[Metric]:
    hints = HintMetrics()
    hints.watch(Capacity())
    for registry in (hints.registry, ScoringMetrics().registry, QuestionMetrics().registry):
        yield from registry.collect()


def _run() -> Iterable[Metric]:
    """With every figure measured."""
    pooled = PooledRow(value=1.0, low=1.0, high=1.0, count=64, before=1.0, floor=0.9, passed=True)
    return _families(
        RunFigures(
            turns=1,
            objections=1,
            hints={(HintStatus.ACTIVE, None): 1},
            lessons={(LessonKind.HINT, LessonState.READY): 1},
            lesson_drops={LessonDrop.STALE: 1},
            trained={"h0": {LessonKind.HINT: 1}},
            judged_share=0.5,
            row=a_row(1).model_copy(update={"pooled": pooled, "keep": GAP}),
            step={"version": 1, "staleness_mean": 0.0, "staleness_max": 0.0},
        )
    )


def page() -> str:
    """The page as it should be."""
    parts = [INTRODUCTION]
    found = families()
    for process in dict.fromkeys(one.process for one in found):
        rows = [
            f"| `{one.name}` | {one.kind} | {one.text.rstrip('.')} |"
            for one in found
            if one.process == process
        ]
        head = f"## The {process}'s process\n\n| metric | kind | meaning |\n|---|---|---|\n"
        parts.append(head + "\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
