"""`opd doctor` without a session finds what is wrong with machine, settings and judge."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from opd.checkup import checks
from opd.checkup.judge_probe import PROBES, probe_judge
from opd.cli.app import app

MODEL = Path(__file__).parents[3] / "examples" / "tool_lab" / "model"
POSITIVE = "\\boxed{1}[HINT_START]Answer in French.[HINT_END]"
NEGATIVE = "\\boxed{-1}"


def doctor(*options: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *options])


def test_a_model_is_checked_before_there_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctor("--model", str(MODEL))
    names = {line.split()[1] for line in result.output.splitlines() if line[:2] in ("ok", "--")}
    wanted = "versions disk ports device store model renderer template calibration judge"
    assert names == {f"{name}:" for name in wanted.split()}
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = doctor("--model", str(tmp_path / "none"))
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1


def test_a_run_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = doctor("--run", str(tmp_path / "none"))
    assert (result.exit_code, "no such folder" in result.output) == (2, True)


def problems(config_file: Path) -> dict[str, str]:
    """What is wrong with a run, by the name of the check; the exit status says that it is."""
    result = doctor("--run", str(config_file.parent), "--json")
    found = json.loads(result.output)["checks"]
    wrong = {one["name"]: one["found"] for one in found if one["remedy"]}
    assert result.exit_code == (1 if wrong else 0)
    return wrong


def test_each_wrong_thing_is_found(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's model and judge are not there; then its port is taken, and the disk is full."""
    assert {"model", "judge"} == set(problems(config_file))
    calibration = {
        "noise": 0.5,
        "warnings": ["policy scores differ from run to run"],
        "engines": {"policy": {"max_abs": 0.7}},
        "bound": 0.9,
    }
    (config_file.parent / "calibration.json").write_text(json.dumps(calibration))
    monkeypatch.setattr(checks, "LEAST_FREE_BYTES", 2**62)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = f"port = {port}\nworkers = 64"
        text = config_file.read_text().replace("port = 8000", settings, 1)
        text = text.replace("\nworkers = 1\n", "\n", 1)
        config_file.write_text(text)
        wrong = problems(config_file)
    assert set(wrong) == {"model", "judge", "disk", "calibration", "ports", "workers"}
    assert "more workers than cores" in wrong["workers"]
    assert f"{port} on 127.0.0.1 is in use" in wrong["ports"]
    assert "policy scores differ" in wrong["calibration"]


def _about(body: dict) -> str:
    text = body["messages"][-1]["content"]
    return next(probe.name for probe in PROBES if probe.followed in text)


async def test_a_judge_that_understands_has_no_finding(judge_server, judge_config, reply) -> None:
    judge_server.behave = lambda _n, body: reply.answer(
        POSITIVE if _about(body) == "an objection" else NEGATIVE
    )
    found = await probe_judge(judge_config())
    assert [one.remedy for one in found] == [None, None, None]
    assert "Answer in French." in found[0].found


@pytest.mark.parametrize(
    ("text", "wrong"),
    [(POSITIVE, [False, True, True]), (NEGATIVE, [True, False, False]), ("what?", [True] * 3)],
)
async def test_a_judge_that_always_says_the_same_is_found(
    judge_server, judge_config, reply, text, wrong
) -> None:
    judge_server.replies(reply.answer(text))
    assert [one.remedy is not None for one in await probe_judge(judge_config())] == wrong


async def test_a_judge_that_is_down_is_one_finding(judge_server, judge_config, reply) -> None:
    judge_server.replies(reply.error(500, "broken"))
    [found] = await probe_judge(judge_config())
    assert "does not answer" in found.found
