"""`baton chat` as a command, through pipes, and Ctrl-C."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from baton.services.cli.main import run
from baton.services.cli.settings import COMMANDS
from baton.settings.base import known_variables
from tests.unit.cli.chat.scripted_router import Act, scripted_router


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in known_variables(COMMANDS.values()):
        monkeypatch.delenv(name, raising=False)


def says(*words: str) -> Act:
    events = [(None, json.dumps({"choices": [{"index": 0, "delta": {"content": word}}]})) for word in words]
    return Act([*events, (None, "[DONE]")])


def pipe(monkeypatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_one_question_from_the_command_line(monkeypatch, capsys):
    pipe(monkeypatch, "")
    with scripted_router(says("Hel", "lo")) as router:
        assert run(["chat", "hi", "there", "--router", router.url]) == 0
    assert capsys.readouterr().out == "Hello\n"


def test_a_piped_conversation_takes_commands(monkeypatch, capsys, tmp_path):
    file = tmp_path / "talk.json"
    pipe(monkeypatch, f"one\n\n/set temperature 0\ntwo\n/save {file}\n/models\n/exit\nthree\n")
    with scripted_router(says("1"), says("2")) as router:
        assert run(["chat", "--router", router.url, "--set", "top_k=3", "--system", "short"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "1\n2\n"
    saved = json.loads(file.read_text())
    assert [message["content"] for message in saved["messages"]] == ["short", "one", "1", "two", "2"]
    assert (saved["top_k"], saved["temperature"]) == (3, 0)


def test_a_model_without_a_template_is_completed(monkeypatch, capsys):
    pipe(monkeypatch, "")
    refused = Act(status=400, body=b'{"error": {"message": "this model has no chat template; use /v1/completions"}}')
    with scripted_router(refused, says("x")) as router:
        assert run(["chat", "hi", "--router", router.url]) == 0
    assert [asked[1] for asked in router.asked] == ["/v1/chat/completions", "/v1/completions"]
    assert capsys.readouterr().out == "x\n"


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--model", "n"], 2, "Served: m."),
        (["--set", "messages=1"], 2, "set by the conversation itself"),
        (["--set", "top_k"], 2, "Write --set top_k=20"),
    ],
)
def test_wrong_flags_are_explained(flags, code, words, monkeypatch, capsys):
    pipe(monkeypatch, "")
    with scripted_router() as router:
        assert run(["chat", "hi", "--router", router.url, *flags]) == code
    assert words in capsys.readouterr().err
    assert router.asked == []


def test_no_router_is_explained(monkeypatch, capsys):
    pipe(monkeypatch, "")
    assert run(["chat", "hi", "--router", "http://127.0.0.1:1"]) == 1
    assert "Start one with `baton up`" in capsys.readouterr().err


def test_a_failed_answer_gives_a_failed_exit_code(monkeypatch, capsys):
    pipe(monkeypatch, "one\ntwo\n")
    refused = Act(status=429, body=b'{"error": {"message": "busy"}}')
    with scripted_router(refused, says("2")) as router:
        assert run(["chat", "--router", router.url]) == 1
    captured = capsys.readouterr()
    assert captured.out == "2\n"
    assert "HTTP 429: busy" in captured.err


class Terminal(io.StringIO):
    """Standard input that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def save_picture(folder: Path) -> Path:
    file = folder / "my picture.png"
    Image.new("RGB", (4, 4), "red").save(file)
    return file


def test_an_image_goes_with_the_next_question(monkeypatch, capsys, tmp_path):
    file = save_picture(tmp_path)
    pipe(monkeypatch, f"/image {file}\nWhat is it?\nSure?\n")
    with scripted_router(says("Red."), says("Yes.")) as router:
        assert run(["chat", "--router", router.url]) == 0
    assert capsys.readouterr().out == "Red.\nYes.\n"
    image, text = router.bodies[0]["messages"][0]["content"]
    kind, _, data = image["image_url"]["url"].partition(",")
    assert (image["type"], kind) == ("image_url", "data:image/png;base64")
    assert base64.b64decode(data) == file.read_bytes()
    assert text == {"type": "text", "text": "What is it?"}
    assert [message["content"] for message in router.bodies[1]["messages"][1:]] == ["Red.", "Sure?"]


def test_a_pipe_does_not_ask_about_an_image_that_is_not_there(monkeypatch, capsys, tmp_path):
    pipe(monkeypatch, f"/image {tmp_path}/none.png\nWhat is it?\n")
    with scripted_router() as router:
        assert run(["chat", "--router", router.url]) == 1
    assert "none.png: No such file or directory" in capsys.readouterr().err
    assert router.asked == []


def test_a_pipe_that_ends_after_an_image_says_that_nothing_was_asked(monkeypatch, capsys, tmp_path):
    pipe(monkeypatch, f"/image {save_picture(tmp_path)}\n")
    with scripted_router() as router:
        assert run(["chat", "--router", router.url]) == 1
    assert "no question follows" in capsys.readouterr().err
    assert router.asked == []


def test_a_terminal_says_what_is_wrong_with_an_image_and_goes_on(monkeypatch, capsys, tmp_path):
    text = tmp_path / "note.png"
    text.write_text("no picture")
    lines = iter([f"/image {text}", f"/image {save_picture(tmp_path)}", "What is it?"])
    monkeypatch.setattr("baton.services.cli.chat.command.read_line", lambda interactive: next(lines, None))
    monkeypatch.setattr("sys.stdin", Terminal())
    refused = Act(status=400, body=b'{"error": {"message": "this model takes no images"}}')
    with scripted_router(refused) as router:
        assert run(["chat", "--router", router.url]) == 0
    told = capsys.readouterr().err
    assert "note.png is no image that is accepted: send PNG, JPEG or WebP" in told
    assert "my picture.png goes with the next question" in told
    assert "HTTP 400: this model takes no images." in told
    assert len(router.bodies[0]["messages"][0]["content"]) == 2


def test_a_model_without_a_template_is_not_shown_an_image_as_text(monkeypatch, capsys, tmp_path):
    pipe(monkeypatch, f"one\n/image {save_picture(tmp_path)}\ntwo\n")
    refused = Act(status=400, body=b'{"error": {"message": "this model has no chat template"}}')
    with scripted_router(refused, says("1"), refused) as router:
        assert run(["chat", "--router", router.url]) == 1
    assert [asked[1] for asked in router.asked] == ["/v1/chat/completions", "/v1/completions", "/v1/chat/completions"]
    assert "no chat template" in capsys.readouterr().err


@pytest.fixture
def sigint_is_heard() -> Iterator[None]:
    """As in a terminal. Programs that a script starts in the background inherit that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_is_heard")
def test_ctrl_c_stops_the_answer_and_not_the_program(monkeypatch, capsys):
    gone = threading.Event()
    begun = says("Once")
    begun.events, begun.hold = begun.events[:-1], gone
    lines = iter(["tell", "again"])

    def shown(self, piece, known=[]) -> None:  # noqa: B006
        if not known:
            os.kill(os.getpid(), signal.SIGINT)
        known.append(piece.text)
        self.out.write(piece.text)

    monkeypatch.setattr("baton.services.cli.chat.terminal.ChatOutput.piece", shown)
    monkeypatch.setattr("baton.services.cli.chat.command.read_line", lambda interactive: next(lines, None))
    monkeypatch.setattr("sys.stdin", Terminal())
    with scripted_router(begun, says("Done")) as router:
        assert run(["chat", "--router", router.url]) == 0
        assert gone.wait(30.0), "the router did not see the client go"
    captured = capsys.readouterr()
    assert captured.out == "Once\nDone\n"
    assert "stopped" not in captured.out


def test_two_ctrl_c_at_the_prompt_leave(monkeypatch, capsys):
    asked = []

    def interrupt(interactive: bool) -> str:
        asked.append(interactive)
        raise KeyboardInterrupt

    monkeypatch.setattr("baton.services.cli.chat.command.read_line", interrupt)
    monkeypatch.setattr("sys.stdin", Terminal())
    with scripted_router() as router:
        assert run(["chat", "--router", router.url]) == 0
    assert asked == [True, True]
    assert "Ctrl-C again leaves" in capsys.readouterr().err
