#!/usr/bin/env bash
# Makes .venv hold what a level needs, exactly as locked: `run` (what `baton up` uses) or `dev` (everything).
# A stamp in .venv, keyed on all that decides its contents, lets a second call return at once. pip writes to a log file.
set -euo pipefail
cd "$(dirname "$0")/.."

level="${1:-run}"
torch="${TORCH:-torch==2.13.0}"
cpu_index="${TORCH_INDEX_URL-https://download.pytorch.org/whl/cpu}"
log="${INSTALL_LOG:-.venv/install.log}"
# What the default index's build of torch needs, one for CUDA 13; the packages of the extra `gpu` are for the same CUDA.
oldest_driver=580

# The version of NVIDIA's driver whose GPU can be reached; empty without one.
nvidia_driver() {
    local loaded="${NVIDIA_DRIVER_FILE:-/proc/driver/nvidia/version}"
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | grep -m 1 -oE '^[0-9]+\.[0-9.]+' || true
    elif [ -r "$loaded" ]; then
        grep -m 1 -oE '[0-9]+\.[0-9.]+' "$loaded" || true
    fi
}

driver="$(nvidia_driver)"
build=cpu
if [ -n "$driver" ] && { [ "${driver%%.*}" -ge "$oldest_driver" ] || [[ "$torch" == *+* ]]; }; then build=cuda; fi
case "$level" in
    run) locks=(requirements/worker.txt) ;;
    dev) locks=(requirements/dev.txt) ;;
    *) echo "usage: $0 [run|dev]" >&2; exit 2 ;;
esac
# A build of torch that was named (2.13.0+cu126) may be for another CUDA, so it comes without the extra.
if [ "$build" = cuda ] && [[ "$torch" != *+* ]]; then
    case "$level" in
        run) locks=(requirements/gpu.txt) ;;
        dev) locks+=(requirements/gpu.txt) ;;
    esac
fi
case "$level" in
    run) locks+=(requirements/build.txt) ;;
    dev) locks+=(requirements/proto.txt) ;;
esac

key="$( { cat requirements/*.txt pyproject.toml hatch_build.py scripts/install.sh; echo "$torch $build $PWD"; } \
    | sha256sum | cut -c1-16)"
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
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "Baton needs Python 3.11, 3.12, 3.13 or 3.14 with the venv module (Debian: apt install python3-venv)." >&2
    echo "Name another interpreter with: make PYTHON=/path/to/python3.11 ..." >&2
    return 1
}

# step WORDS... -- COMMAND...: a line on the terminal, the output in the log; the end of the log if the command fails.
step() {
    local words=() began=$SECONDS
    while [ "$1" != -- ]; do words+=("$1"); shift; done
    shift
    printf '%s ... ' "${words[*]}"
    if ! "$@" >>"$log" 2>&1; then
        echo "failed"
        return 1
    fi
    echo "$((SECONDS - began)) s"
}

give_up() {
    tail -n 15 "$log" >&2
    echo "The installation failed; everything that pip wrote is in $log." >&2
    exit 1
}

# Without a GPU the default index would bring gigabytes of CUDA. torch's own index has a build for the CPU.
install_torch() {
    if [ "$build" = cpu ] && [ -n "$driver" ]; then
        echo "the NVIDIA driver $driver is older than $oldest_driver, which $torch needs: Baton will run on the CPU."
        echo "Update the driver, or name a build for it: make TORCH=torch==2.13.0+cu126, with its index in pip's settings."
    fi
    if [ -z "$cpu_index" ] || [ "$build" = cuda ]; then
        step "installing $torch" -- "${pip[@]}" "$torch"
        return
    fi
    step "installing $torch for the CPU" -- "${pip[@]}" --retries 1 --timeout 30 --index-url "$cpu_index" "$torch" && return
    echo "torch's index for CPUs did not do; the default index may bring a build with CUDA"
    step "installing $torch" -- "${pip[@]}" "$torch"
}

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python="$(find_python)"
    echo "creating .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi

pip=(.venv/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off)
rm -f .venv/.baton-*
: >"$log"
install_torch || give_up
for lock in "${locks[@]}"; do
    if [ "$lock" = requirements/proto.txt ]; then
        # The pinned protoc has no wheel for the newest Pythons and compiles for many minutes; only `make proto` needs it.
        step "installing $lock" -- "${pip[@]}" --only-binary :all: --no-deps --require-hashes -r "$lock" \
            || echo "no protoc here, which \`make proto\` alone needs; the reason is in $log"
        continue
    fi
    step "installing $lock" -- "${pip[@]}" --no-deps --require-hashes -r "$lock" || give_up
done
step "installing Baton and compiling its kernels" -- "${pip[@]}" --no-deps --no-build-isolation --editable . || give_up
touch ".venv/.baton-$level-$key"
# Last, so that a missing compiler or a time limit is the last thing that is read.
.venv/bin/python -m scripts.build_kernels
if ! .venv/bin/python -c 'import sys; from baton.services.cli.processes.local_redis import find_server; sys.exit(find_server() is None)'; then
    .venv/bin/python -c 'from baton.services.cli.processes.local_redis import HOW_TO_GET_ONE as how; print(f"No redis-server is here, which `baton up` needs: {how}.")'
fi
