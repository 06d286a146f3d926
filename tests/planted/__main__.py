"""`python -m tests.planted [WORDS]`: plants every bug whose name has the words; exit status 1 if one goes unnoticed."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from tests.planted.bugs import BUGS
from tests.planted.runner import run_bug

NUM_AT_ONCE = 2


def main(words: str) -> int:
    """Runs the bugs and prints a line each."""
    chosen = [bug for bug in BUGS if words in str(bug)]
    num_unnoticed = 0
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        for result in pool.map(run_bug, chosen):
            verdict = result.problem or "noticed"
            print(f"{result.seconds:5.1f} s  {result.bug}: {verdict}", flush=True)
            num_unnoticed += bool(result.problem)
    print(f"{len(chosen) - num_unnoticed} of {len(chosen)} planted bugs were noticed")
    return int(num_unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
