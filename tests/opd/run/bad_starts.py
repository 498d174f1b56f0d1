"""What the tests of bad starts share: runs and models that are broken in one way each."""

from __future__ import annotations

import json
import shutil
import sqlite3
import struct
from pathlib import Path
from typing import Any

from examples.tool_lab.run_lab import MODEL
from opd.run import config as run_config
from opd.run.defaults import single_machine


def model_with(folder: Path, name: str, data: bytes | None) -> Path:
    """The lab's model in `folder` with other bytes in one of its files; None: without it."""
    shutil.copytree(MODEL, folder)
    if data is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(data)
    return folder


KINDS: dict[str, dict[str, Any]] = {
    "encoder_decoder": {"model_type": "t5", "is_encoder_decoder": True},
    "sliding_layers": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "odd_layers": {"layer_types": ["full_attention", "sliding_attention"]},
    "linear_layers": {"model_type": "qwen3_next", "full_attention_interval": 4},
    "state_space": {"model_type": "mamba", "state_size": 16},
    "chunks": {"model_type": "llama4_text", "layer_types": ["chunked_attention"] * 4},
    "alibi": {"model_type": "bloom"},
    "unlike_heads": {"model_type": "gemma4_text"},
    "shared_layers": {"model_type": "gemma3n", "text_config": {"num_kv_shared_layers": 2}},
    "quantised": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "other_vocabulary": {"vocab_size": 40},
    "classifier": {"architectures": ["Qwen3ForSequenceClassification"]},
}
"""Models that are whole and not for this program: what their `config.json` says."""


def _config(config: dict[str, Any], **changes: Any) -> bytes:
    kept = {key: value for key, value in config.items() if key != "layer_types"}
    return json.dumps({**kept, **changes}).encode()


def broken_models(root: Path) -> dict[str, Path]:
    """Each lacks something else, or has something damaged."""
    weights = (MODEL / "model.safetensors").read_bytes()
    config = json.loads((MODEL / "config.json").read_text())
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    sharded = model_with(root / "shards", "model.safetensors.index.json", index.encode())
    (sharded / "model.safetensors").rename(sharded / "model-1.safetensors")
    gguf = root / "gguf"
    gguf.mkdir()
    (gguf / "small.gguf").write_bytes(b"GGUF")
    (root / "empty").mkdir()
    (root / "parent" / "step_000001").mkdir(parents=True)
    files: dict[str, tuple[str, bytes | None]] = {
        "no_config": ("config.json", None),
        "bad_config": ("config.json", b"{"),
        "no_type": ("config.json", b"{}"),
        "unknown_type": ("config.json", json.dumps({**config, "model_type": "qwenn"}).encode()),
        "no_weights": ("model.safetensors", None),
        "empty_weights": ("model.safetensors", b""),
        "short_weights": ("model.safetensors", weights[:5]),
        "cut_header": ("model.safetensors", weights[:200]),
        "cut_weights": ("model.safetensors", weights[:-100]),
        "long_weights": ("model.safetensors", weights + b"more"),
        "no_safetensors": ("model.safetensors", struct.pack("<Q", 4) + b"nope"),
        "lfs": ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "bad_index": ("model.safetensors.index.json", b"{}"),
        "no_tokenizer": ("tokenizer.json", None),
        "bad_tokenizer": ("tokenizer.json", b'{"version": '),
        "no_template": ("chat_template.jinja", None),
        "bad_template": ("chat_template.jinja", b"{% for m in messages %}{{ m.content"),
        **{name: ("config.json", _config(config, **changes)) for name, changes in KINDS.items()},
    }
    made = {name: model_with(root / name, *how) for name, how in files.items()}
    given = {"shards": sharded, "gguf": gguf, "empty": root / "empty", "parent": root / "parent"}
    return {**made, **given, "gguf_file": gguf / "small.gguf"}


def a_run(folder: Path, command: str | None, **changes: Any) -> Path:
    """A run of `command` in `folder`, as it lies there after it has ended."""
    folder.mkdir(parents=True)
    values = run_config.merge(single_machine(str(MODEL), folder), changes)
    own = {"base_url": "http://127.0.0.1:9/v1", "model": "judge"}
    values = run_config.merge({"judge": own}, values)
    if command is not None:
        values["made_by"] = command
    run_config.save(run_config.build(values), folder / "config.toml")
    return folder


def broken_databases(root: Path) -> dict[str, Path]:
    """Runs whose `records.db` is something else than a database of this program."""
    runs = {
        name: a_run(root / name, "serve") for name in ("text", "folder", "cut", "newer", "locked")
    }
    (runs["text"] / "records.db").write_text("not a database, " * 100)
    (runs["folder"] / "records.db").mkdir()
    for name in ("cut", "newer", "locked"):
        with sqlite3.connect(runs[name] / "records.db") as made:
            made.execute("PRAGMA journal_mode=WAL")
            made.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
            made.execute("INSERT INTO alembic_version VALUES ('9999')")
            made.execute("CREATE TABLE more AS SELECT hex(randomblob(20000)) AS text")
        made.close()
    whole = (runs["cut"] / "records.db").read_bytes()
    (runs["cut"] / "records.db").write_bytes(whole[:4096] + b"\xff" * 4096)
    return runs
