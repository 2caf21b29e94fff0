#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian packages that building, testing and checking need; Debian 12 and Ubuntu 24.04.
# Does nothing, in well under a second, when all are there.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: tools/setup/apt.sh [--print]

Installs what is missing of the packages below with apt-get. Without root it prints the line to run
and exits with 1.

  --print   only print the names of the missing packages, one a line
TEXT
}

print_only=0
for arg in "$@"; do
  case "$arg" in
    --print) print_only=1 ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; printf "apt.sh: unknown argument '%s'.\n" "$arg" >&2; exit 2 ;;
  esac
done

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  printf 'apt.sh: this is not a Debian or Ubuntu system; install the packages named in %s by hand.\n' "$0" >&2
  exit 1
fi

packages=(
  # Compilers and build tools. clang is for the fuzzers and a second opinion, g++ for everything else.
  build-essential g++ clang cmake ninja-build ccache pkg-config git
  # Libraries: SIMD, text, command line, JSON, HTTP with TLS.
  libhwy-dev libfmt-dev libcli11-dev nlohmann-json3-dev libcpp-httplib-dev libssl-dev
  # Packed tests of a benchmark, and the sandbox that its programs run in.
  zlib1g-dev bubblewrap
  # Tests and benchmarks.
  libgtest-dev libgmock-dev libbenchmark-dev
  # Checks.
  clang-format clang-tidy shellcheck pyflakes3
  # Python, only where vLLM must be met.
  python3 python3-venv python3-dev
)

# libFuzzer and clang's sanitizers are in a package that carries clang's version in its name.
clang_version() {
  local version
  version=$(clang --version 2>/dev/null | sed -n '1s/.*version \([0-9]*\).*/\1/p')
  if [[ -z $version ]]; then
    version=$(LC_ALL=C apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9]*\).*/\1/p' | head -n 1)
  fi
  printf '%s\n' "$version"
}

is_installed() { [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }

missing=()
find_missing() {
  local package version
  missing=()
  version=$(clang_version)
  for package in "${packages[@]}" ${version:+"libclang-rt-$version-dev"}; do
    is_installed "$package" || missing+=("$package")
  done
}

find_missing
if [[ $print_only == 1 ]]; then
  ((${#missing[@]} == 0)) || printf '%s\n' "${missing[@]}"
  exit 0
fi

if ((${#missing[@]})); then
  if [[ $(id -u) != 0 ]]; then
    printf 'apt.sh: %d packages are missing. Run this, then try again:\n  sudo apt-get update && sudo apt-get install -y --no-install-recommends %s\n' \
      "${#missing[@]}" "${missing[*]}" >&2
    exit 1
  fi
  printf 'apt.sh: installing %s\n' "${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  install_missing() { apt-get install -y --no-install-recommends "${missing[@]}" >>"$log" 2>&1; }
  apt-get update >>"$log" 2>&1 || printf 'apt.sh: apt-get update failed; going on with the lists there are.\n' >&2
  # Before the lists were fetched clang's version may have been unknown.
  find_missing
  if ! install_missing; then
    tail -n 20 "$log" >&2
    printf 'apt.sh: apt-get could not install the packages above; the whole log is %s.\n' "$log" >&2
    exit 1
  fi
  # With clang there, its run-time package can be named for sure.
  find_missing
  if ((${#missing[@]})) && ! install_missing; then
    tail -n 20 "$log" >&2
    printf 'apt.sh: apt-get could not install %s; the whole log is %s.\n' "${missing[*]}" "$log" >&2
    exit 1
  fi
  rm -f "$log"
fi

# Distributions older than the two named have a cmake that cannot read the presets.
cmake_version=$(cmake --version | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
if [[ $(printf '%s\n3.25\n' "$cmake_version" | sort -V | head -n 1) != 3.25 ]]; then
  printf 'apt.sh: cmake is %s; at least 3.25 is needed (Debian 12 and Ubuntu 24.04 have it).\n' "$cmake_version" >&2
  exit 1
fi
