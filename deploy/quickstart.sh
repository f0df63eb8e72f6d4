#!/usr/bin/env bash
# From a fresh Debian 12 to a running server: installs missing packages, builds, starts the server, checks
# its results against float64, measures it, prints its latency histogram, stops it.
#
#   deploy/quickstart.sh          all of that
#   deploy/quickstart.sh --keep   leaves the server running
#
# Fails if any step fails. A second run takes seconds.
set -euo pipefail
cd "$(dirname "$0")/.."
source deploy/packages.sh
source deploy/server_log.sh

keep=false
case "${1:-}" in
  "") ;;
  --keep) keep=true ;;
  *) echo "$0: unknown argument '$1' (want --keep)" >&2; exit 2 ;;
esac

step() { printf '\n--- %s\n' "$*"; }

step "packages"
ensure_packages "${BUILD_PACKAGES[@]}" curl
echo "all installed"

step "build"
# If tests/run.sh has configured the build folder, keep its configuration. In CI it then uses this build, and
# a warning is an error.
[[ -f build/build.ninja ]] ||
  cmake --preset release -DFLASHCORE_BUILD_TESTS=OFF -DFLASHCORE_BUILD_BENCHMARKS=OFF \
    -DFLASHCORE_WARNINGS_AS_ERRORS=${CI:+ON}
cmake --build --preset release --target flashcore-server flashcore

flashcore=build/client/cli/flashcore
work=$(mktemp -d)
socket=$work/flashcore.sock
server_log=$work/server.log
server=""
cleanup() {
  if [[ -n $server ]]; then
    kill -TERM "$server" 2>/dev/null || true
    wait "$server" || true
  fi
  rm -rf "$work"
}
trap cleanup EXIT

step "server"
# Port 0: the server takes a free port and logs it.
build/server/flashcore-server --listen=127.0.0.1:0 --listen="unix:$socket" \
  --metrics_listen=127.0.0.1:0 --log_format=json 2>"$server_log" &
server=$!
wait_for_server "$server" "$server_log" 60 || {
  echo "the server did not start:" >&2
  cat "$server_log" >&2
  exit 1
}
target=$(first_address "$server_log")
metrics=http://$(log_field "$server_log" metrics address)/metrics
device() { log_field "$server_log" device "$1"; }
echo "process $server, gRPC at $target and unix:$socket, metrics at $metrics"
echo "device: $(device device) ($(device name)), reason: $(device reason)"

step "health and info"
"$flashcore" health --target="$target"
"$flashcore" info --target="$target"

step "verify: random shapes, inline and resident K/V, up to 33,000 rows, against float64"
"$flashcore" verify --target="$target"

step "bench: B=1 H=8 S=512 D=64"
"$flashcore" bench --target="$target" --shape=1x8x512x64 --duration=4s --warmup=1s

step "resident K/V: decode steps of 32 forks of one prefix, compared with inline K/V"
"$flashcore" bench --target="$target" --mode=decode --shape=1x8x512x64 --sequences=32 \
  --fork_from_prefix=256 --compare_inline --duration=4s --warmup=1s

step "the server's own latency histogram"
curl -fsS "$metrics" | awk '
  # Prints upper bounds of the quantiles of flashcore_request_duration_seconds{rpc="Attend",outcome="ok"}.
  /^flashcore_request_duration_seconds_bucket{outcome="ok",rpc="Attend"/ {
    match($0, /le="[^"]*"/)
    bound[++n] = substr($0, RSTART + 4, RLENGTH - 5)
    count[n] = $NF
  }
  END {
    if (n == 0 || count[n] == 0) { print "no Attend request was recorded"; exit 1 }
    split("0.5 0.9 0.99 0.999", quantiles, " ")
    for (q = 1; q <= 4; ++q) {
      for (i = 1; i < n && count[i] < quantiles[q] * count[n]; ++i);
      printf "  p%-5g <= %s s\n", quantiles[q] * 100, bound[i]
    }
    printf "  of %d requests\n", count[n]
  }'

if $keep; then
  trap - EXIT
  step "left running"
  echo "stop it with: kill $server    (log: $server_log)"
else
  step "stop"
  kill -TERM "$server"
  wait "$server" || { echo "the server exited with status $?" >&2; cat "$server_log" >&2; exit 1; }
  server=""
  echo "drained, exit status 0"
fi
