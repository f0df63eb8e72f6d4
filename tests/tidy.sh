#!/usr/bin/env bash
# Runs clang-tidy with the checks of .clang-tidy. Fails on any finding.
#
#   tests/tidy.sh           all sources of server/, client/ and proto/, and kernels/*.cc (minutes)
#   tests/tidy.sh FILE...   only these
#
# kernels/cpu and kernels/bench are left out: SIMD templates take the analyzer minutes, and a benchmark's
# loop variable is a finding.
#
# Needs build/compile_commands.json and the generated protobuf headers, so build first. Leaves out CUDA
# files and generated code. TIDY_JOBS sets how many files are checked at a time (2).
set -euo pipefail
cd "$(dirname "$0")/.."

database=build/compile_commands.json
[[ -e $database ]] || { echo "$0: no $database: run cmake --preset release" >&2; exit 2; }
files=("$@")
((${#files[@]})) ||
  mapfile -t files < <(git ls-files 'server/*.cc' 'client/*.cc' 'proto/*.cc' \
    ':(glob)kernels/*.cc')

# Only what this build compiles: without a CUDA compiler, the CUDA device is not part of it.
checked=()
for file in "${files[@]}"; do
  if grep -qF "\"file\": \"$PWD/$file\"" "$database"; then
    checked+=("$file")
  else
    echo "tidy: $file is not in the build: left out"
  fi
done
printf '%s\0' "${checked[@]}" |
  xargs -0 -n 1 -P "${TIDY_JOBS:-2}" clang-tidy --quiet -p build --extra-arg=-Wno-unknown-warning-option ||
  { echo "tidy: findings" >&2; exit 1; }
echo "tidy: ok, ${#checked[@]} files"
