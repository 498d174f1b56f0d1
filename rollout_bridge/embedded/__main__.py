"""`python -m rollout_bridge.embedded --model PATH`: one embedded engine in this process.

Prints one line of JSON with the bound port when it is ready to serve.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys

from rollout_bridge.embedded.config import EmbeddedEngineConfig


def main() -> None:
    """Parse the command line, then serve; heavy imports come after parsing."""
    parser = argparse.ArgumentParser(prog="rollout_bridge.embedded", description=__doc__)
    for name, field in EmbeddedEngineConfig.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, required=field.is_required(), default=argparse.SUPPRESS)
    config = EmbeddedEngineConfig.model_validate(vars(parser.parse_args()))

    # What is imported stays: looking through it for garbage takes a sixth of a start.
    gc.disable()
    from rollout_bridge.embedded.errors import UnsupportedModel
    from rollout_bridge.embedded.server.server import serve

    gc.freeze()
    gc.enable()

    def ready(port: int) -> None:
        print(json.dumps({"host": config.host, "port": port}), flush=True)

    try:
        serve(config, ready)
    except UnsupportedModel as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
