#!/usr/bin/env bash
# Runs the linters beside pytest, and prints what they found after it. Arguments go to pytest.
set -uo pipefail
cd "$(dirname "$0")/.."

lint_log="$(mktemp)"
set -m # the linters get a process group of their own, so that an interrupt ends all of them
scripts/lint.sh >"$lint_log" 2>&1 &
lint=$!
set +m
trap 'kill -TERM -- "-$lint" 2>/dev/null; rm -f "$lint_log"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
.venv/bin/python -m pytest "$@"
tests_status=$?
wait "$lint"
lint_status=$?
cat "$lint_log"
[ "$lint_status" -eq 0 ] && exit "$tests_status"
echo "make lint failed" >&2
exit "$lint_status"
