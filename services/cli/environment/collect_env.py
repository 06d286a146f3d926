"""`baton collect-env`: everything about this machine that a bug report needs, without secrets."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json as json_format
import platform
import re
import sys
from dataclasses import asdict, dataclass
from typing import Annotated

from cyclopts import Parameter

from baton.services.cli.doctor.command import run_checks
from baton.services.cli.doctor.results import DoctorResult
from baton.services.cli.settings import COMMANDS, DoctorSettings
from baton.settings.sources import secret_variables, set_variables

PACKAGE = "baton-serve"


@dataclass(frozen=True, slots=True)
class EnvironmentFacts:
    """The report. `packages`: those that Baton asks for, with None for one that is not installed."""

    baton: str
    python: str
    system: str
    packages: dict[str, str | None]
    variables: dict[str, str]
    checks: list[DoctorResult]

    def lines(self) -> list[str]:
        """The report as Markdown, to paste into an issue."""
        versions = [f"{name} {version or '(not installed)'}" for name, version in self.packages.items()]
        return [
            *(f"- baton: {self.baton}", f"- python: {self.python}", f"- system: {self.system}"),
            f"- packages: {', '.join(versions)}",
            *(f"- {name}={value}" for name, value in self.variables.items()),
            *("", "```", *(check.line() for check in self.checks), "```"),
        ]


def collect_env(
    *,
    json: Annotated[bool, Parameter(negative=(), help="Print one JSON object.")] = False,
    settings: Annotated[DoctorSettings | None, Parameter(name="*")] = None,
) -> int:
    """Print versions, variables and the doctor's checks for a bug report, without secrets. Always exits with 0."""
    facts = asyncio.run(collect(settings or DoctorSettings()))
    print(json_format.dumps(asdict(facts), indent=2) if json else "\n".join(facts.lines()))
    return 0


async def collect(settings: DoctorSettings) -> EnvironmentFacts:
    """Reads the environment; runs every check of the doctor."""
    return EnvironmentFacts(
        baton=_version(PACKAGE) or "(not installed as a package)",
        python=sys.version.replace("\n", " "),
        system=platform.platform(),
        packages={name: _version(name) for name in _required_packages()},
        variables=set_variables(secret_variables(tuple(COMMANDS.values()))),
        checks=[result async for result in run_checks(settings)],
    )


def _required_packages() -> list[str]:
    """Names of all requirements, those of extras for users included."""
    try:
        requirements = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    names = [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requirements if "extra == 'dev'" not in text]
    return sorted({*names} - {PACKAGE})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
