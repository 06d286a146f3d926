"""The JSON Schema Test Suite against grammars. `make schema-suite` fetches it; by hand, another draft or more walks:

    python -m tests.fuzz.schemas.suite SUITE/tests/draft2020-12 [WALKS]

A schema is refused by name, or every text that a random walk completes validates, and no text that the suite calls
invalid is accepted.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from baton.domain.errors import ConstraintFailed
from baton.grammar import sources
from baton.grammar.matcher import CompiledConstraint, ConstraintMatcher
from tests import grammars

NUM_WALKS, MAX_TOKENS = 3, 120
SEPARATORS = ((",", ":"), (", ", ": "))
ELSEWHERE = ("$dynamicAnchor", "patternProperty")
"""Keywords of a schema that a `$ref` names, and the library's singular."""

_FALSE = re.compile(r"[Ss]chema (is )?false")


@dataclass(slots=True)
class SuiteReport:
    """What became of the schemas. Lists hold (schema, text or message) of what must not be."""

    counts: Counter[str] = field(default_factory=Counter)
    invalid: list[tuple[Any, str]] = field(default_factory=list)
    accepted: list[tuple[Any, str]] = field(default_factory=list)
    unnamed: list[tuple[Any, str]] = field(default_factory=list)

    def add(self, schema: Any, instances: list[dict[str, Any]], num_walks: int) -> None:
        """Compiles the schema, walks over it, and holds the suite's own instances against it."""
        try:
            constraint = grammars.constraint(sources.json_schema_grammar(schema))
            compiled = grammars.compiler().compile(constraint)
        except ConstraintFailed as error:
            self.counts["refused"] += 1
            message = str(sources.explain(schema, error))
            if not names_a_reason(schema, message):
                self.unnamed.append((schema, message))
            return
        self.counts["compiled"] += 1
        validator = jsonschema.Draft202012Validator(schema)
        texts = (grammars.random_text(constraint, seed, MAX_TOKENS) for seed in range(num_walks))
        for text in filter(None, texts):
            self.counts["complete texts"] += 1
            if not validator.is_valid(json.loads(text)):
                self.invalid.append((schema, text))
        for instance in instances:
            text = json.dumps(instance["data"])
            is_accepted = accepts(compiled, instance["data"])
            self.counts["valid" if instance["valid"] else "invalid"] += 1
            self.counts["valid and accepted"] += instance["valid"] and is_accepted
            if is_accepted and not instance["valid"]:
                self.accepted.append((schema, text))


def accepts(compiled: CompiledConstraint, data: Any) -> bool:
    """True if the grammar takes a text of the value, compact or with spaces."""
    for separators in SEPARATORS:
        text = json.dumps(data, ensure_ascii=False, separators=separators)
        try:
            state = ConstraintMatcher.of(compiled, grammars.encode(text))
        except ConstraintFailed:
            continue
        if (grammars.allowed(state) or set()) & compiled.constraint.eos:
            return True
    return False


def names_a_reason(schema: Any, message: str) -> bool:
    """True if the message has a keyword of the schema or of its meta-schema, or says that the schema is false."""
    keywords = {*re.findall(r'"([$\w]+)":', json.dumps(schema)), *ELSEWHERE}
    return bool(keywords & set(re.findall(r"[$\w]+", message)) or _FALSE.search(message))


def cases(directory: Path) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """The schemas of a folder of the suite, each with its instances."""
    for path in sorted(directory.glob("*.json")):
        for case in json.loads(path.read_text(encoding="utf-8")):
            yield case["schema"], case["tests"]


def report(directory: Path, num_walks: int = NUM_WALKS) -> SuiteReport:
    """Plays all cases of a folder."""
    played = SuiteReport()
    for schema, instances in cases(directory):
        played.add(schema, instances, num_walks)
    return played


def main(directory: Path, num_walks: int) -> int:
    """Returns the exit status: 0 if nothing is wrong."""
    played = report(directory, num_walks)
    wrong = {"invalid": played.invalid, "accepted": played.accepted, "unnamed": played.unnamed}
    sys.stdout.write(f"{dict(played.counts)}\n{json.dumps(wrong, indent=1)}\n")
    return int(any(wrong.values()) or not played.counts["complete texts"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else NUM_WALKS))
