"""Constrained output does not depend on the drafter: real grammars, masks and scheduler over the exact fake model."""

from __future__ import annotations

import pytest

from baton.domain.constraint import Constraint, FreePhase, GrammarPhase
from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.engine.batch import Batch
from baton.engine.chunking import ChunkBudget
from baton.engine.drafts.base import Drafter
from baton.engine.drafts.policy import MAX_DRAFT_TOKENS, DraftPolicy, DraftSkipReason
from baton.engine.fake_runner import SLOT_BYTES, FakeRunner
from baton.engine.masks import MaskFiller
from baton.grammar import sources
from baton.kv.memory import PageMemory
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.swap_space import SwapSpace
from baton.services.decode.effects import EmitTokens
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import ImportLimits, LocalPrompt
from baton.services.decode.rows.rules import RowRules
from baton.services.decode.scheduler import DecodeScheduler
from tests import grammars
from tests.property.drafts.drafters import AdversarialDrafter, MadeDrafter, MadeTreeDrafter, TreeDrafter

PAGE_SIZE, NUM_PAGES, MAX_TOKENS = 4, 256, 40
MARKER = 77
LIST = GrammarPhase(sources.json_schema_grammar({"type": "array", "items": {"enum": [1, 22]}, "minItems": 9}))
WORDS = GrammarPhase(sources.regex_grammar("([a-c]{2,5} )+[x-z]"))
EOS = grammars.compiler().tokenizer.eos
CONSTRAINTS = {
    "list": Constraint((LIST,), eos=EOS),
    "words": Constraint((WORDS,), eos=EOS, min_tokens=9),
    "free": None,
    "thoughts": Constraint((FreePhase(((MARKER,),), budget=6, on_budget=(MARKER,)), LIST), eos=EOS),
}


def request(name: str, seed: int) -> EngineRequest:
    constraint = CONSTRAINTS[name]
    stop = StopParams(MAX_TOKENS, 0, frozenset() if constraint is None else constraint.eos)
    sampling = SamplingParams(temperature=1.0, seed=seed)
    prompt = (11 + seed, 12, 13)
    id = AttemptId(RequestId(f"{name}-{seed}"), 1)
    return EngineRequest(id, prompt, len(prompt), sampling, stop, constraint=constraint)


class Engine:
    """A decode worker's scheduler and runner, which computes its prompts itself."""

    def __init__(self, drafter: Drafter | None, cuts: bool) -> None:
        masks = MaskFiller(grammars.compiler())
        self.cache = PrefixCache(PagePool(NUM_PAGES))
        self.policy = None
        if drafter is not None:
            constraints = masks if cuts else None
            self.policy = DraftPolicy(drafter, MAX_DRAFT_TOKENS, PAGE_SIZE, self.cache.pool, constraints=constraints)
        imports = ImportTable(self.cache, ImportLimits(PAGE_SIZE, 8, NUM_PAGES, 9.0))
        rules, chunks = RowRules(drafts=self.policy), ChunkBudget(64, PAGE_SIZE)
        self.scheduler = DecodeScheduler(imports, SwapSpace(0), PAGE_SIZE, chunks, rules)
        memory = PageMemory(NUM_PAGES, PAGE_SIZE * SLOT_BYTES)
        make = drafter.make if isinstance(drafter, MadeDrafter) else None
        self.runner = FakeRunner(memory, PAGE_SIZE, grammars.VOCAB_SIZE, masks=masks, make_drafts=make)
        self.num_steps = 0

    def run(self, requests: list[EngineRequest]) -> dict[AttemptId, list[int]]:
        """The output of each request, all in one batch."""
        outputs: dict[AttemptId, list[int]] = {}
        for each in requests:
            table = PageTable(self.cache, PAGE_SIZE, each.id.request_id, Hold.LIVE)
            assert table.extend(len(each.tokens))
            self.scheduler.add_prompt(LocalPrompt(each, table, 0))
            outputs[each.id] = []
        while (batch := self._next()) is not None:
            self.num_steps += 1
            for effect in self.scheduler.commit(batch, self.runner.run(batch), 0.0):
                assert isinstance(effect, EmitTokens), f"{effect}: a row has failed"
                outputs[effect.id] += [token.token for token in effect.tokens]
        return outputs

    def _next(self) -> Batch | None:
        return self.scheduler.schedule(0.0)


@pytest.mark.parametrize(
    ("adversary", "cuts"),
    [
        (AdversarialDrafter, True),
        (AdversarialDrafter, False),
        (MadeDrafter, True),
        (TreeDrafter, True),
        (TreeDrafter, False),
        (MadeTreeDrafter, True),
    ],
    ids=["cut proposals", "whole proposals", "drafts of the runner", "cut trees", "whole trees", "trees of the runner"],
)
def test_output_does_not_depend_on_the_drafter(adversary: type[AdversarialDrafter], cuts: bool):
    """Rows with grammars, with free text before one, and without any, in one batch."""
    accepted = wrong = 0
    for seed in range(4):
        requests = [request(name, seed) for name in CONSTRAINTS]
        plain = Engine(None, cuts)
        expected = plain.run(requests)
        behind = [*grammars.encode(",22,1"), *EOS, 5, *EOS]
        right = {each.id: [*each.tokens, *expected[each.id], *behind] for each in requests}
        drafting = Engine(adversary(right.__getitem__, grammars.VOCAB_SIZE, seed), cuts)
        assert drafting.run(requests) == expected
        assert drafting.num_steps < plain.num_steps
        policy = drafting.policy
        assert policy is not None
        accepted += policy.totals.num_accepted
        wrong += policy.totals.num_drafts - policy.totals.num_accepted
        is_cut = cuts and not issubclass(adversary, MadeDrafter)  # what is not known yet cannot be cut
        assert (policy.totals.skipped[DraftSkipReason.CONSTRAINT] > 0) == is_cut
    assert min(accepted, wrong) > 40


def test_a_right_drafter_saves_steps_of_constrained_rows():
    requests = [request("list", 3)]
    plain = Engine(None, True)
    expected = plain.run(requests)
    (output,) = expected.values()
    right = {each.id: [*each.tokens, *output, 5, 5, 5] for each in requests}
    drafting = Engine(AdversarialDrafter(right.__getitem__, grammars.VOCAB_SIZE, kinds=["right"]), True)
    assert drafting.run(requests) == expected
    assert drafting.num_steps < plain.num_steps / 3, "a row reaches into one more page at a time"
