#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Puts the vLLM plugin into the Python environment, or packs it with the built library as a wheel.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: tools/setup/plugin.sh [--wheel]

Without arguments: installs python/ into .venv as an editable package, so that vLLM finds the plugin and
the plugin finds build/release/lib/libbitdecoding.so. Does nothing when that is already so.

  --wheel   instead makes out/wheel/bitdecoding_vllm-*.whl with the library inside, for other machines
            of this kind: pip install --no-deps FILE

Needs tools/setup/venv.sh; --wheel also needs the release build.
TEXT
}

die() {
  printf 'plugin.sh: %s\n' "$*" >&2
  exit 1
}

wheel=0
for arg in "$@"; do
  case "$arg" in
    --wheel) wheel=1 ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; die "unknown argument '$arg'." ;;
  esac
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=${BITDECODING_VENV:-$root/.venv}
[[ -x $venv/bin/python ]] || die "there is no Python at $venv/bin/python; run tools/setup/venv.sh first."
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)

if [[ $wheel == 0 ]]; then
  # pyproject.toml names the entry point, so a newer one has to be installed again.
  stamp=$venv/.bitdecoding-plugin
  hash=$(printf '%s\n' "$root" | cat - "$root/python/pyproject.toml" | sha256sum | cut -d' ' -f1)
  [[ -f $stamp && $(<"$stamp") == "$hash" ]] && exit 0
  "${pip[@]}" install --no-deps --no-build-isolation --editable "$root/python"
  printf '%s\n' "$hash" >"$stamp"
  printf 'plugin.sh: the plugin is in %s, pointing to python/\n' "$venv"
  exit 0
fi

library=$root/build/release/lib/libbitdecoding.so
[[ -f $library ]] || die "there is no $library; build it: cmake --preset release && cmake --build --preset release."
rm -rf "$root/out/wheel"
mkdir -p "$root/out/wheel"
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
cp -R "$root/python/bitdecoding_vllm" "$root/python/pyproject.toml" "$stage"
cp -L "$library" "$stage/bitdecoding_vllm/libbitdecoding.so"
# The package itself is pure Python; the library in it is not, and the file's name must say so.
"${pip[@]}" wheel --no-deps --no-build-isolation --wheel-dir "$root/out/wheel" \
  "--config-settings=--build-option=--plat-name=linux_$(uname -m)" "$stage"
printf 'plugin.sh: made %s\n' "$root"/out/wheel/*.whl
