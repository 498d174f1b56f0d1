"""A file of canaries: what is read of it, and one line for each thing that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opd.guard.canaries import Canary, load_function, read_canaries
from opd.run import config as run_config
from opd.run.start_checks import check_canaries
from trainer.errors import ConfigError, StartupError

GOOD = {"name": "a", "prompt": "Hi", "contains": "Hi"}


def written(tmp_path: Path, *lines: dict[str, Any] | str) -> Path:
    path = tmp_path / "canaries.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_canaries_are_read_and_empty_lines_are_none(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    path = written(tmp_path, GOOD, "", {"name": "b", "messages": messages, "matches": "^x$"})
    first, second = read_canaries(path)
    assert first.conversation == [{"role": "user", "content": "Hi"}]
    assert second.conversation == messages


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not a JSON object"),
        ({**GOOD, "other": 1}, "other: Extra inputs"),
        ({"prompt": "Hi", "contains": "x"}, "name: Field required"),
        ({"name": "a", "contains": "x"}, "give 'prompt' or 'messages'"),
        ({**GOOD, "messages": [{"role": "user", "content": "x"}]}, "and not both"),
        ({"name": "a", "messages": [{"content": "x"}], "contains": "x"}, "needs a 'role'"),
        ({"name": "a", "prompt": "Hi"}, "give one of contains, matches"),
        ({**GOOD, "matches": "x"}, "give one of contains, matches"),
        ({"name": "a", "prompt": "Hi", "matches": "("}, "not a regular expression"),
        ({"name": "a", "prompt": "Hi", "function": "no.such:one"}, "cannot be imported"),
        ({"name": "a", "prompt": "Hi", "function": "json:no_such"}, "cannot be imported"),
        ({"name": "a", "prompt": "Hi", "function": "json:__name__"}, "is not a function"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(
    tmp_path: Path, line: dict[str, Any] | str, says: str
) -> None:
    path = written(tmp_path, {**GOOD, "name": "first"}, line)
    with pytest.raises(StartupError) as caught:
        read_canaries(path)
    assert f"{path}, line 2: " in str(caught.value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_without_canaries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="it contains no canary"):
        read_canaries(written(tmp_path, ""))
    with pytest.raises(StartupError, match="a second canary 'a'"):
        read_canaries(written(tmp_path, GOOD, GOOD))
    with pytest.raises(StartupError, match="cannot be read"):
        read_canaries(tmp_path / "none.jsonl")


def test_a_start_reads_them_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "{")
    monkeypatch.chdir(tmp_path)
    values = {
        "model": "none",
        "store": {"url": "sqlite:///records.db"},
        "judge": {"base_url": "http://127.0.0.1:9", "model": "none"},
        "guard": {"canaries": "canaries.jsonl"},
    }
    config = run_config.build(values)
    assert config.guard.canaries == tmp_path / "canaries.jsonl"
    with pytest.raises(StartupError, match="line 1: not a JSON object"):
        check_canaries(config.guard)
    assert not run_config.build({**values, "guard": {}}).guard.is_on
    with pytest.raises(ConfigError, match=r"trainer\.keep_checkpoints to 2 or more"):
        run_config.build({**values, "trainer": {"keep_checkpoints": 1}})


def test_a_function_is_found_by_its_path() -> None:
    assert load_function("json:loads") is json.loads
    assert Canary(name="a", prompt="Hi", function="json:loads").function == "json:loads"
