"""Tokens a step with chains and with trees of n-grams, at equal numbers of nodes.

    python -m bench.speculation.trees --texts 40

Recorded outputs take the place of a model's draws, so no model runs. Drafter and draft policy are the worker's, without
a draft budget, and every step verifies up to so many nodes. Counts only, seeded: nothing depends on the machine.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.domain.timing.step_time import StepShape
from baton.engine.drafts.base import ROOT, Proposal
from baton.engine.drafts.native_suffix import new_suffix_index
from baton.engine.drafts.ngram import NGramDrafter
from baton.engine.drafts.policy import DraftLimits, DraftPolicy
from baton.kv.pages import PagePool
from bench.speculation.transcripts import RecordedOutput, transcripts

VOCAB_SIZE = 4096
WIDTHS: tuple[tuple[int, ...], ...] = ((), (2,), (3, 2), (4, 3, 2))
NUM_NODES = (3, 7, 15)
PAGE_SIZE = 16


def right_path(proposal: Proposal, text: Sequence[int]) -> list[int]:
    """The nodes of a proposal that `text`, what follows the row, goes through."""
    parents = proposal.parents or tuple(range(-1, len(proposal.tokens) - 1))
    path: list[int] = []
    at = ROOT
    for token in text:
        children = (node for node, parent in enumerate(parents) if parent == at)
        found = next((node for node in children if proposal.tokens[node] == token), None)
        if found is None:
            break
        path.append(found)
        at = found
    return path


def num_steps(text: RecordedOutput, policy: DraftPolicy, id: AttemptId, num_nodes: int) -> int:
    """Steps that the output takes."""
    end = len(text.output)
    request = EngineRequest(id, text.prompt, len(text.prompt), SamplingParams(), StopParams(end + 2 * num_nodes))
    tokens, steps = [*text.prompt, text.output[0]], 0
    policy.begin(request, tokens)
    while (done := len(tokens) - len(text.prompt)) < end:
        limits = DraftLimits.of(request, tokens, len(tokens) + num_nodes)
        shape = StepShape.of([(1, len(tokens) - 1)])
        assert policy.asks(shape, 1)
        (proposal,) = policy.plan([limits], shape, None, 0)
        path = right_path(proposal, text.output[done : end - 1])
        new = list(text.output[done : done + len(path) + 1])
        tokens += new
        policy.accepted(id, new, len(proposal.tokens), path)
        steps += 1
    policy.end(id)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print("| texts | nodes | widths | tokens a step | drafts a step | accepted off the chain |")
    print("|---|---|---|---|---|---|")
    for kind, num_nodes, widths in itertools.product(("copy", "prose"), NUM_NODES, WIDTHS):
        drafter = NGramDrafter(1 << 20, new_index=new_suffix_index, widths=widths)
        policy = DraftPolicy(drafter, num_nodes, PAGE_SIZE, PagePool(1))
        steps = tokens = 0
        texts = itertools.islice(transcripts(kind, VOCAB_SIZE, options.seed), options.texts)
        for number, text in enumerate(texts):
            steps += num_steps(text, policy, AttemptId(RequestId(f"r{number}"), 1), num_nodes)
            tokens += len(text.output) - 1
        totals = policy.totals
        name = ",".join(map(str, widths)) or "chain"
        counts = f"{tokens / steps:.3f} | {totals.num_drafts / steps:.2f} | {totals.num_off_chain}"
        print(f"| {kind} | {num_nodes} | {name} | {counts} |", flush=True)


if __name__ == "__main__":
    main()
