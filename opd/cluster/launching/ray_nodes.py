"""`python -m opd.cluster.launching.ray_nodes HOST:PORT` prints the nodes of a Ray cluster as JSON.

Runs in slime's Python, the only one that has Ray: `[{"ip": "10.0.0.1", "gpus": 8}, ...]`.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys


def main(address: str) -> None:
    """Print the nodes that are alive; output of libraries goes to standard error."""
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ray = importlib.import_module("ray")
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    nodes = [
        {"ip": node["NodeManagerAddress"], "gpus": int(node["Resources"].get("GPU", 0))}
        for node in ray.nodes()
        if node["Alive"]
    ]
    json.dump(sorted(nodes, key=lambda node: node["ip"]), answer_to)
    answer_to.close()


if __name__ == "__main__":
    main(sys.argv[1])
