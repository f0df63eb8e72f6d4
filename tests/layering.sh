#!/usr/bin/env bash
# Fails on an include that the layers do not allow. All headers of the packages sit in one folder, so
# the build alone does not stop a wrong one.
#
#   main -> transport -> core -> kernels        proto <- transport, client
#               \-> telemetry <- core           client/cli -> kernels (the float64 reference, to verify)
set -euo pipefail
cd "${1:-$(dirname "$0")/..}"

failures=0
# forbid FOLDER REGEX WHY: no #include in FOLDER may match REGEX.
forbid() {
  local found
  [[ -d $1 ]] || { echo "layering: no folder $1" >&2; exit 2; }
  found=$(grep -rnE --include='*.h' --include='*.cc' --include='*.cu' --include='*.cuh' \
    "^[[:space:]]*#[[:space:]]*include[[:space:]]*[<\"]($2)" "$1" || true)
  if [[ -n $found ]]; then
    printf 'layering: %s %s:\n%s\n' "$1" "$3" "$found"
    failures=1
  fi
}

forbid kernels 'grpc|google/|absl/|prometheus/|flashcore/v1|proto/|server/|client/|tests/' \
  'knows CUDA and the CPU, nothing else'
forbid server/telemetry 'grpc|google/|flashcore/v1|proto/|kernels/|server/(core|transport)/|server/[a-z_]+\.h|client/|tests/' \
  'knows neither gRPC nor what it measures'
forbid server/core 'grpc|google/|prometheus/|flashcore/v1|proto/|server/transport/|server/[a-z_]+\.h|client/|tests/' \
  'knows neither gRPC nor a generated type'
forbid server/transport 'prometheus/|kernels/(cpu|sm[0-9x]+|plan|reference)|server/[a-z_]+\.h|client/|tests/' \
  'is below main and above core'
forbid server 'kernels/reference|client/|tests/' 'never serves with the reference'
forbid proto 'prometheus/|kernels/|server/|client/|tests/' 'is used by server and client alike'
forbid client/cpp 'prometheus/|kernels/|server/|client/cli|tests/' 'knows only the contract'
forbid client/cli 'prometheus/|kernels/(cpu|sm[0-9x]+|plan|registry)|server/|tests/' \
  'knows the contract, the client library and the reference'

((failures == 0)) && echo "layering: ok"
exit $failures
