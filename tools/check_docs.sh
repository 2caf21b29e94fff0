#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Finds dead names in the documents: links, files, folders, test programs and tests that they name and that
# the tree does not have. Prints each with its place and exits with 1 when there is one.
set -euo pipefail
export LC_ALL=C

cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Every file that git knows or would take, and every folder above one.
mapfile -t files < <(git ls-files --cached --others --exclude-standard | while IFS= read -r file; do
  [[ ! -e $file ]] || printf '%s\n' "$file"
done | sort -u)
mapfile -t folders < <(printf '%s\n' "${files[@]}" | sed -n 's|/[^/]*$||p' | awk -F/ '
  { path = ""; for (i = 1; i <= NF; ++i) { path = path (i > 1 ? "/" : "") $i; print path } }' | sort -u)
declare -A folder_names=()
for folder in "${folders[@]}"; do folder_names[${folder##*/}]=1; done

# Tests as documents name them: `Suite.Name` of C++, `test_name` of Python.
declare -A tests=([Suite.Name]=1) # the form itself
while IFS= read -r name; do tests[$name]=1; done < <(
  cat tests/*.cc | tr '\n' ' ' | grep -oE '\bTEST(_F|_P)?\( *[A-Za-z0-9]+, *[A-Za-z0-9]+ *\)' |
    sed -E 's/.*\( *([A-Za-z0-9]+), *([A-Za-z0-9]+) *\)/\1.\2/'
  sed -nE 's/^def (test_[a-z0-9_]+)\(.*/\1/p' python/tests/*.py
)

sources='\.(h|c|cc|cu|cuh|sh|py|cmake|md|toml|lock|jsonl)$'
# shellcheck disable=SC2016  # these are the document's backticks
quoted='`[^` ]+`'
places=0
dead=0

report() {
  printf '%s: %s\n' "$1" "$2"
  dead=$((dead + 1))
}

# A path may be named by its end (`common/plan.h`) and may be a pattern (`fp4_*.cuh`).
is_there() {
  local path
  for path in "${files[@]}" "${folders[@]}"; do
    # shellcheck disable=SC2053  # a pattern is meant
    [[ /$path != */$1 ]] || return 0
  done
  return 1
}

# The headings of a document as the anchors that links name.
anchors() {
  sed -n 's/^##* *//p' "$1" | tr '[:upper:]' '[:lower:]' | sed -e 's/[^a-z0-9 _-]//g' -e 's/ /-/g'
}

check_link() {
  local place=$1 link=$2 file anchor
  [[ $link != *://* ]] || return 0
  places=$((places + 1))
  file=${link%%#*}
  anchor=${link#"$file"}
  [[ -n $file ]] && file=$(dirname "${place%%:*}")/$file || file=${place%%:*}
  if [[ ! -e $file ]]; then
    report "$place" "the link '$link' leads nowhere"
  elif [[ -n $anchor ]] && ! anchors "$file" | grep -qxF -- "${anchor#\#}"; then
    report "$place" "the link '$link' names a heading that '${file#./}' does not have"
  fi
}

# A word in backticks is a test by its form, and a path when it ends like a source file or begins with a folder of
# the tree.
check_word() {
  local place=$1 word=${2#./}
  word=${word%/}
  [[ $word != out/* && $word != build/* ]] || return 0 # made by programs
  if [[ $word =~ ^[a-z0-9_]+_(test|bench)$ ]]; then
    places=$((places + 1))
    is_there "$word.*" || report "$place" "there is no program '$word'"
  elif [[ $word =~ ^([A-Z][A-Za-z0-9]+\.[A-Z][A-Za-z0-9]+|test_[a-z0-9_]+)$ ]]; then
    places=$((places + 1))
    [[ -n ${tests[$word]:-} ]] || report "$place" "there is no test '$word'"
  elif [[ $word =~ ^[A-Za-z0-9_.*/-]+$ && ($word =~ $sources ||
    ($word == */* && -n ${folder_names[${word%%/*}]:-})) ]]; then
    places=$((places + 1))
    is_there "$word" || report "$place" "there is no '$word'"
  fi
}

mapfile -t documents < <(printf '%s\n' "${files[@]}" | grep '\.md$')
while IFS=: read -r file line link; do
  link=${link#](}
  check_link "$file:$line" "${link%)}"
done < <(grep -Hnoe '\]([^)]*)' "${documents[@]}")
while IFS=: read -r file line word; do
  check_word "$file:$line" "${word//\`/}"
done < <(grep -HnoE "$quoted" "${documents[@]}")
# Comments send their reader to documents, too.
while IFS=: read -r file line path; do
  places=$((places + 1))
  [[ -e $path ]] || report "$file:$line" "there is no '$path'"
done < <(printf '%s\0' "${files[@]}" | xargs -0 grep -HnoIE '\bdocs/[A-Za-z0-9_./-]*\.md\b' --)

if ((dead)); then
  printf '%d of %d places name what is not there\n' "$dead" "$places"
  exit 1
fi
printf '%d places in %d documents lead somewhere\n' "$places" "${#documents[@]}"
