#!/usr/bin/env bash
# Runs the tests of a bundle on this machine's GPU. Prints one line per suite. tests/gpu_bundle.sh copies
# this file into the bundle as run_tests.sh.
#
#   run_tests.sh [LOGS]          every suite, with its output in LOGS/SUITE.log (logs/ beside this file)
#     --only REGEX               only the suites whose names match
#     --timeout SECONDS          time limit of one suite (300)
#     --memcheck                 only device_test, under compute-sanitizer memcheck
#
# Fails if a test fails, or if no test of a suite has run: without a GPU nothing passes. A suite that
# needs more GPUs than there are is skipped. The end-to-end tests need a python3 with grpcio, protobuf
# and numpy, which PYTHONPATH may name.
set -uo pipefail
here=$(realpath "$(dirname "$0")")
logs=$here/logs
only=""
seconds=300
memcheck=false
while (($#)); do
  case $1 in
    --memcheck) memcheck=true ;;
    --only | --timeout)
      [[ $# -ge 2 ]] || { echo "$0: $1 needs a value" >&2; exit 2; }
      if [[ $1 == --only ]]; then only=$2; else seconds=$2; fi
      shift
      ;;
    -*)
      echo "$0: unknown argument '$1' (want [LOGS], --only, --timeout, --memcheck)" >&2
      exit 2
      ;;
    *) logs=$(realpath -m "$1") ;;
  esac
  shift
done
mkdir -p "$logs"

readonly CUDA_CASES='*/sm*:*/cuda*' # the GoogleTest filter of tests/CMakeLists.txt
export FLASHCORE_SERVER=$here/flashcore-server FLASHCORE_CLI=$here/flashcore
export FLASHCORE_DEVICE_CLIENT=$here/flashcore-device-client
export FLASHCORE_TEST_DEVICE=${FLASHCORE_TEST_DEVICE:-cuda:0}
failures=0

# number LOG REGEX [GROUP]: the group in the last matching line; 0 if no line matches.
number() {
  local found
  found=$(sed -nE "s/$2/\\${3:-1}/p" "$1" | tail -n 1)
  echo "${found:-0}"
}

# Read the summaries of GoogleTest and unittest. unittest counts skipped tests as run.
count_skipped() {
  number "$1" '^(\[  SKIPPED \] |OK \(skipped=)([0-9]+).*' 2
}
count_passed() {
  local ran
  ran=$(number "$1" '^Ran ([0-9]+) tests? .*')
  if ((ran > 0)); then
    echo $((ran - $(count_skipped "$1")))
  else
    number "$1" '^\[  PASSED  \] ([0-9]+) test.*'
  fi
}
failed_names() {
  sed -nE -e 's/^\[  FAILED  \] ([^ ,]*\.[^ ,]*).*/\1/p' -e 's/^(FAIL|ERROR): ([^ ]+).*/\2/p' "$1" |
    sort -u | tr '\n' ' '
}

# run SUITE COMMAND...
run() {
  local suite=$1 log=$logs/$1.log status=0 begin=$SECONDS passed skipped
  shift
  timeout -k 10 "$seconds" "$@" >"$log" 2>&1 </dev/null || status=$?
  passed=$(count_passed "$log")
  skipped=$(count_skipped "$log")
  if ((status == 0 && passed > 0)); then
    echo "$suite: PASSED $passed, skipped $skipped ($((SECONDS - begin)) s)"
    return
  fi
  if ((status == 77)); then
    echo "$suite: not run: $(tail -n 1 "$log")"
    return
  fi
  failures=$((failures + 1))
  ((status != 0)) || status="0, but no test ran"
  echo "$suite: FAILED $(failed_names "$log")(exit status $status; $log)"
}

if $memcheck; then
  PATH=$PATH:/usr/local/cuda/bin
  run memcheck_device_test compute-sanitizer --tool memcheck --error-exitcode 99 \
    "$here/device_test" --gtest_filter="$CUDA_CASES"
  exit $((failures > 0))
fi
suites=0
for test in "$here"/*_test "$here"/e2e/*_test.py; do
  suite=$(basename "$test" .py)
  [[ $suite =~ $only ]] || continue
  suites=$((suites + 1))
  case $test in
    *.py) run "$suite" python3 -B "$test" ;;
    *) run "$suite" "$test" --gtest_filter="$CUDA_CASES" ;;
  esac
done
((suites > 0)) || { echo "$0: no suite matches '$only'" >&2; exit 2; }
exit $((failures > 0))
