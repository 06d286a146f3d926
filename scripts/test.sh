#!/usr/bin/env bash
# Runs the linters beside pytest, and prints what they found after it. Arguments go to pytest.
# Tests whose body saw nothing wrong and that failed all the same (tests/lateness.py) are named and run three times more,
# alone; each time must pass.
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
    printf 'late or unclean beside other tests, three times more alone: %s\n' "${late[@]}" >&2
    for _ in 1 2 3; do
        .venv/bin/python -m pytest "${late[@]}"
        tests_status=$?
        [ "$tests_status" -eq 0 ] || break
    done
fi
[ "$lint_status" -eq 0 ] && exit "$tests_status"
echo "make lint failed" >&2
exit "$lint_status"
