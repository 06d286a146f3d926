"""A runner without a model, for scheduler tests and simulation: exact and instant. Imports no torch.

Each token slot of the pool holds the token and a digest of all tokens up to it, in place of keys and values. Before a
step writes, it reads back the earlier slots of each row: they must chain from the first position on and match the row's
history, so a rejected draft that counts as filled is found. A page that was freed too soon, shared wrongly, never
imported or written twice raises `Broken` in the step that uses it. A transfer moves these bytes like real ones.

Where window parts are kept apart (`baton.kv.windows`), each repeats the slots of its page, and a step reads back those
in the window of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b

from baton.domain.errors import Broken
from baton.domain.ids import PageId
from baton.domain.request import SampledToken, TokenLogprobs
from baton.domain.scores.prompt_scores import PromptScores, ScoredToken, pack_scores
from baton.engine.batch import Batch, HostCopy, Row, SampleSpec, ScoreSpec, StepOutput
from baton.engine.drafts.base import draft_path
from baton.engine.drafts.trees import SlotMoves, walk_trees
from baton.engine.masks import MaskFiller, StepMasks, check_rows
from baton.grammar.matcher import MaskRow, is_allowed
from baton.kv.geometry import KVGeometry, LayerGeometry, PageWindow
from baton.kv.memory import PageMemory
from baton.kv.windows.memory import WindowedMemory
from baton.kv.windows.slots import NO_SLOT

TOKEN_BYTES = 4
DIGEST_BYTES = 12
SLOT_BYTES = TOKEN_BYTES + DIGEST_BYTES
EMPTY_PREFIX = blake2b(digest_size=DIGEST_BYTES, person=b"baton-fake").digest()


def fake_geometry(page_size: int) -> KVGeometry:
    """One layer, one head, 16 bytes a token. A fake pool needs no padding: its pages have `SLOT_BYTES` a token."""
    return KVGeometry.of_layers((LayerGeometry(1, 2, 2),), "float32", page_size)


def fake_slot(prefix: bytes, token: int) -> bytes:
    """The "KV" of a token after the prefix of digest `prefix`; its own digest is the last 12 bytes."""
    name = token.to_bytes(TOKEN_BYTES, "little")
    return name + blake2b(name, key=prefix, digest_size=DIGEST_BYTES).digest()


def fake_slots(tokens: Iterable[int], prefix: bytes = EMPTY_PREFIX) -> list[bytes]:
    """The slots of `tokens` after the prefix of digest `prefix`."""
    slots = []
    for token in tokens:
        slots.append(fake_slot(prefix, token))
        prefix = slots[-1][TOKEN_BYTES:]
    return slots


def fake_token(
    history: Sequence[int],
    vocab_size: int,
    seed: int = 0,
    banned: frozenset[int] = frozenset(),
    mask: MaskRow | None = None,
    allowed: tuple[int, ...] = (),
) -> int:
    """The fake model's next token after `history`: the first id from its digest on that is allowed."""
    banned = banned.union(set(range(vocab_size)).difference(allowed)) if allowed else banned
    first = int.from_bytes(fake_slots(history)[-1][TOKEN_BYTES:], "little") + seed
    tokens = ((first + i) % vocab_size for i in range(vocab_size))
    return next(token for token in tokens if token not in banned and (mask is None or is_allowed(mask, token)))


def fake_scores(slots: Iterable[bytes], first: int, k: int, vocab_size: int) -> PromptScores:
    """The fake model's scores of the tokens with these slots, at positions from `first` on."""
    scored = []
    for slot in slots:
        number = int.from_bytes(slot[-2:], "little")
        top = tuple(((number + i) % vocab_size, -i / 4) for i in range(min(k, vocab_size)))
        scored.append(ScoredToken(-number / 64, number % vocab_size + 1, top))
    return pack_scores(first, scored)


def _tree_slots(row: Row, prefix: bytes) -> list[bytes]:
    """The slots of a row with a tree: each node's after its path."""
    slots: list[bytes] = []
    for token, parent in zip(row.tokens, row.token_parents, strict=True):
        slots.append(fake_slot(prefix if parent < 0 else slots[parent][TOKEN_BYTES:], token))
    return slots


class FakeRunner:
    """A `Runner` over `memory`, whose pages are `page_size * SLOT_BYTES` long."""

    def __init__(
        self,
        memory: PageMemory | WindowedMemory,
        page_size: int,
        vocab_size: int,
        host: PageMemory | None = None,
        masks: MaskFiller | None = None,
        make_drafts: Callable[[Row], Sequence[int]] | None = None,
    ) -> None:
        """`make_drafts`: as many as a row wants. They write nothing: where draft layers lie is the model's business."""
        self._apart = None if isinstance(memory, PageMemory) else memory
        self.window: PageWindow | None = None  # of window parts that are apart
        self.fixed_slots: Sequence[int] | None = None
        """Slots of pages' window parts when the step was started; None: as they are when it runs."""
        self._memory = memory if isinstance(memory, PageMemory) else memory.leading
        if self._memory.page_bytes != page_size * SLOT_BYTES:
            raise ValueError(f"a fake page of {page_size} tokens has {page_size * SLOT_BYTES} bytes")
        self._host = host
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._masks = masks
        self._make_drafts = make_drafts
        self.num_steps = 0
        self.num_tokens = 0

    @property
    def page_size(self) -> int:
        return self._page_size

    def run(self, batch: Batch) -> StepOutput:
        """Checks every row against the pages, then writes, then samples. Raises `Broken` at the first mismatch."""
        for copy in batch.copies:
            self._copy(copy)
        has_made = any(row.wanted is not None for row in batch.rows)
        if has_made:
            batch = self._with_drafts(batch)
        before = [self._verified(row) for row in batch.rows]
        written: set[tuple[int, int]] = set()
        for row, prefix in zip(batch.rows, before, strict=True):
            self._write(row, prefix, written)
        self.num_steps += 1
        self.num_tokens += batch.num_tokens
        masks = StepMasks() if self._masks is None else self._masks.fill(batch.rows)
        specs = [spec for row in batch.rows if row.sample is not None for spec in (row.sample, *row.drafted)]
        if any(spec.mask is not None and index not in masks.rows for index, spec in enumerate(specs)):
            raise Broken("a constrained row has no mask")
        specs = check_rows(specs, masks, self._vocab_size)
        sampled = [self._sample(spec, masks.rows.get(index)) for index, spec in enumerate(specs)]
        if has_trees := any(row.parents for row in batch.rows):
            walk = walk_trees(batch, sampled, masks)
            for moves in walk.moves:
                self._move(moves)
            output = walk.masks.output(walk.batch, walk.sampled)
        else:
            output = masks.output(batch, sampled)
        scores = {
            index: self._scores(row, row.score, prefix)
            for index, (row, prefix) in enumerate(zip(batch.rows, before, strict=True))
            if row.score is not None
        }
        if has_trees:
            return replace(output, scores=scores, batch=walk.batch)
        return replace(output, scores=scores, batch=batch if has_made else None) if scores or has_made else output

    def _move(self, moves: SlotMoves) -> None:
        """Moves slots of a row, all at once."""
        taken = [bytes(self._slot(moves.pages, source)) for source, _ in moves.places]
        for (_, target), slot in zip(moves.places, taken, strict=True):
            self._slot(moves.pages, target)[:] = slot

    def _with_drafts(self, batch: Batch) -> Batch:
        if self._make_drafts is None:
            raise Broken("a row wants drafts, and this runner makes none")
        wanting = (index for index, row in enumerate(batch.rows) if row.wanted is not None)
        return batch.with_made({index: self._make_drafts(batch.rows[index]) for index in wanting})

    def _scores(self, row: Row, wanted: ScoreSpec, prefix: bytes) -> PromptScores:
        slots = fake_slots([row.tokens[0], *wanted.targets], prefix)[1:]
        return fake_scores(slots, row.start + 1, wanted.k, self._vocab_size)

    def _verified(self, row: Row) -> bytes:
        """Checks the row's shape and its earlier slots; returns the digest of its earlier tokens."""
        end = row.start + len(row.tokens)
        if not row.tokens or row.start < 0:
            raise Broken(f"{row.id}: a row needs at least one token and a position")
        if len(row.pages) * self._page_size < end:
            raise Broken(f"{row.id}: {len(row.pages)} pages do not hold {end} tokens")
        history = None if row.sample is None else row.sample.history
        for at, spec in enumerate([] if row.sample is None else (row.sample, *row.drafted)):
            new = self._new_tokens(row, at)
            if len(spec.history) != row.start + len(new) or list(spec.history[row.start :]) != new:
                raise Broken(f"{row.id}: history of {len(spec.history)} tokens does not end in {new}")
        prefix = EMPTY_PREFIX
        for position in range(row.start):
            slot = bytes(self._slot(row.pages, position))
            token = int.from_bytes(slot[:TOKEN_BYTES], "little")
            if slot != fake_slot(prefix, token) or (history is not None and history[position] != token):
                page = row.pages[position // self._page_size]
                raise Broken(f"{row.id}: page {page} does not hold the KV of position {position}")
            if self._is_read_apart(row.start, position) and slot != bytes(self._window_slot(row.pages, position)):
                raise Broken(f"{row.id}: the window part of position {position} is not what was written")
            prefix = slot[TOKEN_BYTES:]
        return prefix

    def window_slots(self) -> Sequence[int] | None:
        """Slots of pages' window parts as they are now; None if there are none."""
        return None if self._apart is None else tuple(self._apart.slot_of)

    def _is_read_apart(self, start: int, position: int) -> bool:
        """True if the token at `start` reads the window part of `position`."""
        return self._apart is not None and self.window is not None and position > start - self.window.num_tokens

    def _window_slot(self, pages: Sequence[PageId], position: int) -> memoryview:
        assert self._apart is not None
        page, at = pages[position // self._page_size], position % self._page_size * SLOT_BYTES
        window_slot = (self.fixed_slots or self._apart.slot_of)[page]
        if window_slot == NO_SLOT:
            raise Broken(f"page {page} has no window part, and position {position} needs it")
        return self._apart.windows.page(window_slot)[at : at + SLOT_BYTES]

    @staticmethod
    def _new_tokens(row: Row, place: int) -> list[int]:
        """The row's new tokens up to its sampled `place`: 0 behind its own, n behind draft n - 1."""
        known, drafts = row.num_known_tokens, row.tokens[row.num_known_tokens :]
        behind = [drafts[node] for node in draft_path(row.parents, place - 1)] if row.parents else drafts[:place]
        return [*row.tokens[:known], *behind]

    def _write(self, row: Row, prefix: bytes, written: set[tuple[int, int]]) -> None:
        slots = _tree_slots(row, prefix) if row.parents else fake_slots(row.tokens, prefix)
        for position, slot in enumerate(slots, row.start):
            place = (row.pages[position // self._page_size], position % self._page_size)
            if place in written:
                raise Broken(f"{row.id}: another row of this step writes page {place[0]}, slot {place[1]}")
            written.add(place)
            self._slot(row.pages, position)[:] = slot
            if self._apart is not None:
                self._window_slot(row.pages, position)[:] = slot

    def _slot(self, pages: Sequence[PageId], position: int) -> memoryview:
        page, slot = pages[position // self._page_size], position % self._page_size
        return self._memory.page(page)[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]

    def _sample(self, spec: SampleSpec, mask: MaskRow | None) -> SampledToken:
        seed = 0 if spec.sampling.greedy else spec.sampling.seed
        allowed = spec.sampling.allowed_token_ids
        token = fake_token(spec.history, self._vocab_size, seed, spec.banned, mask, allowed)
        if spec.sampling.logprobs is None:
            return SampledToken(token)
        named = spec.sampling.logprob_token_ids
        top = ((token, 0.0),) if spec.sampling.logprobs and not named else tuple((each, -1.0) for each in named)
        return SampledToken(token, TokenLogprobs(0.0, top))

    def _copy(self, copy: HostCopy) -> None:
        if self._host is None:
            raise Broken("a copy needs swap space; this runner has none")
        size = self._memory.page_bytes
        for at, (page, slot) in enumerate(zip(copy.pages, copy.slots, strict=True)):
            pairs = [(self._memory.page(page), self._host.page(slot)[:size])]
            if self._apart is not None and copy.window_slots[at] != NO_SLOT:
                pairs.append((self._apart.windows.page(copy.window_slots[at]), self._host.page(slot)[size:]))
            for ours, theirs in pairs:
                if copy.to_host:
                    theirs[:] = ours
                else:
                    ours[:] = theirs
