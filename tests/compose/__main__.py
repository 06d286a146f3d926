"""`python -m tests.compose`: brings docker/compose.yaml up, breaks it under load, and takes it down again.

`make test-compose` runs it. It needs Docker Engine with compose v2, and uses a project name and ports of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from baton.bundled import MODEL_DIR
from baton.services.cli.processes.ports import free_ports
from tests.compose.alerts import Alerts
from tests.compose.engine import ComposeProject, DockerFailed, missing_docker
from tests.compose.load import Expected
from tests.compose.steps import STEPS, ComposeTest

NUM_TOKENS = 24
PROMPTS = tuple(tuple(range(first, first + length)) for first, length in ((5, 40), (60, 3), (100, 70), (300, 130)))


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every step passed; 1: one failed; 2: there is no docker."""
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description=__doc__)
    parser.add_argument("--steps", default=",".join(STEPS), help="which of them, in their order: %(default)s")
    parser.add_argument("--project", default=f"baton-test-{os.getpid()}", help="name of the compose project")
    parser.add_argument("--no-build", action="store_true", help="take the images that are there")
    options = parser.parse_args(arguments)
    names = options.steps.split(",")
    if unknown := set(names) - STEPS.keys():
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    api, collector, prometheus, grafana = free_ports(4)
    project = ComposeProject(options.project, environment(api, collector, prometheus, grafana))
    if (missing := missing_docker(project)) is not None:
        print(missing, file=sys.stderr)
        return 2
    test = ComposeTest(
        project,
        f"http://127.0.0.1:{api}",
        f"http://127.0.0.1:{collector}/",
        references(MODEL_DIR),
        not options.no_build,
        alerts=Alerts(f"http://127.0.0.1:{prometheus}"),
        grafana_url=f"http://127.0.0.1:{grafana}",
    )
    return run_steps(test, names)


def environment(api: int, collector: int, prometheus: int, grafana: int) -> dict[str, str]:
    """The variables of docker/compose.yaml: free ports, float32, in which every token is exact, and spans."""
    return {
        "ROUTER_ADDRESS": f"127.0.0.1:{api}",
        "TRACING_PORT": str(collector),
        "PROMETHEUS_PORT": str(prometheus),
        "GRAFANA_PORT": str(grafana),
        "PAGE_URL": f"http://127.0.0.1:{api}",
        "BATON_DTYPE": "float32",
        "BATON_OTLP_ENDPOINT": "http://collector:4318",
    }


def references(directory: Path) -> list[Expected]:
    """The model's own greedy tokens for every prompt."""
    from tests.exactness.reference import Reference  # torch, which a machine without docker need not load

    model = Reference(directory)
    return [Expected(prompt, tuple(model.generate(prompt, NUM_TOKENS))) for prompt in PROMPTS]


def run_steps(test: ComposeTest, names: Sequence[str]) -> int:
    """Runs the steps until one fails; takes the stack down then, too, if `down` was asked for."""
    for name, step in STEPS.items():
        if name not in names:
            continue
        began, test.notes = time.monotonic(), []
        print(f"{name} ... ", end="", flush=True)
        try:
            step(test)
        except BaseException as error:  # also an interrupt: nothing stays behind
            print(f"FAILED after {time.monotonic() - began:.0f} s: {error}")
            if "down" in names and name != "down":
                save_logs(test.project)
                test.project.down()
            if not isinstance(error, AssertionError | TimeoutError | DockerFailed):
                raise
            return 1
        print(f"ok, {time.monotonic() - began:.0f} s" + "".join(f"; {note}" for note in test.notes))
    return 0


def save_logs(project: ComposeProject) -> None:
    """Writes the logs of all containers to a file, and says which."""
    try:
        text = project.compose("logs", "--no-color", "--timestamps")
    except DockerFailed as error:
        text = str(error)
    path = Path(f"{project.name}.log")
    path.write_text(text, encoding="utf-8")
    print(f"the logs of all containers: {path}")


if __name__ == "__main__":
    sys.exit(main())
