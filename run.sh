#!/usr/bin/env bash
# One door to everything: makes its own environment, then runs one command in it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
    cat <<'TEXT'
usage: ./run.sh [COMMAND] [OPTIONS]

  (nothing)   the tool lab: watch an agent's policy learn from the reactions of its users
  serve       put the whole loop behind an endpoint:  ./run.sh serve --model PATH_OR_ID
  train       the embedded trainer alone, on the store of a run:  ./run.sh train --config RUN/config.toml
  judge       the judge and scoring workers alone:  ./run.sh judge --config RUN/config.toml
  keys        create, list, rotate, revoke API keys:  ./run.sh keys create --config RUN/config.toml
  records     backup, restore, verify, export, forget:  ./run.sh records verify --config RUN/config.toml
  doctor      why each turn of a session was trained, waits or was dropped:
              ./run.sh doctor SESSION --config RUN/config.toml
  eval        pass@k of a version, and two versions compared:  ./run.sh eval --run RUN --against start
  test        all tests
  check       ruff, pyright, import-linter, then all tests  (--static: without the tests)
  audit       known vulnerabilities of the pinned dependencies
  bench       the benchmarks, one after the other
  sglang      the engine contract and a short lab run on real SGLang, on this machine's CPU
              (sglang serve: one server, until Ctrl-C)
  replay      learn from recorded sessions:  ./run.sh replay FILE|DIR... [--votes FILE]
  slime       training on a cluster:  ./run.sh slime --config configs/qwen3_4b.toml --dry-run

Every command takes --help.
TEXT
}

# The environment is made once, and again when what it is made from changes.
environment() {
    local wanted
    wanted=$(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)
    if [ "$(cat .venv/made_from 2>/dev/null)" = "$wanted" ]; then return; fi
    echo "Setting up the environment in .venv (a few minutes, once)" >&2
    [ -x .venv/bin/python ] || python3 -m venv .venv
    # torch first and pinned: a range would fetch a build with gigabytes of GPU libraries.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' constraints.txt)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
    echo "$wanted" > .venv/made_from
}

static_checks() {
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/pyright
    .venv/bin/lint-imports
}

# In an environment of its own, and made only where the service answers.
audit() {
    local service=https://api.osv.dev
    if ! .venv/bin/python - "$service" <<'PYTHON'
import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], timeout=10)
except urllib.error.HTTPError:
    pass  # it answers
except OSError:
    sys.exit(1)
PYTHON
    then
        echo "audit: SKIPPED, $service does not answer: vulnerabilities were not looked for" >&2
        return
    fi
    [ -x .venv-audit/bin/pip-audit ] || python3 -m venv .venv-audit
    .venv-audit/bin/python -m pip install --quiet --disable-pip-version-check 'pip-audit>=2.9,<3'
    .venv-audit/bin/pip-audit --vulnerability-service osv --requirement constraints.txt --no-deps --disable-pip
}

bench() {
    local script
    for script in engine_throughput proxy_latency store_writes logprob_memory objective_cost; do
        printf '\n== benchmarks.%s\n' "$script"
        .venv/bin/python -m "benchmarks.$script" "$@"
    done
}

command="${1:-lab}"
case "$command" in -h | --help | help) usage; exit 0 ;; esac
case "$command" in
    lab | serve | train | judge | keys | records | doctor | eval | replay | sglang | slime | test | check | audit | bench) [ $# -eq 0 ] || shift ;;
    -*) command=lab ;;
    *) echo "run.sh: unknown command '$command'" >&2; usage >&2; exit 2 ;;
esac

environment
case "$command" in
    test) exec .venv/bin/python -m pytest "$@" ;;
    check)
        static_checks
        if [ "${1:-}" != "--static" ]; then exec .venv/bin/python -m pytest "$@"; fi
        ;;
    audit) audit ;;
    bench) bench "$@" ;;
    sglang)
        examples/sglang_cpu/install.sh
        exec .venv/bin/python -m examples.sglang_cpu "$@"
        ;;
    lab) exec .venv/bin/python -m examples.tool_lab "$@" ;;
    *) exec .venv/bin/opd "$command" "$@" ;;
esac
