"""Event files as slime writes them become the rows that an embedded trainer would have written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

from opd.report.cluster_steps import ClusterSteps
from opd.report.curves import metric_rows, run_curves


class Job:
    """A job's two processes that report: the one that hands over, and the first trainer."""

    def __init__(self, run: Path, epochs: int = 1) -> None:
        folder = str(run / "tensorboard")
        self.manager = SummaryWriter(folder, filename_suffix=".manager")
        self.trainer = SummaryWriter(folder, filename_suffix=".trainer")
        self.epochs = epochs
        self.now = 1_000.0

    def hand_over(self, batch: int, **values: float) -> None:
        found = {"handover/version": batch + 1, "handover/turns": 4.0, "handover/is_refresh": 0.0}
        self._add(self.manager, found | values, batch)

    def train(self, batch: int, losses: list[float], **values: float) -> None:
        self._add(self.trainer, {"rollout/opd/adv_mean": 0.5, **values}, batch)
        for number, loss in enumerate(losses):
            self._add(self.trainer, {"train/loss": loss}, batch * self.epochs + number)

    def _add(self, writer: SummaryWriter, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.now += 0.01
            writer.add_scalar(name, value, step, walltime=self.now)
        writer.flush()


def figures(run: Path, *names: str) -> list[list[Any]]:
    return [[row.get(name) for name in names] for row in metric_rows(run)]


def test_a_batch_is_a_row_once_the_next_one_trains(tmp_path: Path) -> None:
    job, steps = Job(tmp_path), ClusterSteps(tmp_path)
    steps.update()
    assert metric_rows(tmp_path) == []
    job.hand_over(0)
    job.train(0, [2.0])
    job.hand_over(1)
    steps.update()
    assert metric_rows(tmp_path) == []
    job.train(1, [1.0])
    steps.update()
    assert figures(tmp_path, "step", "version", "loss", "opd/adv_mean", "turns/live") == [
        [1, 1, 2.0, 0.5, 4.0]
    ]
    steps.update(is_end=True)
    steps.update(is_end=True)
    assert figures(tmp_path, "step", "loss") == [[1, 2.0], [2, 1.0]]


def test_several_steps_on_a_batch_are_its_mean_also_after_a_batch_with_one(tmp_path: Path) -> None:
    job, steps = Job(tmp_path, epochs=4), ClusterSteps(tmp_path)
    job.hand_over(0)
    job.train(0, [4.0, 3.0, 2.0, 1.0])
    job.epochs = 1  # slime numbers the only step of an empty batch 1, as one of the batch before
    job.hand_over(1, **{"handover/turns": 0.0, "handover/is_refresh": 1.0})
    job.train(1, [0.0])
    job.epochs = 4
    job.hand_over(2, **{"lessons/hint": 3.0})
    job.train(2, [1.0, 1.0, 0.0, 0.0])
    steps.update(is_end=True)
    assert figures(tmp_path, "step", "loss", "turns", "skipped") == [
        [1, 2.5, 4.0, None],
        [2, 0.0, 0.0, "refresh"],
        [3, 0.5, 7.0, None],
    ]


def test_a_resumed_job_replaces_the_batches_that_it_does_again(tmp_path: Path) -> None:
    first = Job(tmp_path)
    for batch in range(4):
        first.hand_over(batch)
        first.train(batch, [float(batch)])
    ClusterSteps(tmp_path).update(is_end=True)
    assert figures(tmp_path, "step", "loss") == [[1, 0.0], [2, 1.0], [3, 2.0], [4, 3.0]]

    second, steps = Job(tmp_path), ClusterSteps(tmp_path)
    second.now = 2_000.0
    second.hand_over(2, **{"handover/version": 6})
    second.train(2, [20.0])
    steps.update()
    assert figures(tmp_path, "step", "loss") == [[1, 0.0], [2, 1.0]]
    steps.update(is_end=True)
    assert figures(tmp_path, "step", "version", "loss")[2:] == [[3, 6, 20.0]]


def test_a_job_that_goes_back_replaces_rows_that_are_written_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, steps = Job(tmp_path), ClusterSteps(tmp_path)
    for batch in range(4):
        first.hand_over(batch)
        first.train(batch, [float(batch)])
    steps.update(is_end=True)
    second = Job(tmp_path)
    second.now = 2_000.0
    second.hand_over(1, **{"handover/version": 6})
    with monkeypatch.context() as patch:

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("opd.report.cluster_steps.os.replace", full)
        with pytest.raises(OSError, match="No space"):
            steps.update()
    assert figures(tmp_path, "step", "version") == [[1, 1], [2, 2], [3, 3], [4, 4]]
    second.train(1, [10.0])
    second.hand_over(2, **{"handover/version": 7})
    second.train(2, [20.0])
    steps.update()
    assert figures(tmp_path, "step", "version", "loss") == [[1, 1, 0.0], [2, 6, 10.0]]
    steps.update(is_end=True)
    assert figures(tmp_path, "step", "version")[2:] == [[3, 7]]


def test_rows_that_found_no_room_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, steps = Job(tmp_path), ClusterSteps(tmp_path)
    job.hand_over(0)
    job.train(0, [2.0])
    steps.update()
    job.hand_over(1)
    job.train(1, [1.0])
    whole = Path.open

    def half(path: Path, *words: Any, **named: Any) -> Any:
        with whole(path, *words, **named) as file:
            file.write('{"step": 1, ')
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", half)
        with pytest.raises(OSError, match="No space"):
            steps.update()
    steps.update(is_end=True)
    assert figures(tmp_path, "step", "loss") == [[1, 2.0], [2, 1.0]]


def test_what_was_not_measured_is_missing_and_a_number_without_a_name_in_json_is_null(
    tmp_path: Path,
) -> None:
    job, steps = Job(tmp_path), ClusterSteps(tmp_path)
    job.hand_over(0)
    job.train(0, [1.0], **{"rollout/opd/adv_std": float("nan")})
    job.hand_over(1, **{"handover/staleness_mean": 1.5})
    job.train(1, [0.5])
    steps.update(is_end=True)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert "NaN" not in "".join(lines)
    assert "staleness_mean" not in json.loads(lines[0])
    curves = {curve.title: curve.series for curve in run_curves(metric_rows(tmp_path))}
    assert curves["Staleness"]["mean"] == [None, 1.5]
    assert curves["Teacher minus student"]["standard deviation"] == [None, None]
    assert curves["Loss"]["total"] == [1.0, 0.5]


def test_what_the_next_batch_says_of_a_batch_is_in_that_batchs_row(tmp_path: Path) -> None:
    job, steps = Job(tmp_path), ClusterSteps(tmp_path)
    kl, last = "rollout/rollout_corr/kl", "rollout/last_batch/"
    job.hand_over(0)
    job.train(0, [2.0], **{kl: float("nan")})
    job.hand_over(1)
    said = {f"{last}rollout_corr/kl": 0.25, f"{last}opd/loss_max": 3.0}
    job.train(1, [1.0], **{kl: 0.5, **said})
    steps.update()
    job.hand_over(2)
    job.train(2, [0.5], **{kl: 0.75, f"{last}opd/loss_max": 4.0})
    steps.update(is_end=True)
    assert figures(tmp_path, "step", "rollout_corr/kl", "opd/loss_max") == [
        [1, 0.25, 3.0],
        [2, 0.5, 4.0],
        [3, 0.75, None],
    ]


def test_a_resumed_job_says_nothing_of_a_batch_that_has_its_row(tmp_path: Path) -> None:
    first = Job(tmp_path)
    for batch in range(2):
        first.hand_over(batch)
        first.train(batch, [float(batch)])
    steps = ClusterSteps(tmp_path)
    steps.update(is_end=True)
    first.hand_over(2)
    first.train(2, [2.0], **{"rollout/last_batch/opd/loss_max": 9.0})
    steps.update(is_end=True)
    assert figures(tmp_path, "step", "loss", "opd/loss_max") == [
        [1, 0.0, None],
        [2, 1.0, None],
        [3, 2.0, None],
    ]
