#!/usr/bin/env bash
# Makes .venv hold what a level needs, exactly as locked: `run` (what `baton up` uses) or `dev` (everything).
# A stamp in .venv, keyed on all that decides its contents, lets a second call return at once.
set -euo pipefail
cd "$(dirname "$0")/.."

level="${1:-run}"
torch="${TORCH:-torch==2.13.0}"
case "$level" in
    run) locks=(requirements/worker.txt requirements/build.txt) ;;
    dev) locks=(requirements/dev.txt requirements/proto.txt) ;;
    *) echo "usage: $0 [run|dev]" >&2; exit 2 ;;
esac

key="$( { cat requirements/*.txt pyproject.toml hatch_build.py scripts/install.sh; echo "$torch $PWD"; } | sha256sum | cut -c1-16)"
is_installed() { [ -e ".venv/.baton-dev-$key" ] || [ -e ".venv/.baton-$level-$key" ]; }
if is_installed; then exec .venv/bin/python -m scripts.build_kernels; fi

# Two makes at once must not install over each other; the second finds the first one's stamp.
if command -v flock >/dev/null; then
    exec 9>.venv.lock
    flock 9
    if is_installed; then exit 0; fi
fi

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "Baton needs Python 3.11 or 3.12 with the venv module (Debian: apt install python3-venv)." >&2
    echo "Name another interpreter with: make PYTHON=/path/to/python3.11 ..." >&2
    return 1
}

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python="$(find_python)"
    echo "creating .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi

pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input)
rm -f .venv/.baton-*
echo "installing $torch"
"${pip[@]}" "$torch"
for lock in "${locks[@]}"; do
    echo "installing $lock"
    "${pip[@]}" --no-deps --require-hashes -r "$lock"
done
"${pip[@]}" --no-deps --no-build-isolation --editable .
touch ".venv/.baton-$level-$key"
