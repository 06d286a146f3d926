"""Planted bugs in constrained output; a part of the table in `bugs`."""

from __future__ import annotations

from tests.planted.runner import PlantedBug

CONSTRAINED = "constrained output"
MASKS_TESTS = "tests/unit/engine/test_masks.py"
MATCHER, MATCHER_TESTS = "baton/grammar/matcher.py", "tests/unit/grammar/test_matcher.py"

CONSTRAINT_BUGS = (
    PlantedBug(
        CONSTRAINED,
        "the prompt is consumed as output",
        "baton/engine/masks.py",
        "spec.history[spec.num_prompt_tokens + state.matcher.num_tokens :]",
        "spec.history[state.matcher.num_tokens :]",
        MASKS_TESTS,
    ),
    PlantedBug(
        CONSTRAINED,
        "the first token of an import is not consumed",
        "baton/engine/masks.py",
        "state.matcher.num_tokens :]:\n",
        "state.matcher.num_tokens :][1:]:\n",
        MASKS_TESTS,
    ),
    PlantedBug(
        CONSTRAINED,
        "the token of a failed row is given out",
        "baton/engine/masks.py",
        "tokens.append(tuple(sampled[first:end]))",
        "tokens.append(tuple(sampled[first : max(end, first + 1)]))",
        MASKS_TESTS,
    ),
    PlantedBug(
        CONSTRAINED,
        "what follows a draft that is not allowed is given out",
        "baton/engine/masks.py",
        "tokens.append(tuple(sampled[first:end]))",
        "tokens.append(() if end == first else tuple(sampled[first:num_sampled]))",
        MASKS_TESTS,
    ),
    PlantedBug(
        CONSTRAINED,
        "drafts count as output",
        "baton/engine/masks.py",
        "ahead = matcher.copy()",
        "ahead = matcher",
        MASKS_TESTS,
    ),
    PlantedBug(
        CONSTRAINED,
        "a row without its mask is sampled",
        "baton/model/sampling/sampler.py",
        "row.mask is not None and index not in masks",
        "False and index not in masks",
        "tests/unit/model/sampling/test_sampler.py",
    ),
    PlantedBug(
        CONSTRAINED,
        "an incomplete text may end",
        MATCHER,
        "        if is_accepting:\n            _clear_bits",
        "        if True:\n            _clear_bits",
        MATCHER_TESTS,
    ),
    PlantedBug(
        CONSTRAINED,
        "min_tokens forbids the only token",
        MATCHER,
        "    if kept.any():\n        row[:] = kept",
        "    row[:] = kept",
        MATCHER_TESTS,
    ),
    PlantedBug(
        CONSTRAINED,
        "workers without the library get constrained requests",
        "services/router/dispatch/placement/pair.py",
        "grammars in ('', worker.grammars)".replace("'", '"'),
        "True",
        "tests/unit/router/dispatch/test_placement.py",
    ),
    PlantedBug(
        CONSTRAINED,
        "a phase of a later version is skipped",
        "baton/rpc/tokens/constraint_codec.py",
        'raise ValueError("a phase is of no known kind")',
        "return FreePhase()",
        "tests/unit/rpc/test_codec.py",
    ),
)
