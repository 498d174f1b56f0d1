"""slime's own plugin contract tests, with this project's paths."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

# Each starts processes that import torch.
pytestmark = [pytest.mark.slime, pytest.mark.timeout(900)]

PLUGIN = "rollout_bridge.slime.rollout"
PATHS = {
    "ROLLOUT_FUNCTION_PATH": f"{PLUGIN}.generate_rollout",
    "DATA_SOURCE_PATH": f"{PLUGIN}.HindsightDataSource",
    "CUSTOM_CONVERT_SAMPLES_TO_TRAIN_DATA_PATH": f"{PLUGIN}.convert_samples",
    "CUSTOM_ROLLOUT_LOG_FUNCTION_PATH": f"{PLUGIN}.log_rollout",
}


def test_slimes_contract_tests_pass_with_our_paths(
    run_in_slime: Callable[..., subprocess.CompletedProcess[str]], slime_root: Path
) -> None:
    done = run_in_slime(
        *("-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-rA"),
        "tests/plugin_contracts",
        cwd=slime_root,
        **{f"SLIME_CONTRACT_{key}": path for key, path in PATHS.items()},
    )
    found = re.search(r"(\d+) passed", done.stdout)
    assert found, done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]
    for name in (
        "test_rollout_function_path_contract_supports_user_override",
        "test_path_loading_path_aligns_with_expected_format[data_source]",
        "test_runtime_hook_path_aligns_with_expected_format[custom_convert_samples_to_train_data]",
        "test_runtime_hook_path_aligns_with_expected_format[custom_rollout_log]",
    ):
        assert re.search(rf"^PASSED .*{re.escape(name)}", done.stdout, re.MULTILINE), name


def test_a_path_that_breaks_the_contract_is_noticed(
    run_in_slime: Callable[..., subprocess.CompletedProcess[str]], slime_root: Path
) -> None:
    with pytest.raises(AssertionError, match="1 failed"):
        run_in_slime(
            *("-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"),
            "tests/plugin_contracts/test_plugin_rollout_contracts.py",
            cwd=slime_root,
            SLIME_CONTRACT_ROLLOUT_FUNCTION_PATH=PATHS["DATA_SOURCE_PATH"],
        )
