"""The root of the `baton` command: subcommands, and errors as messages with an exit code."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence

from cyclopts import App

from baton.services.cli.bench.commands import bench_app
from baton.services.cli.cache.command import cache_app
from baton.services.cli.chat.command import chat
from baton.services.cli.doctor.command import doctor
from baton.services.cli.environment.collect_env import collect_env
from baton.services.cli.environment.completion import completion_command
from baton.services.cli.environment.config import config_command
from baton.services.cli.errors import EXIT_INTERRUPTED, EXPECTED_ERRORS, explain
from baton.services.cli.key import key
from baton.services.cli.replay import replay
from baton.services.cli.run import run_model
from baton.services.cli.serve import serve_app
from baton.services.cli.top.command import top
from baton.services.cli.trace.command import trace
from baton.services.cli.up import up
from baton.services.cli.workers.drain import drain
from baton.services.cli.workers.role import role
from baton.settings.process import end_process


def build_app() -> App:
    """The command with all its subcommands."""
    app = App(
        name="baton",
        help="LLM serving with prefill and decode in separate services that hand requests over page by page.",
        version=lambda: importlib.metadata.version("baton-serve"),
    )
    app.command(bench_app)
    app.command(cache_app)
    app.command(chat)
    app.command(doctor)
    app.command(drain)
    app.command(key)
    app.command(replay)
    app.command(role)
    app.command(run_model, name="run")
    app.command(serve_app)
    app.command(top)
    app.command(trace)
    app.command(up)
    app.command(collect_env)
    app.command(config_command(app))
    app.command(completion_command(app))
    return app


def run(tokens: Sequence[str]) -> int:
    """Runs one command line, without the program's name, and returns its exit code. Prints errors to stderr."""
    try:
        code = build_app()(list(tokens), exit_on_error=False, print_error=False, result_action="return_value")
    except EXPECTED_ERRORS as error:
        message, code = explain(error)
        print(f"baton: {message}", file=sys.stderr)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    return code if isinstance(code, int) else 0


def main() -> None:
    """The entry point of the `baton` script."""
    exit_code = run(sys.argv[1:])
    if sys.argv[1:2] == ["serve"]:
        end_process(exit_code)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
