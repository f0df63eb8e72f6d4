#!/usr/bin/env bash
# Fails if clang-format would change a source file.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files -z '*.h' '*.cc' '*.cu' '*.cuh' '*.proto' | xargs -0 clang-format --dry-run --Werror
echo "format: ok"
