#!/usr/bin/env bash
# Installs missing packages, builds, and runs tests. Without arguments: those of the gate, in four stages.
#
#   tests/run.sh                  all stages; the first that fails ends it
#   tests/run.sh --stage STAGE    one of them:
#                                   release  kernels, byte path, documents and wheel, optimised, in build/
#                                   tsan     programs without gRPC under ThreadSanitizer, in build-tsan/
#                                   asan     all but kernels under AddressSanitizer, LeakSanitizer and UBSan, in
#                                            build-asan/; replays the inputs of the fuzzers
#                                   e2e      server and command line of build-asan/ as processes
#   tests/run.sh --release        every unit test in the release build: needs no clang
#   tests/run.sh --torch          not of the gate: the Python package with torch and transformers, of the Python
#                                 $FLASHCORE_TORCH_PYTHON or python3; skipped where that has none
#   tests/run.sh --stress [PART]  what takes long, or depends on time, load, memory readings or other programs;
#                                 ends with a summary. PART: release, asan, tsan, e2e, fuzz, perf, python
#                                 or tidy
#   tests/run.sh --stress REGEX   the stress tests whose names match
#
# The sanitizer builds use clang, which also checks the thread-safety annotations.
set -euo pipefail
cd "$(dirname "$0")/.."
source deploy/packages.sh

jobs=$(nproc)
logs=build/logs # what ctest logged, by stage
stages=(release tsan asan e2e)
parts=(release asan tsan e2e fuzz perf python tidy)

usage() {
  sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "$0" >&2
  exit 2
}

# build PRESET TARGET...: configures and builds targets.
build() { cmake --preset "$1" && cmake --build --preset "$1" --target "${@:2}"; }

# Functions of --stress run in a condition, where set -e is off: each command's status counts.

# run_ctest NAME PRESET ARGUMENT...: runs ctest and keeps its log as $logs/NAME.log.
run_ctest() {
  local name=$1 preset=$2 folder=build status=0
  shift 2
  [[ $preset == release ]] || folder=build-$preset
  ctest --preset "$preset" "$@" || status=$?
  mkdir -p "$logs"
  cp "$folder/Testing/Temporary/LastTest.log" "$logs/$name.log" || status=$?
  return "$status"
}

run_stage() {
  local stage=$1 preset=$1 label=gate at_once=$jobs began=$SECONDS count
  if [[ $stage == e2e ]]; then
    preset=asan label=e2e at_once=$((jobs + 1)) # they wait for each other's processes some of the time
  fi
  printf '\n--- stage %s\n' "$stage"
  build "$preset" flashcore_gate
  printf 'built in %d s\n' $((SECONDS - began))
  run_ctest "$stage" "$preset" -L "^$label\$" -j "$at_once"
  count=$(tests/executed.py "$stage" "$logs/$stage.log")
  printf '%s, %d s\n' "$count" $((SECONDS - began))
  executed+=("$count")
}

run_part() {
  case $1 in
    release | asan | tsan)
      local target=all
      [[ $1 != tsan ]] || target=flashcore_unit_tests
      build "$1" "$target" && run_ctest "stress-$1" "$1" -L '^(unit|stress)$' -E '^(e2e|fuzz)' -j "$jobs"
      ;;
    e2e) build release all && run_ctest stress-e2e release -L '^(stress|e2e)$' -R '^e2e' -j 1 ;;
    fuzz) build asan flashcore_gate && run_ctest stress-fuzz asan -L '^stress$' -R '^fuzz' -j "$jobs" ;;
    perf)
      build release flashcore-server flashcore flashcore_cpu_bench_c flashcore-grpc-api-bench &&
        { /usr/bin/python3 -B tests/bench/perf_gate.py || (($? == 77)); }
      ;;
    python) build release flashcore-server && tests/python_runtimes.sh ;;
    tidy) tests/tidy.py --all ;;
    *) build release all && run_ctest stress-named release -L '^stress$' -R "$1" ;;
  esac
}

run_stress() {
  local part status=0 began summary=()
  export FLASHCORE_TEST_SEED=${FLASHCORE_TEST_SEED:-$RANDOM}
  for part in "$@"; do
    printf '\n--- stress %s\n' "$part"
    began=$SECONDS
    if run_part "$part"; then
      summary+=("passed  $part, $((SECONDS - began)) s")
    else
      status=1
      summary+=("FAILED  $part, $((SECONDS - began)) s")
    fi
  done
  printf '\nstress, FLASHCORE_TEST_SEED=%s:\n' "$FLASHCORE_TEST_SEED"
  printf '  %s\n' "${summary[@]}"
  return "$status"
}

install_packages() {
  ensure_packages "${BUILD_PACKAGES[@]}" "${TEST_PACKAGES[@]}" "$@"
}

executed=()
case ${1-} in
  "")
    install_packages "${SANITIZER_PACKAGES[@]}"
    for stage in "${stages[@]}"; do run_stage "$stage"; done
    printf '\n%s; all passed\n' "$(printf '%s; ' "${executed[@]}" | sed 's/; $//')"
    ;;
  --stage)
    [[ $# -eq 2 && " ${stages[*]} " == *" $2 "* ]] || usage
    install_packages "${SANITIZER_PACKAGES[@]}"
    run_stage "$2"
    ;;
  --release)
    [[ $# -eq 1 ]] || usage
    install_packages
    build release all
    ctest --preset release -L '^(unit|gpu)$' -j "$jobs"
    ;;
  --torch) # gate: not of it
    [[ $# -eq 1 ]] || usage
    install_packages
    build release flashcore-server flashcore flashcore_python_proto flashcore-server-fake-gpu flashcore_fake_cuda
    ctest --preset release -L '^torch$' -j "$jobs" # gate: not of it
    ;;
  --stress)
    [[ $# -le 2 ]] || usage
    install_packages "${SANITIZER_PACKAGES[@]}" "${LINT_PACKAGES[@]}" "${STRESS_PACKAGES[@]}"
    if [[ $# -eq 2 ]]; then run_stress "$2"; else run_stress "${parts[@]}"; fi
    ;;
  *) usage ;;
esac
