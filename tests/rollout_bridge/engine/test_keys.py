"""The key of a run's engines: its file, what is sent where, and an engine without one."""

from __future__ import annotations

import stat
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from rollout_bridge.config import ScoringConfig
from rollout_bridge.embedded.config import EmbeddedEngineConfig
from rollout_bridge.engine.keys import EngineKeys, ensure_key_file, read_key_file


def test_the_file_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "engine.key"
    ensure_key_file(path)
    key = read_key_file(path)
    assert len(key) >= 43
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    ensure_key_file(path)
    assert read_key_file(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["engine.key"]


def test_a_file_without_a_key_is_refused(tmp_path: Path) -> None:
    empty, foreign = tmp_path / "empty", tmp_path / "foreign"
    empty.write_text(" \n")
    foreign.write_bytes(b"\xff\xfe")
    for path, reason in ((empty, "empty"), (foreign, "not ASCII"), (tmp_path / "no", "No such")):
        with pytest.raises(ValueError, match=reason):
            read_key_file(path)


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/generate", "a"),
        ("/v1/models", "a"),
        ("/server_info", "a"),
        ("/pause_generation", "b"),
        ("/continue_generation", "b"),
        ("/update_weights_from_disk", "b"),
        ("/abort_request", "b"),
        ("/flush_cache", "b"),
    ],
)
def test_the_admin_key_goes_to_the_routes_that_change_the_server(path: str, sent: str) -> None:
    both = EngineKeys(api="a", admin="b")
    assert both.headers(path) == {"Authorization": f"Bearer {sent}"}
    assert EngineKeys(api="a").headers(path) == {"Authorization": "Bearer a"}
    assert EngineKeys().headers(path) == {}
    assert "b" not in repr(both).lower().replace("enginekeys", "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "engine.example"])
def test_an_engine_that_others_reach_needs_a_key(host: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="api_key_file"):
        EmbeddedEngineConfig(model="m", host=host)
    assert EmbeddedEngineConfig(model="m", host=host, api_key_file=tmp_path / "key").host == host
    assert EmbeddedEngineConfig(model="m", host="::1").api_key_file is None


def test_a_key_for_a_teacher_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValidationError, match="no such teacher"):
        ScoringConfig.model_validate({"teacher_api_keys": {"big": "k"}})
    config = ScoringConfig.model_validate(
        {"teachers": {"big": "http://127.0.0.1:1"}, "teacher_api_keys": {"big": "k"}}
    )
    assert config.keys_of_teacher("big").api == "k"
    assert "k" not in str(config.teacher_api_keys)


def test_an_engine_without_a_key_answers_this_machines_programs_alone(lab_engine: str) -> None:
    with httpx.Client(base_url=lab_engine) as http:
        assert http.get("/model_info").status_code == 200
        for headers in ({"host": "rebound.example"}, {"origin": "https://evil.example"}):
            for path in ("/model_info", "/server_info", "/v1/models"):
                assert http.get(path, headers=headers).status_code == 403
            refused = http.post("/pause_generation", json={}, headers=headers)
            assert refused.status_code == 403
            assert refused.json()["message"]
        simple = http.post(
            "/pause_generation", content=b"{}", headers={"content-type": "text/plain"}
        )
        assert simple.status_code == 415
        assert http.get("/health", headers={"host": "rebound.example"}).status_code == 200
