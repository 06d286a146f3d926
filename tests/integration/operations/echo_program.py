"""A program for the fork server's own tests: it writes its words, and its exit code is the variable MARK."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def run(words: Sequence[str]) -> int:
    """Writes `words`, and returns MARK."""
    sys.stdout.write(" ".join(words) + "\n")
    return int(os.environ["MARK"])
