#!/usr/bin/env bash
# Validates FlashCore on a GPU machine and writes one report: GPU tests, CUDA kernel times against the
# published record, hardware counters, the L2 window, and the server over TCP and a Unix socket.
#
#   deploy/l4_validate.sh                   builds for the GPU of this machine, then runs all steps
#   deploy/l4_validate.sh --bundle FOLDER   uses a bundle of tests/gpu_bundle.sh: installs nothing
#     --report FOLDER                       folder for report.md and the logs (build/validate);
#                                           replaces an existing report
#     --quick                               a selection of steps, at most 4 minutes
#
# FLASHCORE_TEST_DEVICE selects the GPU for the tests and the server (cuda:0). The benchmarks use the
# first GPU that CUDA_VISIBLE_DEVICES leaves visible.
# Exit status: 0 if no step failed. A step that cannot run here is skipped; the report says why.
set -uo pipefail
fail() { echo "$0: $*" >&2; exit 2; }

root=$(realpath "$(dirname "$0")/..")
source "$root/deploy/server_log.sh"
bundle=""
report=$root/build/validate
quick=false
while (($#)); do
  case $1 in
    --quick) quick=true ;;
    --bundle | --report)
      [[ $# -ge 2 ]] || fail "$1 needs a value"
      if [[ $1 == --bundle ]]; then bundle=$(realpath -m "$2"); else report=$(realpath -m "$2"); fi
      shift
      ;;
    *) fail "unknown argument '$1' (want --bundle FOLDER, --report FOLDER, --quick)" ;;
  esac
  shift
done
[[ -z $bundle || -x $bundle/run_tests.sh ]] || fail "$bundle is not a bundle of tests/gpu_bundle.sh"
if [[ -n $(ls -A "$report" 2>/dev/null) ]]; then
  [[ -e $report/report.md ]] || fail "$report exists and is not a report"
  rm -rf "$report"
fi
mkdir -p "$report" || fail "cannot write to $report"

readonly QUICK_SECONDS=200 # the rest of the 4 minutes is to start and drain the server
readonly GPU_FACTS=index,name,driver_version,compute_cap,memory.total,power.limit,clocks.max.sm,clocks.max.memory
readonly GPU_SAMPLE=timestamp,index,clocks.sm,clocks.mem,temperature.gpu,power.draw,utilization.gpu
device=${FLASHCORE_TEST_DEVICE:-cuda:0}
work=$(mktemp -d)
rows=()     # rows of the result table
sections=() # steps with logs, in order
failures=0
server=""
running=""
sampler=""

# record STEP RESULT SECONDS DETAIL
record() {
  rows+=("| $1 | $2 | $3 | ${4//|//} |")
  echo "$1: $2 ($3 s) $4"
  [[ $2 != FAILED ]] || failures=$((failures + 1))
}
skip() { record "$1" skipped 0 "$2"; }

# limit SECONDS: the time limit of a step, or less if --quick leaves less.
limit() {
  local left=$((QUICK_SECONDS - SECONDS))
  if $quick && ((left < $1)); then echo "$left"; else echo "$1"; fi
}

# step NAME SECONDS COMMAND...: runs the command with its output in NAME.log. The table gets what the
# sed script $says prints of it, or without $says its last line. A step that fails with output that
# matches $cannot is skipped, not failed.
step() {
  local name=$1 seconds log=$report/$1.log status=0 begin=$SECONDS result=FAILED detail
  seconds=$(limit "$2")
  ((seconds > 0)) || { skip "$name" "--quick: no time left"; return 1; }
  sections+=("$name")
  timeout --kill-after=5 "$seconds" "${@:3}" >"$log" 2>&1 </dev/null &
  running=$!
  wait "$running" || status=$?
  running=""
  detail=$(grep -v '^ *$' "$log" | tail -n 1)
  if ((status == 0)); then
    result=passed
    [[ -z ${says:-} ]] || detail=$(sed -nE "$says" "$log" | paste -sd ' ')
  elif [[ -n ${cannot:-} ]] && grep -q "$cannot" "$log"; then
    result=skipped detail=$(grep "$cannot" "$log" | tail -n 1)
  elif ((status == 124 || status == 137)); then
    detail="not done after $seconds s"
    ((seconds == $2)) || result=skipped # cut short by --quick
  else
    detail="exit status $status: $detail"
  fi
  record "$name" "$result" $((SECONDS - begin)) "$detail"
  return "$status"
}

build() {
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1) ||
    fail "no GPU to build for: nvidia-smi fails; use --bundle for programs built elsewhere"
  bundle=$root/build/gpu
  (
    set -e
    cd "$root"
    source deploy/packages.sh
    ensure_packages "${BUILD_PACKAGES[@]}" "${TEST_PACKAGES[@]}"
    cmake --preset release -B build-validate "-DCMAKE_CUDA_ARCHITECTURES=${capability/./}-real"
    tests/gpu_bundle.sh "$bundle" --build build-validate
  ) || fail "the build failed"
}

# Writes GPU, driver and host to machine.txt, and starts to sample the clocks.
describe_machine() {
  {
    date -u '+date: %Y-%m-%d %H:%M UTC'
    echo "commit: $(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)"
    echo "CPU: $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores"
    echo "system: $(uname -sr), $(ldd --version 2>&1 | head -n 1)"
    if command -v nvidia-smi >/dev/null; then
      nvidia-smi --query-gpu="$GPU_FACTS" --format=csv 2>&1
    else
      echo "no nvidia-smi; the logs of the benchmarks name the GPU"
    fi
  } >"$report/machine.txt"
  command -v nvidia-smi >/dev/null || return
  nvidia-smi --query-gpu="$GPU_SAMPLE" --format=csv,nounits --loop=2 \
    >"$report/clocks.csv" 2>&1 </dev/null &
  sampler=$!
}

run_tests() {
  local only=. names
  if $quick; then
    only='^(device|driver_calls|engine|kv_pages|transport)_test$'
    skip attention_test "--quick"
    skip end-to-end "--quick"
  elif ! python3 -c 'import google.protobuf, grpc, numpy' 2>"$work/python"; then
    names=$(cd "$bundle" && printf '%s|' *_test)
    only="^(${names%|})\$"
    skip end-to-end "needs Python with grpcio, protobuf and numpy: $(tail -n 1 "$work/python")"
  fi
  if $quick; then
    step tests 80 "$bundle/run_tests.sh" "$report/tests" --only "$only" --timeout 75
  else
    step tests 3600 "$bundle/run_tests.sh" "$report/tests" --only "$only" --timeout 900
  fi
}

# bench_kernels NAME FLAG...: times one kind of kernel and holds it against the record.
bench_kernels() {
  local name=$1
  shift
  step "kernels-$name" 600 "$bundle/flashcore-kernel-bench" --json="$report/kernels-$name.json" "$@" ||
    return
  command -v python3 >/dev/null || { skip "gate-$name" "no python3"; return; }
  step "gate-$name" 30 python3 -B "$root/tests/bench/kernels/gate.py" "$report/kernels-$name.json"
}

bench_all_kernels() {
  if $quick; then
    bench_kernels float16 --shape=mission --shape=long --shape=decode1 --shape=decode64
    return
  fi
  bench_kernels float16
  bench_kernels bfloat16 --dtype=bfloat16
  bench_kernels accumulate_float16 --accumulate=float16
  bench_kernels kv_float8 --kv_dtype=float8_e4m3
  bench_kernels kv_int8 --kv_dtype=int8
  bench_kernels kv_int8_qk_pv --kv_dtype=int8 --precision=int8_qk_pv
}

profile() {
  local shapes=() ncu
  ncu=$(command -v "${NCU:-ncu}" || command -v /usr/local/cuda/bin/ncu) ||
    { skip profile "no ncu: install Nsight Compute"; return; }
  command -v python3 >/dev/null || { skip profile "no python3"; return; }
  if $quick; then shapes=(mission); fi
  cannot=ERR_NVGPUCTRPERM NCU=$ncu step profile 900 \
    "$root/tests/bench/kernels/profile.sh" "$bundle/flashcore-kernel-bench" "${shapes[@]}"
}

l2_window() {
  local repeats=200
  if $quick; then repeats=20; fi
  cannot='keeps nothing persisting' step l2-window 600 "$bundle/flashcore-l2-window-bench" \
    --repeats="$repeats" --json="$report/l2-window.json" \
    --run="$(python3 -B "$root/tests/bench/kernels/run_info.py" || echo null)"
}

# Sets `target` and `socket`. Port 0: the server takes a free port and logs it.
start_server() {
  local log=$report/server.log
  socket=$work/flashcore.sock
  "$bundle/flashcore-server" --device="$device" --listen=127.0.0.1:0 --listen="unix:$socket" \
    --metrics_listen=127.0.0.1:0 --log_format=json >"$log" 2>&1 </dev/null &
  server=$!
  wait_for_server "$server" "$log" 60 ||
    { record server FAILED 0 "did not start: $(tail -n 1 "$log")"; return 1; }
  target=$(first_address "$log")
}

bench_server() {
  local cli=$bundle/flashcore cases=1000 duration=10s
  if $quick; then cases=100 duration=3s; fi
  says='s/^device +//p' step info 30 "$cli" info --target="$target"
  step health 30 "$cli" health --target="$target"
  step verify 300 "$cli" verify --target="$target" --cases="$cases"
  local transport to concurrency
  local says='s/^(attend|decode) +([0-9.]+) +[0-9.]+ +([0-9.]+) .*/p50 \2 us, p99 \3 us,/p
              s/^(attend|decode) +([0-9.]+ req.s),.*/\2/p'
  for transport in tcp unix; do
    to=$target
    [[ $transport == tcp ]] || to=unix:$socket
    for concurrency in 1 16; do
      step "mission-$transport-$concurrency" 120 "$cli" bench --target="$to" --duration="$duration" \
        --concurrency="$concurrency" --connections="$concurrency" --shape=1x8x512x64
      step "decode-$transport-$concurrency" 120 "$cli" bench --target="$to" --duration="$duration" \
        --concurrency="$concurrency" --connections="$concurrency" --mode=decode \
        --shape=1x32/8x4096x128
    done
  done
}

stop_server() {
  local status=0 begin=$SECONDS
  kill -TERM "$server" 2>/dev/null
  wait "$server" || status=$?
  server=""
  if ((status == 0)); then
    record drain passed $((SECONDS - begin)) ""
  else
    record drain FAILED $((SECONDS - begin)) "exit status $status: $(tail -n 1 "$report/server.log")"
  fi
}

# Prints the range of SM clocks in the samples with a busy GPU.
busy_clocks() {
  awk -F', *' '$7 + 0 >= 50 {
      if (!n++) low = high = $3
      if ($3 + 0 < low + 0) low = $3
      if ($3 + 0 > high + 0) high = $3
    }
    END { if (n) print "SM clock while busy: " low " to " high " MHz" }' "$report/clocks.csv"
}

write_report() {
  local section
  {
    echo "# FlashCore on this machine"
    printf '\n```\n%s\n' "$(cat "$report/machine.txt")"
    if [[ -e $report/clocks.csv ]]; then busy_clocks; fi
    printf '```\n\n'
    if ((failures)); then echo "**$failures steps failed.**"; else echo "No step failed."; fi
    printf '\n| step | result | s | |\n| --- | --- | ---: | --- |\n'
    printf '%s\n' "${rows[@]}"
    for section in "${sections[@]}"; do
      printf '\n## %s\n\n```\n%s\n```\n' "$section" "$(tail -n 100 "$report/$section.log")"
    done
  } >"$report/report.md"
}

# Runs at every exit: stops what runs and writes the report.
finish() {
  local process
  for process in $running $server $sampler; do
    kill "$process" && wait "$process"
  done 2>/dev/null
  write_report
  rm -rf "$work"
  echo "$report/report.md: $failures of ${#rows[@]} steps failed, in $SECONDS s"
}

[[ -n $bundle ]] || build
trap 'record run FAILED "$SECONDS" "interrupted"; exit 1' INT TERM
trap finish EXIT
SECONDS=0
describe_machine
run_tests
bench_all_kernels
if start_server; then
  bench_server
  stop_server
fi
l2_window
profile
exit $((failures > 0))
