"""`opd eval` as it is typed: on real engines with the lab's model, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from opd.cli.app import app
from opd.evaluation.figures.pass_at_k import pass_at_k
from opd.run import config as run_config
from records.store import Store
from rollout_bridge.engine.client import EngineClient
from tests.examples.shipped import MODEL
from tests.opd.evaluation.lab_run import make_run, record_states


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "lab")


def opd_eval(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["eval", "--run", str(folder), *options])


def refused(folder: Path, *options: str) -> str:
    result = opd_eval(folder, *options)
    assert result.exit_code == 2, result.output
    [line] = result.output.strip().splitlines()
    return line.removeprefix("error: ")


def test_two_versions_on_the_labs_tasks(run_folder: Path, lab_engine: str) -> None:
    options = ["--against", "start", "--tasks", "2", "--samples", "2", "--engine-url", lab_engine]
    result = opd_eval(run_folder, *options)
    assert result.exit_code == 0, result.output
    values = json.loads((run_folder / "eval_2.json").read_text())
    assert (values["suite"], values["version"], values["against"]) == ("lab", 2, [0])
    assert (values["k"], values["tasks"]) == ([1, 2], 2 * 7)
    for version in ("2", "0"):
        for one in values["versions"][version].values():
            counts = one["counts"].values()
            assert one["tasks"] == len(counts) == 2
            for k, shown in one["pass_at"].items():
                mean = sum(pass_at_k(n, c, int(k)) for c, n in counts) / 2
                assert shown["value"] == pytest.approx(mean)
                assert shown["low"] <= mean + 1e-9
                assert shown["high"] >= mean - 1e-9
    # The start can do what the noise cannot, on every task of the same names.
    start, noise = values["versions"]["0"], values["versions"]["2"]
    assert start["valid_calls"]["pass_at"]["1"]["value"] == 1.0
    assert noise["valid_calls"]["pass_at"]["1"]["value"] == 0.0
    assert start["valid_calls"]["counts"].keys() == noise["valid_calls"]["counts"].keys()
    paired = values["comparisons"]["0"]["valid_calls"]
    assert (paired["better"], paired["worse"], paired["equal"]) == (0, 2, 0)
    assert paired["difference_at"]["1"]["value"] == -1.0
    assert paired["p_value"] == 0.5
    ranked = values["rankings"]
    assert {one["k"] for one in ranked} == {1, 2, 16, 64, 256, 1024}
    for one in ranked:
        values_there = [of["pass_at_k"] for of in one["versions"]]
        assert values_there == sorted(values_there, reverse=True)
        for of in one["versions"] if one["k"] == 1 else []:
            measured = values["versions"][str(of["version"])][one["metric"]]["pass_at"]["1"]
            assert of["pass_at_k"] == measured["value"]
        assert one["is_fitted"] == (one["k"] > 2)
    page = (run_folder / "eval.html").read_text()
    assert "versions by pass@k, best first" in page
    assert "pass@k (beyond k = 2: as fitted)" in page
    assert "Example turns" not in page

    async def served() -> str:
        async with EngineClient(lab_engine) as client:
            return (await client.model_info()).weight_version

    assert asyncio.run(served()) == "0", "the engine got its weights back"


def test_hard_tasks_get_further_tries(run_folder: Path, lab_engine: str, tmp_path: Path) -> None:
    options = ["--against", "start", "--tasks", "3", "--samples", "2", "--max-samples", "7"]
    out = tmp_path / "adaptive.json"
    result = opd_eval(run_folder, *options, "--out", str(out), "--engine-url", lab_engine)
    assert result.exit_code == 0, result.output
    assert "never passed" in result.output
    values = json.loads(out.read_text())
    for version in ("2", "0"):
        for metric, one in values["adaptive"][version].items():
            first = values["versions"][version][metric]["counts"]
            assert first.keys() == one["counts"].keys()
            for task, (c, n) in one["counts"].items():
                # Noise never passes, so that it uses up what it is given.
                assert (n == 2) if first[task][0] else (c or n == 7)
            assert one["unsolved"] == sum(c == 0 for c, _ in one["counts"].values())
            assert one["expected_at"].keys() == {"4"}
    assert {n for _, n in values["adaptive"]["2"]["success_unit"]["counts"].values()} == {7}
    # Noise passes nothing: there is nothing to fit, and the table says so.
    assert values["adaptive"]["2"]["success_unit"]["expected_at"] == {"4": None}
    assert (values["max_samples"], values["until"]) == (7, None)
    assert "no fit" in out.with_suffix(".html").read_text()


def test_equal_seeds_give_equal_results_and_json_is_printed(
    run_folder: Path, lab_engine: str, tmp_path: Path
) -> None:
    def measured(name: str) -> dict[str, Any]:
        options = ["--version", "start", "--tasks", "2", "--samples", "2", "--seed", "5", "--json"]
        out = tmp_path / name
        result = opd_eval(run_folder, *options, "--out", str(out), "--engine-url", lab_engine)
        assert result.exit_code == 0, result.output
        values = json.loads(result.stdout)
        assert values == json.loads(out.read_text())
        assert out.with_suffix(".html").exists()
        return values["versions"]["0"]

    assert measured("first.json") == measured("again.json")


def test_the_hinted_teacher_prefers_the_start_to_noise(run_folder: Path, lab_engine: str) -> None:
    options = ["--suite", "recorded", "--samples", "2"]
    assert refused(run_folder, *options).startswith("no database at ")

    async def nothing_recorded() -> None:
        store = await Store.open(run_config.load(run_folder / "config.toml").store)
        await store.close()

    asyncio.run(nothing_recorded())
    assert refused(run_folder, *options).startswith("no recorded turn has a hint")
    asyncio.run(record_states(run_folder, 4))
    # The policy's engine is started by the command itself.
    result = opd_eval(run_folder, *options, "--set", f"frozen.url={lab_engine}")
    assert result.exit_code == 0, result.output
    assert "states won / lost / even" in result.output
    values = json.loads((run_folder / "eval_recorded_2.json").read_text())
    assert (values["version"], values["against"]) == (2, [0])
    assert (values["states"], values["sessions"], values["states_trained"]) == (4, 4, 0)
    assert values["left_out"] == {"hinted_prompt_mismatch": 1}
    assert values["win_rate"]["value"] == 0.0
    assert values["win_rate"]["high"] == pytest.approx(1 - 0.05**0.25)
    assert values["nats_per_token"]["high"] < -1.0
    assert all(one["tokens"] <= 32 for one in values["contests"])
    assert (run_folder / "eval_recorded.html").exists()


def test_a_teacher_that_reads_other_tokens_scores_nothing(tmp_path: Path, lab_engine: str) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text("Hello. " + template.read_text())
    folder = make_run(tmp_path / "run", model)
    asyncio.run(record_states(folder, 1))
    teacher = ["scoring.default_teacher=other", f"scoring.teachers.other={lab_engine}"]
    options = [word for one in teacher for word in ("--set", one)]
    said = refused(folder, "--suite", "recorded", *options)
    assert said.startswith(f"scoring.teachers.other: not compatible with {model}: the chat templat")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--version", "9"], "version 9: never written; in {run} there are: 0 (start), 2"),
        (
            ["--against", "1"],
            "version 1: its weights were deleted (only the newest are kept); in {run} there are: "
            "0 (start), 2",
        ),
        (["--version", "newest"], "version 'newest': give a number, 'latest' or 'start'"),
        (["--against", "2"], "version 2 would be compared with itself; give another --version or"),
        (["--against", "start,0"], "version 0 would be compared with itself; give another"),
        (["--against", "start,,2"], "--against start,,2: give versions, such as start,4,8"),
        (
            ["--suite", "recorded", "--against", "start,1"],
            "--against start,1: recorded states compare two versions; give one, or a suite of",
        ),
        (["--k", "1,8"], "--k 8: pass@8 needs at least 8 samples of each task, and --samples is 4"),
        (["--k", "0,1"], "--k 0,1: give whole numbers from 1 up, such as 1,2,4"),
        (["--until", "2"], "--until 2: it ends further tries; set --max-samples"),
        (["--max-samples", "4"], "--max-samples 4: give more than --samples 4"),
        (
            ["--max-samples", "8", "--until", "9"],
            "--until 9: only --max-samples 8 tries are made",
        ),
        (
            ["--suite", "recorded", "--max-samples", "8"],
            "--max-samples: an answer at a recorded state does not pass or fail",
        ),
        (["--suite", "other"], "--suite other: unknown; known: lab, recorded, or your own as "),
        (["--suite", "no.such:suite"], "--suite no.such:suite: cannot import no.such:suite: "),
        (
            ["--set", "policy.url=http://127.0.0.1:5", "--engine-url", "http://127.0.0.1:5/"],
            "--engine-url http://127.0.0.1:5/: that is an engine of the run itself",
        ),
    ],
)
def test_what_is_refused(run_folder: Path, options: list[str], said: str) -> None:
    assert refused(run_folder, *options).startswith(said.format(run=run_folder))


def test_a_folder_that_is_no_run_and_a_damaged_checkpoint(run_folder: Path, tmp_path: Path) -> None:
    assert refused(tmp_path).startswith(f"--run {tmp_path}: no config.toml in it")
    weights = run_folder / "checkpoints" / "step_000002" / "config.json"
    content = weights.read_bytes()
    weights.write_bytes(content + b"\n")
    try:
        assert refused(run_folder).startswith("a damaged checkpoint: ")
    finally:
        weights.write_bytes(content)
