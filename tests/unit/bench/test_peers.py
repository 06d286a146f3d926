"""Measuring other servers: the same model for each, how they are started, and whose gain a ratio is."""

import itertools
import json
import subprocess

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench.peers.compare import LOADS, arm_name, findings_of, measure
from bench.peers.make_gguf import name_in_gguf, read_tensors
from bench.peers.servers import baton, llama, vllm
from bench.random_models import save_random_model
from bench.rotations import Block
from bench.shapes import Shape

SHAPE = Shape("qwen2", 300, 32, 48, 2, 4, 2, 8, 256, 1e4)


def test_tensors_for_llama_are_the_models(tmp_path):
    directory = save_random_model(SHAPE, tmp_path / "model")
    expected = load_file(directory / "model.safetensors")
    read = {tensor.name: tensor.bits for tensor in read_tensors(directory / "model.safetensors")}
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        bits = tensor.view(torch.uint16).numpy()
        assert np.array_equal(read[name], bits)
    names = {name_in_gguf(name) for name in read}
    assert len(names) == len(read)
    assert {"token_embd.weight", "output_norm.weight", "blk.1.attn_q.bias", "blk.0.ffn_down.weight"} <= names


def test_a_tensor_of_another_type_is_refused(tmp_path):
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match="x is F32"):
        list(read_tensors(path))


def test_every_server_gets_the_same_cores(tmp_path):
    servers = [
        baton(tmp_path, 1001, (0, 3), "auto"),
        vllm(tmp_path, 1002, (0, 3), "bfloat16", tmp_path),
        llama(tmp_path / "x.gguf", 1003, (0, 3), tmp_path),
    ]
    for server in servers:
        assert server.command[:3] == ("taskset", "--cpu-list", "0,3")
        assert any(str(server.port) in word for word in server.command)
    assert servers[1].variables["VLLM_CPU_OMP_THREADS_BIND"] == "0,3"
    assert servers[2].command[servers[2].command.index("--n_threads") + 1] == "2"


def test_no_server_sees_a_prompt_twice(tmp_path, monkeypatch):
    seeds: list[str] = []

    def note(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        seeds.append(command[command.index("--seed") + 1])
        return subprocess.CompletedProcess(command, 1, stderr="enough")

    monkeypatch.setattr("subprocess.run", note)
    for server in (baton(tmp_path, 1, (0,), "auto"), vllm(tmp_path, 2, (0,), "auto", tmp_path)):
        turns = itertools.count(5)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="enough"):
                measure(server, LOADS[0], turns, tmp_path)
    assert seeds == ["5", "6", "5", "6"]


def test_a_ratio_over_one_is_batons_gain():
    blocks = [
        Block(0, arm_name(server, load), 1.0, 1.0, (time_ms,))
        for load in LOADS
        for server, time_ms in (("baton", 10.0), ("vllm", 15.0))
    ]
    found = {finding.name: finding.over_all.median for finding in findings_of(blocks)}
    assert [found[f"{load.name}: vllm / baton"] for load in LOADS] == [1.5] * 3
    assert found["baton: one stream"] == 10.0
