"""Trees of drafts: the walk through one, what is left of it, and how they are proposed, cut and counted."""

from __future__ import annotations

import pytest

from baton.domain.errors import Broken, ConstraintFailed, FailedConstraint
from baton.domain.ids import AttemptId, PageId, RequestId
from baton.domain.request import EngineRequest, SampledToken, SamplingParams, StopParams
from baton.domain.timing.step_time import StepShape
from baton.engine.batch import Batch, Row, SampleSpec
from baton.engine.drafts.acceptance import PRIOR, SIBLING_PRIOR, AcceptanceModel
from baton.engine.drafts.base import MAX_TREE_NODES, NO_PROPOSAL, ROOT, Proposal, first_chain, num_off_chain
from baton.engine.drafts.guard import GuardedDrafter
from baton.engine.drafts.ngram import NGramDrafter
from baton.engine.drafts.policy import DraftLimits, DraftPolicy
from baton.engine.drafts.trees import TreeWalk, walk_trees
from baton.engine.fake_runner import SLOT_BYTES, FakeRunner, fake_slots
from baton.engine.masks import StepMasks
from baton.kv.memory import PageMemory
from baton.kv.pages import PagePool
from tests.unit.engine.drafts.test_guard import ScriptedDrafter

ID = AttemptId(RequestId("r"), 1)
PAGE_SIZE, VOCAB_SIZE = 4, 101
TOKENS = [1, 2, 3, 4, 5, 6, 7]
START = len(TOKENS) - 1
DRAFTS = (10, 20, 11, 21, 12, 20)
PARENTS = (ROOT, ROOT, 0, 1, 2, 2)
"""10 with 11 behind it, and behind that 12 or 20; beside 10 another branch: 20, 21."""
REQUEST = EngineRequest(ID, tuple(TOKENS), len(TOKENS), SamplingParams(), StopParams(max_tokens=50))


def tree_row(drafts: tuple[int, ...] = DRAFTS, parents: tuple[int, ...] = PARENTS) -> Row:
    pages = [PageId(page) for page in (3, 1, 4, 2)]
    row = Row(ID, TOKENS[START:], START, pages, SampleSpec.of(REQUEST, TOKENS))
    return row.with_drafts(REQUEST, drafts, parents)


def walked(*draws: int, failed: int | None = None) -> TreeWalk:
    """The walk of `tree_row` between two other rows. `draws`: at its own token and at each node."""
    other = Row(ID, [1], 0, [PageId(5)], SampleSpec.of(REQUEST, TOKENS))
    error = ConstraintFailed("nothing is left", FailedConstraint.DEAD_END)
    masks = StepMasks({}, {} if failed is None else {1 + failed: error})
    return walk_trees(Batch((other, tree_row(), other)), [SampledToken(n) for n in (90, *draws, 91)], masks)


def test_a_tree_knows_its_positions_and_histories():
    row = tree_row()
    assert row.positions() == [START + depth for depth in (0, 1, 1, 2, 2, 3, 3)]
    assert row.token_parents == (-1, 0, 0, 1, 2, 3, 3)
    behind = [[10], [20], [10, 11], [20, 21], [10, 11, 12], [10, 11, 20]]
    assert [list(spec.history)[len(TOKENS) :] for spec in row.drafted] == behind
    chain = tree_row((10, 11), ())
    assert (chain.positions(), chain.token_parents) == ([START, START + 1, START + 2], ())


@pytest.mark.parametrize(
    ("draws", "path", "drafts", "drawn", "moves"),
    [
        ((10, 11, 9, 20, 9, 8, 7), (0, 2, 5), [10, 11, 20], [10, 11, 20, 7], [(9, 8), (12, 9)]),
        ((20, 9, 21, 9, 66, 9, 9), (1, 3), [20, 21], [20, 21, 66], [(8, 7), (10, 8)]),
        ((10, 20, 9, 9, 9, 9, 9), (0,), [10, 11], [10, 20, 9], []),  # 20 is a draft of another branch
        ((77, 9, 9, 9, 9, 9, 9), (), [10], [77, 9], []),
        ((21, 9, 9, 9, 9, 9, 9), (), [10], [21, 9], []),  # no child of the root
    ],
)
def test_the_walk_leaves_one_path_and_the_draft_that_was_wrong(draws, path, drafts, drawn, moves):
    walk = walked(*draws)
    first, row, last = walk.batch.rows
    assert (first.parents, row.parents, last.parents) == ((), (), ())
    assert list(row.tokens) == [TOKENS[-1], *drafts]
    assert row.path[: len(path)] == path
    assert [one.token for one in walk.sampled] == [90, *drawn, 91]
    assert walk.kept == {1: (0, *(node + 1 for node in path))}
    assert [place for move in walk.moves for place in move.places] == moves
    for place, spec in enumerate(row.drafted, start=1):
        assert list(spec.history) == [*TOKENS, *drafts[:place]]


def test_the_walk_ends_where_nothing_could_be_drawn():
    walk = walked(10, 11, 9, 20, 9, 8, 7, failed=3)  # behind 10, 11
    output = walk.masks.output(walk.batch, walk.sampled)
    assert [one.token for one in output.sampled[1]] == [10, 11]
    assert not output.failures
    walk = walked(10, 11, 9, 20, 9, 8, 7, failed=0)
    assert list(walk.masks.output(walk.batch, walk.sampled).failures) == [1]
    walk = walked(20, 9, 21, 9, 66, 9, 9, failed=3)  # of a branch that was not taken
    assert [one.token for one in walk.masks.output(walk.batch, walk.sampled).sampled[1]] == [20, 21, 66]


def fake() -> FakeRunner:
    return FakeRunner(PageMemory(8, PAGE_SIZE * SLOT_BYTES), PAGE_SIZE, VOCAB_SIZE)


def test_the_slots_of_a_path_are_adjacent_after_the_step():
    runner, row = fake(), tree_row()
    runner.run(Batch((Row(ID, TOKENS[:START], 0, row.pages, None),)))
    greedy = runner.run(Batch((Row(ID, TOKENS[START:], START, row.pages, SampleSpec.of(REQUEST, TOKENS)),)))
    right = greedy.sampled[0][0].token
    row = tree_row((50, right, 51, 52), (ROOT, ROOT, 1, 1))
    output = runner.run(Batch((row,)))
    assert output.batch is not None
    assert output.batch.rows[0].path[0] == 1
    place = len(TOKENS)
    page = bytes(runner._memory.page(row.pages[place // PAGE_SIZE]))
    at = place % PAGE_SIZE * SLOT_BYTES
    assert page[at : at + SLOT_BYTES] == fake_slots([*TOKENS, right])[-1]
    with pytest.raises(Broken, match="does not end in"):
        runner.run(Batch((Row(ID, [9, 9], START, row.pages, row.sample, drafted=row.drafted[:1]),)))


def test_a_tree_that_is_no_tree_is_cut():
    def proposed(tokens: tuple, parents: tuple) -> Proposal:
        drafter = ScriptedDrafter(tokens=tokens)
        drafter.propose = lambda id, max_tokens: Proposal(tokens, 2, parents)  # type: ignore[method-assign]
        return GuardedDrafter(drafter, 100, lambda _: None).propose(ID, 3)

    assert proposed(DRAFTS, PARENTS) == Proposal(DRAFTS, 2, PARENTS)
    for parents in ((ROOT, 1), (ROOT, -2), (ROOT, 2), (ROOT, "0"), (ROOT, True), (ROOT,)):
        assert proposed((1, 2), parents) == Proposal((1,), 2, (ROOT,))
    assert proposed((1, 100, 2), (ROOT, 0, 0)) == Proposal((1,), 2, (ROOT,))
    assert proposed((1,), (ROOT, 0, 0)) == Proposal((1,), 2, (ROOT,))
    assert not proposed((1, 2), (0, 0)).tokens
    assert len(proposed((1,) * 99, (ROOT,) * 99).tokens) == MAX_TREE_NODES


def policy(proposal: Proposal, allows_trees: bool = True) -> DraftPolicy:
    drafter = ScriptedDrafter()
    drafter.propose = lambda id, max_tokens: proposal  # type: ignore[method-assign]
    made = DraftPolicy(drafter, 15, PAGE_SIZE, PagePool(8))
    made.allows_trees = allows_trees
    return made


def plan(policy: DraftPolicy, num_slots: int) -> Proposal:
    limits = DraftLimits.of(REQUEST, TOKENS, len(TOKENS) + num_slots)
    return policy.plan([limits], StepShape.of([(1, START)]), None, 0)[0]


def test_the_most_probable_nodes_are_planned():
    tree = Proposal((10, 20, 11, 21, 12, 22), 0, (ROOT, ROOT, 0, 1, 2, 4))
    assert plan(policy(tree), 4) == Proposal((10, 11, 12, 22)), "without branches it is a chain"
    assert plan(policy(tree), 5) == Proposal((10, 11, 12, 22, 20), 0, (ROOT, 0, 1, 2, ROOT))
    assert plan(policy(tree), 0) == NO_PROPOSAL
    learned = policy(tree)
    for _ in range(20):  # the second child is right
        drafts = plan(learned, 6)
        assert drafts.parents.count(ROOT) == 2
        learned.accepted(ID, [20, 9], len(drafts.tokens), [drafts.tokens.index(20)])
    assert plan(learned, 2).tokens == (10, 20), "siblings keep their order, and both come first"
    assert learned.totals.num_off_chain == 20


def test_where_trees_cannot_be_verified_their_chain_is():
    tree = Proposal((20, 10, 11, 21, 12), 3, (ROOT, ROOT, 1, 0, 3))
    assert plan(policy(tree, allows_trees=False), 6) == Proposal((20, 21, 12), 3)
    assert first_chain(tree, 2) == Proposal((20, 21), 3)


def test_chances_are_products_along_a_path():
    model = AcceptanceModel()
    tree = Proposal(DRAFTS, 0, PARENTS)
    first, second = PRIOR, SIBLING_PRIOR
    expected = [first, second, first**2, second * first, first**3, first**2 * second]
    assert model.chances(ID, tree) == pytest.approx(expected)
    for _ in range(50):
        model.observe_tree(ID, tree, [1, 3])
    chances = model.chances(ID, tree)
    assert chances[1] <= chances[0], "siblings keep their order"
    assert chances[1] > second
    assert num_off_chain(PARENTS, [0, 2, 4]) == 0
    assert num_off_chain(PARENTS, [0, 2, 5]) == 1
    assert num_off_chain(PARENTS, [1, 3]) == 2


def test_n_grams_propose_the_other_tokens_that_followed():
    drafter = NGramDrafter(widths=(3, 2))
    drafter.begin(ID, [1, 2, 3, 4, 5, 0, 9, 2, 3, 4, 6, 7, 0, 1, 2, 3, 4, 8, 0, 1, 2, 3, 4])
    tree = drafter.propose(ID, 3)
    assert first_chain(tree, 3).tokens == (8, 0, 1)
    roots = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == ROOT]
    assert roots == [8, 6, 5], "the longest match, then the latest ones"
    paths = [Proposal((6, 7, 0)), Proposal((5, 0, 9))]
    for path in paths:
        at = tree.tokens.index(path.tokens[0])
        assert tree.tokens[at : at + 3] == path.tokens
        assert tree.parents[at : at + 3] == (ROOT, at, at + 1)
    plain = NGramDrafter()
    plain.begin(ID, [1, 2, 3, 4, 5, 0, 1, 2, 3, 4])
    assert plain.propose(ID, 3).parents == ()
