#!/usr/bin/env bash
# Installs missing packages, builds, and runs the tests.
#
#   tests/run.sh                 every test, release build, in build/
#   tests/run.sh --asan          with AddressSanitizer, LeakSanitizer and UBSan, in build-asan/
#   tests/run.sh --tsan          with ThreadSanitizer, in build-tsan/: only tests without gRPC, because
#                                Debian's gRPC is not instrumented
#   tests/run.sh --filter REGEX  only the tests whose name matches
#
# The sanitizer builds use clang, which also checks the thread-safety annotations.
set -euo pipefail
cd "$(dirname "$0")/.."
source deploy/packages.sh

sanitizer=""
filter=()
while (($#)); do
  case $1 in
    --asan) sanitizer=address ;;
    --tsan) sanitizer=thread ;;
    --filter)
      [[ $# -ge 2 ]] || { echo "$0: --filter needs a regular expression" >&2; exit 2; }
      filter=(-R "$2")
      shift
      ;;
    *) echo "$0: unknown argument '$1' (want --asan, --tsan, --filter REGEX)" >&2; exit 2 ;;
  esac
  shift
done

ensure_packages "${BUILD_PACKAGES[@]}" "${TEST_PACKAGES[@]}"
case $sanitizer in
  "") preset=release ;;
  address) preset=asan ;;
  thread) preset=tsan ;;
esac
[[ -z $sanitizer ]] || ensure_packages "${SANITIZER_PACKAGES[@]}"

cmake --preset "$preset"
cmake --build --preset "$preset"
ctest --preset "$preset" "${filter[@]}"
