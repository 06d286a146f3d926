"""The state of a conversation and its commands."""

from __future__ import annotations

import json

import pytest

from baton.services.cli.chat.conversation import HELP, ChatCommands, ChatHistory, set_field


def conversation(**fields) -> ChatHistory:
    return ChatHistory("m", None, fields)


def test_a_request_has_system_prompt_history_and_fields():
    history = conversation(temperature=0)
    history.system = "be short"
    history.ask("one")
    history.answer("two", [])
    history.ask("three")
    body = history.body()
    assert [message["content"] for message in body["messages"]] == ["be short", "one", "two", "three"]
    assert (body["temperature"], body["model"], body["stream"]) == (0, "m", True)
    completion = history.completion_body()
    assert completion["prompt"] == "three"
    assert "messages" not in completion


def test_a_question_without_an_answer_is_forgotten():
    history = conversation()
    history.ask("one")
    history.answer("", [])
    assert history.messages == []


def test_tool_calls_stay_in_the_history():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = conversation()
    history.ask("one")
    history.answer("", [call])
    assert history.messages[-1] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert history.undo() == "one"
    assert history.messages == []


def test_commands_change_the_conversation():
    history = conversation(seed=1)
    commands = ChatCommands(history)
    commands.run("/system be short")
    commands.run("/model n")
    commands.run("/set temperature 0.25")
    commands.run('/set stop ["x"]')
    commands.run("/set tool_choice none")
    commands.run("/set seed")
    assert (history.system, history.model) == ("be short", "n")
    assert history.fields == {"temperature": 0.25, "stop": ["x"], "tool_choice": "none"}
    assert "temperature 0.25" in commands.run("/params").text
    commands.run("/raw")
    assert history.raw
    history.ask("q")
    history.answer("a", [])
    assert commands.run("/retry").retry == "q"
    assert history.messages == []
    assert json.loads(history.as_json())["model"] == "n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/nope", "there is no /nope"),
        ("/set", "/set needs a name"),
        ("/set messages []", "set by the conversation itself"),
        ("/retry", "nothing to ask again"),
        ("/undo", "nothing to forget"),
        ("/save", "needs a file"),
    ],
)
def test_a_wrong_command_is_explained_and_changes_nothing(line, words):
    history = conversation()
    assert words in ChatCommands(history).run(line).text
    assert (history.fields, history.messages) == ({}, [])


def test_every_command_is_in_the_help():
    missing = [name for name in ChatCommands(conversation()).names if name not in HELP]
    assert missing == ["/help", "/quit"]
    assert ChatCommands(conversation()).run("/exit").leave


def test_a_field_is_json_or_text():
    fields: dict[str, object] = {}
    for name, value in (("a", "1"), ("b", "{}"), ("c", "hello {")):
        set_field(fields, name, value)
    assert fields == {"a": 1, "b": {}, "c": "hello {"}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def test_images_go_with_the_next_question_only():
    history = conversation()
    commands = ChatCommands(history)
    assert commands.run("/image two words.png").image == "two words.png"
    assert "needs a file" in commands.run("/image").text
    history.attach(IMAGE)
    history.attach(IMAGE)
    history.ask("what?")
    history.answer("a circle", [])
    history.ask("and now?")
    shown = [IMAGE, IMAGE, {"type": "text", "text": "what?"}]
    assert [message["content"] for message in history.body()["messages"]] == [shown, "a circle", "and now?"]
    assert history.is_text
    history.undo()
    retried = commands.run("/retry").retry
    assert retried == shown
    history.ask(retried)
    assert history.messages == [{"role": "user", "content": shown}]
    assert not history.is_text


def test_a_reset_forgets_images():
    history = conversation()
    history.attach(IMAGE)
    ChatCommands(history).run("/reset")
    history.ask("what?")
    assert history.messages[0]["content"] == "what?"
