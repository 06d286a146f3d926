"""Worker records: copies with another load."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from baton.domain.worker import WorkerLoad, WorkerRecord


def _distinct(kind: type[Any]) -> Any:
    """A value of `kind` whose fields all differ, whatever their types: a copy that mixes two up is not equal."""
    return kind(**{field.name: number for number, field in enumerate(fields(kind), 1)})


def test_a_record_with_another_load_keeps_every_other_field():
    record, load = _distinct(WorkerRecord), WorkerLoad(waiting_tokens=7)
    assert record.with_load(load) == replace(record, load=load)


def test_work_is_added_to_a_load_and_changes_nothing_else():
    load = _distinct(WorkerLoad)
    added = load.with_work(num_prompts=100, prompt_tokens=200, num_rows=300, num_pages=2)
    waiting, rows = load.waiting_requests + 100, load.running_rows + 300
    assert added == replace(
        load,
        waiting_requests=waiting,
        waiting_tokens=load.waiting_tokens + 200,
        running_rows=rows,
        available_pages=load.available_pages - 2,
    )
    assert load.with_work(0, 0, 0, 1000).available_pages == 0
