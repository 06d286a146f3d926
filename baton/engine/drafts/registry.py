"""Drafters by name: the built-in ones, and those that other packages register as entry points.

An entry point of the group `baton.drafters` loads to a `DrafterEntry`; its name is the drafter's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from types import MappingProxyType

from baton.engine.drafts.base import Drafter
from baton.engine.drafts.native_suffix import max_step_tokens, new_suffix_index
from baton.engine.drafts.ngram import NGramDrafter
from baton.engine.drafts.runner_drafter import RunnerDrafter
from baton.engine.drafts.store import MAX_OUTPUT_TOKENS, SuffixStore
from baton.settings.base import SettingsError

ENTRY_POINT_GROUP = "baton.drafters"
NO_DRAFTER = "none"
TREE_STEP_TOKENS = 1024
STORE_BYTES = 64 << 20
"""Of earlier outputs that `ngram-shared` keeps: some 700,000 tokens."""


@dataclass(frozen=True, slots=True)
class DrafterTraits:
    """What a drafter needs of the engine. A worker refuses one that needs what it does not have.

    `needs_pages`: a draft model or head, which has layers of its own in the pages. `needs_features`: a head, which
    reads hidden states of the target. `max_branches`: of the trees that it proposes, whatever the
    settings say; a worker that verifies none takes their chain of first children. 1: chains.
    """

    needs_pages: bool = False
    needs_features: bool = False
    max_branches: int = 1


CHAINS = DrafterTraits()
DRAFT_MODEL_CHAINS = DrafterTraits(needs_pages=True)
HEAD_CHAINS = DrafterTraits(needs_pages=True, needs_features=True)


@dataclass(frozen=True, slots=True)
class DrafterEntry:
    """Makes the drafter of one worker, for a vocabulary of that size.

    `make_trees`: the same as one of trees with so many branches at the first depths; None: it makes none.
    """

    make: Callable[[int], Drafter]
    traits: DrafterTraits = CHAINS
    make_trees: Callable[[int, tuple[int, ...]], Drafter] | None = None


def _step_tokens(widths: tuple[int, ...]) -> int:
    """Tokens that all rows index in a step; what followed three tokens is kept by Python."""
    return min(max_step_tokens(), TREE_STEP_TOKENS) if widths else max_step_tokens()


def _ngram(_: int, widths: tuple[int, ...] = ()) -> NGramDrafter:
    return NGramDrafter(_step_tokens(widths), new_index=new_suffix_index, widths=widths)


def _ngram_shared(_: int, widths: tuple[int, ...] = ()) -> NGramDrafter:
    store = SuffixStore(STORE_BYTES, new_suffix_index, min(MAX_OUTPUT_TOKENS, max_step_tokens()))
    return NGramDrafter(_step_tokens(widths), new_index=new_suffix_index, store=store, widths=widths)


def _of_runner(_: int, widths: tuple[int, ...] = ()) -> RunnerDrafter:
    return RunnerDrafter(widths)


BUILT_IN: Mapping[str, DrafterEntry] = MappingProxyType(
    {
        "ngram": DrafterEntry(_ngram, make_trees=_ngram),
        "ngram-shared": DrafterEntry(_ngram_shared, make_trees=_ngram_shared),
        "draft-model": DrafterEntry(_of_runner, DRAFT_MODEL_CHAINS, make_trees=_of_runner),
        "eagle": DrafterEntry(
            _of_runner, HEAD_CHAINS, make_trees=_of_runner
        ),  # a head of any kind; its files say which
        "mtp": DrafterEntry(_of_runner, HEAD_CHAINS, make_trees=_of_runner),
    }
)


def find_drafter(name: str, has_draft_model: bool = False, has_head: bool | None = None) -> DrafterEntry | None:
    """The entry of the drafter called `name`; None for `none`. `has_draft_model`: the worker has one.

    `has_head`: it is a head, not a model; None: not known yet.
    Raises `SettingsError` for an unknown one, and for one whose traits this engine does not serve.
    """
    if name == NO_DRAFTER:
        return None
    entry = BUILT_IN.get(name) or _plugin(name)
    if entry.traits.needs_pages and not has_draft_model:
        hint = "Give the same --draft-model to all workers."
        raise SettingsError(f"drafter={name}", why="there is no draft model", hint=hint)
    if entry.traits.needs_pages and has_head not in (None, entry.traits.needs_features):
        found, other = ("a head", "eagle or mtp") if has_head else ("a model, not a head", "draft-model")
        raise SettingsError(f"drafter={name}", why=f"--draft-model is {found}", hint=f"Use --drafter {other}.")
    if replace(entry.traits, max_branches=1) not in (CHAINS, DRAFT_MODEL_CHAINS, HEAD_CHAINS):
        why = f"it needs {entry.traits}"
        raise SettingsError(f"drafter={name}", why=why, hint="This engine has no such drafters.")
    return entry


def require_trees(name: str, entry: DrafterEntry | None, widths: tuple[int, ...]) -> None:
    """Raises `SettingsError` if `widths` ask for trees and the drafter called `name` makes none."""
    if widths and (entry is None or entry.make_trees is None):
        raise SettingsError(f"drafter={name}", why="it makes no trees", hint="Leave out --draft-tree.")


def make_drafter(entry: DrafterEntry, vocab_size: int, widths: tuple[int, ...]) -> Drafter:
    """The drafter of `entry`, of trees if there are `widths`."""
    return entry.make_trees(vocab_size, widths) if widths and entry.make_trees else entry.make(vocab_size)


def _plugin(name: str) -> DrafterEntry:
    points = entry_points(group=ENTRY_POINT_GROUP)
    if name not in points.names:
        known = ", ".join([NO_DRAFTER, *BUILT_IN, *sorted(points.names)])
        raise SettingsError(f"drafter={name}", why="there is no such drafter", hint=f"Known are: {known}.")
    entry = points[name].load()
    if not isinstance(entry, DrafterEntry):
        why = f"its entry point gives {type(entry).__name__}, not DrafterEntry"
        raise SettingsError(f"drafter={name}", why=why, hint="Ask its package for another version.")
    return entry
