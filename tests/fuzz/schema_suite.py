"""Random walks over the schemas of the JSON Schema Test Suite. Run by hand: the suite is no dependency.

    python -m tests.fuzz.schema_suite SUITE/tests/draft2020-12

A schema is refused, or every text that a walk completes validates. PyPI's source archive of `jsonschema` has the suite.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs

from baton.domain.errors import ConstraintFailed
from baton.grammar import sources
from tests import grammars

NUM_WALKS, MAX_TOKENS = 3, 120


def schemas(directory: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(directory.glob("*.json")):
        cases = json.loads(path.read_text(encoding="utf-8"))
        yield from (case["schema"] for case in cases if isinstance(case["schema"], dict))


def walk(schema: dict[str, Any], counts: Counter[str]) -> list[str]:
    """Counts what becomes of a schema; returns the texts that do not validate."""
    try:
        constraint = grammars.constraint(sources.json_schema_grammar(schema))
        grammars.compiler().compile(constraint)
    except ConstraintFailed:
        counts["refused"] += 1
        return []
    counts["compiled"] += 1
    texts = [grammars.random_text(constraint, seed, MAX_TOKENS) for seed in range(NUM_WALKS)]
    complete = [text for text in texts if text is not None]
    counts["complete texts"] += len(complete)
    return [text for text in complete if not jsonschema_rs.is_valid(schema, json.loads(text))]


def main(directory: Path) -> int:
    """Returns the exit status: 0 if every complete text validates."""
    counts: Counter[str] = Counter()
    wrong = [(schema, text) for schema in schemas(directory) for text in walk(schema, counts)]
    sys.stdout.write(f"{dict(counts)}, {len(wrong)} invalid\n")
    return int(bool(wrong) or not counts["complete texts"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
