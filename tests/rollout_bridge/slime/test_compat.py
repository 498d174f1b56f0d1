from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollout_bridge.slime import compat as slime_compat
from rollout_bridge.slime.compat import UnknownSlimeError, check_slime


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `slime` whose sources hold all that is relied on."""
    for module, texts in slime_compat._RELIED_ON.items():
        path = Path(tmp_path, *module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(texts))
    (tmp_path / "slime" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "slime", raising=False)
    return tmp_path


def test_a_slime_with_everything_passes_and_none_of_it_is_imported(tree: Path) -> None:
    check_slime()
    assert "slime.ray.rollout" not in sys.modules


def test_a_slime_that_drops_a_key_is_named(tree: Path) -> None:
    path = tree / "slime" / "ray" / "rollout.py"
    path.write_text(path.read_text().replace('"prompt"', '"prompts"'))
    with pytest.raises(UnknownSlimeError, match=r'lacks "prompt" in slime\.ray\.rollout; use') as e:
        check_slime()
    assert "\n" not in str(e.value)


def test_a_slime_without_a_module_is_named(tree: Path) -> None:
    (tree / "slime" / "rollout" / "base_types.py").unlink()
    with pytest.raises(UnknownSlimeError, match=r"the module itself in slime\.rollout\.base_types"):
        check_slime()
