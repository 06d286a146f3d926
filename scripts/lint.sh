#!/usr/bin/env bash
# Style, types and import rules; the first failure ends it.
set -euo pipefail
renice -n 10 $$ >/dev/null # beside tests, which wait for processes
cd "$(dirname "$0")/.."

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports
