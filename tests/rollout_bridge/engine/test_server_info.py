"""What servers say of themselves, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_bridge.engine.errors import EngineProtocolError
from rollout_bridge.engine.server_info import read_server_info
from rollout_bridge.engine.wire import read_model_info

RECORDED = Path(__file__).parents[1] / "sglang_replies"
SGLANG: dict[str, Any] = json.loads((RECORDED / "server_info.json").read_text())["json"]
MODEL: dict[str, Any] = json.loads((RECORDED / "model_info.json").read_text())["json"]
ROUTER = {"router_manager": True, "routers_count": 1, "workers_count": 2}


def test_a_plain_sglang_is_fit() -> None:
    info = read_server_info(SGLANG)
    assert (info.kind, info.version, info.problems) == ("sglang", (0, 5, 23), ())
    assert info.reports_spans
    assert info.checks_vocabulary
    assert info.returns_routed_experts is False


def test_a_router_counts_its_workers_and_promises_nothing() -> None:
    info = read_server_info(ROUTER)
    assert (info.kind, info.num_workers, info.reports_spans) == ("router", 2, None)
    assert not info.checks_vocabulary


def test_the_embedded_engine_is_known() -> None:
    info = read_server_info({"engine": "embedded", "vocab_size": 9})
    assert (info.kind, info.problems, info.reports_spans) == ("embedded", (), True)


@pytest.mark.parametrize(
    ("version", "spans", "vocabulary", "queue"),
    [
        ("0.5.7", False, False, False),
        ("0.5.13.post1", False, False, False),
        ("0.5.14", False, True, False),
        ("0.5.19", False, True, False),
        ("0.5.20rc1", True, True, False),
        ("0.5.21", True, True, True),
        ("0.6.0", True, True, True),
        ("1.0.0.dev3+gabc", True, True, True),
    ],
)
def test_fields_of_newer_releases_are_known_by_the_version(
    version: str, spans: bool, vocabulary: bool, queue: bool
) -> None:
    info = read_server_info({**SGLANG, "version": version})
    assert info.problems == ()
    assert (info.reports_spans, info.checks_vocabulary) == (spans, vocabulary)
    assert info.keeps_its_queue == queue


@pytest.mark.parametrize("version", ["0.5.6.post2", "0.4.10", "0.5.0rc1"])
def test_what_is_too_old_is_refused_by_its_version(version: str) -> None:
    (problem,) = read_server_info({**SGLANG, "version": version, "is_embedding": True}).problems
    assert "older than 0.5.7" in problem


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("allow_auto_truncate", True, "--allow-auto-truncate"),
        ("stream_output", True, "--stream-output"),
        ("is_embedding", True, "--is-embedding"),
        ("skip_tokenizer_init", True, "--skip-tokenizer-init"),
        ("preferred_sampling_params", {"top_k": 5}, "--preferred-sampling-params"),
        ("watermark_enforce_all", True, "--watermark-config"),
        ("enable_deterministic_inference", True, "--enable-deterministic-inference"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode"),
    ],
)
def test_a_setting_that_changes_replies_is_refused_by_its_flag(
    field: str, value: Any, flag: str
) -> None:
    (problem,) = read_server_info({**SGLANG, field: value}).problems
    assert flag in problem


@pytest.mark.parametrize(("version", "is_known"), [("0.5.10", False), ("0.5.11", True)])
def test_streams_of_new_tokens_are_taken_where_they_are_known(version: str, is_known: bool) -> None:
    body = {**SGLANG, "version": version, "incremental_streaming_output": True}
    problems = read_server_info(body).problems
    assert ("--incremental-streaming-output" in "".join(problems)) is not is_known


@pytest.mark.parametrize("body", ["<html>", None, [], {}, {"version": None}, {"version": "new"}])
def test_what_is_no_engine_is_not_believed(body: Any) -> None:
    with pytest.raises(EngineProtocolError, match="SGLang server"):
        read_server_info(body)


def test_the_context_length_comes_from_the_list_of_models() -> None:
    info = read_model_info(MODEL, {"data": [{"id": "m", "max_model_len": 512}]})
    assert (info.context_length, info.vocab_size, info.weight_version) == (512, None, "v0")
    # A router lists its models without their lengths.
    assert read_model_info(MODEL, {"data": [{"id": "m"}]}).context_length is None


@pytest.mark.parametrize("models", [None, "x", {}, {"data": []}, {"data": [1]}, {"data": {}}])
def test_a_list_of_no_models_is_not_believed(models: Any) -> None:
    with pytest.raises(EngineProtocolError, match="lists no model"):
        read_model_info(MODEL, models)


@pytest.mark.parametrize("info", [None, "ok", {}, {"model_path": "m"}])
def test_no_model_information_is_not_believed(info: Any) -> None:
    with pytest.raises(EngineProtocolError, match="weight_version"):
        read_model_info(info, None)
