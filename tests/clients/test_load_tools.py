"""GuideLLM and AIPerf drive the router: every request is answered, and counts as they counted it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Address = Callable[[str], str]
NUM_REQUESTS, NUM_TOKENS = 6, 12
TIMEOUT_S = 300.0


def run(name: str, *arguments: str) -> str:
    """Output of a program beside this interpreter. Fails with it."""
    command = [str(Path(sys.executable).with_name(name)), *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("format", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_gets_every_token(base_url: Address, tokenizer_dir: str, tmp_path: Path, format: str) -> None:
    run(
        "guidellm", "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={base_url('guidellm')},model=bundled,request_format={format}",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={tokenizer_dir}",
        "--data", f"kind=synthetic_text,prompt_tokens=40,output_tokens={NUM_TOKENS}",
        "--output", f"kind=json,path={tmp_path}/out.json",
    )  # fmt: skip
    [benchmark] = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), len(requests["errored"])) == (NUM_REQUESTS, 0)
    assert [each["output_metrics"]["text_tokens"] for each in requests["successful"]] == [NUM_TOKENS] * NUM_REQUESTS


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf_gets_every_answer(base_url: Address, tokenizer_dir: str, tmp_path: Path, kind: str) -> None:
    run(
        "aiperf", "profile", "--model", "bundled", "--url", base_url("aiperf"), "--endpoint-type", kind, "--streaming",
        "--tokenizer", tokenizer_dir, "--concurrency", "2", "--request-count", str(NUM_REQUESTS),
        "--synthetic-input-tokens-mean", "40", "--output-tokens-mean", str(NUM_TOKENS), "--random-seed", "1",
        "--extra-inputs", "ignore_eos:true", "--use-server-token-count",
        "--artifact-dir", str(tmp_path), "--ui", "none",
    )  # fmt: skip
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert not report.get("error_summary")
    assert report["output_sequence_length"]["avg"] == NUM_TOKENS
