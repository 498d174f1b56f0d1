"""What a launch checks and writes before it starts anything, and how it tells engines are there.

tests/slime/test_launch.py runs whole launches, with a real Ray.
"""

from __future__ import annotations

import io
import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console
from torch.utils.tensorboard import SummaryWriter

from opd.cluster.flag_check import REPOSITORY, FlagReport
from opd.cluster.launching.held import LaunchError
from opd.cluster.launching.launch import _ports_are_free, launch
from opd.cluster.launching.launched import (
    Launch,
    _is_at_rest,
    _launch,
    _write,
    has_version,
)
from opd.cluster.plan import LaunchPlan, make_plan
from opd.processes.supervisor import free_ports
from opd.report.curves import metric_rows
from opd.run import config as run_config
from records.config import StoreConfig
from records.store import Store
from rollout_bridge.slime.handovers import HandoverLog
from rollout_bridge.slime.saved import saved_rollouts
from tests.examples.shipped import MODEL
from tests.opd.cluster.examples import NOWHERE
from tests.opd.cluster.test_going_back import write_run
from tests.rollout_bridge.slime.test_handovers import a_record
from trainer.errors import StartupError
from trainer.schedule.rollback_order import order_rollback

ONE = REPOSITORY / "configs" / "qwen3_4b.toml"


def plan(run: Path, *overrides: str) -> LaunchPlan:
    return make_plan(ONE, [*NOWHERE, *overrides], run)


def test_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"proxy\.port {port} on 127\.0\.0\.1: Address"):
            _ports_are_free(plan(tmp_path, f"proxy.port={port}"))


def test_free_ports_pass(tmp_path: Path) -> None:
    ports = free_ports(4)
    keys = ["proxy.port", *(f"cluster.ray.{key}port" for key in ("", "dashboard_", "agent_"))]
    _ports_are_free(plan(tmp_path, *(f"{k}={p}" for k, p in zip(keys, ports, strict=True))))


def test_canaries_are_read_before_anything_starts(tmp_path: Path) -> None:
    overrides = [*NOWHERE, "guard.canaries=/nowhere/canaries.jsonl"]
    with pytest.raises(StartupError, match=r"guard\.canaries: /nowhere/canaries\.jsonl cannot be"):
        launch(ONE, overrides, tmp_path / "run", dry_run=False)
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_launch_are_written_and_old_addresses_are_gone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = plan(run)
    run.mkdir()
    first.paths.engines.write_text("{}")
    _write(first, start_version=0)
    assert not first.paths.engines.exists()
    assert run_config.load(first.paths.config) == first.config
    assert first.paths.config.stat().st_mode & 0o777 == 0o600
    assert first.paths.ray_token.stat().st_mode & 0o777 == 0o600
    token = first.paths.ray_token.read_text()

    second = plan(run)
    _write(second, start_version=41)
    assert second.paths.launch.name == "launch-002"
    assert second.paths.ray_token.read_text() == token
    custom = json.loads(second.paths.custom_yaml.read_text())
    assert custom == {
        "hindsight_config": str(first.paths.config),
        "hindsight_needs": {"teacher": True, "reward": False, "compared": False, "top_k": 8},
        "update_weight_start_version": 41,
    }


def test_a_launch_that_goes_back_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    write_run(tmp_path)
    order_rollback(tmp_path, 4, served=6)
    made = plan(tmp_path)
    _write(made, start_version=7)
    custom = json.loads(made.paths.custom_yaml.read_text())
    assert custom["hindsight_rollback"] == {"restores": 3, "parent": 6}
    assert saved_rollouts(made.paths.checkpoints) == [1]
    assert (tmp_path / "withdrawn" / "before_v000000008" / "hf" / "3").is_dir()


@pytest.mark.parametrize(
    ("served", "is_at_rest"), [(None, False), (6, False), (7, True), (8, True)]
)
def test_a_job_is_at_rest_once_all_that_it_was_given_is_served(
    tmp_path: Path, served: int | None, is_at_rest: bool
) -> None:
    chain = write_run(tmp_path)
    refresh = a_record(8, 6, chain[-1], turn_ids=(), staleness=())
    HandoverLog(tmp_path).write(refresh)
    assert _is_at_rest(tmp_path, served) is is_at_rest


async def test_store_that_cannot_be_reached_is_one_line_and_starts_nothing(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    url = f"postgresql+asyncpg://nobody@127.0.0.1:{port}/none"
    made = plan(tmp_path / "run", f"store.url={url}")
    made = replace(made, flags=FlagReport(checked=True, text=""))
    with pytest.raises(LaunchError, match=r"store\.url: "):
        await _launch(made)
    assert not made.paths.launch.exists()


async def test_what_slime_reports_becomes_rows_warnings_and_a_report(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = plan(run)
    made = replace(made, config=made.config.model_copy(update={"model": str(MODEL)}))
    run.mkdir()
    said = io.StringIO()
    async with await Store.open(StoreConfig.sqlite(run / "records.db")) as store:
        launch = Launch(made, store, Console(file=said, width=200), start_version=0)
        await launch._report()
        assert said.getvalue() == "", "nothing was trained"
        with SummaryWriter(str(made.paths.tensorboard)) as writer:
            for batch in range(2):
                writer.add_scalar("handover/version", batch + 1, batch)
                writer.add_scalar("rollout/rollout_corr/kl", 0.5, batch)
                writer.add_scalar("train/loss", 1.0, batch)
        await launch._write_steps()
        assert said.getvalue().count("warning: step 1: rollout_corr/kl = 0.5") == 1
        await launch._report()
    assert [row["version"] for row in metric_rows(run)] == [1, 2]
    assert f"report: {run / 'report.html'}" in said.getvalue()
    page = (run / "report.html").read_text()
    assert "Health warnings" in page
    assert "<svg" in page


async def test_a_report_that_cannot_be_made_is_said_and_ends_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = plan(run)  # whose model is not on this machine
    run.mkdir()
    (run / "metrics.jsonl").mkdir()
    with SummaryWriter(str(made.paths.tensorboard)) as writer:
        writer.add_scalar("handover/version", 1, 0)
        writer.add_scalar("train/loss", 1.0, 0)
    said = io.StringIO()
    async with await Store.open(StoreConfig.sqlite(run / "records.db")) as store:
        launch = Launch(made, store, Console(file=said, width=200), start_version=0)
        await launch._write_steps()
        assert "metrics.jsonl is behind: " in said.getvalue()
        (run / "metrics.jsonl").rmdir()
        launch = Launch(made, store, Console(file=said, width=200), start_version=0)
        await launch._report()
    assert "no report: " in said.getvalue()
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("version", "is_there"), [("default", False), ("6", False), ("7", True), ("12", True)]
)
async def test_engines_are_ready_with_weights_of_the_trainer(version: str, is_there: bool) -> None:
    async def info(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": version})

    application = web.Application()
    application.router.add_get("/get_model_info", info)
    async with TestServer(application) as server:
        assert await has_version(str(server.make_url("")).rstrip("/"), 7)() is is_there


async def test_engines_that_do_not_answer_are_not_ready() -> None:
    assert not await has_version(f"http://127.0.0.1:{free_ports(1)[0]}", 1)()
