"""`baton config COMMAND`: the settings that a command would have here, each with its source."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from cyclopts import App, MissingArgumentError, Parameter

from baton.services.cli.settings import COMMANDS
from baton.settings.base import Settings, SettingsError, env_name, refuse_unknown_variables
from baton.settings.sources import EffectiveSetting, ValueSource, setting_values


def config_command(app: App) -> App:
    """The command, which parses the command lines of `app`."""
    command = App(name="config", help="Show the settings that a command would have, each with its source.")

    @command.default
    def config(
        *words: Annotated[str, Parameter(allow_leading_hyphen=True, help="A command with its flags: serve decode.")],
    ) -> int:
        """Show the settings that a command would have here, with their sources; `--json` first gives JSON.

        A flag wins over a variable, a variable over the default. Secrets are masked.
        """
        as_json = words[:1] == ("--json",)
        return _print(app, words[1:] if as_json else words, as_json=as_json)

    return command


def _print(app: App, words: Sequence[str], *, as_json: bool) -> int:
    refuse_unknown_variables(COMMANDS.values())
    found = effective_settings(app, words)
    if as_json:
        print(json_format.dumps([asdict(value) for value in found], indent=2))
        return 0
    width = max(len(value.name) for value in found) + 2
    for value in found:
        flag = f"--{value.name.replace('_', '-')}"
        source = env_name(value.name) if value.source is ValueSource.VARIABLE else value.source.value
        print(f"{flag:<{width}}  {'-' if value.value is None else value.value}  ({source})")
    return 0


def effective_settings(app: App, words: Sequence[str]) -> list[EffectiveSetting]:
    """The settings of the command line `words`. Raises `SettingsError` for a command without any."""
    name = _command_name(words)
    model = COMMANDS[name]
    flags = words[len(name.split()) :]
    try:
        bound = app.parse_args([*words], exit_on_error=False, print_error=False)[1]
    except MissingArgumentError:  # an id, which no setting depends on
        bound = app.parse_args([*name.split(), "id", *flags], exit_on_error=False, print_error=False)[1]
    settings = bound.arguments.get("settings") or model()
    assert isinstance(settings, Settings)
    return list(setting_values(settings, flags))


def _command_name(words: Sequence[str]) -> str:
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name
    hint = f"Choose one of: {', '.join(COMMANDS)}; for example: baton config serve decode."
    raise SettingsError("config", why=f"{' '.join(words) or 'nothing'} is no command with settings", hint=hint)
