"""Planted bugs in draft models and their layers in the page; a part of the table in `bugs`."""

from __future__ import annotations

from tests.planted.runner import PlantedBug

DRAFT_LAYERS, HEADS = "draft layers are those of their tokens", "heads go on from any page"
RUNNER, DRAFT_MODEL = "baton/engine/runner.py", "baton/model/drafts/draft_model.py"
EAGLE, EAGLE_TESTS = "baton/model/drafts/eagle.py", "tests/unit/model/drafts/test_eagle.py"
TAILS, DEPTHS = "baton/model/drafts/tails.py", "baton/model/drafts/mtp_depths.py"
GROWING = "tests/unit/model/drafts/test_growing_trees.py"
ENGINES = "tests/exactness/drafts/test_draft_model.py"
SELF_DRAFT = f"{ENGINES}::test_a_model_that_drafts_for_itself_is_always_right"

DRAFT_MODEL_BUGS = (
    PlantedBug(
        DRAFT_LAYERS,
        "a step does not write them",
        RUNNER,
        "            self._drafts.write(inputs.ids, own_positions, step, capture, embeds)",
        "            pass",
        SELF_DRAFT,
    ),
    PlantedBug(
        DRAFT_LAYERS,
        "a pass over them clears the target's pages",
        DRAFT_MODEL,
        "partial_pages=step.partial_pages[:0]",
        "partial_pages=step.partial_pages",
        "tests/unit/model/drafts/test_draft_model.py",
    ),
    PlantedBug(
        DRAFT_LAYERS,
        "they lie over the target's",
        "baton/model/storage.py",
        "first_element=first)",
        "first_element=0)",
        "tests/unit/model/test_storage.py",
    ),
    PlantedBug(
        DRAFT_LAYERS,
        "all draft models have one name",
        "baton/model/loading/identity.py",
        'parts["draft_model"] = draft',
        'parts["draft_model"] = "one"',
        "tests/unit/model/loading/test_identity.py",
    ),
    PlantedBug(
        DRAFT_LAYERS,
        "all drafts are drawn as the first one",
        RUNNER,
        "SampleSpec.of(wanted.request, DraftedHistory(sample.history, drafts)) if drafts else sample",
        "sample",
        SELF_DRAFT,
    ),
    PlantedBug(
        DRAFT_LAYERS,
        "a page that drafts fill keeps what its last owner left",
        "baton/model/drafts/chains.py",
        "(row.start + row.count) // size + 1)",
        "(row.start + row.count + 1) // size)",
        "tests/unit/model/drafts/test_draft_model.py",
    ),
    PlantedBug(
        HEADS,
        "a tail is that of a rejected draft",
        RUNNER,
        "            self.drafts.settle(",
        "            list(",
        f"{EAGLE_TESTS}::test_accepted_drafts_leave_the_state_of_plain_steps",
    ),
    PlantedBug(
        HEADS,
        "pages have no tails",
        TAILS,
        "        if places:\n",
        "        if False:\n",
        EAGLE_TESTS,
    ),
    PlantedBug(
        HEADS,
        "only the last page of a chunk has a tail",
        TAILS,
        "range(segment.start // page_size, (segment.end - 1) // page_size + 1)",
        "[(segment.end - 1) // page_size]",
        EAGLE_TESTS,
    ),
    PlantedBug(
        HEADS,
        "a chunk goes on from nothing",
        TAILS,
        "for segment in step.segments], shifted.device)] = before",
        "for segment in step.segments], shifted.device)] = 0",
        EAGLE_TESTS,
    ),
    PlantedBug(
        HEADS,
        "queries see the slot without a feature",
        "baton/model/drafts/head_layer.py",
        "first_key=index + 1",
        "first_key=0",
        EAGLE_TESTS,
    ),
    PlantedBug(
        HEADS,
        "queries of a later layer see a slot without a feature",
        "baton/model/drafts/head_layer.py",
        "first_key=index + 1",
        "first_key=1",
        EAGLE_TESTS,
    ),
    PlantedBug(
        HEADS,
        "the head goes on with a feature of the target's",
        EAGLE,
        "outputs, features[index] = self._layer.run(",
        "outputs, _ = self._layer.run(",
        EAGLE_TESTS,
    ),
    PlantedBug(
        HEADS,
        "all MTP layers go on from the target's feature",
        DEPTHS,
        "shifted = self._tails.shift(step, features[-1], of_segments)",
        "shifted = self._tails.shift(step, features[0], of_segments)",
        EAGLE_TESTS,
    ),
    PlantedBug(
        HEADS,
        "a draft's layer reads the slot of its token only",
        DEPTHS,
        "first if depth == 0 else torch.cat((first, self._outputs[index]))",
        "first.expand(depth + 1, -1)",
        EAGLE_TESTS,
    ),
    PlantedBug(
        HEADS,
        "a sibling is the draft of its elder",
        "baton/model/drafts/growing_trees.py",
        "            logits[place, sampled.token] = DRAWN_LOGIT",
        "            pass",
        f"{GROWING}::test_siblings_are_drawn_without_the_elder_ones",
    ),
    PlantedBug(
        HEADS,
        "a node goes on from the place before its own",
        EAGLE,
        "outputs[index][int64_tensor(segment.parents[1:], device)]",
        "outputs[index][[*range(segment.num_tokens - 1)]]",
        f"{GROWING}::test_nodes_are_those_of_the_published_formula",
    ),
    PlantedBug(
        DRAFT_LAYERS,
        "the step ends without the drafts that it made",
        "services/decode/scheduler.py",
        "        batch = output.batch or batch\n",
        "",
        "tests/property/drafts/test_drafts.py::test_rejected_drafts_leave_no_trace",
    ),
)
