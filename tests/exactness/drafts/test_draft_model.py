"""A draft model in the pages: it changes no token, and is accepted across the split as if nothing had been split.

Both engines in one process, on real models. The target as its own draft model is a drafter that is always right. The
reference for the draft layers is transformers' own cache of the draft model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import EngineRequest, OutputToken, SamplingParams, StopParams
from baton.engine.chunking import ChunkBudget
from baton.engine.drafts.policy import MAX_DRAFT_TOKENS, DraftPolicy, DraftTotals
from baton.engine.drafts.runner_drafter import MAX_RUNNER_DRAFTS, RunnerDrafter, max_chain
from baton.engine.runner import ModelRunner
from baton.kv.memory import PageMemory
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache
from baton.kv.swap_space import SwapSpace
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import LoadedModel, load_model
from baton.model.storage import PageStorage
from baton.services.decode.effects import EmitTokens
from baton.services.decode.import_table import ImportTable
from baton.services.decode.kv_import import ImportLimits, LocalPrompt
from baton.services.decode.rows.rules import RowRules
from baton.services.decode.scheduler import DecodeScheduler
from baton.services.local.pair import LocalPair, PairLimits
from baton.transfer.base import Pull
from tests.exactness.drafts.test_drafted_tokens import PAGE_SIZE, SAMPLINGS, prompts
from tests.tiny_models import save_random_model

pytestmark = pytest.mark.exactness

NUM_TOKENS = 30
NOISE = 0.01


def load(directory: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(directory, dtype=DtypeChoice(dtype), page_size=PAGE_SIZE, latent_pages=False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model("qwen3", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model("llama", tmp_path_factory.mktemp("draft"), seed=1)


@pytest.fixture(scope="module")
def similar(target: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The target, and a draft model with the same weights and a little noise: right now and then."""
    path = tmp_path_factory.mktemp("similar")
    module = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * NOISE
    module.save_pretrained(path)
    return load(target).with_draft(load(path))


Outputs = list[list[OutputToken]]


def make_policy(model: LoadedModel, pool: PagePool, widths: tuple[int, ...] = ()) -> DraftPolicy:
    """Takes all drafts that fit. `widths`: of trees; (): chains."""
    max_drafts = MAX_DRAFT_TOKENS if widths else max_chain(len(model.head))
    return DraftPolicy(RunnerDrafter(widths), max_drafts, PAGE_SIZE, pool)


class SplitEngine:
    """Prefill and decode with a pool each; pages are copied from one to the other."""

    def __init__(
        self, model: LoadedModel, num_pages: int = 96, drafts: bool = True, widths: tuple[int, ...] = ()
    ) -> None:
        self.pair = LocalPair(model, PairLimits(num_pages, max_rows=6, token_budget=2 * PAGE_SIZE))
        self.totals: DraftTotals | None = None
        self.scheduler = self.pair.decode._scheduler
        if drafts:
            pool = self.scheduler._imports._cache.pool
            self.scheduler._drafts = policy = make_policy(model, pool, widths)
            self.totals = policy.totals

    def generate(self, num_tokens: int = NUM_TOKENS) -> Outputs:
        outputs: dict[AttemptId, list[OutputToken]] = {}
        for prompt, sampling in zip(prompts(), SAMPLINGS.values(), strict=True):
            id = self.pair.submit(prompt, sampling, StopParams(num_tokens))
            assert id is not None
            outputs[id] = []
        finished = 0
        while finished < len(outputs):
            for part in self.pair.run():
                outputs[part.id] += part.tokens
                finished += part.finish is not None
        return list(outputs.values())


class JointEngine:
    """One pool and one runner, which computes the prompts as well."""

    def __init__(self, model: LoadedModel, num_pages: int = 96, widths: tuple[int, ...] = ()) -> None:
        self.cache = PrefixCache(PagePool(num_pages))
        self.policy = make_policy(model, self.cache.pool, widths)
        imports = ImportTable(self.cache, ImportLimits(PAGE_SIZE, 8, num_pages, 9.0))
        chunks = ChunkBudget(2 * PAGE_SIZE, PAGE_SIZE)
        self.scheduler = DecodeScheduler(imports, SwapSpace(0), PAGE_SIZE, chunks, RowRules(drafts=self.policy))
        memory = PageMemory(num_pages, model.geometry.page_bytes, model.geometry.part_ends)
        self.storage = PageStorage.on_memory(model.geometry, memory)
        self.runner = ModelRunner(model, self.storage)

    def generate(self, prompt: tuple[int, ...], sampling: SamplingParams, num_tokens: int = NUM_TOKENS) -> list[int]:
        """One request alone."""
        id = AttemptId(RequestId("r"), 1)
        request = EngineRequest(id, prompt, len(prompt), sampling, StopParams(num_tokens))
        self.table = PageTable(self.cache, PAGE_SIZE, "", Hold.LIVE)
        assert self.table.extend(len(prompt))
        self.scheduler.add_prompt(LocalPrompt(request, self.table, 0))
        output: list[int] = []
        while (batch := self.scheduler.schedule(0.0)) is not None:
            self.pages = list(self.table.pages)
            for effect in self.scheduler.commit(batch, self.runner.run(batch), 0.0):
                assert isinstance(effect, EmitTokens)
                output += [token.token for token in effect.tokens]
        return output


def values(outputs: Outputs) -> list[list[tuple[int, list[float]]]]:
    """Tokens and log probabilities, without the names of those listed beside: equal logits have no order."""
    return [[(token.token, _logprobs(token)) for token in output] for output in outputs]


def _logprobs(token: OutputToken) -> list[float]:
    found = token.logprobs
    return [] if found is None else [found.logprob, *(value for _, value in found.top)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_drafts_for_itself_is_always_right(target: Path, dtype: str) -> None:
    """Greedy, seeded, penalised and biased rows in one batch: drafts are drawn as the tokens are."""
    model = load(target, dtype)
    plain = SplitEngine(model, drafts=False).generate()
    engine = SplitEngine(model.with_draft(model))
    assert values(engine.generate()) == values(plain)
    totals = engine.totals
    assert totals is not None
    assert totals.num_accepted == totals.num_drafts > 100
    assert totals.accepted_at[MAX_RUNNER_DRAFTS - 1] > 0
    assert totals.accepted_at[MAX_RUNNER_DRAFTS] == 0
    trees = SplitEngine(model.with_draft(model), widths=(3, 2))
    assert values(trees.generate()) == values(plain)
    assert trees.totals is not None
    assert trees.totals.num_drafts > trees.totals.num_accepted > 100
    assert trees.totals.num_off_chain == 0, "a first child is always right"


@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "gemma3_text"])
def test_another_model_changes_no_token(target: Path, tmp_path: Path, family: str) -> None:
    """Random weights are wrong nearly always. DeepSeek runs on the stock decoder, and has values of other sizes."""
    model = load(target)
    other = load(save_random_model(family, tmp_path, seed=1))
    engine = SplitEngine(model.with_draft(other))
    assert values(engine.generate(16)) == values(SplitEngine(model, drafts=False).generate(16))
    totals = engine.totals
    assert totals is not None
    assert totals.num_drafts > totals.num_accepted + 50


def test_trees_of_a_draft_model_change_no_token(target: Path, similar: LoadedModel) -> None:
    engine = SplitEngine(similar, widths=(3, 2))
    assert values(engine.generate()) == values(SplitEngine(load(target), drafts=False).generate())
    totals = engine.totals
    assert totals is not None
    assert 20 < totals.num_accepted < totals.num_drafts
    assert totals.num_off_chain > 0, "a path that is no chain of first children was accepted"


def test_rows_that_were_preempted_are_drafted_from_their_pages(target: Path) -> None:
    """A pool that is too small for all: pages go to the host and come back, with their draft layers."""
    model = load(target)
    engine = SplitEngine(model.with_draft(model), num_pages=24)
    assert values(engine.generate(70)) == values(SplitEngine(model, drafts=False).generate(70))
    totals = engine.totals
    assert totals is not None
    assert engine.scheduler.num_preemptions > 0
    assert totals.num_accepted == totals.num_drafts > 100


def reference_cache(directory: Path, tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer, [kv heads, tokens, dim], as transformers caches them in one pass."""
    module = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        cache = module(input_ids=torch.tensor([tokens]), use_cache=True).past_key_values
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def in_pages(side: torch.Tensor, pages: Sequence[int], num_tokens: int) -> torch.Tensor:
    """One side of a layer out of its pages: [kv heads, tokens, dim]."""
    return side[list(pages)].flatten(1, 2).transpose(0, 1).flatten(1, 2)[:, :num_tokens]


@pytest.mark.parametrize("drafts_itself", [False, True], ids=["wrong drafts", "right drafts"])
def test_draft_layers_hold_the_cache_of_the_draft_model(target: Path, draft: Path, drafts_itself: bool) -> None:
    """After chunks of a prompt, accepted and rejected drafts. The target's own layers are beside them, unharmed."""
    directory = target if drafts_itself else draft
    model = load(target)
    engine = JointEngine(model.with_draft(load(directory)))
    prompt = prompts()[3]
    output = engine.generate(prompt, SamplingParams(temperature=0.0))
    totals, tokens = engine.policy.totals, [*prompt, *output][:-1]
    assert (totals.num_accepted == totals.num_drafts) == drafts_itself
    for storage, path in ((engine.storage.draft_view(), directory), (engine.storage, target)):
        for layer, sides in enumerate(reference_cache(path, tokens)):
            for found, expected in zip((storage.keys(layer), storage.values(layer)), sides, strict=True):
                torch.testing.assert_close(in_pages(found, engine.pages, len(tokens)), expected, atol=1e-5, rtol=1e-5)


def split_acceptance(engine: SplitEngine, prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[int, int]:
    """Drafts and accepted ones of one request alone."""
    totals = engine.totals
    assert totals is not None
    before = totals.num_drafts, totals.num_accepted
    assert engine.pair.submit(prompt, sampling, StopParams(NUM_TOKENS)) is not None
    for _ in engine.pair.run():
        pass
    return totals.num_drafts - before[0], totals.num_accepted - before[1]


def joint_acceptance(
    model: LoadedModel, prompt: tuple[int, ...], sampling: SamplingParams, widths: tuple[int, ...] = ()
) -> tuple[int, int]:
    engine = JointEngine(model, widths=widths)
    engine.generate(prompt, sampling)
    return engine.policy.totals.num_drafts, engine.policy.totals.num_accepted


def test_acceptance_across_the_split_is_that_of_one_worker(similar: LoadedModel) -> None:
    """Not always right, so that a state that came over wrongly would show. The second time pages are cached."""
    engine, accepted = SplitEngine(similar), 0
    for prompt in prompts()[3:]:
        for sampling in (SAMPLINGS["greedy"], SAMPLINGS["seeded"]):
            alone = joint_acceptance(similar, prompt, sampling)
            assert split_acceptance(engine, prompt, sampling) == alone
            assert split_acceptance(engine, prompt, sampling) == alone
            accepted += alone[1]
    totals = engine.totals
    assert totals is not None
    assert 20 < 2 * accepted == totals.num_accepted < totals.num_drafts - 20


def test_draft_layers_that_did_not_come_over_show_in_the_acceptance(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves that the tests above would see it: tokens stay the same, drafts become wrong."""
    model = load(target)
    engine = SplitEngine(model.with_draft(model))
    copy = engine.pair.copy_pages
    view = PageStorage.on_memory(model.with_draft(model).geometry, engine.pair.decode_memory).draft_view()

    def without_draft_layers(pull: Pull) -> None:
        copy(pull)
        for layer in range(len(model.layers)):
            view.keys(layer)[list(pull.local_pages)] = 0.0

    monkeypatch.setattr(engine.pair.decode, "_hooks", replace(engine.pair.decode._hooks, submit=without_draft_layers))
    assert values(engine.generate()) == values(SplitEngine(model, drafts=False).generate())
    totals = engine.totals
    assert totals is not None
    assert totals.num_accepted < totals.num_drafts / 2
