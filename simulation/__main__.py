"""`python -m simulation`: runs seeds until one fails, and shows the shrunk failure.

python -m simulation --seeds 200                        seeds 0..199
python -m simulation --seeds 10000 --jobs 8             the same in eight processes, with a progress bar
python -m simulation --first 4200 --seeds 5800 --jobs 8 continue where it was stopped
python -m simulation --seed 17 --trace                  one seed with its trace
"""

from __future__ import annotations

import argparse
import sys
import time

from simulation.report import MAX_LINES, describe
from simulation.run import run
from simulation.scenario_generator import generate_scenario
from simulation.shrink import shrink
from simulation.sweep import ProgressBar, SweepResult, failing_seed, num_cores, sweep, sweep_here

INTERRUPTED = 130
"""Exit status of a shell after SIGINT."""


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 without a violation."""
    options = _options(arguments)
    if options.seed is not None:
        result = run(generate_scenario(options.seed))
        _print(describe(result, len(result.trace.entries) if options.trace else MAX_LINES))
        return int(result.violation is not None)
    return _run_seeds(options.first, options.seeds, options.jobs or num_cores())


def _run_seeds(first: int, num_seeds: int, num_jobs: int) -> int:
    began_at = time.monotonic()
    result = _sweep(first, num_seeds, num_jobs)
    if result.failing_seed is not None:
        _print(describe(shrink(run(generate_scenario(result.failing_seed)), run)))
        _print(f"{result.num_good} seeds were good; on with --first {result.next_seed}")
        return 1
    if result.next_seed < first + num_seeds:
        _print(f"stopped after {result.num_good} good seeds; on with --first {result.next_seed}")
        return INTERRUPTED
    _print(f"{num_seeds} seeds from {first} in {time.monotonic() - began_at:.1f} s: 0 violations")
    return 0


def _sweep(first: int, num_seeds: int, num_jobs: int) -> SweepResult:
    show = ProgressBar(first, num_seeds, sys.stderr).show
    if num_jobs == 1:
        return sweep_here(first, num_seeds, show, failing_seed)
    return sweep(first, num_seeds, num_jobs, show)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("simulation", description="Runs simulated clusters; see docs/testing.md.")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="in how many processes; 0: one a core")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--trace", action="store_true", help="with --seed: show everything that happened")
    return parser.parse_args(arguments)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
