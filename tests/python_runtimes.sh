#!/usr/bin/env bash
# Runs the Python package with the oldest and the newest numpy, grpcio and protobuf that pyproject.toml allows, in
# each Python here: its tests without a server, and its examples against build/'s server, over gRPC and the local
# socket. Then mypy over the package, and mypy and pyright over code that calls it. All of it comes from PyPI, some
# tens of MB for each environment; pyright brings Node.js, 61 MB.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
server=
trap '[[ -z $server ]] || kill "$server"; rm -rf "$work"' EXIT

cp -r client proto "$work"
package=$work/client/python
build/server/flashcore-server --listen="unix:$work/server" --local_listen="$work/local" --metrics_listen= 2>"$work/log" &
server=$!

python3 -m venv "$work/uv"
"$work/uv/bin/pip" install --quiet uv
tried=0
for version in 3.10 3.11 3.12 3.13; do
  python=python$version
  "$python" -c "" 2>/dev/null || { echo "skipped Python $version: not here" && continue; }
  for age in lowest-direct highest; do
    venv=$work/$version-$age
    "$work/uv/bin/uv" --quiet venv --python "$python" "$venv"
    "$work/uv/bin/uv" --quiet pip install --python "$venv" --resolution "$age" --only-binary numpy --only-binary grpcio \
      --only-binary protobuf "$package"
    echo "--- Python $version, $age: $("$venv/bin/python" -m flashcore show-config | tail -n 3 | paste -sd ' ')"
    for test in client credentials local sequences; do
      "$venv/bin/python" -B "tests/client/python_${test}_test.py"
    done
    for example in merge beam speculative; do
      for target in "unix:$work/server" "local:$work/local"; do
        FLASHCORE_TARGET=$target "$venv/bin/python" -B "client/python/examples/$example.py"
      done
    done
    tried=$((tried + 1))
  done
  "$work/uv/bin/uv" --quiet pip install --python "$venv" mypy 'pyright[nodejs]'
  (cd "$package" && "$venv/bin/mypy")
  for checker in mypy pyright; do
    FLASHCORE_TYPE_CHECKER=$checker "$venv/bin/python" -B tests/client/python_types_test.py
  done
done
((tried > 0))
