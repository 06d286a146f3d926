"""The policy classes of a simulated cluster, so tests can plant a broken one."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from baton.domain.fingerprint import Fingerprint, FingerprintPart
from baton.domain.media.span import MediaRules
from baton.engine.handoff.cached_exports import CachedExports
from baton.engine.handoff.kv_export import ExportTable
from baton.engine.handoff.page_imports import PageImports
from baton.services.decode.handoff_client import HandoffClient
from baton.services.decode.import_policy import ImportPolicy
from baton.services.decode.import_table import ImportTable
from baton.services.decode.scheduler import DecodeScheduler
from baton.services.encode.scheduler import EncodeScheduler
from baton.services.prefill.media_gate import MediaGate
from baton.services.prefill.scheduler import PrefillScheduler
from baton.services.router.dispatch.dispatcher import TokenDispatcher
from baton.services.router.takeover.supersede_listener import SupersedeListener
from baton.store.memory_store import MemoryStore
from baton.store.ownership import OwnerLease
from baton.store.write_behind.writer import StoreWriter
from baton.worker.budget_control import BudgetChange
from baton.worker.handoff.handoff_log import HandoffLog
from baton.worker.lifecycle import WorkerLifecycle
from baton.worker.media.media_receiver import MediaReceiver
from baton.worker.request_validator import EngineRequestValidator
from simulation.nodes.lua_store import LuaStore
from simulation.scenario import VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class PolicyClasses:
    """The real classes by default."""

    export_table: type[ExportTable] = ExportTable
    cached_exports: type[CachedExports] = CachedExports
    page_imports: type[PageImports] = PageImports
    prefill_scheduler: type[PrefillScheduler] = PrefillScheduler
    import_table: type[ImportTable] = ImportTable
    decode_scheduler: type[DecodeScheduler] = DecodeScheduler
    import_policy: type[ImportPolicy] = ImportPolicy
    handoffs: type[HandoffClient] = HandoffClient
    handoff_log: type[HandoffLog] = HandoffLog
    lifecycle: type[WorkerLifecycle] = WorkerLifecycle
    dispatcher: type[TokenDispatcher] = TokenDispatcher
    store: type[MemoryStore] | type[LuaStore] = MemoryStore
    writer: type[StoreWriter] = StoreWriter
    ownership: type[OwnerLease] = OwnerLease
    supersede_listener: type[SupersedeListener] = SupersedeListener
    encode_scheduler: type[EncodeScheduler] = EncodeScheduler
    media_gate: type[MediaGate] = MediaGate
    media_receiver: type[MediaReceiver] = MediaReceiver


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Sizes and times of the simulated cluster: defaults, except leases and deadlines."""

    page_size: int = 2
    num_prefill_pages: int = 14
    num_decode_pages: int = 12
    token_budget: int = 4
    max_pinned_pages: int = 7
    max_rows: int = 4
    max_window_pages: int = 2
    max_model_len: int = 32
    lease_s: float = 1.2
    renew_s: float = 0.5
    pull_deadline_s: float = 1.0
    reserve_timeout_s: float = 1.5
    heartbeat_s: float = 0.5
    worker_ttl_s: float = 2.0
    max_step_age_s: float = 1.5
    patience_s: float = 3.0
    max_attempts: int = 4
    drain_s: float = 2.0
    owner_ttl_s: float = 1.5
    max_given_pages: int = 4
    max_imported_pages: int = 6
    num_host_slots: int = 20
    encode_budget_rows: int = 3
    num_file_slots: int = 48


CONFIG = SimConfig()
MODEL = "fake"


def random_budgets(rng: Random, *, is_prefill: bool) -> BudgetChange:
    """Budgets that a worker may have, 0 among them. A prefill worker has one."""
    tokens = rng.choice([0, CONFIG.page_size, CONFIG.token_budget, 2 * CONFIG.token_budget])
    if is_prefill:
        return BudgetChange(tokens)
    return BudgetChange(tokens, rng.randint(0, CONFIG.max_rows), rng.randint(0, CONFIG.max_rows))


def model_fingerprint(version: int) -> Fingerprint:
    """Fingerprint of workers with this version of the model."""
    return Fingerprint((FingerprintPart("weights", f"{MODEL} {version}"),))


PLACEHOLDER = VOCAB_SIZE
"""Id of the tokens that stand for rows of images. No output has it."""

INTAKE = EngineRequestValidator(VOCAB_SIZE, CONFIG.max_model_len)
IMAGE_INTAKE = EngineRequestValidator(VOCAB_SIZE + 1, CONFIG.max_model_len, MediaRules(frozenset({PLACEHOLDER})))
