"""Planted bugs in draft models and their layers in the page; a part of the table in `bugs`."""

from __future__ import annotations

from tests.planted.runner import PlantedBug

DRAFT_LAYERS = "draft layers are those of their tokens"
RUNNER, DRAFT_MODEL = "baton/engine/runner.py", "baton/model/drafts/draft_model.py"
ENGINES = "tests/exactness/drafts/test_draft_model.py"
SELF_DRAFT = f"{ENGINES}::test_a_model_that_drafts_for_itself_is_always_right"

DRAFT_MODEL_BUGS = (
    PlantedBug(
        DRAFT_LAYERS,
        "a step does not write them",
        RUNNER,
        "            self._drafts.write(flat_ids, int64_tensor(own_positions, device), step)",
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
        "the step ends without the drafts that it made",
        "services/decode/scheduler.py",
        "        batch = output.batch or batch\n",
        "",
        "tests/property/drafts/test_drafts.py::test_rejected_drafts_leave_no_trace",
    ),
)
