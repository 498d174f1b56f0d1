from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from rollout_bridge.slime.engines import router_urls, write_engines


def test_every_model_has_the_address_of_its_router(tmp_path: Path) -> None:
    args = SimpleNamespace(
        sglang_router_ip="10.0.0.1",
        sglang_router_port=3001,
        sglang_model_routers={"policy": ("10.0.0.1", 3001), "frozen": ("[fd00::1]", 3002)},
    )
    urls = router_urls(args)
    assert urls == {"policy": "http://10.0.0.1:3001", "frozen": "http://[fd00::1]:3002"}
    path = write_engines(tmp_path, urls)
    assert json.loads(path.read_text()) == urls
    write_engines(tmp_path, {"policy": "http://10.0.0.2:1"})
    assert json.loads(path.read_text()) == {"policy": "http://10.0.0.2:1"}
    assert [file.name for file in tmp_path.iterdir()] == ["engines.json"]


def test_the_first_model_is_the_policy_whatever_its_name() -> None:
    args = SimpleNamespace(
        sglang_router_ip="127.0.0.1",
        sglang_router_port=3001,
        sglang_model_routers={"default": ("127.0.0.1", 3001)},
    )
    assert router_urls(args)["policy"] == "http://127.0.0.1:3001"


def test_a_job_without_routers_has_no_engines() -> None:
    assert router_urls(SimpleNamespace()) == {}
    assert router_urls(SimpleNamespace(sglang_router_ip=None, sglang_model_routers=None)) == {}
