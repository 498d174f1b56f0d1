"""Process ids of a supervisor's children, to kill them by."""

from __future__ import annotations

from opd.processes.supervisor import Supervisor


def pids_of(supervisor: Supervisor) -> dict[str, int]:
    """By name, of those that run."""
    return {
        child.name: child.process.pid
        for child in supervisor._children
        if child.process is not None and child.process.returncode is None
    }
