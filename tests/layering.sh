#!/usr/bin/env bash
# Fails on an include that goes against the layers. The headers of all packages are in /usr/include,
# so the build alone does not stop a wrong include.
#
#   server/: main -> transport -> engine -> device -> kv -> request -> memory -> base
#            A room may include itself, every room to its right, and telemetry.
#   proto <- transport, client        client/c -> client/cpp/local        client/cli -> kernels/reference (to verify)
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
  'may include only CUDA, Highway and itself'
forbid server/telemetry 'grpc|google/|flashcore/v1|proto/(wire|grpc)|kernels/|server/(memory|request|kv|device|engine|transport)|server/[a-z_]+\.h|client/|tests/' \
  'may not know gRPC or what it measures'

above='transport' # the rooms above the current one, as a regex
for room in engine device kv request memory base; do
  forbid "server/$room" "server/($above)/|server/[a-z_]+\.h" 'may not include a room above it'
  forbid "server/$room" 'grpc|google/|prometheus/|flashcore/v1|proto/|client/|tests/' \
    'may not know gRPC, a generated type or prometheus-cpp'
  above+="|$room"
done
forbid server/base 'server/telemetry/|kernels/' 'is the bottom room'
forbid server/transport 'prometheus/|kernels/(cpu|cuda|sm[0-9]+|plan)|server/[a-z_]+\.h|client/|tests/' \
  'may not include main, kernels or prometheus-cpp'
forbid server 'kernels/reference|client/|tests/' 'never serves with the reference'
forbid proto 'prometheus/|kernels/|server/|client/|tests/' 'is used by server and client alike'
forbid client/cpp 'prometheus/|kernels/|server/|client/cli|tests/' 'knows only the contract'
forbid client/c 'grpc|prometheus/|kernels/|server/|client/cpp/[a-z_]+\.h|client/cli|tests/' \
  'knows only the local socket'
forbid client/cli 'prometheus/|kernels/(cpu|cuda|sm[0-9]+|plan|registry)|server/|tests/' \
  'knows the contract, the client library and the reference'

((failures == 0)) && echo "layering: ok"
exit $failures
