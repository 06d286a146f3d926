"""`baton completion SHELL`: a script that completes commands and flags. Takes some seconds: it reads every command."""

from __future__ import annotations

from typing import Literal

from cyclopts import App


def completion_command(app: App) -> App:
    """The command, which describes `app`."""
    command = App(name="completion", help="Print a script that completes commands and flags in a shell.")

    @command.default
    def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
        """Print a script for SHELL: `baton completion bash > ~/.local/share/bash-completion/completions/baton`."""
        print(app.generate_completion(prog_name="baton", shell=shell))
        return 0

    return command
