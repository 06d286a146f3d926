"""The root of the `baton` command: subcommands, and errors as messages with an exit code."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cyclopts import App

from baton.services.cli.environment.completion import completion_command
from baton.services.cli.environment.config import config_command
from baton.services.cli.errors import EXIT_INTERRUPTED, EXPECTED_ERRORS, explain
from baton.services.cli.serve import serve_app
from baton.settings.process import end_process

PACKAGE = "baton.services.cli"
Call = Callable[[], object]
"""A command with its arguments."""
COMMANDS = {
    "bench": "bench.commands:bench_app",
    "cache": "cache.command:cache_app",
    "chat": "chat.command:chat",
    "doctor": "doctor.command:doctor",
    "drain": "workers.drain:drain",
    "key": "key:key",
    "replay": "replay:replay",
    "role": "workers.role:role",
    "run": "run:run_model",
    "top": "top.command:top",
    "trace": "trace.command:trace",
    "up": "up:up",
    "collect-env": "environment.collect_env:collect_env",
}
"""Commands by their names, and where they are below `PACKAGE`."""
SERVE = "serve"


def build_app(words: Sequence[str] = ()) -> App:
    """The command with all its subcommands.

    `words`: a command line. If it begins with a subcommand, the others are imported on use only: each process of a
    cluster calls one, and all of them take twice as long to import. Help and completion describe all.
    """
    app = App(
        name="baton",
        help="LLM serving with prefill and decode in separate services that hand requests over page by page.",
        version=lambda: importlib.metadata.version("baton-serve"),
    )
    calls_one = bool(words) and words[0] in {SERVE, *COMMANDS}
    for name, place in COMMANDS.items():
        path = f"{PACKAGE}.{place}"
        app.command(path if calls_one else _imported(path), name=name)
    app.command(serve_app)
    app.command(config_command(app))
    app.command(completion_command(app))
    return app


def _imported(path: str) -> Any:
    """The command at `module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def parse(tokens: Sequence[str]) -> Call:
    """What a command line, without the program's name, asks for. Raises `CycloptsError`, or what settings raise."""
    function, bound, _ = build_app(tokens).parse_args(list(tokens), exit_on_error=False, print_error=False)
    return lambda: function(*bound.args, **bound.kwargs)


def run(tokens: Sequence[str], call: Call | None = None) -> int:
    """Runs one command line, without the program's name, and returns its exit code. Prints errors to stderr.

    `call`: what `parse` has read from it before.
    """
    try:
        if call is None:
            code = build_app(tokens)(list(tokens), exit_on_error=False, print_error=False, result_action="return_value")
        else:
            code = call()
    except EXPECTED_ERRORS as error:
        message, code = explain(error)
        print(f"baton: {message}", file=sys.stderr)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    return code if isinstance(code, int) else 0


def main() -> None:
    """The entry point of the `baton` script."""
    exit_code = run(sys.argv[1:])
    if sys.argv[1:2] == [SERVE]:
        end_process(exit_code)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
