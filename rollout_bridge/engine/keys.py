"""The keys that an engine requires, and the file in which a run keeps that of its own engines.

SGLang's form: `Authorization: Bearer KEY` on every route, and another key on the routes that change
the server, if it was started with `--admin-api-key`. Never on a command line, which `ps` shows.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

_ADMIN_ROUTES = (
    "/abort_request",
    "/continue_generation",
    "/flush_cache",
    "/load_lora_adapter",
    "/pause_generation",
    "/unload_lora_adapter",
    "/update_weights",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKeys:
    """What a client sends; None: nothing. `admin`: for the routes that change the server."""

    api: str | None = None
    admin: str | None = None

    def headers(self, path: str) -> dict[str, str]:
        """The headers of a request to `path`."""
        key = self.admin if self.admin and path.startswith(_ADMIN_ROUTES) else self.api
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def __repr__(self) -> str:
        return "EngineKeys(...)"


def read_key_file(path: Path) -> str:
    """The key in a file. Raises ValueError that says what to do."""
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not ASCII"
        raise ValueError(
            f"api_key_file {path}: {reason}; write a random word into it, readable by you alone"
        ) from None
    if not key:
        raise ValueError(f"api_key_file {path}: empty; write a random word into it")
    return key


def ensure_key_file(path: Path) -> None:
    """Create the file with a random key, unless it exists; only its owner can read it."""
    if not path.exists():
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        # Whole or not at all, and never in place of one that another process made meanwhile.
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
        partial.unlink()
    path.chmod(0o600)
