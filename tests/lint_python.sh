#!/usr/bin/env bash
# Runs flake8 with .flake8 over every Python file. Fails on any finding.
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files -z '*.py' | xargs -0 flake8
echo "python: ok"
