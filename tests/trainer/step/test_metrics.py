"""The trainer's metrics: JSON lines, TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from opd.run.start_checks import check_curves
from trainer.config import TrainerConfig
from trainer.errors import StartupError
from trainer.step.metrics import MetricsLog


def write(folder: Path, **options: Any) -> None:
    """Two starts of a trainer, with a step and a skipped attempt each."""
    for start in (1, 3):
        log = MetricsLog(folder, **options)
        log.write({"loss": 0.5 * start, "skipped": None}, start)
        log.write({"loss": float("nan"), "skipped": "below_noise"}, None)
        log.close()


def test_lines_append_and_curves_have_the_same_numbers(tmp_path):
    write(tmp_path, tensorboard=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [0.5, None, 1.5, None]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (3, 1.5)]


def test_tensorboard_is_optional(tmp_path):
    log = MetricsLog(tmp_path, tensorboard=False)
    log.write({"loss": 1.0}, 1)
    log.close()
    assert not (tmp_path / "tensorboard").exists()


def ended_records(folder: Path, starts: int, *, wait_s: float = 30.0) -> list[Any]:
    """What Weights & Biases keeps to be uploaded, oldest first, once each start has its end there:
    their process writes the last block a moment after `finish` has returned.
    """
    until = time.monotonic() + wait_s
    while True:
        paths = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
        found = [record for path in paths for record in records(path.read_bytes())]
        if sum(one.WhichOneof("record_type") == "exit" for one in found) == starts:
            return found
        assert time.monotonic() < until, f"{starts} starts have not ended in {paths}"
        time.sleep(0.02)


def records(content: bytes) -> Iterator[Any]:
    """Records of LevelDB's log format, each with a checksum, its length and a kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    place = 7
    while place < len(content):
        _, length, _ = struct.unpack_from("<IHB", content, place)
        record = Record()
        record.ParseFromString(content[place + 7 : place + 7 + length])
        yield record
        place += 7 + length


def test_weights_and_biases_get_the_same_numbers_as_one_run(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    folder = tmp_path / "mine"
    write(folder, tensorboard=False, wandb="hindsight")
    found = ended_records(folder, starts=2)
    runs = [one.run for one in found if one.WhichOneof("record_type") == "run"]
    assert len({run.run_id for run in runs}) == 1
    assert {(run.project, run.display_name) for run in runs} == {("hindsight", "mine")}
    history = [one.history for one in found if one.WhichOneof("record_type") == "history"]
    values = [
        {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in one.item}
        for one in history
    ]
    assert [(one["trainer/step"], one["loss"]) for one in values] == [(1, 0.5), (3, 1.5)]
    assert "skipped" not in values[0]
    assert not list(folder.glob("wandb/offline-run-*/files/*"))
    assert "wandb" not in capfd.readouterr().out


def test_training_goes_on_where_weights_and_biases_fail(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = MetricsLog(tmp_path / "mine", tensorboard=False, wandb="hindsight")
    [curves] = log._curves

    def killed(values: object) -> None:
        raise ConnectionResetError("its process is gone")

    monkeypatch.setattr(curves._run, "log", killed)
    for step in (1, 2):
        log.write({"loss": 1.0}, step)
    log.close()
    assert len((tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()) == 2
    assert caplog.text.count("Weights & Biases did not take a step's numbers") == 1
    curves._run.finish()


_WITHOUT_KEY = """
import sys
from pathlib import Path
from trainer.step.metrics import MetricsLog
MetricsLog(Path(sys.argv[1]), tensorboard=False, wandb="hindsight")
"""


def test_weights_and_biases_without_a_key_say_what_to_set(tmp_path):
    """In a process of its own: theirs reads its environment once."""
    environment = {key: one for key, one in os.environ.items() if not key.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    command = [sys.executable, "-c", _WITHOUT_KEY, str(tmp_path / "mine")]
    ended = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    last = ended.stderr.splitlines()[-1]
    assert "StartupError: trainer.wandb: " in last
    assert "; set WANDB_API_KEY, or WANDB_MODE=offline" in last


def test_weights_and_biases_without_their_package_are_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_curves(TrainerConfig())
    with pytest.raises(StartupError, match="pip install 'wandb"):
        check_curves(TrainerConfig(wandb="hindsight"))
