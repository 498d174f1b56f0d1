"""Which adapter serves the policy now, for all clients of the policy's engine.

An engine knows its adapters but not which of them is the newest version; the trainer does. It
writes that to one file in the run folder once every engine has loaded the adapter, and each request
of each process looks there. Each version has its own name, which shows which weights answered;
SGLang's `weight_version` (the base's) does not.

    served.json   {"version": 7, "adapter": "opd-v000007-3f9a1c2b4d5e", "folder": "checkpoints/..."}

Without the file, requests name no adapter and the engine's own label counts: it serves full or
merged weights.

    staged.json   the same about a version that is loaded but serves nobody: only the guard names it
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollout_bridge.engine.errors import EngineUnavailable

SERVED_FILE, STAGED_FILE = "served.json", "staged.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """The unique name of an adapter, and its folder."""

    name: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
    """What serves the policy: an adapter, or None for the base as it is. `label`: the version."""

    label: str
    adapter: AdapterRef | None = None


class ServedSource(Protocol):
    """Tells what serves now."""

    def current(self) -> ServedVersion | None:
        """None: whatever the engine reports."""
        ...


class Chosen:
    """One version, set explicitly."""

    def __init__(self, version: ServedVersion | None = None) -> None:
        self.version = version

    def current(self) -> ServedVersion | None:
        """The version that was set."""
        return self.version


class ServedFile:
    """The file of one run folder, read again when it has changed; `name` is SERVED_FILE or
    STAGED_FILE.
    """

    def __init__(self, folder: Path, name: str = SERVED_FILE) -> None:
        self._folder = folder.resolve()
        self._path = self._folder / name
        self._stamp: tuple[int, int, int] | None = None
        self._version: ServedVersion | None = None

    def current(self) -> ServedVersion | None:
        """Its content; None without a file. Raises EngineUnavailable for a damaged one."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            self._stamp = self._version = None
            return None
        stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
        if stamp != self._stamp:
            self._version = self._read()
            self._stamp = stamp
        return self._version

    def write(self, version: ServedVersion) -> None:
        """Make `version` the file's from here on; written to disk whole or not at all."""
        adapter = version.adapter
        said: dict[str, Any] = {"version": int(version.label), "adapter": None, "folder": None}
        if adapter is not None:
            folder = Path(adapter.path)
            inside = folder.is_relative_to(self._folder)
            said["adapter"] = adapter.name
            # Relative, so that the run folder can move.
            said["folder"] = str(folder.relative_to(self._folder) if inside else folder)
        temporary = self._path.with_suffix(".new")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(said) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)

    def remove(self) -> None:
        """Name no version from here on."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> ServedVersion | None:
        try:
            said = json.loads(self._path.read_bytes())
            name, folder = said["adapter"], said["folder"]
            adapter = None
            if name is not None:
                adapter = AdapterRef(name=str(name), path=str(self._folder / str(folder)))
            return ServedVersion(label=str(int(said["version"])), adapter=adapter)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise EngineUnavailable(
                f"{self._path}: cannot be read ({error}); the trainer rewrites it when it starts"
            ) from None


class StagedFirst:
    """What a check asks: the run's staged version, else the one that serves."""

    def __init__(self, folder: Path) -> None:
        self._staged, self._served = ServedFile(folder, STAGED_FILE), ServedFile(folder)

    def current(self) -> ServedVersion | None:
        """Raises EngineUnavailable for a damaged file."""
        return self._staged.current() or self._served.current()

    def is_unserved(self, version: int) -> bool:
        """Whether `version` is staged, and serves nobody. Raises like `current`."""
        staged, served = self._staged.current(), self._served.current()
        is_staged = staged is not None and staged.label == str(version)
        return is_staged and (served is None or served.label != str(version))
