#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fetches vLLM's CUDA wheel (340 MB) and unpacks its Python code (60 MB) into out/vllm-cuda, for the
# tests that import it on a machine without a GPU. Nothing of it is installed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=${BITDECODING_VENV:-$root/.venv}
lock=$root/python/requirements/vllm-cuda.lock
target=${BITDECODING_VLLM_CUDA:-$root/out/vllm-cuda}
stamp=$target/.stamp

[[ -f $stamp ]] && cmp -s "$lock" "$stamp" && exit 0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
  --require-hashes --dest "$folder" -r "$lock"
rm -rf "$target"
mkdir -p "$target"
"$venv/bin/python" - "$folder" "$target" <<'PY'
import glob
import sys
import zipfile

(wheel,) = glob.glob(sys.argv[1] + "/vllm-*.whl")
with zipfile.ZipFile(wheel) as archive:
    kept = [n for n in archive.namelist() if n.endswith((".py", ".json", "/METADATA"))]
    archive.extractall(sys.argv[2], kept)
PY
cp "$lock" "$stamp"
echo "vLLM's Python code is in $target"
