"""Runs `step_probe` in a process of its own, and keeps what it found.

Step times depend on the model's files, on the settings that shape a step, on the cores and on Baton's version. They are
measured once for all of these, and kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from baton import __version__
from baton.model.kernels.build import BUILT_DIR
from baton.services.cli.calibration.prediction import StepCalibration
from baton.services.cli.calibration.step_probe import ProbePlan
from baton.services.cli.doctor.host import cpu_name
from baton.services.cli.processes import die_with_parent
from baton.settings.base import ENV_PREFIX
from baton.settings.process import child_environment, thread_variables

TIMEOUT_S = 180.0
DIE_WITH_PARENT = Path(die_with_parent.__file__)
FORMAT = 2
"""Of kept files; grows when the steps that are timed change."""
_MAX_FILE_BYTES = 65_536


class CalibrationFailed(Exception):
    """The step times of a model could not be measured. The message says why, to end a sentence."""


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """Step times, and the seconds that measuring them took; `at`: when they were measured, seconds since 1970.

    `times` None: they could not be measured, and `why`. `path`: where this is kept, if anywhere.
    """

    times: StepCalibration | None
    seconds: float
    at: float
    why: str = ""
    path: Path | None = None


def calibrate(plan: ProbePlan, model_directory: Path, cache: Path | None) -> tuple[TimedSteps, bool]:
    """The step times, and whether they were measured now. `cache` None: nothing is kept.

    Failures are kept, too: a model whose steps are too slow to be timed would delay each start.
    """
    path = None if cache is None else cache / f"{calibration_key(plan, model_directory)}.json"
    if path is not None and (kept := read_kept(path)) is not None:
        return kept, False
    began, times, why = time.monotonic(), None, ""
    try:
        times = _probe(plan)
    except CalibrationFailed as failed:
        why = str(failed)
    found = TimedSteps(times, time.monotonic() - began, time.time(), why)
    if path is not None:
        with suppress(OSError):  # a read-only home: measured again next time
            _keep(path, found)
            found = replace(found, path=path)
    return found, True


def calibration_key(plan: ProbePlan, model_directory: Path) -> str:
    """Names all that step times depend on. Files of model and kernels count by name, size and time of change."""
    machine = [platform.node(), platform.machine(), cpu_name()]
    files = [_stats(model_directory), _stats(BUILT_DIR)]
    parts = [FORMAT, __version__, machine, asdict(plan), str(model_directory), files]
    return hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=16).hexdigest()


def read_kept(path: Path) -> TimedSteps | None:
    """Kept step times; None if there are none that can be read."""
    try:
        with path.open("rb") as file:
            kept = json.loads(file.read(_MAX_FILE_BYTES))
        times, why = None if kept["times"] is None else _times(kept["times"]), str(kept["why"])
        return TimedSteps(times, float(kept["seconds"]), float(kept["at"]), why, path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _keep(path: Path, found: TimedSteps) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump({**asdict(found), "path": None}, file)
    Path(file.name).replace(path)


def _times(values: Mapping[str, Any]) -> StepCalibration:
    """From JSON. Raises `ValueError`, `TypeError` or `KeyError` for anything else, also for times that are not above
    zero."""
    mixed_s = {int(chunk): float(seconds) for chunk, seconds in values["mixed_s"].items()}
    times = StepCalibration(**{**values, "mixed_s": mixed_s})
    numbers = [times.num_rows, times.row_s, times.split_row_s, times.split_prompt_rate, *mixed_s, *mixed_s.values()]
    if not mixed_s or not all(0.0 < number < float("inf") for number in numbers):
        raise ValueError("times are above zero")
    return times


def _probe(plan: ProbePlan) -> StepCalibration:
    probe = [sys.executable, "-m", "baton.services.cli.calibration.step_probe"]
    command = [sys.executable, str(DIE_WITH_PARENT), str(os.getpid()), *probe]
    # Its flags name all that counts; variables of Baton's would add to them.
    inherited = {name: value for name, value in child_environment({}).items() if not name.startswith(ENV_PREFIX)}
    environment = {**inherited, **thread_variables(1)}
    try:
        ran = subprocess.run(
            command,
            input=json.dumps(asdict(plan)),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CalibrationFailed(f"no step times within {TIMEOUT_S:.0f} s") from None
    try:
        return _times(json.loads(ran.stdout))
    except (ValueError, TypeError, KeyError, AttributeError):
        lines = ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"]
        raise CalibrationFailed(lines[-1][:200]) from None


def _stats(directory: Path) -> list[tuple[str, int, int]]:
    files = sorted(entry for entry in directory.iterdir() if entry.is_file()) if directory.is_dir() else []
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
