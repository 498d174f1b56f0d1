"""The entry points with slime's own types; what a whole RolloutManager does is elsewhere."""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
import warnings
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import tomli_w

from rollout_bridge.engine.errors import EngineRejected
from rollout_bridge.slime.rows import train_rows
from rollout_bridge.slime.settings import SlimeConfigError
from tests.examples.shipped import MODEL
from tests.rollout_bridge.slime.runs import run_values, slime_args
from tests.rollout_bridge.slime.test_host import four_ready, on_store
from tests.trainer.tiny import conversation

pytestmark = [pytest.mark.slime, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def plugin(slime_root: Path) -> Any:
    if str(slime_root) not in sys.path:
        sys.path.append(str(slime_root))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from rollout_bridge.slime import rollout as slime_rollout
    return slime_rollout


@pytest.fixture
def source(plugin: Any, tmp_path: Path) -> Any:
    args = slime_args(tmp_path, sglang_model_routers={"policy": ("127.0.0.1", 30000)})
    opened = plugin.HindsightDataSource(args)
    yield opened
    opened.close()


def test_engines_are_announced_when_the_source_is_made(source: Any, tmp_path: Path) -> None:
    engines = json.loads((tmp_path / "engines.json").read_text())
    assert engines == {"policy": "http://127.0.0.1:30000"}


def test_what_cannot_work_is_refused_in_one_line(plugin: Any, source: Any, tmp_path: Path) -> None:
    args = slime_args(tmp_path)
    with pytest.raises(SlimeConfigError, match="--data-source-path: set"):
        plugin.generate_rollout(args, 0, SimpleNamespace())
    with pytest.raises(SlimeConfigError, match="--eval-interval: leave it out"):
        plugin.generate_rollout(args, 0, source, evaluation=True)
    empty = plugin.HindsightDataSource(SimpleNamespace())
    with pytest.raises(SlimeConfigError, match="hindsight_config is not set"):
        plugin.generate_rollout(args, 0, empty)
    with pytest.raises(SlimeConfigError, match="--num-rollout"):
        plugin.HindsightDataSource(slime_args(tmp_path, num_rollout=None))


def source_at(plugin: Any, folder: Path, url: str, renderer: str = "qwen3") -> Any:
    """The data source of a job with the lab's model, whose engines are at `url`."""
    values = run_values(folder, renderer={"name": renderer, "enable_thinking": False})
    (folder / "config.toml").write_text(tomli_w.dumps(values | {"model": str(MODEL)}))
    address = urlsplit(url)
    routers = {"policy": (address.hostname, address.port)}
    source = plugin.HindsightDataSource(slime_args(folder, sglang_model_routers=routers))
    source.load()
    on_store(folder, four_ready)
    return source


def test_the_first_batch_brings_what_the_engines_make_of_fixed_texts(
    plugin: Any, lab_engine: str, tmp_path: Path
) -> None:
    source = source_at(plugin, tmp_path, lab_engine)
    try:
        for number, rollout_id in ((6, 0), (0, 1)):
            rows, metrics = source.next_rows(rollout_id)
            assert metrics["handover/probes"] == number
            assert sum(row.carrier.probe is not None for row in rows) == number
            assert rows[0].carrier.batch.calibration_bound == (0.1 if number else None)
            on_store(tmp_path, four_ready)
    finally:
        source.close()


def test_engines_that_do_not_answer_are_said_and_turns_go_on(
    plugin: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = source_at(plugin, tmp_path, "http://127.0.0.1:9")
    try:
        _, metrics = source.next_rows(0)
    finally:
        source.close()
    assert metrics["handover/probes"] == 0
    assert "engines are not calibrated: " in caplog.text


def test_engines_that_do_not_know_what_they_are_asked_end_the_job(
    plugin: Any, tmp_path: Path
) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        source = source_at(plugin, tmp_path, f"http://127.0.0.1:{server.server_port}")
        try:
            with pytest.raises(EngineRejected, match="404"):
                source.next_rows(0)
        finally:
            source.close()
            server.shutdown()


def test_slime_can_neither_take_turns_past_the_rollout_function_nor_add_any(source: Any) -> None:
    with pytest.raises(RuntimeError, match="--rollout-function-path"):
        source.get_samples(1)
    with pytest.raises(RuntimeError, match="cannot add samples"):
        source.add_samples([])
    assert len(source) == 0


def test_a_merged_row_becomes_a_sample_with_its_carrier(plugin: Any) -> None:
    samples = conversation("a", [(5, 3), (2, 4)], seed=1, version=7)
    [row, padding] = train_rows(samples, [0, 1], min_rows=2)
    found = [plugin.row_sample(one, index) for index, one in enumerate([row, padding])]
    merged = found[0]
    assert (len(merged.tokens), merged.response_length) == (14, 9)
    assert merged.loss_mask == [1] * 3 + [0] * 2 + [1] * 4
    assert merged.weight_versions == ["7"]
    args = SimpleNamespace(global_batch_size=16)
    data = plugin.convert_samples(args, found)
    assert args.global_batch_size == 2
    assert data["rollout_ids"] == [0, 1]
    assert data["rollout_mask_sums"] == [7, 0]
    assert [len(carrier.turns) for carrier in data["prompt"]] == [2, 0]
    # No turn has a reward: that is unknown, not 0.
    assert all(reward != reward for reward in data["rewards"])
    assert "rollout_routed_experts" not in data


def test_what_only_some_samples_have_is_refused(plugin: Any) -> None:
    samples = conversation("a", [(5, 3)], seed=1)
    rows = train_rows(samples, [0], min_rows=2)
    found = [plugin.row_sample(one, index) for index, one in enumerate(rows)]
    found[1].metadata = {}
    with pytest.raises(ValueError, match="prompt: 1 of 2 samples have it"):
        plugin.convert_samples(SimpleNamespace(), found)


def test_rows_of_one_rollout_share_its_denominator(plugin: Any) -> None:
    rows = train_rows(
        [*conversation("a", [(5, 3)], seed=1), *conversation("b", [(5, 4)], seed=2)],
        [0, 0],
        min_rows=1,
    )
    found = [plugin.row_sample(one, index) for index, one in enumerate(rows)]
    found[1].rollout_id = found[0].rollout_id
    args = SimpleNamespace()
    assert plugin.convert_samples(args, found)["rollout_mask_sums"] == [7, 7]
    assert args.global_batch_size == 1
