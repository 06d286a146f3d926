"""The command from flags to table, and the same table from the saved file."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.services.cli.bench.results.run_file import load
from baton.services.cli.main import run
from tests.fake_dispatcher import one_token_chunks
from tests.service.http.http_server import TIMEOUT_S, router, tokens_of

SMALL = ["--num-prompts", "3", "--random-input-len", "5", "--random-output-len", "4", "--ignore-eos"]


@contextmanager
def router_url() -> Iterator[str]:
    """Runs the router in a thread, because the command has its own event loop; yields its URL."""
    ready: list[str] = []
    began, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with router(lambda sequence: one_token_chunks(tokens_of("hello", eos=False)[:2])) as server:
            ready.append(str(server.http.base_url))
            began.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert began.wait(TIMEOUT_S)
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        loop.close()


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_a_saved_run_gives_the_same_table(capsys, tmp_path):
    with router_url() as url:
        flags = ["--base-url", url, "--save-result", "--result-dir", str(tmp_path), "--goodput", "e2el:60000"]
        assert run(["bench", "serve", *SMALL, *flags, "--api-key", "hidden"]) == 0
    shown = capsys.readouterr().out
    for words in ("requests answered", "3", "TTFT p99 (ms)", "ITL mean (ms)", "attainment (%)", "100.0"):
        assert words in shown
    [path] = tmp_path.iterdir()
    saved = load(path)
    assert len(saved.rows) == 3
    assert [row.num_output_tokens for row in saved.rows] == [2, 2, 2]
    assert "hidden" not in path.read_text()
    assert run(["bench", "report", str(path)]) == 0
    again = capsys.readouterr().out.splitlines()
    figures = [[cell.strip() for cell in line.split("│")[1:3]] for line in shown.splitlines() if "│" in line]
    assert figures == [[cell.strip() for cell in line.split("│")[1:3]] for line in again if "│" in line]
    assert len(figures) > 20


def test_a_late_run_is_refused_live_and_from_its_file(capsys, tmp_path):
    with router_url() as url:
        flags = ["--base-url", url, "--save-result", "--result-dir", str(tmp_path), "--result-filename", "late.json"]
        run(["bench", "serve", *SMALL, *flags, "--request-rate", "1000"])
    path = tmp_path / "late.json"
    data = json.loads(path.read_text())
    for row in data["rows"]:
        row["sent_s"] = row["due_s"] + 0.006
    path.write_text(json.dumps(data))
    capsys.readouterr()
    assert run(["bench", "report", str(path)]) == 1
    said = capsys.readouterr()
    assert "late: refused: the client itself sent 6.0 ms late" in said.err
    assert said.out == ""


def test_two_runs_have_a_column_each(capsys, tmp_path):
    with router_url() as url:
        for name in ("one", "two"):
            flags = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", f"{name}.json"]
            assert run(["bench", "serve", "--base-url", url, *SMALL, *flags]) == 0
    capsys.readouterr()
    paths = [str(tmp_path / f"{name}.json") for name in ("one", "two")]
    assert run(["bench", "report", *paths, "--percentile-metrics", "ttft", "--metric-percentiles", "95"]) == 0
    shown = capsys.readouterr().out
    assert "one" in shown
    assert "two" in shown
    assert "TTFT p95 (ms)" in shown
    assert "ITL" not in shown


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["serve", "--base-url", "http://127.0.0.1:1"], "/v1/models"),
        (["serve", "--num-prompts", "0"], "--num-prompts 0"),
        (["serve", "--dataset-name", "mooncake"], "Give --dataset-path."),
        (["serve", "--dataset-name", "azure", "--dataset-path", "/no/such"], "/no/such"),
        (["serve", "--goodput", "ttft"], "--goodput ttft"),
        (["serve", "--percentile-metrics", "ttfb"], "'ttfb' is none of"),
        (["serve", "--metric-percentiles", "101"], "from 0 to 100"),
        (["serve", "--endpoint", "embeddings"], "embeddings"),
        (["report", "/no/such/run.json"], "/no/such/run.json"),
        (["report", __file__], "is not a run"),
    ],
)
def test_wrong_commands_print_a_reason(tokens, words, capsys):
    assert run(["bench", *tokens]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_the_help_names_the_flags(capsys):
    assert run(["bench", "serve", "--help"]) == 0
    shown = capsys.readouterr().out
    for flag in ("--request-rate", "--burstiness", "--max-concurrency", "--goodput", "--scale-length", "--scale-rate"):
        assert flag in shown
    assert "Poisson" in shown


def test_bench_modules_import_nothing_heavy():
    root = Path(__file__).resolve().parents[4] / "services" / "cli" / "bench"
    heavy = ("numpy", "torch", "pandas", "baton.services.router", "baton.services.decode", "baton.services.prefill")
    assert [p.name for p in root.rglob("*.py") if any(f"import {h}" in p.read_text() for h in heavy)] == []
