#!/usr/bin/env bash
# Real SGLang for a machine without a GPU, in .venv-sglang at the root of the repository: a server
# beside the product, never inside its environment. About two minutes and 2.7 GB, once, and again
# when what it is made from changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

source_folder=examples/sglang_cpu
target=.venv-sglang
torch=$(grep '^torch==' constraints-torch.txt)

# The product's torch, so that both compute alike; its other pins are not SGLang's.
wanted=$({ cat "$source_folder/install.sh" "$source_folder/requirements.txt"; echo "$torch"; } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$target/made_from" 2>/dev/null)" = "$wanted" ]; then exit 0; fi
echo "Setting up SGLang in $target (a few minutes, once)" >&2
# Made anew: pip does not remove what an older list asked for.
rm -rf "$target"
python3 -m venv "$target"
# --no-compile: most of the gigabytes are never imported.
pip=("$target/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
"${pip[@]}" "$torch"
"${pip[@]}" --no-deps sglang==0.5.23 torchvision==0.28.0
"${pip[@]}" "$torch" -r "$source_folder/requirements.txt"
echo "$wanted" > "$target/made_from"
