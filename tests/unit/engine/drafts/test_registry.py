"""Drafters by name, plugins among them; what cannot be served is refused by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from baton.domain.ids import AttemptId, RequestId
from baton.engine.drafts import registry
from baton.engine.drafts.base import DRAFT_PLACEHOLDER, MAX_TREE_NODES, draft_depths
from baton.engine.drafts.ngram import NGramDrafter
from baton.engine.drafts.registry import DrafterEntry, DrafterTraits, find_drafter, make_drafter, require_trees
from baton.engine.drafts.runner_drafter import MAX_RUNNER_DRAFTS, placeholder_tree
from baton.services.decode.settings import DecodeSettings
from baton.settings.base import SettingsError

ID = AttemptId(RequestId("r"), 1)
PLUGIN = DrafterEntry(lambda vocab_size: NGramDrafter(vocab_size))
TREES = DrafterEntry(lambda _: NGramDrafter(), DrafterTraits(max_branches=4))
ODD = DrafterEntry(lambda _: NGramDrafter(), DrafterTraits(needs_features=True))
NO_ENTRY = "text"


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints(
        EntryPoint(name, f"{__name__}:{attribute}", registry.ENTRY_POINT_GROUP)
        for name, attribute in (("mine", "PLUGIN"), ("trees", "TREES"), ("odd", "ODD"), ("wrong", "NO_ENTRY"))
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))


def test_built_in_drafters_and_none():
    assert find_drafter("none") is None
    entry = find_drafter("ngram")
    assert entry is not None
    assert isinstance(entry.make(100), NGramDrafter)
    assert find_drafter(DecodeSettings().drafter) is None, "off by default"


def test_only_ngram_shared_keeps_earlier_outputs():
    made = {name: entry.make(100) for name in ("ngram", "ngram-shared") if (entry := find_drafter(name)) is not None}
    assert {name: vars(drafter)["_store"] is not None for name, drafter in made.items()} == {
        "ngram": False,
        "ngram-shared": True,
    }


def test_a_draft_model_proposes_drafts_that_the_runner_makes():
    entry = find_drafter("draft-model", has_draft_model=True)
    assert entry is not None
    drafter, id = entry.make(100), AttemptId(RequestId("r"), 1)
    drafter.begin(id, [1, 2, 3])
    assert drafter.propose(id, 3).tokens == (DRAFT_PLACEHOLDER,) * 3
    assert drafter.propose(id, 15).tokens == (DRAFT_PLACEHOLDER,) * MAX_RUNNER_DRAFTS
    assert find_drafter("ngram", has_draft_model=True) == find_drafter("ngram"), "others draft beside one, too"


def test_a_plugin_is_found_by_its_entry_point():
    entry = find_drafter("mine")
    assert entry == PLUGIN
    assert find_drafter("trees") == TREES, "the policy takes what the model can verify"


def test_trees_are_asked_for_and_of_some_drafters_only():
    entry = find_drafter("ngram")
    require_trees("ngram", entry, (3, 2))
    require_trees("draft-model", find_drafter("draft-model", has_draft_model=True), ())
    assert entry is not None
    assert vars(make_drafter(entry, 100, (3, 2)))["_widths"] == (3, 2)
    assert vars(make_drafter(entry, 100, ()))["_widths"] == ()
    for name in ("draft-model", "eagle", "mtp"):
        found = find_drafter(name, has_draft_model=True)
        require_trees(name, found, (3, 2))
        assert found is not None
        assert make_drafter(found, 100, (3, 2)).propose(ID, 2).parents == (-1, 0, -1, 0, 2, -1, 2, 5, 5)
        assert not make_drafter(found, 100, ()).propose(ID, 2).parents
    for name in ("none", "mine"):
        with pytest.raises(SettingsError, match=f"drafter={name}.*makes no trees"):
            require_trees(name, find_drafter(name), (2,))


def test_the_tree_of_a_runner_has_few_generations_and_low_ranks():
    tree = placeholder_tree((8, 8, 8), 7)
    assert len(tree.tokens) == MAX_TREE_NODES
    assert set(tree.tokens) == {DRAFT_PLACEHOLDER}
    assert max(draft_depths(tree.parents)) == 7, "the chain of first children is whole"
    assert all(parent < node for node, parent in enumerate(tree.parents))
    whole = placeholder_tree((3, 2), 2)
    assert sorted(draft_depths(whole.parents)) == [1] * 3 + [2] * 6
    assert placeholder_tree((1,), 3).parents == (-1, 0, 1)


def test_widths_of_trees_are_a_few_small_numbers():
    assert DecodeSettings(draft_tree="3,2").tree_widths == (3, 2)
    assert DecodeSettings().tree_widths == ()
    for text in ("0", "9", "3,,2", "3, 2", "x", ",", "1," * 15 + "1"):
        with pytest.raises(ValueError, match="draft_tree"):
            DecodeSettings(draft_tree=text)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "beagle",
            "there is no such drafter. Known are: none, ngram, ngram-shared, draft-model, eagle, mtp, mine, odd, trees",
        ),
        ("eagle", "there is no draft model.*--draft-model"),
        ("draft-model", "there is no draft model.*--draft-model"),
        ("odd", "needs_features=True.*no such drafters"),
        ("wrong", "gives str, not DrafterEntry"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(name: str, message: str):
    with pytest.raises(SettingsError, match=f"drafter={name}.*{message}"):
        find_drafter(name)


@pytest.mark.parametrize(
    ("name", "has_head", "message"),
    [
        ("draft-model", True, "--draft-model is a head.*--drafter eagle or mtp"),
        ("eagle", False, "--draft-model is a model, not a head.*--drafter draft-model"),
        ("mtp", False, "--draft-model is a model, not a head.*--drafter draft-model"),
    ],
)
def test_a_head_and_a_draft_model_are_not_taken_for_each_other(name: str, has_head: bool, message: str):
    with pytest.raises(SettingsError, match=message):
        find_drafter(name, has_draft_model=True, has_head=has_head)
    assert find_drafter(name, has_draft_model=True, has_head=not has_head) is not None
    assert find_drafter(name, has_draft_model=True) is not None, "not known before it is loaded"
    assert find_drafter("ngram", has_draft_model=True, has_head=has_head) is not None
