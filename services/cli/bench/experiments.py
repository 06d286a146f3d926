"""`baton bench engine`, `prefix`, `transfer`, `exposed` and `router`: experiments on Baton itself, from a checkout.

Registered by `services.cli.bench.commands`. The experiments are the repository's `bench/`, which no wheel contains.
They have flags and help of their own, so a command here only hands its words on, to a program that takes this process's
place: its thread pools are one thread wide before anything numeric is loaded, and signals reach nobody else.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NoReturn

from cyclopts import App, Parameter

from baton.domain.errors import BatonError
from baton.settings.process import child_environment, thread_variables


class CheckoutMissing(BatonError):
    """An experiment was asked for where only the wheel is installed."""

    code = "no_checkout"


@dataclass(frozen=True, slots=True)
class ExperimentCommand:
    """A module of the checkout with a command line of its own."""

    command: str
    module: str
    help: str


EXPERIMENTS = (
    ExperimentCommand(
        "engine", "bench.engine.steps", "Decode and prefill steps on one core, over what the core can do."
    ),
    ExperimentCommand(
        "prefix", "bench.system.prefix_cache", "Time to first token with shared prefixes, over the ideal."
    ),
    ExperimentCommand("transfer", "bench.transfer.throughput", "How fast pages move, over a copy or a socket."),
    ExperimentCommand(
        "exposed",
        "bench.system.exposed_transfer",
        "Transfer time that no computing hides, over the time to the first token.",
    ),
    ExperimentCommand("router", "bench.router.overhead", "What the router adds to a request and to a token."),
)


def add_experiments(app: App) -> None:
    """Makes a subcommand of each; `--help` is the experiment's own."""
    for experiment in EXPERIMENTS:
        command = App(name=experiment.command, help=f"{experiment.help} Needs a checkout.", help_flags=())
        command.default(_runner(experiment))
        app.command(command)


def run_experiment(experiment: ExperimentCommand, flags: Sequence[str]) -> NoReturn:
    """Becomes the experiment. Raises `CheckoutMissing`."""
    if not _is_here(experiment.module):
        raise CheckoutMissing(
            f"`baton bench {experiment.command}` is {experiment.module}, which is part of the repository and of no "
            "wheel. Run it in a checkout that was set up with `make install-dev`."
        )
    command = [sys.executable, "-m", experiment.module, *flags]
    os.execve(sys.executable, command, child_environment(thread_variables(1)))


def _runner(experiment: ExperimentCommand) -> Callable[..., NoReturn]:
    def run(*flags: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> NoReturn:
        run_experiment(experiment, flags)

    return run


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package
        return False
