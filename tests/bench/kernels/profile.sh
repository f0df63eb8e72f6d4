#!/usr/bin/env bash
# profile.sh BENCH_BINARY [SHAPE...]: reads hardware counters of flashcore-kernel-bench's kernels
# and prints pass or fail per check (profile_check.py). Needs Nsight Compute (ncu, or $NCU) and
# permission to read counters. Exit status: 0 if every check passed.
set -euo pipefail

if (($# == 0)); then
  echo "usage: $0 BENCH_BINARY [SHAPE...]" >&2
  exit 2
fi
bench=$1
shift
shapes=("$@")
((${#shapes[@]} > 0)) || shapes=(mission long canon_1 decode64)
ncu=${NCU:-ncu}
check="$(dirname "$0")/profile_check.py"

command -v "$ncu" >/dev/null || { echo "profile.sh: no $ncu: install Nsight Compute" >&2; exit 2; }
known=$("$ncu" --query-metrics) || { printf '%s\n' "$known" >&2; exit 2; }
metrics=$(python3 -B "$check" --metrics <<<"$known")

status=0
for shape in "${shapes[@]}"; do
  output=$("$ncu" --profile-from-start off --csv --page raw --print-units base \
    --metrics "$metrics" "$bench" --profile --shape="$shape") || {
    printf 'profile.sh: %s: ncu failed:\n%s\n' "$shape" "$output" >&2
    status=1
    continue
  }
  python3 -B "$check" "$shape" <<<"$output" || status=1
done
exit $status
