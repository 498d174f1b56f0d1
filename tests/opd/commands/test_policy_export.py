import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from opd.cli.app import app
from opd.run import config as run_config
from opd.run.defaults import single_machine
from tests.trainer.checkpoints.test_checkpoint import write
from tests.trainer.step.test_update import make, mixed_batch
from tests.trainer.tiny import load, save_model
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import LoraConfig
from trainer.publishing.merged import MergedFolders

IDS, MASK = torch.arange(10).unsqueeze(0), torch.tensor([[0.0] + [1.0] * 9])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def trained_run(folder: Path, model: Path, lora: LoraConfig | None):
    """A run of two versions, the first one pruned; the updater that made them."""
    values = single_machine(str(model), folder)
    values |= {"judge": {"base_url": "http://127.0.0.1:1/v1", "model": "none"}}
    folder.mkdir()
    run_config.save(run_config.build(values), folder / "config.toml")
    checkpoints = Checkpoints(folder / "checkpoints", str(model), seed=1)
    updater, chain = make(model, lora=lora), checkpoints.open()
    for step in range(2):
        updater.update(mixed_batch(step), step)
        chain.append(write(checkpoints, updater, chain[-1], step + 1, [f"turn {step}"]))
    checkpoints.prune([2])
    return updater


def exported(run: Path, *options: str):
    return CliRunner().invoke(app, ["policy", "export", "--run", str(run), *options])


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=4)])
def test_an_exported_version_is_a_model_with_the_policys_logprobs(model, tmp_path, lora):
    updater = trained_run(tmp_path / "run", model, lora)
    done = exported(tmp_path / "run", "--version", "2", "--to", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert done.output.startswith("version 2, ")
    torch.testing.assert_close(
        load(tmp_path / "out").token_logprobs(IDS, MASK).logprobs_BT,
        updater.policy.token_logprobs(IDS, MASK).logprobs_BT,
        atol=1e-5,
        rtol=1e-5,
    )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= names
    assert names.isdisjoint({"optimizer.pt", "manifest.json", "adapter_config.json"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--version", "1", "--to", "{tmp}/out"], "version 1: its weights were deleted"),
        (["--version", "7", "--to", "{tmp}/out"], "version 7: never written"),
        (["--to", "{tmp}/run"], "--to {tmp}/run: it exists; name a new folder"),
        (["--to", "{tmp}/none/out"], "--to {tmp}/none/out: no folder {tmp}/none"),
    ],
)
def test_what_is_refused_is_one_line_and_leaves_nothing(model, tmp_path, options, said):
    trained_run(tmp_path / "run", model, LoraConfig(rank=2, alpha=4))
    there = sorted(tmp_path.iterdir())
    done = exported(tmp_path / "run", *(one.format(tmp=tmp_path) for one in options))
    assert done.exit_code == 2
    assert done.output.startswith(f"error: {said.format(tmp=tmp_path)}")
    assert done.output.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == there


def test_merged_folders_are_made_once_from_memory_or_disk_and_pruned(model, tmp_path):
    updater = trained_run(tmp_path / "run", model, LoraConfig(rank=2, alpha=4))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", str(model), seed=1)
    merged = MergedFolders(tmp_path / "run" / "merged", checkpoints)
    assert merged.path(0) == str(model.resolve())
    assert merged.path(1) is None, "its adapter was pruned"
    path = merged.path(2)
    assert path is not None
    from_disk = load(Path(path)).token_logprobs(IDS, MASK).logprobs_BT
    shutil.rmtree(path)
    assert merged.path(2, updater.policy) == path
    from_memory = load(Path(path)).token_logprobs(IDS, MASK).logprobs_BT
    torch.testing.assert_close(from_disk, from_memory, atol=1e-6, rtol=1e-6)
    stamp = (Path(path) / "model.safetensors").stat().st_mtime_ns
    assert merged.path(2, updater.policy) == path
    assert (Path(path) / "model.safetensors").stat().st_mtime_ns == stamp
    (merged.root / ".merging_1_000009").mkdir()
    merged.prune([2])
    assert [one.name for one in merged.root.iterdir()] == ["step_000002"]
    merged.prune([])
    assert list(merged.root.iterdir()) == []
