"""Wrong inputs by hand: one line that says what, where and what to do, before anything starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from examples.tool_lab.__main__ import app as lab
from examples.tool_lab.run_lab import MODEL
from opd.cli.app import app as opd
from opd.processes.supervisor import free_ports, last_words, listen_problem
from records.config import StoreConfig
from records.database.opening import check_file
from records.errors import StoreUnavailable
from tests.opd.run.bad_starts import a_run, broken_databases, broken_models

ROOT = Path(__file__).parents[3]
CPU_S = 2.0
SERVER = "postgres@127.0.0.1:5432"
PG = "store.url=postgresql+asyncpg://"

# Words of the command; {new} is a folder that is not there, {model} a whole model, {m[NAME]} a
# broken one, {db[NAME]} a run with a broken database, {run} a run of serve, {port} a port in use.
SERVE = "serve --run {new} --model {model}"
CASES: dict[str, tuple[str, str]] = {
    # The model
    "no model": ("serve --run {new}", "--model: name the start weights"),
    "no folder": (
        "serve --run {new} --model {root}/absent/x",
        r"model: no folder .*/x \(.* does not exist either\): give a local folder that has "
        r"config\.json",
    ),
    "a typing error in it": (
        "serve --run {new} --model {model}s",
        r"no folder .* \(did you mean .*/model\?\)",
    ),
    "a name of the hub": (
        "serve --run {new} --model nobody/nothing",
        r"no folder nobody/nothing here, and the hub .* cannot be reached: give a local folder",
    ),
    "blanks in the name": ("serve --run {new} --model 'my model'", "model: no folder my model"),
    "a GGUF file": (
        "serve --run {new} --model {m[gguf_file]}",
        r"GGUF, which cannot be trained: .*\./run\.sh models FILE\.gguf NEW_FOLDER",
    ),
    "a folder of GGUF": ("serve --run {new} --model {m[gguf]}", "GGUF, which cannot be trained"),
    "a file": ("serve --run {new} --model {model}/config.json", "is a file: give the folder"),
    "an empty folder": ("serve --run {new} --model {m[empty]}", r"empty has no config\.json: give"),
    "the folder above": ("serve --run {new} --model {model}/..", "did you mean .*/model"),
    "checkpoints": ("serve --run {new} --model {m[parent]}", "contains checkpoints: give one of"),
    "no configuration": ("serve --run {new} --model {m[no_config]}", r"has no config\.json"),
    "damaged configuration": ("serve --run {new} --model {m[bad_config]}", "is not valid JSON"),
    "no type": ("serve --run {new} --model {m[no_type]}", "does not state its model_type"),
    "unknown architecture": (
        "serve --run {new} --model {m[unknown_type]}",
        r"architecture 'qwenn' is unknown to the installed transformers",
    ),
    "no weights": ("serve --run {new} --model {m[no_weights]}", r"has no weights \(\*\.safetens"),
    "empty weights": ("serve --run {new} --model {m[empty_weights]}", "is empty: copy or download"),
    "weights of 5 bytes": ("serve --run {new} --model {m[short_weights]}", "cut off after 5 bytes"),
    "header cut off": ("serve --run {new} --model {m[cut_header]}", "safetensors is cut off"),
    "weights cut off": (
        "serve --run {new} --model {m[cut_weights]}",
        r"is cut off: \d+ of \d+ bytes",
    ),
    "weights too long": ("serve --run {new} --model {m[long_weights]}", "longer than its header"),
    "no safetensors": (
        "serve --run {new} --model {m[no_safetensors]}",
        "is not a safetensors file",
    ),
    "pointer of LFS": ("serve --run {new} --model {m[lfs]}", "git lfs pull"),
    "shards missing": (
        "serve --run {new} --model {m[shards]}",
        r"lacks 1 of the 2 weight files .* model-2\.safetensors first",
    ),
    "index of nothing": ("serve --run {new} --model {m[bad_index]}", "names no weight files"),
    "no tokenizer": (
        "serve --run {new} --model {m[no_tokenizer]}",
        r"has no tokenizer \(tokenizer\.json\): copy it",
    ),
    "damaged tokenizer": ("serve --run {new} --model {m[bad_tokenizer]}", "tokenizer.json is not"),
    "encoder and decoder": (
        "serve --run {new} --model {m[encoder_decoder]}",
        "t5: encoder-decoder models are not served; use another model, or serve it from SGLang",
    ),
    "layers of a window": (
        "serve --run {new} --model {m[sliding_layers]}",
        "qwen3: it has layers of type sliding_attention but does not state their sliding_window",
    ),
    "layers that do not add up": (
        "serve --run {new} --model {m[odd_layers]}",
        "qwen3: layer_types names 2 layers, num_hidden_layers differs",
    ),
    "linear layers": (
        "serve --run {new} --model {m[linear_layers]}",
        r"not every layer is an attention layer \(config\.json has 'full_attention_interval'\)",
    ),
    "state space": (
        "serve --run {new} --model {m[state_space]}",
        r"mamba: not every layer is an attention layer \(config\.json has 'state_size'\)",
    ),
    "layers of chunks": (
        "serve --run {new} --model {m[chunks]}",
        r"llama4_text: layers of type chunked_attention need another cache; only attention to all "
        r"earlier positions, .* or serve it from SGLang \(docs/sglang\.md: policy\.url, frozen\.u",
    ),
    "positions in the mask": (
        "serve --run {new} --model {m[alibi]}",
        r"bloom: its attention mask contains the positions \(ALiBi\), .* or serve it from SGLang",
    ),
    "heads of two sizes": (
        "serve --run {new} --model {m[unlike_heads]}",
        "gemma4_text: its layers differ in the size of a head, which is not served; use another",
    ),
    "layers that share": (
        "serve --run {new} --model {m[shared_layers]}",
        r"gemma3n: layers share keys and values of others \(num_kv_shared_layers\); only",
    ),
    "quantised": (
        "serve --run {new} --model {m[quantised]}",
        r"the weights are quantised \(gptq\), which cannot be trained: give the folder of the orig",
    ),
    "another vocabulary": (
        "serve --run {new} --model {m[other_vocabulary]}",
        r"tokenizer\.json has ids up to \d+, but the weights have rows for 40 \(vocab_size\)",
    ),
    "a classifier": (
        "serve --run {new} --model {m[classifier]}",
        "Qwen3ForSequenceClassification does not write text: give the folder of a causal",
    ),
    # The renderer
    "renderer of another family": (
        SERVE + " --renderer glm-4.5",
        "renderer 'glm-4.5' does not fit the tokenizer of .*; set renderer.name to the model's",
    ),
    "setting of another renderer": (
        SERVE + " --renderer llama-3 --set renderer.enable_thinking=true",
        "renderer 'llama-3' does not take enable_thinking .*: leave it out",
    ),
    "unknown tool parser": (
        SERVE + " --renderer default --set renderer.tool_parser=nope",
        "tool_parser: unknown parser 'nope'; known: qwen3",
    ),
    "no template": (
        "serve --run {new} --model {m[no_template]}",
        r"has no chat template: add a chat_template\.jinja",
    ),
    "damaged template": (
        "serve --run {new} --model {m[bad_template]}",
        r"renderer: the chat template cannot render .*: fix the model's chat_template\.jinja",
    ),
    "damaged template of a renderer": (
        "serve --run {new} --model {m[bad_template]} --renderer default",
        r"renderer: the chat template cannot render .*: fix the model's chat_template\.jinja",
    ),
    "damaged model of a replay": (
        "replay {talk} --run {new} --model {m[cut_weights]}",
        "is cut off",
    ),
    # The machine
    "cuda of the trainer": (
        SERVE + " --set trainer.device=cuda",
        r"trainer\.device: 'cuda' is not there: torch .* is built without CUDA",
    ),
    "cuda of an engine": (
        SERVE + " --set policy.embedded.device=cuda:1",
        r"policy\.embedded\.device: 'cuda:1' is not there",
    ),
    "cuda of a replay": ("replay {talk} --run {new} --set trainer.device=cuda", "is not there"),
    "cuda of one trainer": ("train --run {run} --set trainer.device=cuda", "is not there"),
    "cuda of one engine": (
        "engine --run {run} --role frozen --set frozen.embedded.device=cuda",
        r"frozen\.embedded\.device: 'cuda' is not there",
    ),
    "port in use": (SERVE + " --port {port}", r"proxy\.port: \d+ on 127.0.0.1 is in use: choose"),
    "port of an engine in use": (
        SERVE + " --set policy.embedded.port={port}",
        r"policy\.embedded\.port: \d+ on 127.0.0.1 is in use",
    ),
    "one port for two": (
        SERVE + " --set policy.embedded.port=7 --set frozen.embedded.port=7",
        r"are both 7: change one",
    ),
    "no workers": ("proxy --run {run} --set proxy.workers=0", r"proxy\.workers: "),
    "too many workers": ("proxy --run {run} --set proxy.workers=65", r"proxy\.workers: "),
    "workers in words": ("proxy --run {run} --set 'proxy.workers=\"two\"'", r"proxy\.workers: "),
    "more workers than requests": (
        "proxy --run {run} --set proxy.workers=2 --set proxy.max_running=1",
        "workers = 2 is more than max_running = 1",
    ),
    "port of one proxy in use": ("proxy --run {run} --set proxy.port={port}", "is in use"),
    "host of others": (
        SERVE + " --host 192.0.2.1",
        r"proxy\.host: '192.0.2.1' is not an address of",
    ),
    "no host": (
        SERVE + " --host no.such.invalid",
        r"proxy\.host: 'no\.such\.invalid' is not an addr",
    ),
    # Settings
    "unknown section": (SERVE + " --set trianer.x=1", "trianer: unknown key; did you mean 'tr"),
    "unknown key": (SERVE + " --set trainer.learning_rat=1", "did you mean 'learning_rate'"),
    "no value": (SERVE + " --set trainer.seed", "write it as section.key=value"),
    "two values": (SERVE + " --set trainer=1 --set trainer.seed=1", "already has a value"),
    "wrong kind of value": (SERVE + " --set trainer.seed=abc", r"trainer\.seed: .*\(got 'abc'\)"),
    "section for value": (SERVE + " --set judge=5", "judge: "),
    "value out of range": (SERVE + " --set trainer.learning_rate=-1", r"trainer\.learning_rate: "),
    "unknown renderer": (
        SERVE + " --renderer qwen33",
        "renderer: unknown renderer 'qwen33'; known",
    ),
    "unknown objective": (SERVE + " --set trainer.objective.name=opdd", "unknown 'opdd'"),
    "judge without server": (SERVE + " --judge-model big", "set judge.base_url too"),
    "judge's URL": (SERVE + " --judge-url nowhere --judge-model m", r"judge\.base_url: "),
    "no file of settings": (SERVE + " --config {new}.toml", "no such configuration file"),
    "folder of settings": (SERVE + " --config {model}", "it is a folder; name a file of settings"),
    "settings that are none": (SERVE + " --config {talk}", "not valid TOML"),
    "typing error of a replay": ("replay {talk} --run {new} --set judge.vote=1", "mean 'votes'"),
    # The database
    "no database": (SERVE + " --set " + PG + SERVER + "/nodb", r"no database 'nodb': create it"),
    "no role": (SERVE + " --set " + PG + "norole@127.0.0.1:5432/test", r"let 'norole' in .*create"),
    "nobody listens": (SERVE + " --set " + PG + "postgres@127.0.0.1:{free}/a", "nothing listens"),
    "no server": (SERVE + " --set " + PG + "postgres@no.such.invalid/a", "cannot be reached"),
    "another driver": (SERVE + " --set store.url=postgres://h/d", "'postgres' is not supported"),
    "port that is none": (SERVE + " --set " + PG + "h:abc/d", "not a database URL"),
    "no place for spills": (
        SERVE + " --set store.spill_folder=/proc/spill",
        r"keep what the database may refuse: /proc/spill: .*; free the disk, or set store\.spill_f",
    ),
    "no place for spills of one proxy": (
        "proxy --run {run} --set store.spill_folder=/proc/spill",
        "/proc/spill: .*; free the disk",
    ),
    "no URL": (SERVE + " --set store.url=nonsense", "not a database URL"),
    "no file": (SERVE + " --set store.url=sqlite:///", "the store needs a file"),
    **{
        f"{what} for {command.split()[0]}": (command + " --run {db[" + name + "]}", expected)
        for name, what, expected in (
            (
                "text",
                "text as a database",
                r"records\.db is not a database of SQLite: move records",
            ),
            ("folder", "a folder as a database", r"is a folder|no database at"),
            ("cut", "a damaged database", r"records\.db is damaged \(.*\): move"),
            ("newer", "a newer database", r"records\.db: .*'9999'.* newer version; update"),
            ("locked", "a locked database", r"records\.db is locked by another program: end"),
        )
        for command in ("serve", "keys list", "doctor s")
    },
    # Runs
    "no run": ("train --run {new}", "--run .*: no such folder; name the folder of a run"),
    "a folder that is no run": ("judge --run {model}", r"it has no config\.toml; name"),
    "no run to export": ("records export --run {new} --out {new}", "name the folder of a run"),
    "nothing recorded": ("records verify --run {run}", "no database"),
    "a digest that is none": (
        "records allow sha256:0f1e --run {run}",
        "allow: 'sha256:0f1e' is not a digest: 32 hexadecimal digits follow, "
        "as `opd doctor` prints",
    ),
    "nothing to forget": ("records forget --run {run} --session a", "nothing was recorded"),
    "a file as a run": ("serve --run {talk} --model {model}", "it is a file; name a folder"),
    "no role of an engine": (
        "engine --run {run} --role judge",
        "must be policy, frozen, or NAME.N",
    ),
    "another model": (
        "serve --run {run} --model {m[empty]}",
        r"is a run that started from .*; leave --model out, or use a new folder",
    ),
    "a replay in a run of serve": (
        "replay {talk} --run {run}",
        r"it is a run of `opd serve`, .* would be overwritten: use another folder, or hand",
    ),
    "serve in a run of the lab": ("serve --run {lab}", "a run of the tool lab"),
    "serve in a replay": ("serve --run {replayed}", "a run of `opd replay`"),
    "nothing to rehearse with": (
        "replay {talk} --run {new} --rehearse --mode judge-only",
        "--rehearse: nothing trains in mode judge-only",
    ),
    "a rehearsal that another run decides": (
        "replay {talk} --into {run} --rehearse",
        "--rehearse: .*sets it; change it there",
    ),
    "a replay into nothing": ("replay {talk} --into {new}", "--into .*: no run there"),
    "eval of no run": ("eval --run {new}", "no config.toml in it; give a run's folder"),
    "k that is none": ("eval --run {run} --k a", "--k a: give whole numbers"),
    "k above samples": ("eval --run {run} --k 8", "needs at least 8 samples"),
    "eval into nowhere": ("eval --run {run} --out {new}/x.json", "create it first"),
    "format of an export": (
        "records export --run {run} --out {new} --format csv",
        "'csv' is not one",
    ),
    "state of an export": ("records export --run {run} --out {new} --state a", "'a' is not one of"),
    "date of an export": ("records export --run {run} --out {new} --since x", "'x' is not a date"),
    "tenant of a key": ("keys create --run {run} --tenant 'a b'", "1 to 64 letters"),
    "no key": ("keys revoke --run {run} nokey", "nokey"),
    "compare without runs": ("replay compare {new} {run}", "is not a run folder"),
    "slime without a cluster": ("slime --config {run}/config.toml", "no section .cluster."),
    # Recordings
    "no recording": ("replay {new} --run {new}", "no such file or folder"),
    "an empty recording": ("replay {empty} --run {new}", "it is empty"),
    "a folder without recordings": (
        "replay {model}/.. --run {new} --mode judge-only",
        r"no \*\.jsonl or .* below it",
    ),
    "something else": ("replay {other} --run {new}", "its lines are in none of the formats"),
    "an unknown mode": ("replay {talk} --run {new} --mode guess", "choose one of rescore"),
    "model of another run": ("replay {talk} --into {run} --model x", "sets it; change it there"),
}
LAB_CASES = {
    "unknown preference": ("--preferences foo", "--preferences: choose some of unit, order, title"),
    "unknown hints": ("--hints foo", "--hints: input should be 'judge', 'none'"),
    "typing error": ("--set trianer.x=1", "did you mean 'trainer'"),
    "device": ("--set trainer.device=cuda", "is not there"),
    "folder that exists": ("--run {run}", "already exists; a lab run needs a new folder"),
}
USAGE = {
    "unknown option": ("serve --foo", "No such option: --foo"),
    "unknown command": ("foo", "No such command 'foo'"),
    "port beyond all": (
        "serve --port 70000",
        "'--port': Input should be less than or equal to 65535",
    ),
    "port that is text": ("serve --port abc", "'--port': Input should be a valid integer"),
    "no run named": ("train", "Missing option '--run'"),
    "consent": ("keys create --run x --consent maybe", "'maybe'"),
    "tasks": ("eval --run x --tasks 0", "'--tasks': Input should be greater than"),
    "no recordings": ("replay --mode rescore", "Missing argument"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    root = tmp_path_factory.mktemp("bad_starts")
    (root / "m").mkdir()
    (root / "talk.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]})
    )
    (root / "empty.jsonl").write_text("")
    (root / "other.jsonl").write_text('{"what": 1}\n')
    databases = broken_databases(root / "db")
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        # Bound and not listening: nobody else takes it, and nobody answers.
        free.bind(("127.0.0.1", 0))
        with closing(sqlite3.connect(databases["locked"] / "records.db")) as holder:
            holder.isolation_level = None
            holder.execute("BEGIN IMMEDIATE")
            yield {
                "root": root,
                "model": MODEL,
                "m": broken_models(root / "m"),
                "db": databases,
                "run": a_run(root / "run", "serve"),
                "lab": a_run(root / "lab", "lab"),
                "replayed": a_run(root / "replayed", "replay"),
                "talk": root / "talk.jsonl",
                "empty": root / "empty.jsonl",
                "other": root / "other.jsonl",
                "port": taken.getsockname()[1],
                "free": free.getsockname()[1],
            }


def words_of(command: str, places: dict[str, Any]) -> list[str]:
    new = places["root"] / "new" / uuid4().hex
    return [word.format(new=new, **places) for word in shlex.split(command)]


def assert_one_line(output: str, expected: str) -> None:
    assert "Traceback" not in output
    assert "Value error" not in output
    [line] = output.strip().splitlines()
    assert line.startswith("error: ")
    assert re.search(expected, line), line


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_input_is_one_line_and_nothing_is_started(
    case: str, places: dict[str, Any]
) -> None:
    command, expected = CASES[case]
    result = CliRunner().invoke(opd, words_of(command, places))
    assert_one_line(result.output, expected)
    assert result.exit_code == 2
    left = list((places["root"] / "new").rglob("*")) if (places["root"] / "new").exists() else []
    assert left == [], "a start that comes to nothing leaves nothing behind"


@pytest.mark.parametrize("case", LAB_CASES)
def test_a_wrong_input_of_the_lab_is_one_line(case: str, places: dict[str, Any]) -> None:
    command, expected = LAB_CASES[case]
    given = command if "--run" in command else f"{command} --run {{new}}"
    result = CliRunner().invoke(lab, words_of(given, places))
    assert_one_line(result.output, expected)
    assert result.exit_code == 2


@pytest.mark.parametrize("case", USAGE)
def test_a_wrong_word_is_named_after_how_the_command_is_used(case: str) -> None:
    command, expected = USAGE[case]
    result = CliRunner().invoke(opd, command.split())
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    last = result.output.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    assert expected in last


@pytest.mark.parametrize(
    "command",
    [
        SERVE + " --set trianer.x=1",
        SERVE + " --set trainer.device=cuda",
        "serve --run {new} --model {m[cut_weights]}",
        "serve --run {new} --model {m[sliding_layers]}",
        "serve --run {new} --model {m[linear_layers]}",
        "serve --run {new} --model {m[chunks]}",
        "serve --run {new} --model {m[no_template]}",
        SERVE + " --renderer glm-4.5",
        SERVE + " --port {port}",
        "serve --run {db[text]}",
        "replay {talk} --run {new} --set trianer.x=1",
        "eval --run {run} --k 8",
        "judge --run {new}",
        "hints list --run {new}",
        "records verify --run {new}",
        "slime --config {root}/absent.toml",
    ],
)
def test_a_wrong_input_costs_no_imports_worth_waiting_for(
    command: str, places: dict[str, Any]
) -> None:
    shown = (
        "import sys; from opd.cli.app import app\ntry: app()\nfinally: print(sorted(sys.modules))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", shown, *words_of(command, places)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    modules = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    assert process.returncode == 2
    for heavy in ("torch", "transformers", "matplotlib", "fastapi", "openai"):
        assert f"'{heavy}'" not in modules
    # Twice the limit: on a shared machine the same work takes more of a slower processor's time.
    assert used.ru_utime + used.ru_stime < 2 * CPU_S


@pytest.fixture
def server_with_passwords() -> Iterator[int]:
    """The port of a PostgreSQL server of this test's own that asks for passwords."""
    if shutil.which("initdb") is None or shutil.which("postgres") is None:
        pytest.skip("no PostgreSQL server is installed")
    # It refuses to run as root.
    owner = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        root = Path(folder)
        (root / "password").write_text("right\n")
        if owner:
            shutil.chown(root, **owner)
            (root / "password").chmod(0o644)
        (port,) = free_ports(1)
        common: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        data = str(root / "data")
        subprocess.run(
            [
                *["initdb", "-D", data, "-A", "scram-sha-256", "-U", "ann", "--no-sync"],
                f"--pwfile={root / 'password'}",
            ],
            check=True,
            cwd=root,
            **owner,
            **common,
        )
        process = subprocess.Popen(
            ["postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", ""],
            cwd=root,
            **owner,
            **common,
        )
        try:
            deadline = time.monotonic() + 60
            while listen_problem("127.0.0.1", port) is None:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield port
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def test_a_wrong_password_is_named_and_not_shown(
    server_with_passwords: int, places: dict[str, Any]
) -> None:
    url = f"ann:wrong@127.0.0.1:{server_with_passwords}/postgres"
    result = CliRunner().invoke(opd, words_of(f"{SERVE} --set {PG}{url}", places))
    assert_one_line(result.output, "refuses the password of 'ann': correct store.url")
    assert "wrong" not in result.output
    assert result.exit_code == 2


@contextmanager
def as_somebody_else() -> Iterator[None]:
    """The superuser may write everything: without its rights for a moment."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_database_that_cannot_be_written_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "records.db"
        path.touch(mode=0o444)
        with as_somebody_else(), pytest.raises(StoreUnavailable, match="cannot be written by this"):
            check_file(StoreConfig.sqlite(path))


def test_a_replay_leaves_a_run_of_serve_as_it_is(places: dict[str, Any], tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", None)
    (run / "logs").mkdir()
    (run / "logs" / "proxy.log").touch()  # of a version that did not write whose run it is
    (run / "report.html").write_text("the report of serving")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    words = ["replay", str(places["talk"]), "--run", str(run)]
    result = CliRunner().invoke(opd, words)
    assert_one_line(result.output, "a run of `opd serve`")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_child_that_ends_at_once_is_its_last_line_and_its_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("Traceback (most recent call last):\n  File x\nOSError: no such device\n\n")
    assert last_words(log) == f"OSError: no such device (log: {log})"
    assert last_words(tmp_path / "none.log") == f"no log at {tmp_path / 'none.log'}"
