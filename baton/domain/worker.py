"""The record that a worker keeps alive in the registry."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.domain.ids import Incarnation, WorkerId
from baton.domain.timing.step_time import StepTimeFit
from baton.domain.values.quick_init import quick_init

PROMPT_SCORES, TOKEN_BANS, NAMED_LOGPROBS = "prompt_scores", "token_bans", "named_logprobs"
"""Capabilities: to score prompts that a worker computes; `allowed_token_ids` and `bad_words`; `logprob_token_ids`."""

SESSIONS, SESSION_OPENS = "sessions", "session_opens"
"""Capabilities of a worker that listens for sessions: attempts of decode come in them, too; and so do reservations,
prompts and aborts, as far as its role has them."""

SESSION_LINKS = "session_links"
"""Capability of a worker that gives pages: those that read them ask in a session, too."""

SESSION_PROMPTS = "session_prompts"
"""Capability of such a worker: a short prompt may come in the message that opens its stream, not in parts behind it."""

ALL_IN_SESSIONS = (SESSIONS, SESSION_OPENS, SESSION_PROMPTS)
"""Of a worker of this version that listens for sessions."""

EMBEDDINGS, NO_TOWER = "embeddings", "no_tower"
"""Capabilities of prefill workers: to pull embeddings from encode workers; and to encode no image itself."""

LOWER_TIER = "lower_tier"
"""Capability of a worker: pages that its pool evicts stay in host memory or files. Its cache events do not tell so."""

CAPABILITIES = (PROMPT_SCORES, TOKEN_BANS, NAMED_LOGPROBS)
"""Of a worker of this version."""


NO_KERNELS = "none"
"""`kernels` of a worker on a CPU whose native kernels could not be used."""


TEXT, IMAGE = "text", "image"
"""Modalities. A prefill worker with `IMAGE` encodes images; a decode worker with it takes sequences with spans."""


class WorkerRole(enum.Enum):
    """Role of a worker process. ENCODE: it has a vision tower alone, and no pages."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"


class WorkerStatus(enum.Enum):
    """READY accepts requests, DRAINING finishes its own."""

    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages of a pool by owner (`baton.kv.pages.Owner`); they add up to the pool."""

    free: int = 0
    cached: int = 0
    pinned: int = 0
    live: int = 0
    reserved: int = 0
    draining: int = 0
    retired: int = 0


@dataclass(frozen=True, slots=True)
class MediaCounts:
    """Images that a worker holds: all, those that are encoded, and their bytes. `max_bytes` 0: it serves none."""

    num_held: int = 0
    num_encoded: int = 0
    num_bytes: int = 0
    max_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Activity:
    """Totals since the start: computed tokens, prompt tokens, and prompt tokens found in the prefix cache."""

    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerBudgets:
    """Bounds of a worker's work, which an operator may change while it runs (`Worker.SetBudgets`).

    `prefill_tokens`: most tokens of a step in which prompts are computed; 0: no new prompt is taken. `rows`: most
    sequences generated at once; 0: no new one is taken. `reservations`: most reservations at once that are no row yet;
    None: as many as rows.
    """

    prefill_tokens: int = 0
    rows: int = 0
    reservations: int | None = None

    @property
    def takes_prompts(self) -> bool:
        return self.prefill_tokens > 0

    @property
    def takes_rows(self) -> bool:
        return self.rows > 0 and self.reservations != 0


@quick_init
@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A snapshot by the engine thread. `step_age_s`: age of the current step; 0 while idle.

    `step_time`: what the engine has learned of the time of its steps; None while that is no help.
    """

    waiting_requests: int = 0
    waiting_tokens: int = 0
    running_rows: int = 0
    available_pages: int = 0
    total_pages: int = 0
    step_age_s: float = 0.0
    pages: PageCounts = PageCounts()
    activity: Activity = Activity()
    step_time: StepTimeFit | None = None
    media: MediaCounts = MediaCounts()

    def with_work(self, num_prompts: int, prompt_tokens: int, num_rows: int, num_pages: int) -> WorkerLoad:
        """The load with prompts that wait, and rows that take pages, added to it."""
        return WorkerLoad(  # not `replace`, which takes twice as long
            self.waiting_requests + num_prompts, self.waiting_tokens + prompt_tokens, self.running_rows + num_rows,
            max(0, self.available_pages - num_pages), self.total_pages, self.step_age_s, self.pages, self.activity,
            self.step_time, self.media,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """A worker's working link to one whose pages it reads, mostly a prefill worker. `num_probe_bytes`: of the probe.

    `path`: how the bytes move, as far as the transport can tell. `num_pulled_bytes` and `pull_us`: bytes of all pulls
    since link-up, and the sum of their durations.
    """

    prefill_id: WorkerId
    prefill_incarnation: Incarnation
    transport: str
    bandwidth_bytes_per_s: float
    num_probe_bytes: int
    path: str = ""
    num_pulled_bytes: int = 0
    pull_us: int = 0


@dataclass(frozen=True, slots=True)
class BrokenLink:
    """A prefill worker that a decode worker could not link to, and the reason."""

    prefill_id: WorkerId
    reason: str


@quick_init
@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One live worker process. Workers with different fingerprints cannot be linked.

    `role`: what the process was started as, a label: placement reads `budgets`. `text_digest`: of tokenizer and
    template. `grammars`: library and version that constrain output; "": none. `broken_links`: prefill workers without a
    link.
    `capabilities`: fields of requests that it honours and that workers of an earlier version would ignore.
    `kernels`: level of the native kernels in use, `NO_KERNELS`, or the device that needs none; "": not told.
    `modalities`: of prompts that it serves. `processor`: digest of the image processor that its images are encoded
    with, here or by encode workers; `vision`: fingerprint of the embeddings; both "" where no images are encoded.
    `page_bytes`: of a page's KV; 0: not told.
    `session_address`: of its port for sessions, host:port, or a port of the host of `address`; "": it has none.
    An encode worker has no pages: `page_size` is 0, its budgets are 0, and `load` counts images and their rows.
    `announcement`: grows with each announcement of an incarnation, so a replayed older record is found.
    `signature`: of all other fields under the cluster's secret (`baton.domain.trust`); empty in an open cluster.
    """

    id: WorkerId
    role: WorkerRole
    incarnation: Incarnation
    address: str
    model: str
    fingerprint: str
    page_size: int
    max_model_len: int
    vocab_size: int
    status: WorkerStatus = WorkerStatus.READY
    load: WorkerLoad = WorkerLoad()
    links: tuple[LinkRecord, ...] = ()
    signature: str = ""
    budgets: WorkerBudgets = WorkerBudgets()
    text_digest: str = ""
    announcement: int = 0
    grammars: str = ""
    broken_links: tuple[BrokenLink, ...] = ()
    capabilities: tuple[str, ...] = ()
    kernels: str = ""
    modalities: tuple[str, ...] = (TEXT,)
    processor: str = ""
    vision: str = ""
    page_bytes: int = 0
    session_address: str = ""

    def with_load(self, load: WorkerLoad) -> WorkerRecord:
        """The record with another load. Not by `replace`: a router does this for each worker and placement."""
        return WorkerRecord(
            self.id, self.role, self.incarnation, self.address, self.model, self.fingerprint, self.page_size,
            self.max_model_len, self.vocab_size, self.status, load, self.links, self.signature, self.budgets,
            self.text_digest, self.announcement, self.grammars, self.broken_links, self.capabilities, self.kernels,
            self.modalities, self.processor, self.vision, self.page_bytes, self.session_address,
        )  # fmt: skip

    @property
    def linked(self) -> tuple[Incarnation, ...]:
        """The processes that it has links to, sorted."""
        return tuple(sorted(link.prefill_incarnation for link in self.links))

    @property
    def routing_facts(self) -> str:
        """What routers have to learn of at once, as text: links and budgets. Load can wait for the next heartbeat."""
        budgets = (self.budgets.prefill_tokens, self.budgets.rows, self.budgets.reservations)
        return f"{','.join(map(str, self.linked))} {budgets}"
