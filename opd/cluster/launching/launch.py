"""`opd slime`: plans a launch, checks it, and prints it or carries it out."""

from __future__ import annotations

import socket
from pathlib import Path

from opd.cluster.flag_check import FlagError
from opd.cluster.launching.held import LaunchError
from opd.cluster.plan import LaunchPlan, make_plan
from opd.cluster.show import show
from opd.run.start_checks import check_canaries


def launch(file: Path, overrides: list[str], run: Path, *, dry_run: bool) -> None:
    """Plan, and either print the plan or carry it out until the job or the user ends it."""
    plan = make_plan(file, overrides, run)
    if dry_run:
        print(show(plan), end="")
        return
    check_canaries(plan.config.guard)
    if not plan.flags.checked:
        raise FlagError(plan.flags.text)
    if not Path(plan.config.model).is_dir():
        raise LaunchError(f"model: no folder {plan.config.model} on this node")
    _ports_are_free(plan)

    # Imported after all checks, so that a failed check does not wait for it.
    from opd.cluster.launching.launched import carry_out

    carry_out(plan)


def _ports_are_free(plan: LaunchPlan) -> None:
    """Raise LaunchError for a port of this node that is taken, which would otherwise show only
    minutes later.
    """
    ray, proxy = plan.cluster.ray, plan.config.proxy
    ports = {
        "proxy.port": (proxy.host, proxy.port),
        "cluster.ray.port": ("", ray.port),
        "cluster.ray.dashboard_port": ("127.0.0.1", ray.dashboard_port),
        "cluster.ray.agent_port": ("", ray.agent_port),
    }
    for key, address in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise LaunchError(
                    f"{key} {address[1]} on {address[0] or 'this node'}: {error.strerror}; choose "
                    "another, or stop what uses it"
                ) from None
