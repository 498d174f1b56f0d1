"""How every command ends: an expected error is one line, not a traceback."""

from __future__ import annotations

import os
from collections.abc import Callable

import typer


def guarded(action: Callable[[], None]) -> None:
    """Run `action`; bad input and failed children end in one clear message instead of a
    traceback. Files that the command and its children create are readable only by their owner.
    """
    # Imported late, so that `--help` answers at once.
    from records.database.private_files import UMASK
    from records.errors import StoreError
    from rollout_bridge.engine.errors import EngineError
    from trainer.errors import StartupError

    os.umask(UMASK)
    try:
        action()
    except (StartupError, EngineError, StoreError) as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        if error.filename is None:  # of a connection, say: not expected here
            raise
        # A path that the user named, or one in a folder of theirs.
        typer.secho(f"error: {error.filename}: {error.strerror}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
