"""lm-evaluation-harness runs a tiny task unchanged: it scores choices, and generates from a text and from a chat.

The bundled model knows the capitals; a harness that read a wrong log probability or text would score it low.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Address = Callable[[str], str]
CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Austria": "Vienna",
}
LEAST = 0.7
"""The share of right answers: the model is tiny."""
TIMEOUT_S = 300.0


def task(name: str, directory: Path, **fields: Any) -> None:
    """Writes a task over the capitals; JSON is YAML."""
    whole = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(directory / "capitals.jsonl")}},
        "test_split": "test",
        **fields,
    }
    (directory / f"{name}.yaml").write_text(json.dumps(whole))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    choices = list(CAPITALS.values())
    lines = [
        {"country": country, "capital": capital, "choices": choices, "label": choices.index(capital)}
        for country, capital in CAPITALS.items()
    ]
    (directory / "capitals.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    task(
        "capitals_scored",
        directory,
        output_type="multiple_choice",
        doc_to_text="What is the capital of {{country}}? The capital of {{country}} is",
        doc_to_choice="{{choices}}",
        doc_to_target="label",
        metric_list=[{"metric": "acc"}],
    )
    task(
        "capitals_written",
        directory,
        output_type="generate_until",
        doc_to_text="What is the capital of {{country}}?",
        doc_to_target="The capital of {{country}} is {{capital}}.",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 24, "temperature": 0},
        metric_list=[{"metric": "exact_match"}],
    )
    return directory


def run(tasks: Path, name: str, model: str, out: Path, *arguments: str, **options: str) -> dict[str, Any]:
    """The harness's results of a task."""
    command = [
        str(Path(sys.executable).with_name("lm_eval")), "--model", model, "--tasks", name, "--include_path", str(tasks),
        "--model_args", ",".join(f"{key}={value}" for key, value in {"model": "bundled", **options}.items()),
        "--output_path", str(out), *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    [path] = out.rglob("results*.json")
    found = json.loads(path.read_text())
    assert found["n-samples"][name]["effective"] == len(CAPITALS)
    results: dict[str, Any] = found["results"][name]
    return results


@pytest.mark.parametrize("tokenizer", ["remote", "own"])
def test_choices_are_scored(base_url: Address, tokenizer_dir: str, tasks: Path, tmp_path: Path, tokenizer: str) -> None:
    """The harness tokenizes by itself, or asks the router to."""
    own = {"tokenizer": tokenizer_dir, "tokenizer_backend": "huggingface"}
    options = own if tokenizer == "own" else {"tokenizer_backend": "remote"}
    address = f"{base_url('lm_eval')}/v1/completions"
    arguments = ("--batch_size", "4")
    found = run(tasks, "capitals_scored", "local-completions", tmp_path, *arguments, base_url=address, **options)
    assert found["acc,none"] >= LEAST


def test_chats_are_answered(base_url: Address, tasks: Path, tmp_path: Path) -> None:
    address = f"{base_url('lm_eval')}/v1/chat/completions"
    found = run(
        tasks, "capitals_written", "local-chat-completions", tmp_path, "--apply_chat_template", base_url=address
    )
    assert found["exact_match,none"] >= LEAST
