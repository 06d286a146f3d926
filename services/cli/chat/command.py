"""`baton chat`: asks, shows the answer as it comes, and keeps the conversation.

Lines are read outside of the event loop; each answer is one run of it. So Ctrl-C cancels an answer, which aborts it in
the cluster, and not the program. Registered by `baton.services.cli.main`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from baton.services.cli.chat.answer import AnswerFailed, ChatAnswer
from baton.services.cli.chat.client import ChatClient
from baton.services.cli.chat.conversation import ChatCommands, ChatHistory, CommandOutcome, Content, set_field
from baton.services.cli.chat.image_file import read_image_part
from baton.services.cli.chat.terminal import ChatOutput, complete_commands, open_terminal, read_line
from baton.services.cli.errors import EXIT_FAILED, EXIT_INTERRUPTED
from baton.services.cli.settings import COMMANDS, ChatSettings
from baton.settings.base import SettingsError, refuse_unknown_variables

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_NO_TEMPLATE = "no chat template"
_SAMPLING = ("temperature", "top_p", "max_tokens", "seed")


def chat(
    *message: Annotated[str, Parameter(help="Ask this one question and leave; default: a conversation.")],
    fields: Annotated[
        tuple[str, ...], Parameter(name="--set", help="A request field, such as top_k=20.", negative=())
    ] = (),
    settings: Annotated[ChatSettings | None, Parameter(name="*")] = None,
) -> int:
    """Chat with a model of a running cluster, in this terminal or through a pipe."""
    refuse_unknown_variables(COMMANDS.values())
    chosen = settings or ChatSettings()
    terminal = open_terminal()
    with asyncio.Runner() as runner:
        client = _client(runner, chosen)
        try:
            history = _start(runner, client, chosen, fields)
            talk = _ChatHandler(runner, client, history, terminal)
            return talk.once(" ".join(message)) if message else talk.converse()
        except AnswerFailed as error:
            terminal.problem(str(error))
            return EXIT_FAILED
        finally:
            runner.run(client.close())


def _client(runner: asyncio.Runner, settings: ChatSettings) -> ChatClient:
    key = None if settings.api_key is None else settings.api_key.get_secret_value()
    routers = [url.strip() for url in settings.router.split(",") if url.strip()]

    async def make() -> ChatClient:
        return ChatClient(routers, key)

    return runner.run(make())


def _start(runner: asyncio.Runner, client: ChatClient, settings: ChatSettings, extra: Sequence[str]) -> ChatHistory:
    """The empty conversation. Raises `AnswerFailed` without a router, `SettingsError` for an unusable `--set`."""
    fields: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(settings, name)) is not None}
    for word in extra:
        name, equals, value = word.partition("=")
        try:
            if not equals:
                raise ValueError("there is no =")
            set_field(fields, name, value)
        except ValueError as error:
            raise SettingsError(f"--set {word}", why=str(error), hint="Write --set top_k=20.") from None
    models = runner.run(client.models())
    model = settings.model or models[0]
    if model not in models:
        raise SettingsError(f"--model {model}", why="it is not served here", hint=f"Served: {', '.join(models)}.")
    return ChatHistory(model, settings.system, fields)


class _ChatHandler:
    """One conversation with one terminal."""

    def __init__(self, runner: asyncio.Runner, client: ChatClient, history: ChatHistory, terminal: ChatOutput) -> None:
        self._runner = runner
        self._client = client
        self._history = history
        self._terminal = terminal
        self._path = _CHAT
        self._code = 0

    def once(self, question: str) -> int:
        """Asks one question. Text from a pipe is appended to it."""
        if not sys.stdin.isatty() and (piped := sys.stdin.read().strip()):
            question = f"{question}\n\n{piped}"
        self._ask(question)
        return self._code

    def converse(self) -> int:
        """Reads lines until the end, `/exit`, or a second Ctrl-C at the prompt. Returns the exit code."""
        commands = ChatCommands(self._history)
        interactive = sys.stdin.isatty()
        if interactive:
            complete_commands(commands.names)
            self._terminal.note(f"{self._history.model}. /help lists the commands; Ctrl-D leaves.")
        for line in self._lines(interactive):
            if not line.startswith("/"):
                self._ask(line)
                if self._code == EXIT_INTERRUPTED and not interactive:
                    break
                continue
            outcome = commands.run(line)
            self._terminal.note(outcome.text)
            if outcome.leave:
                break
            if not self._perform(outcome) and not interactive:
                return EXIT_FAILED  # the next line asks about an image that is not there
        if interactive:
            return 0
        if self._history.images:
            self._terminal.problem("/image was given, but no question follows")
            return self._code or EXIT_FAILED
        return self._code

    def _perform(self, outcome: CommandOutcome) -> bool:
        """Does what a command asks for. False if an image could not be attached."""
        if outcome.retry is not None:
            self._ask(outcome.retry)
        if outcome.save is not None:
            self._save(Path(outcome.save))
        if outcome.list_models:
            self._list_models()
        return outcome.image is None or self._attach(Path(outcome.image))

    def _lines(self, interactive: bool) -> Iterator[str]:
        interrupted = False
        while True:
            try:
                line = read_line(interactive)
            except KeyboardInterrupt:
                if interrupted:
                    return
                interrupted = True
                self._terminal.note("\nCtrl-C again leaves")
                continue
            if line is None:
                return
            interrupted = False
            if line.strip():
                yield line.strip()

    def _ask(self, question: Content) -> None:
        """Shows the answer. A stopped one stays in the conversation as far as it came."""
        self._history.ask(question)
        answer = ChatAnswer(time.monotonic())
        try:
            self._runner.run(self._show(answer))
        except KeyboardInterrupt:
            self._code = EXIT_INTERRUPTED
            self._terminal.end("stopped" + (f" - {stats}" if (stats := answer.stats()) else ""))
        except AnswerFailed as error:
            if _NO_TEMPLATE in str(error) and self._path == _CHAT and self._history.is_text:
                self._terminal.note("the model has no chat template: it continues each line, without the conversation")
                self._path = _COMPLETIONS
                self._history.undo()
                self._ask(question)
                return
            self._code = EXIT_FAILED
            if answer.first_s is not None:
                self._terminal.end("")
            self._terminal.problem(str(error))
        else:
            self._terminal.end(answer.stats())
        self._history.answer(answer.content, answer.tool_calls)

    async def _show(self, answer: ChatAnswer) -> None:
        path = self._path if self._history.is_text else _CHAT  # a completion has no images
        body = self._history.body() if path == _CHAT else self._history.completion_body()
        async with contextlib.aclosing(self._client.stream(path, body)) as events:
            async for event in events:
                answer.num_resumed += event.resumed
                pieces = list(answer.add(event.data, time.monotonic()))
                if self._history.raw:
                    self._terminal.raw(event.data, event.id)
                    continue
                for piece in pieces:
                    self._terminal.piece(piece)

    def _list_models(self) -> None:
        try:
            self._terminal.note("\n".join(self._runner.run(self._client.models())))
        except AnswerFailed as error:
            self._terminal.problem(str(error))

    def _attach(self, file: Path) -> bool:
        try:
            self._history.attach(read_image_part(file))
        except ValueError as error:
            self._terminal.problem(str(error))
            return False
        self._terminal.note(f"{file.name} goes with the next question")
        return True

    def _save(self, file: Path) -> None:
        try:
            file.expanduser().write_text(self._history.as_json() + "\n", encoding="utf-8")
        except OSError as error:
            self._terminal.problem(f"{file}: {error.strerror}")
        else:
            self._terminal.note(f"written to {file}")
