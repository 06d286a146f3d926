"""`baton bench engine`, `prefix`, `transfer`, `exposed`, `router`, `token-path`: experiments, from a checkout.

Registered by `baton.services.cli.bench.commands`. The experiments are in the repository's `bench/`, which no wheel
contains. They parse their own flags, so a command here passes its arguments to a program that replaces this process.
That limits thread pools to one thread before numeric libraries are loaded, and signals reach the experiment directly.
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
    """Experiments need a checkout; only the wheel is installed."""

    code = "no_checkout"


@dataclass(frozen=True, slots=True)
class ExperimentCommand:
    """A module of the checkout with a command line of its own."""

    command: str
    module: str
    help: str


EXPERIMENTS = (
    ExperimentCommand(
        "engine", "bench.engine.steps", "Decode and prefill steps on one core, over the core's ceilings."
    ),
    ExperimentCommand("prefix", "bench.system.prefix_cache", "TTFT with shared prefixes, over the ideal."),
    ExperimentCommand("transfer", "bench.transfer.throughput", "Speed of page transfer, over a copy or a socket."),
    ExperimentCommand(
        "exposed",
        "bench.system.exposed_transfer",
        "Transfer time that no compute hides, over TTFT.",
    ),
    ExperimentCommand("router", "bench.router.overhead", "Latency and CPU time that the router adds."),
    ExperimentCommand("token-path", "bench.router.token_path", "The router's CPU time a token, at 1 to 64 streams."),
)


def add_experiments(app: App) -> None:
    """Adds a subcommand for each experiment; `--help` is the experiment's own."""
    for experiment in EXPERIMENTS:
        command = App(name=experiment.command, help=f"{experiment.help} Needs a checkout.", help_flags=())
        command.default(_runner(experiment))
        app.command(command)


def run_experiment(experiment: ExperimentCommand, flags: Sequence[str]) -> NoReturn:
    """Replaces this process with the experiment. Raises `CheckoutMissing`."""
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
    except ModuleNotFoundError:  # the package itself is missing
        return False
