"""Comparison with other servers: one model, turns with equal prompts, and the direction of ratios."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from baton.services.cli.bench.results.records import Delivery, RequestRow
from baton.services.cli.processes.ports import free_ports
from bench.harness.model_shapes import ModelShape
from bench.harness.random_models import save_random_model
from bench.harness.rotations import Block, rotate_exclusive
from bench.peers.compare import arm_name, failure_remark, findings_of, lost_lines, parse, server_arms
from bench.peers.loads import (
    BESIDE_PROMPTS,
    BURST,
    EIGHT_STREAMS,
    LOADS,
    ONE_STREAM,
    PROMPT_861,
    REPORT_LINES,
    START,
    LoadResult,
    PeerLoad,
    RequestResult,
    measure,
)
from bench.peers.make_gguf import Bf16Tensor, name_in_gguf, read_tensors
from bench.peers.servers import PeerServer, baton, is_baton, llama, openvino, vllm

NAMES = (*(load.name for load in LOADS), BESIDE_PROMPTS, START)
ALIKE = ("while all decode", "memory of all processes (PSS)")
"""Ends of lines whose figures `facts` does not scale with its time."""

SHAPE = ModelShape("qwen2", 300, 32, 48, 2, 4, 2, 8, 256, 1e4)


def test_gguf_tensors_equal_the_models(tmp_path):
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
    name = "model.layers.0.self_attn.k_proj.weight"
    assert np.array_equal(Bf16Tensor(name, read[name]).as_float32(), expected[name].float().numpy())


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
        llama(tmp_path / "x.gguf", 1003, (0, 3), tmp_path / "llama-server"),
        openvino(tmp_path / "x.gguf", 1004, (0, 3), "bfloat16", tmp_path),
    ]
    for server in servers:
        assert server.command[:3] == ("taskset", "--cpu-list", "0,3")
        assert any(str(server.port) in word for word in server.command)
    assert servers[1].variables["VLLM_CPU_OMP_THREADS_BIND"] == "0,3"
    assert servers[2].command[servers[2].command.index("--threads") + 1] == "2"
    assert "--threads=2" in servers[3].command


def test_llamas_slots_hold_the_longest_prompts(tmp_path):
    command = llama(tmp_path / "x.gguf", 1003, (0, 3), tmp_path / "llama-server").command
    slots, tokens = (int(command[command.index(flag) + 1]) for flag in ("-np", "--ctx-size"))
    assert slots >= max(load.max_concurrency for load in LOADS)
    assert tokens // slots >= max(load.num_prompt_tokens + load.num_output_tokens for load in LOADS)


def test_batons_variants_have_names_and_flags_of_their_own(tmp_path):
    plain = baton(tmp_path, 1001, (0, 3), "auto")
    two, split, keeps = (
        baton(tmp_path, 1001, (0, 3), "auto", *arm) for arm in (("auto", 2), ("split", 1), ("colocated", 0, False))
    )
    assert [each.name for each in (plain, two, split, keeps)] == [
        "baton",
        "baton, 2 threads",
        "baton, split, 1 thread",
        "baton, colocated, own cores",
    ]
    assert not [word for word in plain.command if word.startswith(("--threads", "--no-lend"))]
    assert "--deployment=auto" in plain.command
    assert {"--threads=1", "--deployment=split"} <= {*split.command}
    assert {"--no-lend-cores", "--deployment=colocated"} <= {*keeps.command}
    assert all(is_baton(each.name) for each in (plain, two, split, keeps))
    assert not is_baton("vllm")
    assert parse(["somewhere", "--baton-threads", "2", "1", "2"]).baton_threads == (2, 1)
    assert parse(["somewhere", "--baton", "split", "auto"]).baton == ("split", "auto")


def http_server(name: str) -> PeerServer:
    (port,) = free_ports(1)
    return PeerServer(name, (sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"), port, "/")


def measure_in_turns(servers: list[PeerServer], tmp_path: Path, on_failure: Callable[[int, str, Exception], None]):
    console = Console(file=io.StringIO())
    turns = {server.name: partial(server_arms, server, 5, tmp_path, console) for server in servers}
    return rotate_exclusive(turns, lambda _: 1.0, num_rotations=2, seed=0, console=console, on_failure=on_failure)


def test_servers_get_equal_fresh_prompts_in_turns_after_a_warm_up(tmp_path, monkeypatch):
    asked: list[tuple[str, PeerLoad, int]] = []

    def note(server: PeerServer, load: PeerLoad, seed: int, _: Path) -> list[float]:
        asked.append((server.name, load, seed))
        return [1.0, 1.0]

    def refuse(*failure: object) -> None:
        raise AssertionError(failure)

    monkeypatch.setattr("bench.peers.compare.measure", note)
    monkeypatch.setattr("bench.peers.compare.measure_beside_prompts", lambda url, seed: [1.0, 1.0])
    blocks = measure_in_turns([http_server("baton"), http_server("vllm")], tmp_path, refuse)
    visits = [asked[at : at + 2 * len(LOADS)] for at in range(0, len(asked), 2 * len(LOADS))]
    assert [len({name for name, _, _ in visit}) for visit in visits] == [1] * 4
    for visit in visits:
        warm, measured = visit[: len(LOADS)], visit[len(LOADS) :]
        assert [load for _, load, _ in warm] == [load.warm_up for load in LOADS]
        assert {load for _, load, _ in measured} == set(LOADS)
    seeds = {name: {(load, seed) for who, load, seed in asked if who == name} for name in ("baton", "vllm")}
    assert seeds["baton"] == seeds["vllm"]
    assert len({seed for _, seed in seeds["baton"]}) == 2 * 2 * len(LOADS)
    assert sorted((block.rotation, block.arm) for block in blocks) == sorted(
        (rotation, arm_name(server, load)) for rotation in (0, 1) for server in ("baton", "vllm") for load in NAMES
    )
    for block in blocks:
        if block.arm.endswith(START):
            start_s, num_bytes = block.values
            assert 0.0 < start_s < 60.0
            assert num_bytes > 1 << 20


def test_a_warm_up_is_as_wide_as_its_load_and_short():
    assert EIGHT_STREAMS.warm_up.flags == (
        *("--num-prompts", "8", "--random-input-len", "16", "--random-output-len", "4", "--max-concurrency", "8"),
    )
    assert PROMPT_861.warm_up.num_prompt_tokens == 861
    assert PROMPT_861.warm_up.num_prompts == 1


def test_a_failed_peer_is_skipped_in_its_rotation_with_a_remark(tmp_path, monkeypatch):
    """One peer does not start; another fails a request in its second rotation."""
    monkeypatch.setattr("bench.peers.compare.measure", fails_after({"llama": 3 * len(LOADS) + 1}))
    monkeypatch.setattr("bench.peers.compare.measure_beside_prompts", lambda url, seed: facts(10.0).values)
    fails = (sys.executable, "-c", "print('no such wheel'); raise SystemExit(3)")
    servers = [http_server("baton"), http_server("llama"), PeerServer("vllm", fails, 1, "/health")]
    remarks = []
    blocks = measure_in_turns(servers, tmp_path, lambda *failure: remarks.append(failure_remark(*failure)))
    said = {remark.name: remark.text for remark in remarks}
    assert said.keys() == {
        "vllm was left out of rotation 1",
        "vllm was left out of rotation 2",
        "llama was left out of rotation 2",
    }
    assert said["vllm was left out of rotation 1"].endswith("no such wheel")
    assert said["llama was left out of rotation 2"] == "1 of 8 requests failed"
    assert {block.rotation for block in blocks if block.arm.startswith("llama")} == {0}
    found = {finding.name: finding for finding in findings_of(blocks)}
    assert found["one stream: llama / baton"].num_rotations == 1
    assert found["baton: one stream"].num_rotations == 2


def fails_after(calls: dict[str, int]) -> Callable[[PeerServer, PeerLoad, int, Path], list[float]]:
    def measure(server: PeerServer, load: PeerLoad, seed: int, directory: Path) -> list[float]:
        if server.name in calls:
            calls[server.name] -= 1
            if calls[server.name] < 0:
                raise RuntimeError("1 of 8 requests failed")
        return facts(10.0).values

    return measure


def test_without_baton_there_is_nothing_to_compare():
    for name in ("baton", "baton, 2 threads"):
        with pytest.raises(RuntimeError, match="no such wheel"):
            failure_remark(0, name, RuntimeError("no such wheel"))


def row(sent_s: float, first_s: float, gap_s: float, num_tokens: int, num_prompt_tokens: int) -> RequestRow:
    """All times but `sent_s` count from sending."""
    deliveries = tuple(Delivery(first_s + n * gap_s, 1) for n in range(num_tokens))
    ended_s = deliveries[-1].at_s
    return RequestRow(0, 0.0, 0.0, sent_s, ended_s, num_tokens, num_prompt_tokens, num_tokens, deliveries, None, None)


def test_concurrent_rate_counts_tokens_while_all_streams_run():
    late = LoadResult.of_rows([row(0.0, 1.0, 1.0, 10, 90), row(0.0, 5.0, 0.5, 5, 90)])
    assert late.concurrent_rate == pytest.approx((2 + 4) / 2.0)  # from 5 s on, when both have begun, to 7 s
    assert late.wall_s == 10.0
    in_turns = LoadResult.of_rows([row(0.0, 1.0, 1.0, 3, 90), row(0.0, 4.0, 1.0, 3, 90)])
    assert in_turns.concurrent_rate == 0.0


def test_the_p99_gap_is_that_of_all_streams_or_of_the_given_ones():
    rows = [row(0.0, 1.0, 0.1, 51, 90), row(0.0, 1.0, 0.3, 51, 90)]
    assert LoadResult.of_rows(rows).gap_p99_s == pytest.approx(0.3)
    assert LoadResult.of_rows(rows, [0.5, 0.5]).gap_p99_s == pytest.approx(0.5)
    single = [row(0.0, 1.0, 0.1, 1, 90)]
    assert LoadResult.of_rows(single).gap_p99_s == 0.0


def test_a_bursts_last_first_token_is_the_slowest_requests():
    rows = [row(0.0, first_s, 0.1, 2, 64) for first_s in (0.2, 0.4, 0.9)]
    block = Block(0, "", 1.0, 1.0, tuple(LoadResult.of_rows(rows).values))
    figures = {line.name: line for line in REPORT_LINES}
    assert figures[f"{BURST.name}: median first token"].of(block) == pytest.approx(400.0)
    assert figures[f"{BURST.name}: last first token"].of(block) == pytest.approx(900.0)


def test_a_failed_request_is_no_measurement():
    failed = RequestRow(0, 0.0, 0.0, 0.0, 1.0, 2, 200, 0, (), None, "cut off")
    with pytest.raises(RuntimeError, match="1 of 1 requests failed: cut off"):
        LoadResult.of_rows([failed])


def facts(time_ms: float, concurrent_rate: float = 100.0) -> LoadResult:
    """All compared times are `time_ms`, except that of a batch."""
    return LoadResult(
        8 * time_ms / 1e3,
        concurrent_rate,
        time_ms / 1e3,
        tuple(RequestResult(time_ms / 1e3, time_ms / 1e3, 900, 1) for _ in range(8)),
    )


def blocks_of(facts_of_server: dict[str, LoadResult]) -> list[Block]:
    return [
        Block(0, arm_name(server, load), 1.0, 1.0, tuple(facts.values))
        for load in NAMES
        for server, facts in facts_of_server.items()
    ]


def test_a_load_result_survives_its_block():
    [block] = [block for block in blocks_of({"vllm": facts(5.0)}) if block.arm == arm_name("vllm", ONE_STREAM.name)]
    assert LoadResult.of_block(block) == facts(5.0)


def test_a_ratio_over_one_is_batons_gain():
    blocks = blocks_of({"baton": facts(10.0, 60.0), "baton, 2 threads": facts(5.0, 30.0), "vllm": facts(15.0, 40.0)})
    found = {finding.name: finding.overall.median for finding in findings_of(blocks)}
    compared = [line.name for line in REPORT_LINES if line.compared]
    own = [name for name in compared if not name.endswith(ALIKE)]
    assert len(own) == 15
    assert [found[f"{name}: vllm / baton"] for name in own] == pytest.approx([1.5] * len(own))
    assert found["one stream: vllm / baton, 2 threads"] == pytest.approx(3.0)
    assert found["8 streams: while all decode: vllm / baton, 2 threads"] == pytest.approx(0.75)
    assert found["baton: one stream"] == pytest.approx(10.0)
    assert found["vllm: first token of 861 tokens"] == pytest.approx(15.0)


def test_lines_that_baton_loses_are_named_the_worst_first():
    blocks = blocks_of({"baton": facts(10.0, 60.0), "vllm": facts(9.0, 40.0), "llama": facts(5.0, 60.0)})
    lost = lost_lines(findings_of(blocks))
    assert "one stream: vllm / baton: 0.9 [0.9, 0.9]" in lost
    ratios = [float(line.rpartition("[")[0].split()[-1]) for line in lost]
    assert ratios == sorted(ratios)
    assert not [line for line in lost if "while all decode: vllm" in line]


def test_a_server_without_a_batch_has_no_batch_figure():
    found = {finding.name for finding in findings_of(blocks_of({"baton": facts(10.0), "llama": facts(20.0, 0.0)}))}
    assert "baton: 8 streams: while all decode" in found
    assert not [name for name in found if "llama" in name and "while all decode" in name]
    assert "8 streams, prompts included: llama / baton" in found


def test_a_rotation_without_a_figure_does_not_count_for_it():
    """It still counts for another server."""
    blocks = [
        replace(block, rotation=rotation)
        for rotation, concurrent_rate in enumerate((50.0, 0.0))
        for block in blocks_of({"baton": facts(10.0, 50.0), "vllm": facts(20.0, concurrent_rate)})
    ]
    found = {finding.name: finding.num_rotations for finding in findings_of(blocks)}
    assert found["baton: 8 streams: while all decode"] == 2
    assert found["vllm: 8 streams: while all decode"] == 1
    assert found["8 streams: while all decode: vllm / baton"] == 1
    assert found["one stream: vllm / baton"] == 2


def test_a_measurement_is_a_run_of_bench_serve(tmp_path, monkeypatch):
    commands: list[list[str]] = []

    def note(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, stderr="enough")

    monkeypatch.setattr("subprocess.run", note)
    with pytest.raises(RuntimeError, match="vllm, prompt of 861: enough"):
        measure(vllm(tmp_path, 2, (0,), "auto", tmp_path), PROMPT_861, 7, tmp_path)
    [command] = commands
    assert command[command.index("--seed") + 1] == "7"
    assert command[command.index("--random-input-len") + 1] == "861"
