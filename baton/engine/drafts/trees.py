"""The walk through trees of drafts once a step has drawn at all their nodes. Called by runners; pure.

From the row's last token the walk goes to the child that equals the draw there, and on, until none does. That path is
left of a tree: a chain whose drafts were right, and behind it one child that was not, if there is one. So nobody behind
the runner knows trees. The path's keys and values lie in the slots of its nodes; `moves` says where they belong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from baton.domain.errors import ConstraintFailed
from baton.domain.ids import PageId
from baton.domain.request import SampledToken
from baton.engine.batch import Batch, Row
from baton.engine.drafts.base import ROOT
from baton.engine.masks import StepMasks


@dataclass(frozen=True, slots=True)
class SlotMoves:
    """Slots of one row's `pages` to move, all at once: (from, to), places in the sequence."""

    pages: Sequence[PageId]
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TreeWalk:
    """A step with one path in place of each tree: its batch, its draws in order, and failures among them.

    `moves`: must be done before anybody reads or digests the pages. `kept`: by the index of a row that had a tree, the
    indices of the tokens that are known now: its own, and the drafts that were drawn.
    """

    batch: Batch
    sampled: tuple[SampledToken, ...]
    masks: StepMasks
    moves: tuple[SlotMoves, ...]
    kept: Mapping[int, tuple[int, ...]]


def walk_trees(batch: Batch, sampled: Sequence[SampledToken], masks: StepMasks) -> TreeWalk:
    """Walks the trees of a step. `sampled`: a draw for each sampled place of its rows, in order."""
    rows, draws, failures = list[Row](), list[SampledToken](), dict[int, ConstraintFailed]()
    moves, kept = list[SlotMoves](), dict[int, tuple[int, ...]]()
    first = 0
    for index, row in enumerate(batch.rows):
        num_places = 0 if row.sample is None else 1 + len(row.drafted)
        places = list(range(first, first + num_places))
        if row.parents:
            path = _path(
                row, sampled[first : first + num_places], {at - first for at in places if at in masks.failures}
            )
            known = row.num_known_tokens
            kept[index] = *range(known), *(known + node for node in path)
            moves += _moves(row, path)
            nodes = [*path, *_next_child(row, path)]
            places = [first, *(first + 1 + node for node in nodes)]
            row = row.with_path(nodes)
        for at in places:
            if at in masks.failures:
                failures[len(draws)] = masks.failures[at]
            draws.append(sampled[at])
        rows.append(row)
        first += num_places
    walked = StepMasks({}, failures)
    return TreeWalk(replace(batch, rows=tuple(rows)), tuple(draws), walked, tuple(moves), kept)


def _path(row: Row, sampled: Sequence[SampledToken], failed: set[int]) -> list[int]:
    """The nodes that the walk reaches. It ends where nothing could be drawn: `failed`, 0 behind the row's own token."""
    path: list[int] = []
    at, known = ROOT, row.num_known_tokens
    while at + 1 not in failed:
        token = sampled[at + 1].token
        found = next((node for node in _children(row, at) if row.tokens[known + node] == token), None)
        if found is None:
            break
        path.append(found)
        at = found
    return path


def _children(row: Row, node: int) -> Iterator[int]:
    return (child for child, parent in enumerate(row.parents) if parent == node)


def _next_child(row: Row, path: Sequence[int]) -> list[int]:
    """A child of the path's end, which is none of it: the draft that was rejected there."""
    return list(_children(row, path[-1] if path else ROOT))[:1]


def _moves(row: Row, path: Sequence[int]) -> list[SlotMoves]:
    first = row.start + row.num_known_tokens
    places = tuple([(first + node, first + place) for place, node in enumerate(path) if place != node])
    return [SlotMoves(row.pages, places)] if places else []
