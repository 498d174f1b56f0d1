"""Addresses of a slime job's engines, for the proxy and the judge, which run outside of it.

slime starts one router per model and knows their addresses only inside its rollout process.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE_NAME = "engines.json"
POLICY = "policy"


def router_urls(args: Any) -> dict[str, str]:
    """Model name -> base URL of its router. slime's first model is the policy, whatever its name.

    Empty if slime started no router (a job that only trains).
    """
    routers: dict[str, tuple[str, int]] = dict(getattr(args, "sglang_model_routers", None) or {})
    urls = {name: f"http://{ip}:{port}" for name, (ip, port) in routers.items()}
    ip, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    if POLICY not in urls and ip is not None and port is not None:
        urls[POLICY] = f"http://{ip}:{port}"
    return urls


def write_engines(run_folder: Path, urls: dict[str, str]) -> Path:
    """RUN/engines.json, whole or not at all."""
    path = run_folder / FILE_NAME
    partial = path.with_suffix(f".partial-{os.getpid()}")
    partial.write_text(json.dumps(urls, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(path)
    return path
