#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Cross-compiles the library and its tests for 64-bit Arm and runs the tests of the kernels under qemu: the
# NEON build of the one SIMD source, on a machine that has no Arm processor.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: tools/check_neon.sh [--setup]

Builds with the preset `neon` (cmake/neon.cmake) and runs the tests of the library under qemu-user.
Exits with 77 and a sentence where the cross compiler or qemu is not installed.

  --setup   only unpack the arm64 libraries into build/neon-root

Needs the packages g++-aarch64-linux-gnu and qemu-user-static. The libraries that are compiled against
(Highway, GoogleTest, fmt, nlohmann-json) are fetched by apt-get as arm64 packages and unpacked below
build/neon-root; nothing is installed and no architecture is added to the system.

Environment: BITDECODING_JOBS (default: the cores at hand), BITDECODING_NEON_TESTS (a regular expression of
ctest; default: the kernels, the reference, numbers, pages and the C ABI).
TEXT
}

setup_only=0
for arg in "$@"; do
  case "$arg" in
    --setup) setup_only=1 ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; printf "check_neon.sh: unknown argument '%s'.\n" "$arg" >&2; exit 2 ;;
  esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD/build/neon-root
jobs=${BITDECODING_JOBS:-$(nproc)}

for tool in aarch64-linux-gnu-g++ qemu-aarch64-static; do
  command -v "$tool" >/dev/null || {
    echo "there is no $tool: apt-get install g++-aarch64-linux-gnu qemu-user-static"
    exit 77
  }
done

# apt's lists for arm64 lie beside the packages: the system's own stay as they are, and root is not needed.
unpack_libraries() {
  local packages=(libhwy-dev libfmt-dev nlohmann-json3-dev libgtest-dev libgmock-dev)
  rm -rf "$root"
  mkdir -p "$root/apt/lists/partial" "$root/apt/cache/archives/partial"
  local options=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State::Lists=$root/apt/lists"
    -o "Dir::Cache=$root/apt/cache" -o Acquire::Languages=none -o Debug::NoLocking=1 -o APT::Sandbox::User=)
  apt-get -qq "${options[@]}" update
  # Shared libraries carry their version in the package's name.
  mapfile -t -O "${#packages[@]}" packages < <(apt-cache "${options[@]}" depends libhwy-dev libfmt-dev |
    sed -nE 's/.*Depends: (lib(hwy|fmt)[0-9][a-z0-9]*).*/\1/p' | sort -u)
  (cd "$root/apt" && apt-get -qq "${options[@]}" download "${packages[@]}")
  local package
  for package in "$root"/apt/*.deb; do dpkg -x "$package" "$root"; done
  rm -rf "$root/apt/lists" "$root/apt/cache"
  touch "$root/.unpacked"
}

[[ -f $root/.unpacked ]] || unpack_libraries
[[ $setup_only == 0 ]] || exit 0

cmake --preset neon >/dev/null
cmake --build --preset neon --parallel "$jobs"
ctest --preset neon --parallel "$jobs" --no-tests=error \
  -R "${BITDECODING_NEON_TESTS:-^(All/)?(Cpu|Reference|Numeric|E2m1|E4m3|E8m0|Bf16|Page|Capi|capi_c_test)}"
