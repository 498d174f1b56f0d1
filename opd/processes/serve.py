"""`opd serve`: the whole loop behind one endpoint until it is told to stop.

The configuration is built and checked here; what then runs (`opd.processes.serving`) takes a second
to import, and a failed start does not wait for that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opd.run import config as run_config
from opd.run import recipe
from opd.run.defaults import resolve
from opd.run.folder import starting_in
from opd.run.resuming import (
    base_values,
    changes_since,
    is_run,
    refuse_other_settings,
    refuse_other_weights,
)
from opd.run.start_checks import check_start


def serve_forever(
    model: str | None,
    folder: Path,
    options: dict[str, Any],
    config_file: Path | None,
    overrides: list[str],
) -> None:
    """Start everything in `folder` and stay until SIGINT or SIGTERM.

    An existing run continues with its own settings; what options and overrides change in them is
    printed.
    """
    values = run_config.merge(base_values(folder, "serve", model), options)
    refuse_other_settings(folder, config_file)
    with starting_in(folder):
        config = resolve(
            values,
            config_file,
            overrides,
            lambda given: check_start(given, serves=True),
            None if is_run(folder) else recipe.recipe,
        )
        refuse_other_weights(folder, config)
        for change in changes_since(folder, config):
            print(f"changed: {change}")

        from opd.processes.serving import serve

        serve(config, folder)
