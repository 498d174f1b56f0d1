"""Events of a stream: each has something that the one before had not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from transformers import AutoTokenizer

from rollout_bridge.embedded.scheduling.request import EngineRequest, Finish, Sampling
from rollout_bridge.embedded.server.replies import ReplyWriter
from rollout_bridge.embedded.server.schemas import GenerateBody
from tests.contract import tiny_model


@pytest.mark.parametrize("top", [0, 1])
def test_a_call_without_a_further_token_makes_no_event(top: int, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model.build(tmp_path / "model", 0))
    request = EngineRequest(input_ids=[1, 2], sampling=Sampling(), num_top=top)
    body = GenerateBody.model_validate(
        {"input_ids": [1, 2], "return_logprob": True, "top_logprobs_num": top}
    )
    writer = ReplyWriter(request, body, tokenizer, "start")
    assert writer.event(False) is None
    for token_id in (3, 4):
        request.append(token_id, -0.5, "start")
        request.output_top.append([(-0.5, token_id)])
    # The engine called twice, once a token; the first event had both.
    assert _ids(writer.event(False)) == [3, 4]
    assert writer.event(False) is None
    request.append(5, -0.5, "start")
    request.output_top.append([(-0.5, 5)])
    request.finish = Finish(kind="length")
    assert _ids(writer.event(True)) == [5]


def _ids(event: bytes | None) -> list[Any]:
    assert event is not None
    return orjson.loads(event.removeprefix(b"data: "))["output_ids"]
