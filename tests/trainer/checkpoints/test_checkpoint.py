import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer

from tests.rollout_bridge.chat_tokenizers import write_tokenizer
from tests.trainer.step.test_update import make, mixed_batch, weights
from tests.trainer.tiny import load, save_model
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.manifest import Manifest
from trainer.config import LoraConfig
from trainer.errors import CheckpointError
from trainer.model.lora import adapter_state, known_warnings, save_adapter
from trainer.model.policy import Policy
from trainer.publishing.merged import save_full
from trainer.step.update import Updater

LORA = LoraConfig(rank=2, alpha=4)
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def checkpoints(folder, tmp_path):
    return Checkpoints(tmp_path / "checkpoints", str(folder), seed=1)


def write(checkpoints, updater, parent: Manifest, version: int, turns: list[str]) -> Manifest:
    return checkpoints.write(
        updater.policy,
        updater.optimizer,
        parent=parent,
        version=version,
        turn_ids=turns,
        staleness=[0] * len(turns),
    )


def three_steps(checkpoints, updater) -> list[Manifest]:
    chain = checkpoints.open()
    for step in range(3):
        updater.update(mixed_batch(step), step)
        chain.append(write(checkpoints, updater, chain[-1], step + 1, [f"a{step}", f"b{step}"]))
    return chain


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2, alpha=4)])
def test_a_resumed_updater_continues_exactly(folder, checkpoints, lora):
    updater = make(folder, lora=lora)
    chain = three_steps(checkpoints, updater)
    assert [link.version for link in checkpoints.open()] == [0, 1, 2, 3]
    options = {"lora": lora, "reference": False, "beta_kl": 0.0}
    found = make(folder if lora else checkpoints.folder(3), **options)
    reference = found.reference or make(folder, lora=lora).reference
    resumed = Updater(found.policy, reference, found.config)
    resumed.settings = updater.settings
    checkpoints.load(chain[-1], resumed.policy, resumed.optimizer)
    for step in range(3, 5):
        updater.update(mixed_batch(step), step)
        resumed.update(mixed_batch(step), step)
    one, other = weights(updater), weights(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)


def logprobs(policy) -> torch.Tensor:
    ids, mask = torch.arange(10).unsqueeze(0), torch.ones(1, 10)
    mask[:, 0] = 0
    return policy.token_logprobs(ids, mask).logprobs_BT


def test_the_folder_is_a_model_that_anyone_can_load(folder, checkpoints):
    updater = make(folder)
    three_steps(checkpoints, updater)
    plain = load(checkpoints.folder(3))
    torch.testing.assert_close(logprobs(plain), logprobs(updater.policy), atol=1e-5, rtol=1e-5)
    assert (checkpoints.folder(3) / "tokenizer_config.json").read_text() == "{}\n"
    assert (logprobs(plain) - logprobs(load(folder))).abs().max() > 1e-3


def test_with_adapters_the_folder_is_one_that_peft_loads_and_little_more(folder, checkpoints):
    updater = make(folder, lora=LORA)
    manifest = three_steps(checkpoints, updater)[-1]
    path = checkpoints.folder(3)
    with known_warnings():
        adapted = PeftModel.from_pretrained(load(folder).model, str(path))
    plain = Policy(adapted, dtype="float32", chunk_tokens=1024)
    torch.testing.assert_close(logprobs(plain), logprobs(updater.policy), atol=1e-5, rtol=1e-5)
    assert (logprobs(plain) - logprobs(load(folder))).abs().max() > 1e-3
    assert (path / "tokenizer_config.json").read_text() == "{}\n"
    assert not (path / "model.safetensors").exists()
    assert {"adapter_config.json", "adapter_model.safetensors"} <= manifest.files.keys()
    config = json.loads((path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder.resolve())
    assert config["target_modules"] == sorted(MODULES)


def test_names_are_short_only_where_they_mean_the_same_modules(folder, tmp_path):
    one = "model.layers.1.mlp.down_proj"
    policy = load(folder, lora=LoraConfig(rank=2, alpha=4, target_modules=[one]))
    save_adapter(policy.model, tmp_path, "base")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == [one]


def test_a_checkpoint_of_an_earlier_program_goes_on_exactly(folder, checkpoints, monkeypatch):
    """Merged weights with `adapter.pt` beside them."""
    updater = make(folder, lora=LORA)
    chain = checkpoints.open()
    updater.update(mixed_batch(0), 0)
    monkeypatch.setattr(Checkpoints, "_save_weights", save_as_earlier)
    chain.append(write(checkpoints, updater, chain[-1], 1, ["a"]))
    chain = checkpoints.open()
    assert [link.version for link in chain] == [0, 1]
    torch.testing.assert_close(
        logprobs(load(Path(checkpoints.weights_path(chain[-1])))),
        logprobs(updater.policy),
        atol=1e-5,
        rtol=1e-5,
    )
    resumed = make(folder, lora=LORA)
    checkpoints.load(chain[-1], resumed.policy, resumed.optimizer)
    for one in (updater, resumed):
        one.update(mixed_batch(1), 1)
    after, expected = weights(resumed), weights(updater)
    assert all(torch.equal(after[name], expected[name]) for name in expected)


def save_as_earlier(self, policy, folder: Path) -> None:
    """What a checkpoint held before adapters were stored alone; in place of `_save_weights`."""
    save_full(policy, folder)
    torch.save(adapter_state(policy.base_model), folder / "adapter.pt")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (LoraConfig(rank=3, alpha=4), "has rank 2, but trainer.lora.rank is 3: set that back"),
        (LoraConfig(rank=2, alpha=8), "has alpha 4, but trainer.lora.alpha is 8: set that back"),
        (
            LoraConfig(rank=2, alpha=4, target_modules=["q_proj"]),
            "does not fit this model and trainer.lora.target_modules: 24 tensors differ, base",
        ),
    ],
)
def test_an_adapter_of_other_settings_is_refused_in_one_line(folder, checkpoints, other, said):
    manifest = three_steps(checkpoints, make(folder, lora=LORA))[-1]
    resumed = make(folder, lora=other)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(manifest, resumed.policy, resumed.optimizer)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_adapter_is_no_full_weights(folder, checkpoints):
    manifest = three_steps(checkpoints, make(folder, lora=LORA))[-1]
    with pytest.raises(CheckpointError, match="has no full weights: the run trains adapters"):
        checkpoints.weights_path(manifest)


def test_merging_adapters_for_the_engines_leaves_the_base_alone(folder, tmp_path):
    updater = make(folder, lora=LORA)
    updater.update(mixed_batch(0), 0)
    save_full(updater.policy, tmp_path)
    start = dict(load(folder).model.named_parameters())
    for name, parameter in updater.policy.base_model.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, start[name.replace(".base_layer", "")])


def test_half_written_folders_are_removed_and_damaged_ones_passed_over(folder, checkpoints):
    three_steps(checkpoints, make(folder))
    (checkpoints.root / ".writing_000009").mkdir()
    weights_file = checkpoints.folder(3) / "model.safetensors"
    content = bytearray(weights_file.read_bytes())
    content[-1] ^= 1
    weights_file.write_bytes(content)
    assert [link.version for link in checkpoints.open()] == [0, 1, 2]
    (checkpoints.folder(2) / "optimizer.pt").unlink()
    assert [link.version for link in checkpoints.open()] == [0, 1]
    shutil.rmtree(checkpoints.folder(1))
    assert [link.version for link in checkpoints.open()] == [0]
    assert not (checkpoints.root / ".writing_000009").exists()
    assert checkpoints.highest_version() == 3


def test_a_changed_ancestor_breaks_the_chain(folder, checkpoints):
    three_steps(checkpoints, make(folder))
    path = checkpoints.folder(1) / "manifest.json"
    content = json.loads(path.read_text())
    content["turn_ids"] = ["a0", "forged"]
    path.write_text(json.dumps(content))
    # Version 1 itself is still whole, as far as one file can say.
    assert [link.version for link in checkpoints.open()] == [0, 1]


def test_a_turn_cannot_stand_twice_on_a_chain(folder, checkpoints):
    updater = make(folder)
    chain = three_steps(checkpoints, updater)
    write(checkpoints, updater, chain[-1], 4, ["a0"])
    assert [link.version for link in checkpoints.open()] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="twice"):
        write(checkpoints, updater, chain[-1], 5, ["x", "x"])


def test_version_numbers_are_not_written_twice(folder, checkpoints):
    updater = make(folder)
    chain = three_steps(checkpoints, updater)
    with pytest.raises(CheckpointError, match="never reused"):
        write(checkpoints, updater, chain[0], 2, ["y"])


def test_pruning_keeps_manifests_and_what_is_named(folder, checkpoints):
    three_steps(checkpoints, make(folder))
    assert checkpoints.prune([1, 3]) == [2]
    assert [path.name for path in checkpoints.folder(2).iterdir()] == ["manifest.json"]
    assert checkpoints.prune([1, 3]) == []
    assert [link.version for link in checkpoints.open()] == [0, 1, 2, 3]
    # A pruned version is no place to continue from.
    shutil.rmtree(checkpoints.folder(3))
    assert [link.version for link in checkpoints.open()] == [0, 1]


def test_a_tokenizer_with_several_templates_fits_into_a_checkpoint(tmp_path, monkeypatch):
    """`save_pretrained` makes a folder for further templates; hub ids go through it."""
    saved = write_tokenizer(tmp_path / "hub", "chat_template_plain.jinja")
    (tmp_path / "hub" / "additional_chat_templates").mkdir()
    template = tmp_path / "hub" / "chat_template.jinja"
    shutil.copy(template, tmp_path / "hub" / "additional_chat_templates" / "tool_use.jinja")
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert set(tokenizer.chat_template) == {"default", "tool_use"}
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda model: tokenizer)
    checkpoints = Checkpoints(tmp_path / "checkpoints", "some/hub-id", seed=1)
    (root,) = checkpoints.open()
    assert "tokenizer.json" in root.files
    assert "chat_template.jinja" in root.files
    checkpoints.verify(root)


def test_another_start_model_is_refused(checkpoints, tmp_path):
    checkpoints.open()
    other = Checkpoints(checkpoints.root, str(save_model(tmp_path / "other")), seed=1)
    with pytest.raises(CheckpointError, match="started from"):
        other.open()


def test_names_survive_a_move_of_the_run_folder(folder, checkpoints):
    chain = three_steps(checkpoints, make(folder))
    assert checkpoints.name(chain[2]) == "checkpoints/step_000002"
    assert checkpoints.weights_path(chain[0]) == str(folder.resolve())
    assert checkpoints.weights_path(chain[2]) == str(checkpoints.folder(2).resolve())


def test_manifests_read_back_and_refuse_rubbish(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": 1, "version": 1}')
    with pytest.raises(CheckpointError, match="not a readable manifest"):
        Manifest.read(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"\xff\x00")
    with pytest.raises(CheckpointError):
        Manifest.read(tmp_path)
