#!/usr/bin/env bash
# Runs the Python package with the oldest and the newest numpy, grpcio and protobuf that pyproject.toml allows, in
# each Python here: its tests without a server, and its examples against build/'s server. Then mypy. All of it comes
# from PyPI, some tens of MB for each environment.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
server=
trap '[[ -z $server ]] || kill "$server"; rm -rf "$work"' EXIT

cp -r client/python proto "$work"
package=$work/python
mv "$work/proto" "$package/"
build/server/flashcore-server --listen="unix:$work/server" --metrics_listen= 2>"$work/log" &
server=$!
export FLASHCORE_TARGET=unix:$work/server

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
    "$venv/bin/python" -B tests/client/python_client_test.py
    for example in merge beam speculative; do
      "$venv/bin/python" -B "client/python/examples/$example.py"
    done
    tried=$((tried + 1))
  done
  "$work/uv/bin/uv" --quiet pip install --python "$venv" mypy
  (cd "$package" && "$venv/bin/mypy")
done
((tried > 0))
