"""`python -m opd.cluster.launching.hold -- COMMAND...` runs a command that must not outlive the
launch.

Ray's own commands do not watch who started them. This process does: when its standard input ends
(the launch is gone, for whatever reason) or it gets SIGTERM, it sends SIGTERM to the command, which
stops its own processes. Its exit status is the command's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

GRACE_S = 60.0
"""Ray takes up to 30 s to let its work end before it stops its processes."""


def main(command: list[str]) -> int:
    """Run `command` until it ends or is no longer wanted; returns its exit status."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def stop(_number: int = 0, _frame: FrameType | None = None) -> None:
        if child.poll() is None:
            child.terminate()
            threading.Thread(target=kill_later, daemon=True).start()

    def kill_later() -> None:
        time.sleep(GRACE_S)
        if child.poll() is None:
            child.kill()

    def watch() -> None:
        while os.read(0, 1024):
            pass
        stop()

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=watch, daemon=True).start()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[sys.argv.index("--") + 1 :]))
