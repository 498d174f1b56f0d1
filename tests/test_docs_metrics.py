"""docs/metrics.md lists the metrics that exist; dashboard and alert rules use no others."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.metric_names import PAGE, families, page

DOCS = Path(__file__).parents[1] / "docs"
ALERTS, DASHBOARD = DOCS / "alerts.yml", DOCS / "grafana.json"
_METRIC = re.compile(r"\b(?:opd|hint|judge|teacher|trainer|run|rehearsal|reward)_[a-z_]+\b")


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


def test_each_metric_has_one_name_and_says_what_it_is() -> None:
    found = families()
    assert len({one.name for one in found}) == len(found)
    assert all(one.text for one in found)


def unknown(expressions: list[str]) -> set[str]:
    """Names in them that no process exposes."""
    known = {name for one in families() for name in one.samples}
    named = {name for text in expressions for name in _METRIC.findall(text)}
    assert named
    return named - known


def test_the_alerts_use_metrics_that_exist() -> None:
    rules = [
        rule
        for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]
    assert unknown([rule["expr"] for rule in rules]) == set()
    assert all(rule["annotations"].keys() == {"summary", "description"} for rule in rules)


def test_the_dashboard_uses_metrics_that_exist() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert unknown([one["expr"] for panel in panels for one in panel["targets"]]) == set()
    assert all(panel["title"] and panel["description"] for panel in panels)


def test_a_name_that_is_not_there_is_noticed() -> None:
    assert unknown(["rate(opd_turns_total[5m]) + opd_nothing_total"]) == {"opd_nothing_total"}


def test_promtool_accepts_the_alerts() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: it comes with Debian's package prometheus")
    done = subprocess.run(
        [promtool, "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
