"""A runner without a model, for tests of schedulers and for simulation: exact, instant, and suspicious.

In place of keys and values it writes into the pool, for every token slot, the token and a digest of all tokens up to
it. Before a step writes anything, each row's earlier slots are read back: they must chain from the first position on,
and spell the row's history where it is known. A page freed too soon, shared wrongly, never landed or written twice
raises `Broken` in the step that would have used it. As these are bytes in a `PageMemory`, a transfer can move them
like the real ones. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from baton.domain.errors import Broken
from baton.domain.request import SampledToken, TokenLogprobs
from baton.engine.batch import Batch, HostCopy, Row, SampleSpec, StepOutput
from baton.kv.geometry import KVGeometry, LayerGeometry
from baton.kv.memory import PageMemory

TOKEN_BYTES = 4
DIGEST_BYTES = 12
SLOT_BYTES = TOKEN_BYTES + DIGEST_BYTES
EMPTY_PREFIX = blake2b(digest_size=DIGEST_BYTES, person=b"baton-fake").digest()


def fake_geometry(page_size: int) -> KVGeometry:
    """One layer, one head, 16 bytes a token."""
    return KVGeometry((LayerGeometry(1, 2, 2),), "float32", page_size)


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


def fake_token(history: Sequence[int], vocab_size: int, seed: int = 0, banned: frozenset[int] = frozenset()) -> int:
    """What the fake model says after `history`: the next id from its digest on that is not banned."""
    first = int.from_bytes(fake_slots(history)[-1][TOKEN_BYTES:], "little") + seed
    return next(token for token in ((first + i) % vocab_size for i in range(vocab_size)) if token not in banned)


class FakeRunner:
    """A `Runner` over `memory`, whose pages are `fake_geometry(page_size)`'s."""

    def __init__(self, memory: PageMemory, page_size: int, vocab_size: int, host: PageMemory | None = None) -> None:
        if memory.page_bytes != page_size * SLOT_BYTES:
            raise ValueError(f"a fake page of {page_size} tokens has {page_size * SLOT_BYTES} bytes")
        self._memory = memory
        self._host = host
        self._page_size = page_size
        self._vocab_size = vocab_size
        self.num_steps = 0
        self.num_tokens = 0

    def run(self, batch: Batch) -> StepOutput:
        """Check every row against the pages, then write, then answer. Raises `Broken` at the first contradiction."""
        for copy in batch.copies:
            self._copy(copy)
        before = [self._verified(row) for row in batch.rows]
        written: set[tuple[int, int]] = set()
        for row, prefix in zip(batch.rows, before, strict=True):
            self._write(row, prefix, written)
        self.num_steps += 1
        self.num_tokens += batch.num_tokens
        return StepOutput(tuple(None if row.sample is None else self._sample(row.sample) for row in batch.rows))

    def _verified(self, row: Row) -> bytes:
        """The digest of the row's earlier tokens, having checked the row's shape and all its earlier slots."""
        end = row.start + len(row.tokens)
        if not row.tokens or row.start < 0:
            raise Broken(f"{row.id}: a row extends by at least one token, from a position")
        if len(row.pages) * self._page_size < end:
            raise Broken(f"{row.id}: {len(row.pages)} pages do not hold {end} tokens")
        history = None if row.sample is None else row.sample.history
        if history is not None and (len(history) != end or list(history[row.start :]) != list(row.tokens)):
            raise Broken(f"{row.id}: history of {len(history)} tokens does not end in the row's, at {end}")
        prefix = EMPTY_PREFIX
        for position in range(row.start):
            slot = bytes(self._slot(row, position))
            token = int.from_bytes(slot[:TOKEN_BYTES], "little")
            if slot != fake_slot(prefix, token) or (history is not None and history[position] != token):
                page = row.pages[position // self._page_size]
                raise Broken(f"{row.id}: page {page} does not hold the KV of position {position}")
            prefix = slot[TOKEN_BYTES:]
        return prefix

    def _write(self, row: Row, prefix: bytes, written: set[tuple[int, int]]) -> None:
        for position, slot in enumerate(fake_slots(row.tokens, prefix), row.start):
            place = (row.pages[position // self._page_size], position % self._page_size)
            if place in written:
                raise Broken(f"{row.id}: another row of this step writes page {place[0]}, slot {place[1]}")
            written.add(place)
            self._slot(row, position)[:] = slot

    def _slot(self, row: Row, position: int) -> memoryview:
        page, slot = row.pages[position // self._page_size], position % self._page_size
        return self._memory.page(page)[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]

    def _sample(self, spec: SampleSpec) -> SampledToken:
        seed = 0 if spec.sampling.greedy else spec.sampling.seed
        token = fake_token(spec.history, self._vocab_size, seed, spec.banned)
        if spec.sampling.logprobs is None:
            return SampledToken(token)
        top = ((token, 0.0),) if spec.sampling.logprobs else ()
        return SampledToken(token, TokenLogprobs(0.0, top))

    def _copy(self, copy: HostCopy) -> None:
        if self._host is None:
            raise Broken("pages are to be copied to a host tier that is not there")
        for page, slot in zip(copy.pages, copy.slots, strict=True):
            if copy.to_host:
                self._host.page(slot)[:] = self._memory.page(page)
            else:
                self._memory.page(page)[:] = self._host.page(slot)
