"""An EAGLE head in the pages: it changes no token, and drafts across the split as if nothing had been split.

Both engines in one process. Heads are fitted to what their target generates, so that they are right now and then: a
feature or a key that came over wrongly would show in what is accepted. That the drafts are those of the published
formula is proven in tests/unit/model/drafts/test_eagle.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.engine.drafts.runner_drafter import MAX_RUNNER_DRAFTS
from baton.model.loading.loader import LoadedModel
from baton.model.storage import PageStorage
from baton.transfer.base import Pull
from tests.exactness.drafts.test_draft_model import (
    SplitEngine,
    joint_acceptance,
    load,
    make_policy,
    split_acceptance,
    values,
)
from tests.exactness.drafts.test_drafted_tokens import SAMPLINGS, prompts
from tests.tiny_models import save_random_model
from tests.unit.model.drafts.tiny_heads import KINDS, HeadReference, random_head, save_head

pytestmark = pytest.mark.exactness


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model("qwen3", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def plain(directory: Path) -> LoadedModel:
    return load(directory)


def fitted_texts(plain: LoadedModel) -> list[list[int]]:
    """Prompts and what the target alone says behind them."""
    outputs = SplitEngine(plain, drafts=False).generate()
    return [[*prompt, *(one.token for one in output)] for prompt, output in zip(prompts(), outputs, strict=True)]


@pytest.fixture(scope="module", params=KINDS)
def model(
    request: pytest.FixtureRequest, directory: Path, plain: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> LoadedModel:
    """The target with a fitted head of each kind."""
    reference = HeadReference.of(request.param, random_head(request.param), directory)
    reference.fit(fitted_texts(plain))
    return plain.with_head(save_head(reference.tensors, tmp_path_factory.mktemp("head")))


def test_output_is_that_without_a_head(plain: LoadedModel, model: LoadedModel) -> None:
    """Greedy, seeded, penalised and biased rows in one batch."""
    engine = SplitEngine(model)
    assert values(engine.generate()) == values(SplitEngine(plain, drafts=False).generate())
    totals = engine.totals
    assert totals is not None
    assert 20 < totals.num_accepted < totals.num_drafts
    assert totals.accepted_at[1] > 0, "the head goes on from its own output"
    assert totals.accepted_at[MAX_RUNNER_DRAFTS] == 0


@pytest.fixture(scope="module", params=[("eagle", 30), ("eagle3", 15), ("mtp", 15)], ids=KINDS[:3])
def unsure(
    request: pytest.FixtureRequest, directory: Path, plain: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> LoadedModel:
    """The target with a head that was fitted in so few steps that its second guess is right now and then."""
    kind, num_steps = request.param
    reference = HeadReference.of(kind, random_head(kind), directory)
    reference.fit(fitted_texts(plain), num_steps=num_steps)
    return plain.with_head(save_head(reference.tensors, tmp_path_factory.mktemp("unsure")))


def test_trees_of_a_head_change_no_token(plain: LoadedModel, unsure: LoadedModel) -> None:
    """Greedy, seeded, penalised and biased rows in one batch; then in a pool that preempts."""
    engine = SplitEngine(unsure, widths=(3, 2))
    assert values(engine.generate()) == values(SplitEngine(plain, drafts=False).generate())
    totals = engine.totals
    assert totals is not None
    assert 20 < totals.num_accepted < totals.num_drafts
    assert totals.num_off_chain > 0, "a path that is no chain of first children was accepted"
    tight = SplitEngine(unsure, num_pages=20, widths=(2, 2))
    assert values(tight.generate(50)) == values(SplitEngine(plain, drafts=False).generate(50))
    assert tight.scheduler.num_preemptions > 0


def test_acceptance_of_trees_across_the_split_is_that_of_one_worker(unsure: LoadedModel) -> None:
    """Count for count; the second time pages come from the prefix caches. Shapes follow what a policy has seen."""
    engine, accepted = SplitEngine(unsure, widths=(3, 2)), 0
    for prompt, sampling in list(zip(prompts(), SAMPLINGS.values(), strict=True))[2:]:
        alone = joint_acceptance(unsure, prompt, sampling, (3, 2))
        for _ in range(2):
            pool = engine.scheduler._imports._cache.pool
            engine.scheduler._drafts = policy = make_policy(unsure, pool, (3, 2))
            engine.totals = policy.totals
            assert split_acceptance(engine, prompt, sampling) == alone
        accepted += alone[1]
    assert accepted > 5


def test_bfloat16_pages_have_bfloat16_tails(directory: Path, tmp_path: Path) -> None:
    plain = load(directory, "bfloat16")
    engine = SplitEngine(plain.with_head(save_head(random_head("eagle3", num_drafted_ids=400), tmp_path)))
    assert values(engine.generate(16)) == values(SplitEngine(plain, drafts=False).generate(16))
    assert engine.totals is not None
    assert engine.totals.num_drafts > 50


def test_rows_that_were_preempted_draft_from_their_pages(plain: LoadedModel, model: LoadedModel) -> None:
    """Pages go to the host and come back with their tails."""
    engine = SplitEngine(model, num_pages=20)
    assert values(engine.generate(50)) == values(SplitEngine(plain, drafts=False).generate(50))
    assert engine.scheduler.num_preemptions > 0
    assert engine.totals is not None
    assert engine.totals.num_accepted > 20


def test_acceptance_across_the_split_is_that_of_one_worker(model: LoadedModel) -> None:
    """Count for count, also the second time, when pages come from the prefix caches."""
    engine, accepted = SplitEngine(model), 0
    for prompt, sampling in zip(prompts(), SAMPLINGS.values(), strict=True):
        alone = joint_acceptance(model, prompt, sampling)
        assert split_acceptance(engine, prompt, sampling) == alone
        assert split_acceptance(engine, prompt, sampling) == alone
        accepted += alone[1]
    totals = engine.totals
    assert totals is not None
    assert 10 < 2 * accepted == totals.num_accepted < totals.num_drafts


@pytest.mark.parametrize("part", ["tail", "draft layer"])
def test_what_did_not_come_over_shows_in_the_acceptance(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Proves that the tests above would see it: tokens stay the same, fewer drafts are right."""
    whole, engine = SplitEngine(model), SplitEngine(model)
    copy, storage = engine.pair.copy_pages, PageStorage.on_memory(model.geometry, engine.pair.decode_memory)
    lost = storage.tails if part == "tail" else storage.draft_view().values(0)

    def without_part(pull: Pull) -> None:
        copy(pull)
        lost[list(pull.local_pages)] = torch.linspace(-9.0, 9.0, lost.shape[-1]).to(lost.dtype)

    monkeypatch.setattr(engine.pair.decode, "_hooks", replace(engine.pair.decode._hooks, submit=without_part))
    assert values(engine.generate(16)) == values(whole.generate(16))
    assert engine.totals is not None
    assert whole.totals is not None
    assert (engine.totals.num_drafts, engine.totals.num_accepted) != (
        whole.totals.num_drafts,
        whole.totals.num_accepted,
    )
