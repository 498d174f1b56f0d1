#!/usr/bin/env bash
# The foreign clients, in environments of their own: install.sh [python] [node], both if none is
# named. Python clients go to .venv-clients (1.1 GB), what runs in Node to tests/clients/node
# (0.7 GB); two to five minutes, once, and again when what they are made from changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

source_folder=tests/clients
[ $# -gt 0 ] || set -- python node

made_from() { cat "$@" "$source_folder/install.sh" | sha256sum | cut -d' ' -f1; }

python_clients() {
    local target=.venv-clients wanted
    wanted=$(made_from "$source_folder/requirements.txt")
    if [ "$(cat "$target/made_from" 2>/dev/null)" = "$wanted" ]; then return; fi
    echo "Setting up foreign Python clients in $target (a minute or two, once)" >&2
    # Made anew: pip does not remove what an older list asked for.
    rm -rf "$target"
    python3 -m venv "$target"
    # --no-compile: most of the gigabyte is never imported.
    "$target/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
        --only-binary :all: --require-hashes -r "$source_folder/requirements.txt"
    echo "$wanted" > "$target/made_from"
}

node_clients() {
    local folder="$source_folder/node" wanted
    if ! command -v npm > /dev/null; then
        echo "install.sh: Codex, Claude Code and the Vercel AI SDK need Node with npm: install it" >&2
        exit 2
    fi
    wanted=$(made_from "$folder/package-lock.json" "$folder/package.json")
    if [ "$(cat "$folder/node_modules/made_from" 2>/dev/null)" = "$wanted" ]; then return; fi
    echo "Setting up foreign Node clients in $folder/node_modules (half a minute, once)" >&2
    npm ci --prefix "$folder" --ignore-scripts --no-audit --no-fund --loglevel=error >&2
    # The one script that is needed: it puts the program for this platform in its place.
    (cd "$folder/node_modules/@anthropic-ai/claude-code" && node install.cjs >&2)
    echo "$wanted" > "$folder/node_modules/made_from"
}

for part in "$@"; do
    case "$part" in
        python) python_clients ;;
        node) node_clients ;;
        *) echo "install.sh: unknown part '$part'; known: python, node" >&2; exit 2 ;;
    esac
done
