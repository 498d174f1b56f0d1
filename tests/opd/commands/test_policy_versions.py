import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opd.cli.app import app
from opd.run import config as run_config
from rollout_bridge.guard.checks import add_check
from rollout_bridge.rehearsal.journal import Journal
from rollout_bridge.stop_order import StopOrder, order_stop, read_stop
from tests.opd.cluster.test_going_back import plan as cluster_plan
from tests.opd.cluster.test_going_back import write_run
from tests.opd.commands.test_policy_export import trained_run
from tests.rollout_bridge.guard.test_checks import moved
from tests.rollout_bridge.rehearsal.test_journal import a_row
from tests.trainer.tiny import save_model
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.schedule.rollback_order import read_rollback


@pytest.fixture
def run(tmp_path) -> Path:
    """Versions 1, without weights, and 2."""
    trained_run(tmp_path / "run", save_model(tmp_path / "model"), None)
    return tmp_path / "run"


def policy(command: str, run: Path, *options: str):
    return CliRunner().invoke(app, ["policy", command, "--run", str(run), *options])


def test_list_says_what_each_version_trained_and_what_became_of_it(run):
    checkpoints = Checkpoints(run / "checkpoints", str(run.parent / "model"), seed=1)
    checkpoints.roll_back(2, parent=checkpoints.open()[-1], new_version=4)
    lines = policy("list", run).output.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["version", "step"],
        ["0", "0"],
        ["1", "1"],
        ["2", "2"],
        ["4", "2"],
    ]
    assert lines[2].split()[4:] == ["1", "0", "deleted"]
    assert lines[3].split()[4:] == ["1", "0", "kept"]
    assert lines[4].endswith("kept     restores version 2, newest")


def test_rollback_leaves_an_order_for_a_version_that_can_be_restored(run):
    refused = policy("rollback", run, "--version", "1")
    assert refused.exit_code != 0
    assert "choose one of: 2" in " ".join(refused.output.split())
    assert read_rollback(run) is None
    done = policy("rollback", run, "--version", "2")
    assert done.exit_code == 0, done.output
    assert read_rollback(run) == 2


def test_resume_takes_the_stop_away_and_repeats_its_reason(run):
    assert policy("resume", run).exit_code != 0
    order_stop(run, StopOrder(reason="obedience fell"))
    done = policy("resume", run)
    assert "obedience fell" in done.output
    assert read_stop(run) is None


def test_pin_serves_a_version_whose_weights_are_kept(run):
    refused = policy("pin", run, "--version", "1")
    assert refused.exit_code != 0
    assert "choose one of: 0, 2" in " ".join(refused.output.split())
    assert read_stop(run) is None
    done = policy("pin", run, "--version", "2")
    assert done.exit_code == 0, done.output
    assert read_stop(run) == StopOrder(reason="version 2 is pinned", serve_version=2)
    again = policy("pin", run, "--version", "0")
    assert "version 2 is pinned" in " ".join(again.output.split())
    assert again.exit_code != 0
    assert policy("resume", run).exit_code == 0
    assert policy("pin", run, "--version", "0").exit_code == 0


def test_show_says_what_was_measured_of_a_version(run):
    rows = [{"version": 1, "loss": 3.0}, {"version": 2, "loss": 0.5, "grad_norm": None}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    Journal(run).add(a_row(2))
    add_check(run, moved(2).model_copy(update={"breaches": ["too bad"]}))
    shown = policy("show", run, "--version", "2")
    assert shown.exit_code == 0, shown.output
    facts = dict(line.split(maxsplit=1) for line in shown.output.splitlines())
    assert facts["loss"] == "0.5"
    assert facts["weights"] == "kept"
    assert "grad_norm" not in facts
    assert facts["canaries"] == "right          1 of 2"
    assert facts["breach"] == "too bad"
    assert "gap" in facts
    assert "KL from the last good 0.125" in " ".join(shown.output.split())
    unknown = policy("show", run, "--version", "9")
    assert unknown.exit_code != 0
    assert "not in the chain" in unknown.output


def test_compare_sets_two_versions_side_by_side_and_says_what_lies_between(run):
    rows = [{"version": 1, "loss": 3.0}, {"version": 2, "loss": 0.5, "grad_norm": 1.5}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    Journal(run).add(a_row(2))
    add_check(run, moved(2))
    done = policy("compare", run, "--version", "1", "--against", "2")
    assert done.exit_code == 0, done.output
    lines = {" ".join(line.split()) for line in done.output.splitlines()}
    assert "version 1 version 2 difference" in lines
    assert "loss 3 0.5 -2.5" in lines
    assert "grad_norm not measured 1.5" in lines
    assert any(line.startswith("gap of ") for line in lines)
    assert any(line.startswith("canaries right, share not measured") for line in lines)
    assert "gap, trained turns not measured 0.2" in lines
    assert "trained between them: 1 turns and 0 lessons in 1 versions" in lines
    refused = policy("compare", run, "--version", "1", "--against", "7")
    assert refused.exit_code != 0
    assert "version 7 is not in the chain" in " ".join(refused.output.split())
    assert policy("compare", run, "--version", "2", "--against", "2").exit_code != 0


@pytest.fixture
def cluster(tmp_path) -> Path:
    """Versions 1 to 7 of a run that slime trains, with checkpoints of 3 and 5."""
    run = tmp_path / "cluster"
    write_run(run)
    run_config.save(cluster_plan(run).config, run / "config.toml")
    return run


def test_a_clusters_versions_are_listed_shown_and_compared(cluster):
    lines = policy("list", cluster).output.splitlines()
    cells = [line.split() for line in lines[1:]]
    assert [(cell[0], cell[1]) for cell in cells] == [(str(n), str(n - 1)) for n in range(1, 8)]
    kept = {cell[0] for cell in cells if cell[6] == "kept"}
    assert kept == {"1", "3", "5"}
    assert {cell[6] for cell in cells} == {"kept", "none"}
    facts = dict(
        line.split(maxsplit=1)
        for line in policy("show", cluster, "--version", "5").output.splitlines()
    )
    assert (facts["step"], facts["turns"], facts["weights"]) == ("4", "1", "kept")
    compared = policy("compare", cluster, "--version", "2", "--against", "5").output
    assert "trained between them: 3 turns and 0 lessons in 3 versions" in compared


def test_a_clusters_rollback_says_what_it_costs(cluster):
    refused = policy("rollback", cluster, "--version", "9")
    assert refused.exit_code != 0
    assert "--version: version 9 is not in the chain" in " ".join(refused.output.split())
    newest = policy("rollback", cluster, "--version", "7")
    assert newest.exit_code != 0
    assert "version 7 is the newest" in " ".join(newest.output.split())
    assert read_rollback(cluster) is None
    done = policy("rollback", cluster, "--version", "4")
    assert done.exit_code == 0, done.output
    assert "the job begins with version 3, from checkpoint iter_0000001" in done.output
    assert "lost too" in done.output
    assert "withdrawn: versions 5 to 7" in done.output
    assert read_rollback(cluster) == 4


def test_a_clusters_version_cannot_be_pinned_and_the_way_out_is_named(cluster):
    refused = policy("pin", cluster, "--version", "5")
    assert refused.exit_code != 0
    assert "go back with opd policy rollback" in " ".join(refused.output.split())
    assert read_stop(cluster) is None
