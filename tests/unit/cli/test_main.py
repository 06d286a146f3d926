"""Flags, settings and error messages of the `baton` command."""

import errno
import importlib.util
import socket
import subprocess
import sys
import tempfile
import types

import pytest

from baton.domain.errors import Broken
from baton.services.cli import main, serve, up
from baton.services.cli.errors import StartFailed, explain
from baton.services.cli.main import run
from baton.services.cli.settings import COMMANDS
from baton.settings.base import SettingsError, known_variables
from tests.redis_server import require_redis


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in known_variables(COMMANDS.values()):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def service(monkeypatch):
    """Fakes for `baton.services.*.app`; returns their settings, in order, with the process's cores and threads."""
    seen = []
    for place in main.COMMANDS.values():  # whose imports must not find the fakes
        main._imported(f"{main.PACKAGE}.{place}")

    async def serve_settings(settings):
        seen.append(settings)
        return 3

    for name in ("router", "prefill", "decode"):
        module = types.ModuleType(f"baton.services.{name}.app")
        monkeypatch.setattr(module, "serve", serve_settings, raising=False)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(serve, "configure_logging", lambda *args: seen.append(args))
    monkeypatch.setattr(serve, "limit_cores", lambda cores: seen.append(cores))
    monkeypatch.setattr(serve, "limit_threads", lambda threads: seen.append(threads))
    return seen


def test_flags_beat_variables_and_the_services_exit_code_is_returned(service, monkeypatch):
    monkeypatch.setenv("BATON_MAX_ROWS", "9")
    monkeypatch.setenv("BATON_PAGE_SIZE", "8")
    assert run(["serve", "decode", "--page-size", "32", "--no-digests", "--log-format", "json"]) == 3
    log, threads, settings = service
    assert log == ("decode", "info", "json")
    assert threads == 1
    assert (settings.max_rows, settings.page_size, settings.digests) == (9, 32, False)


def test_cores_and_threads_are_set_before_a_worker_is_imported(service):
    assert run(["serve", "prefill", "--cpu-affinity", "0", "--threads", "2"]) == 3
    assert service[1:3] == [{0}, 2]


def test_variables_alone_configure_a_service(service, monkeypatch):
    monkeypatch.setenv("BATON_PORT", "1234")
    assert run(["serve", "router"]) == 3
    assert service[-1].port == 1234


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["serve", "decode", "--page-sise", "1"], "Did you mean --page-size?"),
        (["serve", "decode", "--page-size", "0"], "--page-size '0': Input should be greater than or equal to 1"),
        (["serve", "router", "--redis-url", "ftp://x"], "redis://"),
        (["serve", "prefill", "--host", "0.0.0.0", "--redis-url", "unix:///x"], "advertise_address"),
        (["srve"], "srve"),
        (["up", "/no/such/model"], "there is no such directory. Give 'bundled'"),
        (["up", "--redis-url", "redis://127.0.0.1:1/0"], "127.0.0.1:1"),
        (["up", "--decode", "0"], "--decode '0'"),
    ],
)
def test_wrong_commands_are_explained(tokens, words, service, capsys):
    assert run(tokens) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("baton: ")
    assert "Traceback" not in error
    assert service == []


def test_a_wrong_variable_is_explained_with_its_name(service, monkeypatch, capsys):
    monkeypatch.setenv("BATON_MAX_ROWS", "many")
    assert run(["serve", "decode"]) == 2
    assert "BATON_MAX_ROWS" in capsys.readouterr().err


@pytest.mark.parametrize("tokens", [["serve", "router"], ["up"]])
def test_an_unknown_variable_is_refused_with_the_nearest_name(tokens, service, monkeypatch, capsys):
    monkeypatch.setenv("BATON_PAGESIZE", "16")
    assert run(tokens) == 2
    assert "Did you mean BATON_PAGE_SIZE?" in capsys.readouterr().err


def test_a_busy_port_is_explained_before_anything_starts(capsys, monkeypatch):
    started = []
    monkeypatch.setattr(up, "embedded_redis", lambda: started.append("redis"))
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert run(["up", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"HTTP port {port} on 127.0.0.1 is in use by another process (for example --port {port + 1}). " in error
    assert "Stop the process" in error
    assert started == []


def test_nothing_is_left_where_no_worker_can_start(capsys, monkeypatch, tmp_path):
    require_redis()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run(["up", "--port=0", "--token-budget=1"]) == 2
    assert "token_budget" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_errors_become_messages_and_exit_codes():
    assert explain(SettingsError("x", why="y", hint="Z.")) == ("x: y. Z.", 2)
    assert explain(StartFailed("router ended")) == ("router ended", 1)
    assert explain(PermissionError(errno.EACCES, "Permission denied", "/log"))[0].startswith("/log: Permission denied.")
    with pytest.raises(Broken):
        explain(Broken("a bug keeps its traceback"))


def test_the_router_needs_no_torch():
    program = (
        "import sys, baton.services.cli.main; "
        "print([m for m in ('torch', 'transformers', 'nixl_cu12') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("words", ["serve prefill", "serve decode", "serve encode", "up", "run"])
def test_without_the_extra_for_workers_a_command_names_it(words, monkeypatch, capsys):
    """As in an environment with the wheel alone; that `main` itself needs no torch, the test above shows."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name in ("torch", "PIL") else found(name, *rest)
    )
    assert run(words.split()) == 2
    assert capsys.readouterr().err == (
        f"baton: baton {words} needs torch, pillow: pip install 'baton-serve[worker]'. "
        "A router alone needs none of them.\n"
    )


def test_version_and_help(capsys):
    assert run(["--version"]) == 0
    assert run(["serve", "decode", "--help"]) == 0
    out = capsys.readouterr().out
    assert "0.1" in out
    assert "Most sequences generated at once" in out


LISTS_COMMANDS = """
import sys
from baton.services.cli.main import run
run(["serve", "router", "--help"])
print(sorted(name for name in sys.modules if name in
    ("baton.services.router.app", "baton.services.cli.chat.command", "baton.services.cli.up")), file=sys.stderr)
"""


def test_a_service_imports_no_command_but_its_own():
    done = subprocess.run(
        [sys.executable, "-c", LISTS_COMMANDS], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.strip() == "[]"
    assert "--redis-url" in done.stdout


@pytest.mark.parametrize("words", [["--help"], []])
def test_help_describes_every_command(words, capsys):
    assert run(words) == 0
    told = capsys.readouterr().out
    for name in (*main.COMMANDS, "serve", "config", "completion"):
        line = next(line for line in told.splitlines() if line.startswith(f"│ {name} "))
        assert line.strip("│ ").removeprefix(name).strip(), f"{name} has no description"
