"""The limits of the router's parts, made from its settings. Called by `app`."""

from __future__ import annotations

import math

from baton.services.router.admission.admission_queue import AdmissionLimits
from baton.services.router.admission.tenants import TenantTable
from baton.services.router.admission.tenants_file import read_tenants
from baton.services.router.dispatch.dispatcher import DispatchLimits
from baton.services.router.dispatch.placement.policy import PlacementRules
from baton.services.router.dispatch.reserve import ReserveLimits
from baton.services.router.dispatch.workers import WorkerLimits
from baton.services.router.frontend import ApiLimits
from baton.services.router.settings import EventIds, RouterSettings
from baton.services.router.text.text_model import TextModel
from baton.settings.groups import MIB
from baton.store.options import StoreOptions

WORKER_WAIT_S = 30.0
"""Longest wait of an interrupted request for workers: enough for a restart."""

DEFAULT_CONTEXT_TOKENS = 1 << 20
"""For a model without a maximum context: the page pools of the workers are the bound."""


def store_options(settings: RouterSettings) -> StoreOptions:
    """The settings of the store. Records are kept longer than the longest request."""
    return StoreOptions(
        worker_ttl_s=settings.worker_ttl_s,
        heartbeat_s=settings.heartbeat_interval_s,
        retention_s=max(StoreOptions().retention_s, 2 * settings.request_deadline_s),
    )


def stored_media_bytes(settings: RouterSettings) -> int:
    """Most bytes of images in the store, of all routers together."""
    return settings.max_stored_media_mib * MIB


def api_limits(settings: RouterSettings, text: TextModel) -> ApiLimits:
    """The settings of the HTTP side."""
    return ApiLimits(
        model_name=settings.public_model_name,
        other_model_names=settings.model_names[1:],
        max_model_len=text.max_position_tokens or DEFAULT_CONTEXT_TOKENS,
        max_body_bytes=settings.max_body_bytes,
        request_deadline_s=settings.request_deadline_s,
        always_ids=settings.event_ids is EventIds.ALWAYS,
        store_prompts=settings.store_prompts,
        strict_fields=settings.strict_fields,
        cors_origins=settings.allowed_origins,
        media_domains=settings.media_hosts,
    )


def worker_limits(settings: RouterSettings) -> WorkerLimits:
    """The settings of worker tracking."""
    policies = PlacementRules(settings.prefill_placement, settings.decode_placement)
    ttl_s, interval_s = settings.worker_ttl_s, settings.heartbeat_interval_s
    max_tpot_s = settings.max_tpot_s or math.inf
    return WorkerLimits(ttl_s, interval_s, settings.max_step_age_s, policies=policies, max_tpot_s=max_tpot_s)


def dispatch_limits(settings: RouterSettings) -> DispatchLimits:
    """The settings of dispatch."""
    return DispatchLimits(
        admission=AdmissionLimits(
            max_running_requests=settings.max_running_requests,
            max_ttft_s=settings.max_ttft_s,
            max_queued_bytes=settings.max_queued_mib * MIB,
        ),
        reserve=ReserveLimits(settings.reserve_timeout_s, WORKER_WAIT_S),
        max_attempts=settings.max_attempts,
        max_media_bytes=settings.max_media_mib * MIB,
        tenants=TenantTable() if settings.tenants_file is None else read_tenants(settings.tenants_file),
    )
