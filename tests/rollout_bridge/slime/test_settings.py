from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w

from rollout_bridge.slime.settings import SlimeConfigError, is_configured, min_rows, read_settings
from tests.rollout_bridge.slime.runs import run_values, slime_args


def test_settings_come_from_the_run_and_slimes_arguments(tmp_path: Path) -> None:
    settings = read_settings(slime_args(tmp_path, update_weight_start_version=6))
    assert (settings.batch_size, settings.max_staleness, settings.lease_ttl_s) == (4, 4, 600.0)
    assert settings.run_folder == tmp_path
    assert settings.save_folder == tmp_path / "checkpoints"
    assert settings.handover.max_wait_s == 0.2
    assert settings.first_version == 7
    assert not settings.is_async_save


def test_the_first_label_of_slime_is_1(tmp_path: Path) -> None:
    assert read_settings(slime_args(tmp_path)).first_version == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hindsight_config": None}, "hindsight_config is not set"),
        ({"hindsight_needs": None}, "hindsight_needs: .* as `opd slime` writes it"),
        ({"rollout_global_dataset": False}, "--disable-rollout-global-dataset"),
        ({"save": None}, "--save and --save-interval"),
        ({"save_interval": None}, "--save and --save-interval"),
        ({"num_rollout": None}, "--num-rollout"),
        ({"n_samples_per_prompt": 8}, "--n-samples-per-prompt 8: use 1"),
        ({"rollout_batch_size": 8}, "--rollout-batch-size 8: use trainer.rollout_batch_size = 4"),
        ({"update_weights_interval": 2}, "--update-weights-interval 2: use 1"),
        ({"use_dynamic_batch_size": False}, "--use-dynamic-batch-size"),
        ({"custom_convert_samples_to_train_data_path": None}, "convert_samples"),
    ],
)
def test_flags_that_would_lose_samples_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(SlimeConfigError, match=words) as caught:
        read_settings(slime_args(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_a_run_folder_that_this_node_does_not_see_is_named(tmp_path: Path) -> None:
    args = slime_args(tmp_path, hindsight_config=str(tmp_path / "elsewhere" / "config.toml"))
    with pytest.raises(SlimeConfigError, match="storage that every node sees"):
        read_settings(args)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("store = [", "not valid TOML"),
        ("[trainer]\nmax_staleness = 1", "store: Field required"),
        (tomli_w.dumps({**run_values(Path()), "handover": {"max_wait": 1.0}}), "handover.max_wait"),
        (tomli_w.dumps(run_values(Path(), handover={"max_wait_s": 400.0})), "at most half"),
    ],
)
def test_a_wrong_configuration_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(SlimeConfigError, match=words) as caught:
        read_settings(slime_args(tmp_path))
    assert "\n" not in str(caught.value)


def test_slime_without_a_run_is_not_configured() -> None:
    assert not is_configured(SimpleNamespace())
    assert not is_configured(None)
    assert is_configured(SimpleNamespace(hindsight_config="config.toml"))


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 1),
        ({"actor_num_nodes": 2, "actor_num_gpus_per_node": 8}, 16),
        (
            {
                "actor_num_gpus_per_node": 8,
                "tensor_model_parallel_size": 2,
                "context_parallel_size": 2,
            },
            2,
        ),
        (
            {
                "actor_num_gpus_per_node": 8,
                "pipeline_model_parallel_size": 4,
                "virtual_pipeline_model_parallel_size": 2,
            },
            8,
        ),
        (
            {
                "actor_num_gpus_per_node": 8,
                "pipeline_model_parallel_size": 4,
                "virtual_pipeline_model_parallel_size": 2,
                "microbatch_group_size_per_vp_stage": 3,
            },
            6,
        ),
    ],
)
def test_a_step_needs_a_row_for_each_copy_of_the_model(
    tmp_path: Path, changes: dict[str, Any], rows: int
) -> None:
    assert min_rows(slime_args(tmp_path, **changes)) == rows
