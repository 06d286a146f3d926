"""Declares every metric of every service, but those of sessions. `docs/metrics.md` is generated from both.

A metric with labels has no series until a label set is used (`known_series` starts those known in advance). Counters
and gauges may be changed from any thread, but for the fast ones, which a router's event loop changes.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics import MetricWrapperBase

from baton.telemetry.fast.fast_counter import FastCounter
from baton.telemetry.fast.fast_histogram import FastHistogram
from baton.telemetry.registry import COUNT_BUCKETS, LATENCY_BUCKETS_S, LENGTH_BUCKETS, STEP_BUCKETS_S
from baton.telemetry.registry import REGISTRY as REGISTRY
from baton.telemetry.series import session_series

# --- requests (router) ---
REQUESTS_IN_STATE = Gauge("baton_requests_in_state", "Requests by current state.", ["state"], registry=REGISTRY)
REQUESTS_TOTAL = FastCounter(
    "baton_requests", "Requests that ended, by outcome and error code.", ["outcome", "code"], registry=REGISTRY
)
ADMISSION_TOTAL = FastCounter(
    "baton_admission", "Admission decisions.", ["decision", "reason", "tenant"], registry=REGISTRY
)
QUEUED_REQUESTS = Gauge("baton_queued_requests", "Requests in the admission queue.", registry=REGISTRY)
QUEUED_TOKENS = Gauge("baton_queued_tokens", "Prompt tokens in the admission queue.", registry=REGISTRY)
WORKERS = Gauge("baton_workers", "Workers known here, by status.", ["model", "role", "status"], registry=REGISTRY)
READY_PAIRS = Gauge(
    "baton_ready_pairs",
    "Linked prefill/decode pairs that take requests, as this router sees them.",
    ["model"],
    registry=REGISTRY,
)
WORKERS_LOST_TOTAL = Counter(
    "baton_workers_lost",
    "Workers that vanished from the registry without having withdrawn, as this router saw them.",
    ["model", "role"],
    registry=REGISTRY,
)
OPEN_LINK_BREAKERS = Gauge("baton_open_link_breakers", "Links whose breaker is not closed here.", registry=REGISTRY)
PLACEMENTS_TOTAL = FastCounter(
    "baton_placements", "Pairs chosen, by what told their cost.", ["basis"], registry=REGISTRY
)
EARLY_PREFILLS_TOTAL = FastCounter(
    "baton_early_prefills", "Begun beside a reservation.", ["outcome"], registry=REGISTRY
)
RETRIES_TOTAL = Counter(
    "baton_retries", "Attempts lost and retried.", ["phase", "reason", "outcome"], registry=REGISTRY
)
ABORTS_TOTAL = Counter("baton_aborts", "Requests aborted, by the phase they were in.", ["phase"], registry=REGISTRY)
TAKEOVERS_TOTAL = Counter(
    "baton_takeovers",
    "Calls taken over by this router, by cause: orphan (their router was lost) or client (their client came back).",
    ["cause"],
    registry=REGISTRY,
)
STREAMS_RESUMED_TOTAL = Counter("baton_streams_resumed", "Streams that clients resumed here.", registry=REGISTRY)
UNREAD_BYTES = Gauge(
    "baton_unread_bytes", "Output that clients have not read yet, in this router's memory.", registry=REGISTRY
)
HUNG_UP_CLIENTS_TOTAL = Counter(
    "baton_hung_up_clients", "Connections that the router closed because the client did not read.", registry=REGISTRY
)
HTTP_RESPONSES_TOTAL = FastCounter("baton_http_responses", "HTTP responses.", ["route", "status"], registry=REGISTRY)
HTTP_REQUEST_SECONDS = FastHistogram(
    "baton_http_request_seconds", "To the last byte sent.", ["route"], buckets=LATENCY_BUCKETS_S, registry=REGISTRY
)
UNKNOWN_FIELDS_TOTAL = Counter(
    "baton_unknown_fields", "Fields of requests without a row in the table of fields.", registry=REGISTRY
)
INDEX_GAP_TOTAL = Counter(
    "baton_index_gap", "Gaps in the cache events of workers, each made up for by a snapshot.", registry=REGISTRY
)
INDEX_ERROR = FastHistogram(
    "baton_index_error",
    "Prompt tokens by which the index of cached pages differed from what prefill then found in its cache.",
    (),
    buckets=(0.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0),
    registry=REGISTRY,
)

# --- latency (router, from `request_timer` only) ---
REQUEST_STAGE_SECONDS = FastHistogram(
    "baton_request_stage_seconds",
    "Time in a stage; the stages up to `emit` add up to TTFT, all of them to E2E.",
    ["stage"],
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
TTFT_SECONDS = FastHistogram(
    "baton_ttft_seconds",
    "Arrival to first token sent.",
    ["path"],
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
ITL_SECONDS = FastHistogram(
    "baton_itl_seconds",
    "Time between two consecutive tokens.",
    ["path"],
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
FIRST_ITL_SECONDS = FastHistogram(
    "baton_first_itl_seconds",
    "First to second token: the gap in which the transfer's tail shows.",
    ["path"],
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)
TPOT_SECONDS = FastHistogram(
    "baton_tpot_seconds", "Mean time of a sequence's tokens after the first.", [], LATENCY_BUCKETS_S, registry=REGISTRY
)
PROMPT_LENGTH_TOKENS = FastHistogram(
    "baton_prompt_length_tokens", "Prompt tokens of a request.", [], buckets=LENGTH_BUCKETS, registry=REGISTRY
)
OUTPUT_LENGTH_TOKENS = FastHistogram(
    "baton_output_length_tokens", "Output tokens of a sequence.", [], buckets=LENGTH_BUCKETS, registry=REGISTRY
)
E2E_SECONDS = FastHistogram(
    "baton_e2e_seconds", "Arrival to end.", ["path"], buckets=LATENCY_BUCKETS_S, registry=REGISTRY
)

# --- tenants (router, from `series.tenant_series` only) ---
TENANT_REQUESTS_TOTAL = FastCounter(
    "baton_tenant_requests",
    "Requests that ended, by tenant; those beyond 100 tenants as `other`.",
    ["tenant", "outcome"],
    registry=REGISTRY,
)
TENANT_TOKENS_TOTAL = FastCounter(
    "baton_tenant_tokens",
    "Tokens of requests that ended, by tenant and kind: prompt, cached (a part of it), output.",
    ["tenant", "kind"],
    registry=REGISTRY,
)
TENANT_TTFT_SECONDS = FastHistogram(
    "baton_tenant_ttft_seconds",
    "Arrival to first token sent, by tenant.",
    ["tenant"],
    buckets=LATENCY_BUCKETS_S,
    registry=REGISTRY,
)

# --- tokens and pages (workers) ---
PROMPT_TOKENS_TOTAL = Counter("baton_prompt_tokens", "Prompt tokens of accepted requests.", ["role"], registry=REGISTRY)
CACHED_TOKENS_TOTAL = Counter(
    "baton_cached_tokens", "Prompt tokens found in a prefix cache.", ["role", "tier"], registry=REGISTRY
)
IMPORTED_TOKENS_TOTAL = Counter(
    "baton_imported_tokens",
    "Cached prompt tokens that were read from another worker's cache, by its role.",
    ["source"],
    registry=REGISTRY,
)
TIER_PAGES_TOTAL = Counter(
    "baton_tier_pages",
    "Pages read from and written to a tier below the pool; failures cost misses.",
    ["tier", "result"],
    registry=REGISTRY,
)
TIER_CORRUPT_TOTAL = Counter(
    "baton_tier_corrupt", "Pages read from a tier whose bytes had another digest.", ["tier"], registry=REGISTRY
)
PROMPT_SCORES_TOTAL = Counter(
    "baton_prompt_scores", "Prompt tokens whose log probabilities were computed.", ["role"], registry=REGISTRY
)
GENERATED_TOKENS_TOTAL = Counter("baton_generated_tokens", "Tokens sampled.", ["role"], registry=REGISTRY)
TOKENS_RECOMPUTED_TOTAL = Counter(
    "baton_tokens_recomputed",
    "Prompt tokens of a split request computed again by decode; must stay 0.",
    registry=REGISTRY,
)
WEIGHTS_HUGE_FRACTION = Gauge(
    "baton_weights_huge_fraction",
    "Share of the weights' bytes on huge pages, measured after loading; absent where it cannot be measured.",
    ["layout"],
    registry=REGISTRY,
)
WEIGHTS_BYTES = Gauge(
    "baton_weights_bytes",
    "Bytes of the weights after loading, by the mapping that they really lie in: `shared` (of a file) or `private`.",
    ["memory"],
    registry=REGISTRY,
)
KERNELS = Gauge(
    "baton_kernels",
    "1 for the level of the native kernels in use; `none`: they could not be used, and torch computes, much slower.",
    ["level"],
    registry=REGISTRY,
)
VERIFICATION = Gauge(
    "baton_verification",
    "1 for the bits of logits when a step computes several tokens or a tree: exact (as of each alone) or rounding.",
    ["bits"],
    registry=REGISTRY,
)
BORROWED_CORE_SECONDS = Gauge(
    "baton_borrowed_core_seconds",
    "Time that this worker has computed on cores of other, idle workers of its host.",
    registry=REGISTRY,
)
BORROWED_CORE_WAIT_SECONDS = Gauge(
    "baton_borrowed_core_wait_seconds",
    "Time for which threads with a part of a step lacked such cores: others had them, or memory was slow to come.",
    registry=REGISTRY,
)
DRAFTS_TOTAL = Counter("baton_drafts", "Proposals that steps verified, one a row.", ["drafter"], registry=REGISTRY)
DRAFT_TOKENS_TOTAL = Counter("baton_draft_tokens", "Tokens of these proposals.", ["drafter"], registry=REGISTRY)
DRAFT_ACCEPTED_TOTAL = Counter(
    "baton_draft_accepted", "Draft tokens that were drawn, and so emitted.", ["drafter"], registry=REGISTRY
)
DRAFT_ACCEPTED_POSITION_TOTAL = Counter(
    "baton_draft_accepted_position",
    "Draft tokens that were emitted, by their place in the proposal, from 0.",
    ["drafter", "position"],
    registry=REGISTRY,
)
DRAFT_OFF_CHAIN_TOTAL = Counter(
    "baton_draft_off_chain", "Emitted drafts of trees that a chain would not have had.", ["drafter"], registry=REGISTRY
)
DRAFT_SKIPPED_TOTAL = Counter(
    "baton_draft_skipped",
    "Row steps without drafts: load (they would not pay), no_match (none proposed), constraint, limit (output ends), "
    "pages, tokens (of the budget) or preempted (rows wait for pages).",
    ["reason"],
    registry=REGISTRY,
)
BUDGET = Gauge(
    "baton_budget",
    "Budgets in force: prompt tokens of a step, rows, and reservations that are no row yet.",
    ["kind"],
    registry=REGISTRY,
)
KV_EVENT_BATCHES_TOTAL = Counter(
    "baton_kv_event_batches",
    "Batches of cache events for other projects' routers: published, replayed, or lost before they were sent.",
    ["result"],
    registry=REGISTRY,
)
KV_PAGES = Gauge("baton_kv_pages", "Pages of the pool by owner.", ["owner"], registry=REGISTRY)
WINDOW_SLOTS = Gauge("baton_window_slots", "Slots of pages' window parts, by state.", ["state"], registry=REGISTRY)
WINDOW_EVICTIONS_TOTAL = Counter("baton_window_evictions", "Window parts that cached pages lost.", registry=REGISTRY)

# --- handoff and transfer (workers) ---
TRANSFER_BYTES_TOTAL = Counter("baton_transfer_bytes", "Page bytes imported.", ["link", "transport"], registry=REGISTRY)
TRANSFER_SECONDS = Histogram(
    "baton_transfer_seconds",
    "Duration of one pull.",
    ["link", "transport"],
    buckets=STEP_BUCKETS_S,
    registry=REGISTRY,
)
TRANSFER_EXPOSED_SECONDS = Histogram(
    "baton_transfer_exposed_seconds",
    "Seal to commit: transfer time that no compute hid.",
    ["link", "transport"],
    buckets=STEP_BUCKETS_S,
    registry=REGISTRY,
)
TRANSFER_DESCRIPTORS = Histogram(
    "baton_transfer_descriptors", "Pages in one pull.", ["link", "transport"], buckets=COUNT_BUCKETS, registry=REGISTRY
)
LINK_STATE = Gauge("baton_link_state", "1: the link works; 0: broken.", ["source", "destination"], registry=REGISTRY)
LINK_BANDWIDTH_BYTES_PER_SECOND = Gauge(
    "baton_link_bandwidth_bytes_per_second", "As probed at link-up.", ["source", "destination"], registry=REGISTRY
)
LINK_TRANSPORT_INFO = Gauge(
    "baton_link_transport_info",
    "1 for the way that the last pages came.",
    ["source", "destination", "transport"],
    registry=REGISTRY,
)
COMMIT_TOTAL = Counter(
    "baton_commit",
    "Handoffs validated: by v1 (pins), v2 (lease), v3 (digests), or invalid.",
    ["result"],
    registry=REGISTRY,
)
INTEGRITY_FAILURES_TOTAL = Counter(
    "baton_integrity_failures",
    "What did not match its digest: pages pulled (page_digest) or here (pool_page), images' rows (embedding).",
    ["kind"],
    registry=REGISTRY,
)
PAGE_CHECKS_TOTAL = Counter(
    "baton_page_checks", "Settled pages compared with their digests: matched, idle or suspected.", registry=REGISTRY
)
QUARANTINED_PAGES_TOTAL = Counter(
    "baton_quarantined_pages",
    "Pages taken out of the prefix cache: wrong ones and their descendants.",
    registry=REGISTRY,
)
STALE_MESSAGES_TOTAL = Counter(
    "baton_stale_messages", "Messages of an older attempt or incarnation, refused.", ["kind"], registry=REGISTRY
)

REJECTED_CALLS_TOTAL = Counter(
    "baton_rejected_calls",
    "Calls rejected before a servicer: token missing, forged, replayed or for another process, or a malformed message.",
    ["reason"],
    registry=REGISTRY,
)

STORE_UNSEALED_TOTAL = Counter(
    "baton_store_unsealed",
    "Stored records and journal entries that were not used: not sealed, sealed with another secret, changed or cut.",
    ["reason"],
    registry=REGISTRY,
)

# --- engine (workers) ---
STEP_SECONDS = FastHistogram(
    "baton_step_seconds", "One step, from schedule to commit.", ["role"], buckets=STEP_BUCKETS_S, registry=REGISTRY
)
STEP_HOST_SECONDS = FastHistogram(
    "baton_step_host_seconds", "A step less its forward pass.", ["role"], buckets=STEP_BUCKETS_S, registry=REGISTRY
)
STEP_TOKENS = FastHistogram(
    "baton_step_tokens", "Tokens extended in a step.", ["role"], buckets=COUNT_BUCKETS, registry=REGISTRY
)
STEP_TIME_ERROR = Gauge(
    "baton_step_time_error",
    "Mean relative error of the predicted duration of steps; 1 before the first.",
    ["role"],
    registry=REGISTRY,
)
BATCH_ROWS = Gauge("baton_batch_rows", "Rows of the last step.", ["role"], registry=REGISTRY)
WAITING_REQUESTS = Gauge(
    "baton_waiting_requests", "Requests (encode: images) here that are in no batch yet.", ["role"], registry=REGISTRY
)
MASK_SECONDS = Histogram(
    "baton_mask_seconds",
    "CPU time of the masks of a step with constrained rows.",
    buckets=(2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.02, 0.1),
    registry=REGISTRY,
)
GRAMMAR_COMPILE_SECONDS = Histogram(
    "baton_grammar_compile_seconds",
    "CPU time to compile a constraint, and to consume what earlier attempts emitted.",
    buckets=(1e-4, 5e-4, 0.001, 0.005, 0.02, 0.1, 0.5),
    registry=REGISTRY,
)
CONSTRAINT_FAILURES_TOTAL = Counter(
    "baton_constraint_failures", "Requests whose constraint could not be kept.", ["reason"], registry=REGISTRY
)
PREEMPTIONS_TOTAL = Counter("baton_preemptions", "Rows that lost their pages.", ["reason"], registry=REGISTRY)
SEND_BACKS_TOTAL = Counter(
    "baton_send_backs",
    "Rows that decode gave back to the router: no page and no host memory left, or a damaged host copy.",
    ["reason"],
    registry=REGISTRY,
)
SEND_BACKS_GIVEN_TOTAL = Counter(
    "baton_send_backs_given", "Rows given back from whose pages here the next attempt went on.", registry=REGISTRY
)
OVERLAP_DROPPED_TOKENS_TOTAL = Counter(
    "baton_overlap_dropped_tokens", "Tokens that a step ahead computed for rows that had ended.", registry=REGISTRY
)

# --- images (router, prefill, encode) ---
MEDIA_UPLOADS_TOTAL = Counter("baton_media_uploads", "Images sent to prefill workers.", ["outcome"], registry=REGISTRY)
MEDIA_UPLOAD_BYTES_TOTAL = Counter("baton_media_upload_bytes", "Bytes of files in these uploads.", registry=REGISTRY)
MEDIA_REFUSED_TOTAL = Counter(
    "baton_media_refused", "Image parts refused: url, file, bytes, number, role, detail.", ["reason"], registry=REGISTRY
)
ENCODE_SECONDS = Histogram("baton_encode_seconds", "Image encoding steps.", buckets=STEP_BUCKETS_S, registry=REGISTRY)
MEDIA_TOTAL = Counter("baton_media", "Images that came or were encoded, by outcome.", ["outcome"], registry=REGISTRY)
MEDIA_HELD = Gauge("baton_media_held", "Images that are held, as tensors or as embeddings.", registry=REGISTRY)
MEDIA_HELD_BYTES = Gauge("baton_media_held_bytes", "Tensors and embeddings of images that are held.", registry=REGISTRY)
MEDIA_EVICTED_TOTAL = Counter("baton_media_evicted", "Held images that made room for others.", registry=REGISTRY)
EMBEDDING_BYTES_TOTAL = Counter(
    "baton_embedding_bytes", "Bytes of pulled embeddings.", ["transport"], registry=REGISTRY
)

# --- process (all) ---
DEGRADED = Gauge("baton_degraded", "1: serving goes on without this component.", ["component"], registry=REGISTRY)
BUILD_INFO = Gauge(
    "baton_build_info", "Always 1; says what runs here.", ["version", "role", "model"], registry=REGISTRY
)


def render(accept: str = "", registry: CollectorRegistry = REGISTRY) -> tuple[bytes, str]:
    """All metrics and their content type. `accept`: the HTTP header; OpenMetrics on request, which has exemplars."""
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def declared() -> list[MetricWrapperBase | FastHistogram | FastCounter]:
    """Every metric of this file and of `session_series`, in order; the documentation is generated from it."""
    values: list[Any] = [*globals().values(), *vars(session_series).values()]
    return [value for value in values if isinstance(value, MetricWrapperBase | FastHistogram | FastCounter)]
