"""What `cluster.python` is to a launch, on a machine without Ray, slime and GPUs.

    ray start                 stays until it is stopped
    ray job submit            runs the job below, and `ray job stop` ends it
    ray_nodes                 one node with all GPUs

The job stands in for slime's train.py: it takes turns through the real `TurnHost`, "trains" by
sending an engine weights under the next number, and leaves checkpoints as Megatron names them. The
version in RUN/spoil gets the weights in RUN/spoiled.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

from rollout_bridge.slime.engines import write_engines
from rollout_bridge.slime.host import TurnHost
from rollout_bridge.slime.saved import tracked_rollout
from rollout_bridge.slime.settings import read_settings
from tests.examples.shipped import MODEL
from tests.rollout_bridge.slime.runs import slime_args
from tests.rollout_bridge.slime.saved_by_megatron import saves


def main(words: list[str]) -> None:
    module, *words = words[1:]
    if module.endswith("ray_nodes"):
        print(json.dumps([{"ip": "127.0.0.1", "gpus": 8}]))
    elif words[0] == "start":
        signal.pause()
    elif words[:2] == ["job", "stop"]:
        stop(words[-1])
    else:
        submitted(words)


def pid_file(job: str) -> Path:
    return Path(os.environ["STAND_IN_FOLDER"]) / f"{job}.pid"


def stop(job: str) -> None:
    pid = int(pid_file(job).read_text())
    try:
        os.kill(pid, signal.SIGTERM)
        while True:
            os.kill(pid, 0)
            time.sleep(0.05)
    except ProcessLookupError:
        return


def submitted(words: list[str]) -> None:
    pid_file(words[words.index("--submission-id") + 1]).write_text(str(os.getpid()))
    flags = words[words.index("--") + 1 :]
    print(" ".join(flags), flush=True)

    def value(flag: str) -> str | None:
        return flags[flags.index(flag) + 1] if flag in flags else None

    custom = json.loads(Path(str(value("--custom-config-path"))).read_text())
    run = Path(custom["hindsight_config"]).parent
    batch, interval = (
        int(str(value(f"--{name}"))) for name in ("rollout-batch-size", "save-interval")
    )
    save, engine = Path(str(value("--save"))), os.environ["STAND_IN_ENGINE"]
    args = slime_args(
        run,
        rollout_batch_size=batch,
        save=str(save),
        save_interval=interval,
        update_weight_start_version=custom["update_weight_start_version"],
        hindsight_rollback=custom.get("hindsight_rollback"),
    )
    version = custom["update_weight_start_version"] + 1
    loaded = int(value("--ckpt-step") or tracked_rollout(save))
    write_engines(run, {"policy": engine, "frozen": os.environ["STAND_IN_FROZEN"]})
    host = TurnHost(read_settings(args))
    host.resume(loaded)
    send(engine, run, version)
    for rollout_id in range(loaded + 1, 1000):
        host.next_batch(rollout_id)
        version += 1
        if (rollout_id + 1) % interval == 0:
            saves(save, rollout_id)
            host.checkpointed(rollout_id)
        send(engine, run, version)


def send(engine: str, run: Path, version: int) -> None:
    spoil = run / "spoil"
    is_spoiled = spoil.exists() and spoil.read_text() == str(version)
    body = {
        "model_path": str(run / "spoiled" if is_spoiled else MODEL),
        "weight_version": str(version),
    }
    request = urllib.request.Request(
        f"{engine}/update_weights_from_disk",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert json.loads(reply.read())["success"]
    print(f"serving {version}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
