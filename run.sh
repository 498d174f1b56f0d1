#!/usr/bin/env bash
# One door to everything: makes its own environment, then runs one command in it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# Python keeps what it compiled. Otherwise each process of a run compiles the program again.
export PYTHONDONTWRITEBYTECODE=

usage() {
    cat <<'TEXT'
usage: ./run.sh [COMMAND] [OPTIONS]

  (nothing)   the tool lab: watch an agent's policy learn from the reactions of its users
  serve       put the whole loop behind an endpoint:  ./run.sh serve --model PATH_OR_ID
  plan        how much memory that needs, before anything is loaded:  ./run.sh plan --model MODEL
  train       the embedded trainer alone, on the store of a run:  ./run.sh train --run RUN
  judge       the judge and scoring workers alone:  ./run.sh judge --run RUN
  proxy       the OpenAI-compatible endpoint alone:  ./run.sh proxy --run RUN
  engine      one embedded engine alone:  ./run.sh engine --run RUN --role policy
  keys        create, list, rotate, revoke API keys:  ./run.sh keys create --run RUN
  hints       list, show, delete what was learned from objections:  ./run.sh hints list --run RUN
  records     backup, restore, verify, export, forget, allow:  ./run.sh records verify --run RUN
  status      how a run stands and what it learns from, from any terminal:
              ./run.sh status --run RUN [--watch] [--json]
  doctor      why each turn of a session was trained, waits or was dropped:
              ./run.sh doctor [SESSION] --run RUN
  advise      which rollout correction a run needs, from its metrics:  ./run.sh advise --run RUN
  policy      the versions of a run: list, show, compare, pin, rollback, resume, export:
              ./run.sh policy rollback --run RUN --version N
              ./run.sh policy export --run RUN --version N --to FOLDER
  eval        pass@k of a version, or a comparison of two:  ./run.sh eval --run RUN --against start
  test        the tests; options and files go to pytest:  ./run.sh test tests/judge --durations 30
  reliability whole runs with killed processes, and an endpoint under attack; takes minutes
              (--short: kills and attacks of all kinds, without the longer runs of single features)
  learning    whole runs that train until something is learned; takes minutes
              (--short: an endpoint that learns from objections, and the guard)
  browser     the pages in Chromium, which must be installed (Debian: chromium):
              ./run.sh browser [--pictures FOLDER]
  check       ruff, pyright, import-linter, then the tests  (--static: without the tests)
  lock        rebuild constraints.txt from pyproject.toml: every package with its hashes
  audit       known vulnerabilities of the pinned packages, and what could not be audited
  sbom        the bill of materials of the environment (CycloneDX): build/sbom.cdx.json
  docs        the documentation as a site in build/site, with every link checked
  bench       the benchmarks of a quarter of an hour, with a report and a picture  (--quick: three
              minutes)
  sglang      the engine contract and a short lab run on real SGLang, on this machine's CPU
              (--model FOLDER: a model of your own learns there, through adapters;
              sglang serve: one server, until Ctrl-C)
  clients     agents and SDKs of other projects against the endpoint:
              ./run.sh clients [NAME...] [--short]
  replay      learn from recorded sessions:  ./run.sh replay FILE|DIR... [--votes FILE]
  models      two small pretrained models for experiments, in runs/models:  ./run.sh models
              (models FILE.gguf FOLDER: convert a GGUF file)
  slime       training on a cluster:  ./run.sh slime --config configs/qwen3_4b.toml --dry-run

Every command takes --help.
TEXT
}

# The environment is made once, and again when what it is made from changes.
environment() {
    local wanted
    wanted=$(cat pyproject.toml constraints.txt constraints-torch.txt | sha256sum | cut -d' ' -f1)
    if [ "$(cat .venv/made_from 2>/dev/null)" = "$wanted" ]; then return; fi
    echo "Setting up the environment in .venv (a few minutes, once)" >&2
    [ -x .venv/bin/python ] || python3 -m venv .venv
    local pip=(.venv/bin/python -m pip --quiet --disable-pip-version-check)
    # Most of what is installed is never imported; the rest is compiled when it first is.
    local install=("${pip[@]}" install --no-compile)
    # torch first, by version: its builds differ from machine to machine, so no list of hashes names
    # the one that fits. All else comes by hash, as wheels, so that no package runs code here.
    "${install[@]}" --no-deps -r constraints-torch.txt
    "${install[@]}" --no-deps --only-binary :all: --require-hashes -r constraints.txt
    # What a build for GPUs needs besides; nothing where the build is one for CPUs.
    "${install[@]}" --only-binary :all: -r constraints-torch.txt
    "${install[@]}" --no-deps --no-build-isolation -e .
    "${pip[@]}" check
    echo "$wanted" > .venv/made_from
}

# Programs that look at the environment from outside it.
tools() {
    local wanted='cyclonedx-bom>=7.1,<8 pip-audit>=2.10,<3 uv>=0.13,<1'
    if [ "$(cat .venv-audit/made_from 2>/dev/null)" = "$wanted" ]; then return; fi
    [ -x .venv-audit/bin/python ] || python3 -m venv .venv-audit
    # shellcheck disable=SC2086
    .venv-audit/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $wanted
    echo "$wanted" > .venv-audit/made_from
}

# Keeps today's pins where pyproject.toml allows them.
lock() {
    tools
    .venv-audit/bin/uv pip compile pyproject.toml constraints.in --extra dev --quiet \
        --universal --python-version 3.11 --generate-hashes --no-annotate \
        --excludes constraints-torch.txt --output-file constraints.txt \
        --custom-compile-command './run.sh lock' "$@"
}

sbom() {
    tools
    mkdir -p build
    .venv-audit/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
        --spec-version 1.6 --output-format JSON --validate --output-file build/sbom.cdx.json \
        .venv/bin/python
    .venv/bin/python -m supply.sbom build/sbom.cdx.json
}

# Pages from the code and from docs/, and a site of both.
docs() {
    local wanted='mkdocs>=1.6.1,<2 mkdocs-material>=9.7,<10'
    if [ "$(cat .venv-docs/made_from 2>/dev/null)" != "$wanted" ]; then
        [ -x .venv-docs/bin/python ] || python3 -m venv .venv-docs
        # shellcheck disable=SC2086
        .venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $wanted
        echo "$wanted" > .venv-docs/made_from
    fi
    .venv/bin/python -m supply.site build/docs
    NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
    echo "open build/site/index.html"
}

static_checks() {
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/pyright
    .venv/bin/lint-imports
}

# All tests but whole runs and those that look at the clock, on all cores, a file in one process, in
# the order of tests/conftest.py. Tests wait a quarter of their time, so there is a process more than
# cores. With arguments: pytest as it is.
run_tests() {
    if [ $# -gt 0 ]; then exec .venv/bin/python -m pytest "$@"; fi
    .venv/bin/python -m pytest -n $(($(nproc) + 1)) --dist loadfile --no-loadscope-reorder \
        --ignore tests/browser -m "not alone and not long and not learning"
}

# Whole runs of several processes each, two at a time, or three where they wait for most of it; those
# that look at the clock come last, alone.
run_whole_runs() {
    local folders=(tests/reliability tests/integration tests/trainer/step)
    if [ "${2:-}" = --short ]; then folders=(tests/reliability); fi
    local at_once=2
    [ "$1" != long ] || at_once=3
    local together=(-n "$at_once" --dist load --maxschedchunk 1)
    .venv/bin/python -m pytest "${together[@]}" -m "$1 and not alone" "${folders[@]}"
    if [ "$1" = long ]; then .venv/bin/python -m pytest -m alone "${folders[@]}"; fi
}

command="${1:-lab}"
case "$command" in -h | --help | help) usage; exit 0 ;; esac
case "$command" in
    lab | serve | plan | train | judge | proxy | engine | keys | hints | records | status | doctor | advise | policy | eval | replay | sglang | models | slime | test | reliability | learning | check | lock | audit | sbom | docs | bench | clients | browser) [ $# -eq 0 ] || shift ;;
    -*) command=lab ;;
    *) echo "run.sh: unknown command '$command'" >&2; usage >&2; exit 2 ;;
esac

# It makes the environment from what this writes.
if [ "$command" = lock ]; then lock "$@"; exit; fi
environment
case "$command" in
    test) run_tests "$@" ;;
    reliability | learning)
        [ "$command" = learning ] && marker=learning || marker=long
        if [ "$*" = --short ] || [ $# -eq 0 ]; then
            run_whole_runs "$marker" "$@"
            exit
        fi
        exec .venv/bin/python -m pytest -m "$marker" tests/reliability tests/integration "$@"
        ;;
    check)
        static_checks
        if [ "${1:-}" != "--static" ]; then run_tests "$@"; fi
        ;;
    audit)
        tools
        .venv/bin/python -m supply.lock
        exec .venv/bin/python -m supply.audit .venv-audit/bin/pip-audit
        ;;
    sbom) sbom ;;
    docs) docs ;;
    browser) exec .venv/bin/python -m pytest tests/browser "$@" ;;
    bench) exec .venv/bin/python -m benchmarks "$@" ;;
    sglang)
        examples/sglang_cpu/install.sh
        exec .venv/bin/python -m examples.sglang_cpu "$@"
        ;;
    models) exec .venv/bin/python -m examples.real_models "$@" ;;
    clients) exec .venv/bin/python -m tests.clients "$@" ;;
    lab) exec .venv/bin/python -m examples.tool_lab "$@" ;;
    *) exec .venv/bin/opd "$command" "$@" ;;
esac
