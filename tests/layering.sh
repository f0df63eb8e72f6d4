#!/usr/bin/env bash
# Fails on an include, or a forward declaration, that goes against the layers. The headers of all
# packages are in /usr/include, so the build alone does not stop a wrong include.
#
#   server/: main -> transport -> engine -> device -> kv -> access -> request -> memory -> sharing -> base
#            A layer may include itself, every layer to its right, and telemetry.
#   server/transport: server.h -> grpc/, local/ -> rpc/        grpc/: -> grpc/guard/
#   proto <- transport, client        client/c, client/cpp -> client/local        client/bench -> client/cli, kernels/oracle (to verify)
#   client/include, what users see, includes nothing that is not installed. client/c knows flashcore/c.h of it.
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

forbid kernels 'grpc|google/|absl/|prometheus/|flashcore/|proto/|server/|client/|tests/' \
  'may include only CUDA, Highway and itself'
for folder in kernels/{cpu,cuda,plan,sm80}; do
  forbid $folder 'kernels/oracle/' 'is what serves'
done
forbid kernels/oracle 'kernels/(cpu|cuda|sm[0-9]+|plan/|registry)' 'knows no kernel'
forbid server/telemetry 'grpc|google/|flashcore/|proto/(grpc/|wire/(fields|frames|message|ring))|kernels/|server/(sharing|memory|request|access|kv|device|engine|transport)|server/[a-z_]+\.h|client/|tests/' \
  'may not know gRPC or what it measures'

# forbid_hidden FOLDER BELOW...: a class that FOLDER declares, it or a folder of BELOW defines.
forbid_hidden() {
  local name
  for name in $(grep -rhoE --include='*.h' '^(class|struct) [A-Za-z]+;' "$1" | grep -oE '[A-Za-z]+;' | tr -d ';' | sort -u); do
    grep -rqE --include='*.h' "^(class|struct) $name( final)?( :| \\{|$)" "$@" && continue
    echo "layering: $1 declares $name, which is defined above it"
    failures=1
  done
}

above='transport' # the layers above the current one, as a regex
below=(transport engine device kv access request memory sharing base)
forbid_hidden "${below[@]/#/server/}" server/telemetry
for layer in "${below[@]:1}"; do
  below=("${below[@]:1}") # from this layer down
  forbid "server/$layer" "server/($above)/|server/[a-z_]+\.h" 'may not include a layer above it'
  forbid "server/$layer" 'grpc|google/|prometheus/|flashcore/|proto/|client/|tests/' \
    'may not know gRPC, a generated type or prometheus-cpp'
  forbid_hidden "${below[@]/#/server/}" server/telemetry
  above+="|$layer"
done
forbid server/transport/rpc 'server/transport/(server\.h|grpc/|local/)' 'is what all transports share'
for neutral in server/transport/{rpc,local} proto/wire; do
  forbid "$neutral" 'grpc(pp)?/|proto/grpc/|.*\.grpc\.pb\.h' 'knows no gRPC'
done
forbid server/transport/grpc/guard 'server/transport/grpc/[a-z_]+\.h' 'stands between the network and gRPC'
for transport in grpc:local local:grpc; do
  forbid "server/transport/${transport%:*}" "server/transport/(${transport#*:}/|server\.h)" \
    'knows no other transport'
done
forbid server/base 'server/telemetry/|kernels/' 'is the bottom layer'
forbid server/transport 'prometheus/|kernels/(cpu|cuda|sm[0-9]+|plan)|server/[a-z_]+\.h|client/|tests/' \
  'may not include main, kernels or prometheus-cpp'
forbid server 'kernels/oracle|client/|flashcore/[a-z_]+\.h|tests/' 'never serves with the oracle'
forbid proto 'prometheus/|kernels/|server/|client/|flashcore/[a-z_]+\.h|tests/' 'is used by server and client alike'
forbid client/include 'prometheus/|kernels/|server/|client/|proto/|tests/|flashcore/v1/local|.*\.grpc\.pb\.h' \
  'is public: it may include only what is installed with it, and gRPC and Abseil'
forbid client/cpp 'prometheus/|kernels/|server/|client/(cli|bench)|tests/' 'knows only the contract'
for folder in client/c client/local; do
  forbid $folder 'grpc|google/|absl/|proto/grpc/|flashcore/v1/|prometheus/|kernels/|server/|client/cpp/|flashcore/[a-z_]{2,}\.h|client/(cli|bench)|tests/' \
    'knows only the local socket, and needs nothing but the C++ runtime'
done
forbid client/local 'client/c/|flashcore/' 'is below the libraries'
for transport in grpc:local local:grpc; do
  forbid "client/cpp/${transport%:*}" "client/cpp/${transport#*:}/" 'knows no other transport'
done
if grep -nE '#include "client/cpp/(grpc|local)/' client/cpp/*.h client/cpp/*.cc | grep -v '^client/cpp/connection.cc:'; then
  echo 'layering: client/cpp knows its transports by transport.h alone'
  failures=1
fi
forbid client/cli 'prometheus/|kernels/(cpu|cuda|sm[0-9]+|plan|registry|oracle)|server/|tests/' \
  'knows the contract and the client library'
if grep -n '#include "client/bench/' client/cli/*.h client/cli/*.cc | grep -v '^client/cli/main.cc:'; then
  echo 'layering: only main.cc of client/cli knows client/bench'
  failures=1
fi
forbid client/bench 'prometheus/|kernels/(cpu|cuda|sm[0-9]+|plan|registry)|server/|tests/' \
  'knows the contract, the client library, the command line and the oracle'

((failures == 0)) && echo "layering: ok"
exit $failures
