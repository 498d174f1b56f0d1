"""Which flags does the installed slime know, and are the values right? Runs in its Python.

`python -m opd.cluster.parsers` reads one JSON object from standard input and writes one to
standard output. The parsers are slime's, Megatron-LM's and SGLang's own, built in the way that
slime's `parse_args` builds them. No other module of this project is imported, except the hooks that
the flags name.

    in   {"argv": [flag, value, ...], "hooks": ["package.module.name", ...],
          "files": {path: text} that the flags name, or null if the model's folder is not here}
    out  {"versions": {"slime": ..., "megatron": ..., "sglang": ..., "python": ...},
          "known": {"slime": [flag, ...], "sglang": [flag, ...]}, "server_args": [field, ...],
          "errors": [line, ...], "full": "passed" | "not run: REASON"}
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# slime parses these before all others, with a parser that it creates inside a function.
EARLY = [
    "--train-backend",
    "--debug-rollout-only",
    "--debug-train-only",
    "--load-debug-rollout-data",
]


def main() -> None:
    """Entry point; libraries that print while they are imported print to standard error."""
    question = json.load(sys.stdin)
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(answer(question), answer_to)
    answer_to.close()


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """All that `flag_check.py` needs to know; a failed import becomes an error line."""
    result: dict[str, Any] = {
        "versions": {"python": platform.python_version()},
        "known": {},
        "server_args": [],
        "errors": [],
        "full": "not run: the parsers could not be built",
    }
    try:
        slime, engine, fields = _parsers()
        result["versions"] |= _versions()
    except Exception as error:  # the user has to see whatever the installation raises
        result["errors"].append(f"{type(error).__name__}: {_first_line(error)}")
        return result
    result["known"] = {
        "slime": sorted({*slime._option_string_actions, *EARLY}),
        "sglang": sorted(engine._option_string_actions),
    }
    result["server_args"] = fields
    result["errors"] += _parse(slime, question["argv"]) + _parse(engine, question["argv"])
    result["errors"] += _missing_hooks(question["hooks"]) + _unfit_slime()
    result["full"] = "not run: there are errors already"
    if not result["errors"]:
        result["full"], wrong = _full(question["argv"], question["files"])
        result["errors"] += wrong
    return result


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser, list[str]]:
    """(Megatron's parser with slime's flags, SGLang's and its router's, ServerArgs' fields)."""
    server_args = importlib.import_module("sglang.srt.server_args").ServerArgs
    if not dataclasses.is_dataclass(server_args):
        raise TypeError(
            f"SGLang {importlib.import_module('sglang.version').__version__} has no ServerArgs "
            "whose fields this slime can read: no engine would start; use the SGLang of slime's "
            "container"
        )
    sglang = importlib.import_module("slime.backends.sglang_utils.arguments")
    megatron = importlib.import_module("megatron.training.arguments")
    slime = importlib.import_module("slime.utils.arguments")
    engine = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    sglang.add_sglang_arguments(engine)
    trainer = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    trainer = megatron.add_megatron_arguments(trainer)
    trainer = slime.get_slime_extra_args_provider()(trainer)
    return trainer, engine, sorted(field.name for field in dataclasses.fields(server_args))


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """Types, choices and required flags, by the parser itself."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_known_args(argv)
    except SystemExit:
        return [said.getvalue().strip().splitlines()[-1].partition("error: ")[2]]
    return []


def _missing_hooks(hooks: list[str]) -> list[str]:
    missing = []
    for path in hooks:
        module, _, name = path.rpartition(".")
        try:
            if not callable(getattr(importlib.import_module(module), name, None)):
                missing.append(f"{path}: {module} has no such function")
        except Exception as error:  # a missing dependency shows only when it is imported
            missing.append(f"{path}: {type(error).__name__}: {_first_line(error)}")
    return missing


def _unfit_slime() -> list[str]:
    try:
        importlib.import_module("rollout_bridge.slime.compat").check_slime()
    except Exception as error:  # an old slime may lack whole modules
        return [_first_line(error)]
    return []


def _full(argv: list[str], files: dict[str, str] | None) -> tuple[str, list[str]]:
    """slime's whole parse_args, which compares flags with each other and with the model."""
    if files is None:
        return "not run: the model's folder is not here", []
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return "not run: Megatron asks the GPU what it can do, and there is none here", []
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["train_async.py", *_with_files(argv, files, Path(folder))]
        try:
            importlib.import_module("slime.utils.arguments").parse_args()
        except (Exception, SystemExit) as error:
            return "failed", [f"slime's parse_args: {type(error).__name__}: {_first_line(error)}"]
    return "passed", []


def _with_files(argv: list[str], files: dict[str, str], folder: Path) -> list[str]:
    """The command line with copies of files that a dry run does not write."""
    copies = {}
    for number, (path, text) in enumerate(files.items()):
        copy = folder / f"{number}.yaml"
        copy.write_text(text)
        copies[path] = str(copy)
    return [copies.get(word, word) for word in argv]


def _versions() -> dict[str, str]:
    slime = Path(importlib.import_module("slime").__file__ or "").parents[1]
    megatron = importlib.import_module("megatron.core")
    tree = Path(importlib.import_module("megatron.training").__file__ or "").parents[2]
    return {
        "slime": _slime_version(slime),
        "slime_commit": _commit(slime),
        "megatron": str(megatron.__version__),
        "megatron_commit": _commit(tree),
        "sglang": importlib.import_module("sglang.version").__version__,
    }


def _slime_version(root: Path) -> str:
    """From its setup.py: a source tree on the path is not an installed distribution."""
    try:
        found = re.search(r"""version=["']([^"']+)""", (root / "setup.py").read_text())
    except OSError:
        found = None
    return found.group(1) if found else "unknown"


def _commit(root: Path) -> str:
    if not (root / ".git").exists():
        return "unknown"
    words = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["(no message)"])[0]


if __name__ == "__main__":
    main()
