"""`baton config`, `collect-env` and `completion`: sources are right and secrets never show."""

from __future__ import annotations

import json
import subprocess

import pytest
from cyclopts import App

from baton.services.cli.doctor import command
from baton.services.cli.doctor.results import ok
from baton.services.cli.environment import collect_env as collecting
from baton.services.cli.environment.completion import completion_command
from baton.services.cli.main import run
from baton.services.cli.settings import COMMANDS, TraceSettings
from baton.settings.base import known_variables
from baton.settings.sources import MASK, ValueSource, mask_url, setting_values

SECRET = "hunter2-hunter2"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in known_variables(COMMANDS.values()):
        monkeypatch.delenv(name, raising=False)


def config(capsys, *words: str) -> dict[str, tuple[str | None, str]]:
    assert run(["config", "--json", *words]) == 0
    return {value["name"]: (value["value"], value["source"]) for value in json.loads(capsys.readouterr().out)}


def test_each_value_has_its_source(capsys, monkeypatch):
    monkeypatch.setenv("BATON_MAX_ROWS", "9")
    monkeypatch.setenv("BATON_PAGE_SIZE", "8")
    monkeypatch.setenv("BATON_DTYPE", "")
    found = config(capsys, "serve", "decode", "--page-size", "32", "--no-digests", "--page-checks=off")
    assert found["page_size"] == ("32", "flag")
    assert found["digests"] == ("False", "flag")
    assert found["page_checks"] == ("off", "flag")
    assert found["max_rows"] == ("9", "variable")
    assert found["dtype"] == ("auto", "default")
    assert found["worker_id"] == (None, "default")


def test_the_lines_name_flags_and_variables(capsys, monkeypatch):
    monkeypatch.setenv("BATON_PORT", "9000")
    assert run(["config", "up"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.startswith("--port ")] == [["--port", "9000", "(BATON_PORT)"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "for example: baton config serve decode"),
        (["key"], "key is no command with settings"),
        (["serve", "decode", "--page-size", "0"], "--page-size '0'"),
        (["serve", "decode", "--page-sise", "1"], "Did you mean --page-size?"),
    ],
)
def test_what_the_command_would_refuse_is_refused(words, message, capsys):
    assert run(["config", *words]) == 2
    assert message in capsys.readouterr().err


def test_secrets_are_masked_wherever_they_are(capsys, monkeypatch):
    monkeypatch.setenv("BATON_API_KEY", SECRET)
    monkeypatch.setenv("BATON_REDIS_URL", f"redis://user:{SECRET}@10.0.0.7:6379/0")
    assert run(["config", "trace"]) == 0
    assert run(["config", "serve", "router", "--otlp-endpoint", f"http://h/?key={SECRET}"]) == 0

    async def quick(settings):
        yield ok("python", "3.11")

    monkeypatch.setattr(collecting, "run_checks", quick)
    assert run(["collect-env"]) == 0
    assert run(["collect-env", "--json"]) == 0
    out = capsys.readouterr().out
    assert SECRET not in out
    assert f"redis://{MASK}@10.0.0.7:6379/0" in out
    assert "- baton: " in out
    assert "ok   python: 3.11" in out


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("rediss://:pw@h:1/0", f"rediss://{MASK}@h:1/0"),
        ("redis://a:b@c@h/0", f"redis://{MASK}@h/0"),
        ("unix:///run/s?password=pw", f"unix:///run/s?{MASK}"),
    ],
)
def test_urls_lose_their_credentials(url, masked):
    assert mask_url(url) == masked


def test_a_flag_beats_a_variable_as_a_source():
    settings = TraceSettings(router="http://a")
    values = {v.name: v for v in setting_values(settings, ["--router=http://a"], {"BATON_ROUTER": "http://b"})}
    assert values["router"].source is ValueSource.FLAG


def test_completion_is_a_script_that_bash_reads(capsys):
    app = App(name="baton")  # of two commands: describing all takes ten seconds
    app.command(command.doctor)
    app.command(completion_command(app))
    app(["completion", "bash"], result_action="return_value")
    script = capsys.readouterr().out
    assert "--redis-url" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
