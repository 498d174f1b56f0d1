import json

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.step.metrics import MetricsLog


def test_lines_append_and_curves_have_the_same_numbers(tmp_path):
    for start in (1, 3):
        log = MetricsLog(tmp_path, tensorboard=True)
        log.write({"loss": 0.5 * start, "skipped": None}, start)
        log.write({"loss": float("nan"), "skipped": "below_noise"}, None)
        log.close()
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
