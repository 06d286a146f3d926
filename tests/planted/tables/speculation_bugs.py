"""Planted bugs in speculative decoding; a part of the table in `bugs`."""

from __future__ import annotations

from tests.planted.runner import PlantedBug
from tests.planted.tables.draft_model_bugs import DRAFT_MODEL_BUGS

SPECULATION = "drafts change nothing"
SCHEDULER, BASE = "services/decode/scheduler.py", "baton/engine/drafts/base.py"
POLICY, BATCH = "baton/engine/drafts/policy.py", "baton/engine/batch.py"
LOCKSTEP = "tests/property/drafts/test_drafts.py::test_rejected_drafts_leave_no_trace"
RESUMED = "tests/property/drafts/test_drafts.py::test_a_row_that_was_preempted_goes_on_with_its_drafter"
VERIFICATION = "tests/unit/engine/drafts/test_verification.py"

TREES, WALK = "trees leave one path", "baton/engine/drafts/trees.py"
DECODE_APP = "services/decode/app.py"
TREE_TESTS, TREE_MASKS = "tests/unit/engine/drafts/test_trees.py", "tests/unit/model/attention/test_trees.py"

SPECULATION_BUGS = (
    *DRAFT_MODEL_BUGS,
    PlantedBug(
        TREES,
        "a draft of another branch is accepted",
        WALK,
        "for child, parent in enumerate(row.parents) if parent == node)",
        "for child, parent in enumerate(row.parents) if child > node)",
        TREE_TESTS,
    ),
    PlantedBug(
        TREES,
        "the accepted path stays in the slots of its nodes",
        "baton/engine/fake_runner.py",
        "                self._move(moves)\n",
        "                pass\n",
        TREE_TESTS,
    ),
    PlantedBug(
        TREES,
        "the model's pages are not compacted",
        "baton/engine/runner.py",
        "            move_slots(self.storage, walk.moves)",
        "            pass",
        "tests/unit/model/drafts/test_tree_state.py",
    ),
    PlantedBug(
        TREES,
        "a node's position is that of its slot",
        BATCH,
        "(last + depth for depth in draft_depths(self.parents))",
        "(last + 1 + node for node in range(len(self.parents)))",
        TREE_TESTS,
    ),
    PlantedBug(
        TREES,
        "a node sees its siblings",
        "baton/model/attention/base.py",
        "        mask[token, path] = True",
        "        mask[token, : token + 1] = True",
        f"{TREE_MASKS}::test_torch",
    ),
    PlantedBug(
        TREES,
        "a node in the kernel sees its siblings",
        "baton/model/kernels/src/attention.cpp",
        "find_tile(tree.start + path[key + i - tree.start], 1, i, 0);",
        "find_tile(key + i, 1, i, 0);",
        f"{TREE_MASKS}::test_the_kernels",
    ),
    PlantedBug(
        TREES,
        "a page's tail is that of the node in its last slot",
        "baton/model/drafts/tails.py",
        "            if len(tokens) < segment.num_tokens or segment.parents",
        "            if len(tokens) < segment.num_tokens and not segment.parents",
        "tests/unit/model/drafts/test_tree_state.py",
    ),
    PlantedBug(
        SPECULATION,
        "pages settle before the walk",
        SCHEDULER,
        "row.table.pages[row.num_filled // self._page_size : end // self._page_size]",
        "row.table.pages[row.num_filled // self._page_size : (batch_row.start + len(batch_row.tokens)) // 2]",
        LOCKSTEP,
    ),
    PlantedBug(
        SPECULATION,
        "a draft is accepted behind a finish",
        BASE,
        " or finish_reason(stop, drawn.token, num_output_tokens + count) is not None:",
        ":",
        VERIFICATION,
    ),
    PlantedBug(
        SPECULATION,
        "a draft counts unseen",
        BASE,
        "if drawn.token != draft or finish_reason",
        "if finish_reason",
        VERIFICATION,
    ),
    PlantedBug(
        SPECULATION,
        "a rejected draft's slot counts as filled",
        BATCH,
        "return self.start + len(self.tokens) - len(self.drafted) + max(0, num_emitted - 1)",
        "return self.start + len(self.tokens)",
        VERIFICATION,
    ),
    PlantedBug(
        SPECULATION,
        "the page of a rejected draft stays",
        SCHEDULER,
        "                row.table.shrink(end)",
        "                pass",
        LOCKSTEP,
    ),
    PlantedBug(
        SPECULATION,
        "a page is evicted for drafts",
        POLICY,
        "spare = min(num_spare_pages, self._pool.num_free)",
        "spare = num_spare_pages",
        "tests/unit/engine/drafts/test_policy.py",
    ),
    PlantedBug(
        SPECULATION,
        "a resumed row begins again",
        SCHEDULER,
        'if self._drafts is not None and event != "resume":',
        "if self._drafts is not None:",
        RESUMED,
    ),
    PlantedBug(
        SPECULATION,
        "a drafter keeps rows that ended",
        SCHEDULER,
        "            self._drafts.end(row.request.id)",
        "            pass",
        LOCKSTEP,
    ),
    PlantedBug(
        SPECULATION,
        "all places have the bans of the first",
        BATCH,
        "cls.of(request, DraftedHistory(history, drafts[:count]))",
        "cls(request.sampling, DraftedHistory(history, drafts[:count]), request.num_prompt_tokens,"
        " banned_tokens(request.stop, len(history) - request.num_prompt_tokens))",
        VERIFICATION,
    ),
    PlantedBug(
        SPECULATION,
        "a token that no vocabulary has is verified",
        "baton/engine/drafts/guard.py",
        "tuple(itertools.takewhile(self._is_known, tokens))",
        "tokens",
        "tests/unit/engine/drafts/test_guard.py",
    ),
    PlantedBug(
        SPECULATION,
        "other bits are called exact",
        "baton/model/loading/bit_check.py",
        "VerificationBits.EXACT if equal else VerificationBits.ROUNDING",
        "VerificationBits.EXACT",
        "tests/unit/model/loading/test_bit_check.py",
    ),
    PlantedBug(
        TREES,
        "a tree of other bits is called exact",
        "baton/model/loading/bit_check.py",
        "        equal = _has_bits_in_a_tree(rows, decoder)",
        "        _has_bits_in_a_tree(rows, decoder)",
        "tests/unit/model/loading/test_bit_check.py",
    ),
    PlantedBug(
        TREES,
        "a worker drafts chains in spite of --draft-tree",
        DECODE_APP,
        "        widths = () if refusal else settings.tree_widths",
        "        widths = ()",
        "tests/exactness/drafts/test_speculation_exactness.py::test_a_branch_is_accepted",
    ),
    PlantedBug(
        TREES,
        "the trees of a head are cut to chains",
        DECODE_APP,
        "        policy.allows_trees = not refusal",
        "        policy.allows_trees = False",
        "tests/exactness/drafts/test_eagle_cluster.py",
    ),
)
