"""What slime's train_async.py is to a launch, without GPUs: it says where engines are, and ends.

It stands in for slime's training alone; Ray, the launch, the endpoint and the judge are real. The
engine is one that the test started. It reports two batches, and ends when RUN/finish exists, with
the status written there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

custom = json.loads(Path(sys.argv[sys.argv.index("--custom-config-path") + 1]).read_text())
run = Path(custom["hindsight_config"]).parent
engine = os.environ["STAND_IN_ENGINE"]
(run / "job.pid").write_text(str(os.getpid()))
partial = run / "engines.partial"
# slime has a router for each; one engine behind two addresses is enough here.
frozen = engine.replace("127.0.0.1", "localhost")
partial.write_text(json.dumps({"policy": engine, "frozen": frozen}))
partial.replace(run / "engines.json")
with SummaryWriter(os.environ["TENSORBOARD_DIR"]) as writer:
    for batch in range(2):
        for name in ("handover/version", "rollout/opd/adv_mean", "train/loss"):
            writer.add_scalar(name, 1.0 / (batch + 1), batch)
print("training", flush=True)
while not (run / "finish").exists():
    time.sleep(0.2)
sys.exit(int((run / "finish").read_text()))
