#!/usr/bin/env bash
# Runs the linters beside pytest, and prints what they found after it. Arguments go to pytest.
# Tests that failed only because they waited in vain (tests/lateness.py) run once more, alone, and are named.
set -uo pipefail
cd "$(dirname "$0")/.."

lint_log="$(mktemp)"
LATE_TESTS_FILE="$(mktemp)"
export LATE_TESTS_FILE
set -m # the linters get a process group of their own, so that an interrupt ends all of them
scripts/lint.sh >"$lint_log" 2>&1 &
lint=$!
set +m
trap 'kill -TERM -- "-$lint" 2>/dev/null; rm -f "$lint_log" "$LATE_TESTS_FILE"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
.venv/bin/python -m pytest "$@"
tests_status=$?
wait "$lint"
lint_status=$?
cat "$lint_log"
mapfile -t late <"$LATE_TESTS_FILE"
if [ "$tests_status" -eq 1 ] && [ "${#late[@]}" -gt 0 ]; then
    printf 'late beside other tests, once more alone: %s\n' "${late[@]}" >&2
    .venv/bin/python -m pytest "${late[@]}"
    tests_status=$?
fi
[ "$lint_status" -eq 0 ] && exit "$tests_status"
echo "make lint failed" >&2
exit "$lint_status"
