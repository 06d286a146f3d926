"""The storm's services get the settings that the `baton` command would give them."""

from __future__ import annotations

from typing import Any

import pytest

from baton.services.cli import main, serve
from chaos.testbed import service

COMMON = ("--model=bundled", "--port=7", "--redis-url=redis://127.0.0.1:7/0", "--metrics-port=8")
WORKER = ("--kv-memory-mib=24", "--transport=stream", "--dtype=float32", "--worker-id=a.7")


@pytest.mark.parametrize(
    ("role", "flags"),
    [
        ("router", ("--router-id=r", "--request-deadline-s=60", "--max-attempts=6")),
        ("prefill", (*WORKER, "--token-budget=32", "--page-sharing=always")),
        ("decode", (*WORKER, "--pull-deadline-s=20", "--advertise-address=127.0.0.1:7")),
        ("encode", ("--dtype=float32", "--worker-id=a.7", "--advertise-address=127.0.0.1:7")),
    ],
)
def test_flags_mean_what_they_mean_to_the_command(monkeypatch: pytest.MonkeyPatch, role: str, flags: tuple[str, ...]):
    seen: list[Any] = []

    def note(*arguments: object) -> int:
        seen.append(arguments)
        return 5

    for module in (serve, service):
        monkeypatch.setattr(module, "run_service", note)
    tokens = ["serve", role, *COMMON, *flags]
    assert (service.run(tokens), main.run(tokens)) == (5, 5)
    assert seen[0] == seen[1]
    assert seen[0][0] == role


def test_a_wrong_value_is_a_message(capsys: pytest.CaptureFixture[str]):
    assert service.run(["serve", "decode", "--port=x"]) == 2
    assert "port" in capsys.readouterr().err
