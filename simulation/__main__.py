"""`python -m simulation`: runs seeds until one fails, and shows the failure as small as it gets.

python -m simulation --seeds 200          seeds 0..199
python -m simulation --seed 17 --trace    one seed, with all that happened
"""

from __future__ import annotations

import argparse
import sys
import time

from simulation.report import MAX_LINES, describe
from simulation.scenario import scenario_of
from simulation.shrink import shrink
from simulation.world import run


def main(arguments: list[str]) -> int:
    """Returns the exit status: 0 without a violation."""
    options = _options(arguments)
    if options.seed is not None:
        verdict = run(scenario_of(options.seed))
        _say(describe(verdict, len(verdict.trace.entries) if options.trace else MAX_LINES))
        return int(verdict.violation is not None)
    return _run_seeds(options.first, options.seeds)


def _run_seeds(first: int, num_seeds: int) -> int:
    began_at = time.monotonic()
    for seed in range(first, first + num_seeds):
        verdict = run(scenario_of(seed))
        if verdict.violation is not None:
            _say(describe(shrink(verdict, run)))
            return 1
    _say(f"{num_seeds} seeds from {first} in {time.monotonic() - began_at:.1f} s: 0 violations")
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("simulation", description="Runs simulated clusters; see docs/testing.md.")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--trace", action="store_true", help="with --seed: show everything that happened")
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
