#!/usr/bin/env bash
# l2_window_counters.sh BENCH_BINARY [HOT_MIB [COLD_MIB]]: where decode launches over HOT_MIB (16) of
# hot K/V read it from, by hardware counters: alone, and after COLD_MIB (256) of cold K/V without an
# L2 window and with one. HOT_MIB is at most 16, or a multiple of 16. Needs Nsight Compute (ncu, or
# $NCU) and the right to read counters.
#
# The bench profiles its hot launches only, each alone on the device, cold launches before it. ncu
# must not touch the cache in between: nothing is flushed (--cache-control none), and no launch is
# replayed on a cache that its own first run has warmed: if the counters take several passes, each
# is a run of the whole program (--replay-mode application).
#
# "not DRAM" is the share of the K/V bytes that DRAM did not deliver: what was read from L2. "L2 hit"
# is hits per sector looked up; where the L2 has two halves, a sector that the far one has counts as
# looked up in both.
set -euo pipefail

if (($# < 1 || $# > 3)); then
  echo "usage: $0 BENCH_BINARY [HOT_MIB [COLD_MIB]]" >&2
  exit 2
fi
bench=$1
hot_mib=${2:-16}
cold_mib=${3:-256}
ncu=${NCU:-ncu}
export PYTHONPATH=$(dirname "$0")/kernels # profile_check.py, which reads ncu's output
metrics=lts__t_sectors_op_read_lookup_hit.sum,lts__t_sectors_op_read.sum
metrics+=,dram__bytes_read.sum,gpu__time_duration.sum

command -v "$ncu" >/dev/null || {
  echo "l2_window_counters.sh: no $ncu: install Nsight Compute" >&2
  exit 2
}

# Medians over the launches.
summarise='
import profile_check, statistics, sys
mode, kv_bytes, metrics = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",")
try:
    launches = profile_check.parse(sys.stdin.read(), metrics)
except profile_check.NothingToJudge as error:
    sys.exit(f"{mode}: {error}")
def median(metric):
    return statistics.median(launch[metric] for launch in launches)
hits = median("lts__t_sectors_op_read_lookup_hit.sum")
reads = median("lts__t_sectors_op_read.sum")
dram = median("dram__bytes_read.sum")
us = median("gpu__time_duration.sum") / 1e3
print(f"{mode:8} {len(launches):8} {kv_bytes / 2**20:8.0f} {dram / 2**20:9.2f} "
      f"{100 * (1 - dram / kv_bytes):8.1f}% {100 * hits / reads:6.1f}% {us:8.2f}")
'

printf '%-8s %8s %8s %9s %9s %7s %8s\n' window launches 'K/V MiB' 'DRAM MiB' 'not DRAM' 'L2 hit' us
status=0
for mode in alone without with; do
  output=$("$ncu" --profile-from-start off --cache-control none --clock-control none \
    --replay-mode application --csv --page raw --print-units base --metrics "$metrics" \
    "$bench" --once="$mode" --hot_mib="$hot_mib" --cold_mib="$cold_mib") || {
    printf 'l2_window_counters.sh: %s: ncu failed:\n%s\n' "$mode" "$output" >&2
    status=1
    continue
  }
  python3 -B -c "$summarise" "$mode" $((hot_mib << 20)) "$metrics" <<<"$output" || status=1
done
exit $status
