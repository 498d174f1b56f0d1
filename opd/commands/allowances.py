"""Texts that a run's redaction lets pass: added to its configuration, which a resumed run keeps."""

from __future__ import annotations

from pathlib import Path

from opd.run import config as run_config
from trainer.errors import StartupError


def allow(config_file: Path, text: str) -> str:
    """Add a text, or its digest, to `store.redaction.allow`; returns what to print."""
    if not text.strip():
        raise StartupError("allow: name the text that is not a finding, or its digest (sha256:...)")
    run_config.load(config_file)
    values = run_config.read_toml(config_file)
    redaction = values.setdefault("store", {}).setdefault("redaction", {})
    known = redaction.setdefault("allow", [])
    if text in known:
        return f"{config_file}: it was allowed already"
    known.append(text)
    run_config.save(run_config.build(values), config_file)
    return (
        f"{config_file}: store.redaction.allow has {len(known)} texts; it applies from the next "
        "start of the run, and turns that were dropped before stay dropped"
    )
