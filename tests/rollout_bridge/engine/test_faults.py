"""The engine client and servers that are down, gone, empty or something else altogether."""

from __future__ import annotations

from typing import Any

import pytest

from opd.processes.supervisor import free_ports
from rollout_bridge.engine.client import EngineClient
from rollout_bridge.engine.config import EngineClientConfig
from rollout_bridge.engine.errors import EngineProtocolError, EngineRejected, EngineUnavailable
from rollout_bridge.engine.types import SamplingParams
from tests.rollout_bridge.faulty_server import ROUTER_WITHOUT_WORKERS, faulty_server

FAST = EngineClientConfig(
    score_timeout_s=2,
    total_timeout_s=2,
    first_token_timeout_s=2,
    between_tokens_timeout_s=2,
    probe_timeout_s=2,
    attempts=3,
    retry_wait_s=0.01,
    retry_wait_max_s=0.02,
)
PROMPT = [1, 2, 3]
PARAMS = SamplingParams(max_new_tokens=3)


def client_of(url: str) -> EngineClient:
    return EngineClient(url, config=FAST, vocab_size=10)


async def everything(client: EngineClient, error: type[Exception], message: str) -> None:
    """Each kind of request ends in this error."""
    with pytest.raises(error, match=message):
        await client.generate(PROMPT, PARAMS)
    with pytest.raises(error, match=message):
        await anext(client.stream(PROMPT, PARAMS))
    with pytest.raises(error, match=message):
        await client.score(PROMPT, 1)


async def test_nothing_listens() -> None:
    async with client_of(f"http://127.0.0.1:{free_ports(1)[0]}") as client:
        await everything(client, EngineUnavailable, "Cannot connect")
        for question in (client.model_info, client.server_info, client.resume):
            with pytest.raises(EngineUnavailable):
                await question()


async def test_a_router_without_workers_is_waited_for_and_then_named() -> None:
    async with faulty_server(ROUTER_WITHOUT_WORKERS) as server, client_of(server.url) as client:
        await everything(client, EngineUnavailable, "No available workers")
        assert server.asked["/generate"] == 3 * FAST.attempts
        assert (await client.server_info()).num_workers == 0
        with pytest.raises(EngineUnavailable, match="No workers are available"):
            await client.model_info()


async def test_a_routers_model_is_its_servers() -> None:
    replies: dict[str, tuple[int, Any]] = {
        "/get_model_info": (200, {"model_path": "m", "weight_version": "4"}),
        "/v1/models": (200, {"data": [{"id": "m"}]}),
    }
    async with faulty_server(replies) as server, client_of(server.url) as client:
        info = await client.model_info()
    assert (info.weight_version, info.context_length) == ("4", None)


async def test_weights_do_not_go_through_a_router() -> None:
    async with faulty_server(ROUTER_WITHOUT_WORKERS) as server, client_of(server.url) as client:
        for action in (client.pause(), client.resume(), client.update_weights("m", "1")):
            with pytest.raises(EngineRejected, match="404"):
                await action


@pytest.mark.parametrize(
    "body",
    [
        "<html>It works!</html>",
        "",
        [],
        {"text": "hi"},
        {"meta_info": None},
        {"output_ids": [4], "meta_info": {"output_token_logprobs": 3}},
    ],
)
async def test_garbage_is_not_believed_and_not_asked_for_again(body: Any) -> None:
    async with faulty_server({"/generate": (200, body)}) as server, client_of(server.url) as client:
        with pytest.raises(EngineProtocolError):
            await client.generate(PROMPT, PARAMS)
        with pytest.raises(EngineProtocolError):
            await client.score(PROMPT, 1)
        assert server.asked["/generate"] == 2


@pytest.mark.parametrize("status", [301, 401, 403, 404, 405])
async def test_a_server_of_another_kind_refuses(status: int) -> None:
    async with (
        faulty_server({"/generate": (status, "no")}) as server,
        client_of(server.url) as client,
    ):
        await everything(client, EngineRejected, f"engine answered {status}: no")


async def test_the_vocabulary_is_read_from_the_refusal() -> None:
    text = "token_ids_logprob contains out-of-vocabulary token id 7; valid range is [0, 768)."
    replies = {"/generate": (400, {"error": {"message": text}})}
    async with faulty_server(replies) as server, client_of(server.url) as client:
        assert await client.served_vocab_size() == 768
        server.replies["/generate"] = (400, {"error": {"message": "not today"}})
        assert await client.served_vocab_size() is None


async def test_ids_outside_the_vocabulary_are_never_sent() -> None:
    async with faulty_server({}) as server, client_of(server.url) as client:
        for ids in ([10, 1], [1, -1]):
            for request in (
                client.generate(ids, PARAMS),
                anext(client.stream(ids, PARAMS)),
                client.score(ids, 1),
                client.score_with_topk(ids, 1, 2),
            ):
                with pytest.raises(ValueError, match="outside the vocabulary of 10"):
                    await request
        assert not server.asked
