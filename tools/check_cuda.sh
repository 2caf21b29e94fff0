#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the CUDA backend's tests and its benchmark from a built tree on a machine with a GPU, and writes what
# came out as JSON lines for docs/results/.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: tools/check_cuda.sh [--build DIR] [--output FILE] [--repeat N] [--tests-only]

  --build DIR      the built tree (default: build/cuda); its bin/ holds cuda_*_test and cuda_bench
  --output FILE    default: docs/results/GPU-DATE.jsonl, e.g. docs/results/nvidia-h200-2026-12-01.jsonl
  --repeat N       replays of each measurement (default: 60)
  --tests-only     no benchmark

The first line names the GPU, the driver, the date, the commit and the commands. Then one line a test program
(passed, failed, skipped) and the benchmark's own lines. Exits with 1 when a test fails, or when none runs; with
77 and a sentence where there is no GPU or nothing is built. Build with

  cmake --preset release -B build/cuda -DBITDECODING_BUILD_CUDA=ON
  cmake --build build/cuda
TEXT
}

build=build/cuda
output=
repeat=60
bench=1
while [[ $# -gt 0 ]]; do
  case "$1" in
    --build | --output | --repeat)
      [[ $# -gt 1 ]] || { printf 'check_cuda.sh: %s needs a value.\n' "$1" >&2; exit 2; }
      case "$1" in
        --build) build=$2 ;;
        --output) output=$2 ;;
        --repeat) repeat=$2 ;;
      esac
      shift 2 ;;
    --tests-only) bench=0; shift ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; printf "check_cuda.sh: unknown argument '%s'.\n" "$1" >&2; exit 2 ;;
  esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."

gpu=
if command -v nvidia-smi >/dev/null; then
  gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1) || gpu=
fi
[[ -n $gpu ]] || {
  echo "there is no GPU here (nvidia-smi shows none): run this where one is; the build tree can be copied there"
  exit 77
}
shopt -s nullglob
tests=("$build"/bin/cuda_*_test)
[[ ${#tests[@]} -gt 0 ]] || {
  echo "$build/bin holds no cuda_*_test: build with -DBITDECODING_BUILD_CUDA=ON, or name the tree with --build"
  exit 77
}
[[ $bench == 0 || -x $build/bin/cuda_bench ]] || {
  echo "$build/bin holds no cuda_bench: build it, or pass --tests-only"
  exit 77
}

quote() {  # as a JSON string
  local text=${1//\\/\\\\}
  printf '"%s"' "${text//\"/\\\"}"
}

driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
today=$(date -u +%Y-%m-%d)
commit=$(git rev-parse HEAD 2>/dev/null) || commit=${BITDECODING_COMMIT:-unknown}
if [[ -z $output ]]; then
  slug=$(tr '[:upper:] ' '[:lower:]-' <<<"$gpu" | tr -cd 'a-z0-9-')
  output=docs/results/$slug-$today.jsonl
fi
mkdir -p "$(dirname "$output")"
shapes=(8x131072x32x8x128x1 32x32768x32x8x128x1 1x131072x32x8x128x1 8x32768x32x8x128x1 1x32768x32x8x128x1
  8x8192x32x8x128x1 1x8192x32x8x128x1 8x131072x64x8x128x1 8x131072x32x2x128x1 8x131072x4x1x256x1
  8x131072x64x8x64x1 64x0x32x8x128x1 8x32768x32x8x128x4)
bench_command=("$build/bin/cuda_bench" decode plan write --repeat "$repeat")
for shape in "${shapes[@]}"; do bench_command+=(--shape "$shape"); done

lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
failed=0
ran=0
commands=
for test in "${tests[@]}"; do
  echo "== $test" >&2
  commands+="${commands:+, }$(quote "$test")"
  code=0
  words=$("$test" 2>&1) || code=$?
  printf '%s\n' "$words" >&2
  count() { sed -nE "s/^\[  $1 *\] ([0-9]+) tests?.*/\1/p" <<<"$words" | tail -n 1; }
  passed=$(count PASSED)
  broken=$(count FAILED)
  skipped=$(count SKIPPED)
  ran=$((ran + ${passed:-0}))
  [[ $code == 0 ]] || failed=1
  printf '{"test": %s, "exit_code": %d, "passed": %d, "failed": %d, "skipped": %d}\n' \
    "$(quote "$(basename "$test")")" "$code" "${passed:-0}" "${broken:-0}" "${skipped:-0}" >>"$lines"
done
if [[ $bench == 1 ]]; then
  echo "== ${bench_command[*]}" >&2
  commands+=", $(quote "${bench_command[*]}")"
  "${bench_command[@]}" >>"$lines" || failed=1
fi

{
  printf '{"gpu": %s, "driver": %s, "date": %s, "commit": %s, "commands": [%s]}\n' "$(quote "$gpu")" \
    "$(quote "$driver")" "$(quote "$today")" "$(quote "$commit")" "$commands"
  cat "$lines"
} >"$output"
echo "$output"
if [[ $ran == 0 ]]; then
  echo "no test ran: all were skipped, so this library has no kernels for $gpu" >&2
  exit 1
fi
exit "$failed"
