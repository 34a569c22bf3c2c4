#!/usr/bin/env bash
# Linters, types, import layers, tests: what CI runs. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
mypy
lint-imports
pytest "$@"
