"""A scrape of one worker shows all of them, each metric once."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram

from api_proxy.server.other_metrics import other_metrics, replace_metrics
from api_proxy.server.worker_metrics import WorkerMetrics, remove_of_others
from tests.integration.test_run_metrics import samples_of


def a_registry(requests: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("opd_requests", "Requests.", ["status"], registry=registry).labels("200").inc(requests)
    Histogram("opd_request_seconds", "Seconds.", registry=registry).observe(0.5)
    return registry


async def test_each_metric_stands_once_with_the_samples_of_all_workers(tmp_path: Path) -> None:
    for number in (1, 2):
        await WorkerMetrics(a_registry(10 * number), tmp_path, number).write()
    replace_metrics(tmp_path, "judge", b"# HELP votes V.\n# TYPE votes gauge\nvotes 3.0\n")
    text = other_metrics(tmp_path).decode()
    found = samples_of(text)
    assert found["opd_requests_total{status=200,worker=1}"] == 10
    assert found["opd_requests_total{status=200,worker=2}"] == 20
    assert found["opd_request_seconds_bucket{le=0.5,worker=2}"] == 1
    assert found["votes"] == 3
    assert text.count("# TYPE opd_requests_total counter") == 1
    ages = {name for name in found if name.startswith("opd_process_metrics_age_seconds")}
    assert ages == {
        f"opd_process_metrics_age_seconds{{process={name}}}"
        for name in ("judge", "proxy", "proxy.2")
    }


def test_files_of_workers_that_there_are_no_more_are_removed(tmp_path: Path) -> None:
    names = ("judge", "proxy", "proxy.2", "proxy.3", "proxy.4")
    for name in names:
        replace_metrics(tmp_path, name, b"")
    remove_of_others(tmp_path, 3)
    assert {path.stem for path in tmp_path.iterdir()} == {"judge", "proxy", "proxy.2", "proxy.3"}
    remove_of_others(tmp_path, 1)
    assert {path.stem for path in tmp_path.iterdir()} == {"judge"}
