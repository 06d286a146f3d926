"""Dashboards of requests: one request, cache, reliability, tenants. Read by `build.py`.

An expression has a value whenever the cluster serves: `zero` where a series begins with its first event.
"""

from panels import FAILURES, RETRIES, STAGES, Board, Panel, Row, heatmap, of, quantile, quantiles, rate, zero

REQUESTS = Board(
    "baton-requests",
    "Baton: one request",
    "Points are exemplars: each leads to its request's waterfall on the page, which `baton trace` draws, too.",
    (
        heatmap(
            "Time to first token", "Exemplars are sampled, failed, replayed and slow requests.", "baton_ttft_seconds"
        ),
        heatmap("Whole requests", "Arrival to end.", "baton_e2e_seconds"),
        heatmap(
            "Transfer's tail",
            "First byte sent to import committed, of every request.",
            "baton_request_stage_seconds",
            '{stage="transfer_tail"}',
        ),
        Panel(
            "Stages, p99",
            "The slowest hundredth of each stage.",
            "s",
            quantiles("baton_request_stage_seconds", "stage", 0.99),
            width=12,
        ),
        STAGES,
        RETRIES,
        Panel(
            "Aborts per second",
            "Requests aborted, by phase.",
            "ops",
            ((zero(rate("baton_aborts_total", "phase")), "{{phase}}"),),
        ),
    ),
)

CACHE = Board(
    "baton-cache",
    "Baton: cache",
    "What prompts found computed, and where.",
    (
        Panel(
            "Share of prompt tokens found",
            "By prefill workers, in any tier.",
            "percentunit",
            (
                (
                    f"{rate(of('baton_cached_tokens_total', 'role', 'prefill'))} / "
                    f"{rate(of('baton_prompt_tokens_total', 'role', 'prefill'))}",
                    "found",
                ),
            ),
        ),
        Panel(
            "Cached tokens per second",
            "By role and tier.",
            "short",
            ((rate("baton_cached_tokens_total", "role, tier"), "{{role}} {{tier}}"),),
        ),
        Panel(
            "Pages kept for later",
            "Cached pages can be evicted; free ones are empty.",
            "short",
            (('sum by (job, owner) (baton_kv_pages{owner=~"free|cached"})', "{{job}} {{owner}}"),),
        ),
        Panel(
            "Pages of lower tiers per second",
            "Read, written, and failed.",
            "ops",
            ((zero(rate("baton_tier_pages_total", "tier, result")), "{{tier}} {{result}}"),),
        ),
        Panel(
            "Error of the router's index",
            "Prompt tokens by which it differed from what prefill found.",
            "short",
            quantiles("baton_index_error", "job", 0.5, 0.99),
        ),
        Panel(
            "Must stay at zero",
            "Prompt tokens of imported pages computed again; gaps in cache events.",
            "short",
            (
                ("sum(baton_tokens_recomputed_total)", "computed twice"),
                ("sum(baton_index_gap_total)", "gaps"),
            ),
        ),
    ),
)

RELIABILITY = Board(
    "baton-reliability",
    "Baton: reliability",
    "What was lost, and what became of it. docs/runbook.md has a section for each alert.",
    (
        Row("Requests"),
        FAILURES,
        RETRIES,
        Panel(
            "Error budgets",
            "Share of failed requests over 5 minutes to 3 days; the objective is 0.001.",
            "percentunit",
            tuple((f"baton:request_errors:ratio_rate{w}", w) for w in ("5m", "1h", "6h", "3d")),
        ),
        Row("Workers and links"),
        Panel(
            "Workers lost",
            "In 5 minutes, without a drain.",
            "short",
            (("max by (role) (increase(baton_workers_lost_total[5m]))", "{{role}}"),),
        ),
        Panel("Ready pairs", "As each router sees them.", "short", (("baton_ready_pairs", "{{instance}}"),)),
        Panel(
            "Open circuit breakers",
            "Links that a router does not use after failures.",
            "short",
            (('sum by (instance) (baton_open_link_breakers{job="router"})', "{{instance}}"),),
        ),
        Panel(
            "Takeovers and resumed streams",
            "Calls that another router continued; streams that clients resumed.",
            "ops",
            (
                (zero(rate("baton_takeovers_total", "cause")), "{{cause}}"),
                (rate("baton_streams_resumed_total"), "resumed"),
            ),
        ),
        Panel(
            "Degraded",
            "1: serving goes on without this component.",
            "short",
            (("max by (job, component) (baton_degraded)", "{{job}} without {{component}}"),),
        ),
        Panel(
            "Starts in an hour",
            "Of each process.",
            "short",
            (('changes(process_start_time_seconds{job=~"router|prefill|decode|encode"}[1h])', "{{job}} {{instance}}"),),
        ),
        Row("Pages"),
        Panel(
            "Handoffs validated per second",
            "By v1 (pins), v2 (lease), v3 (digests), or invalid.",
            "ops",
            ((rate("baton_commit_total", "job, result"), "{{job}} {{result}}"),),
        ),
        Panel(
            "Must stay at zero",
            "Pages that did not match their digest, and prompt tokens computed twice.",
            "short",
            (
                (zero("sum by (kind) (baton_integrity_failures_total)"), "corrupt {{kind}}"),
                ("sum(baton_tokens_recomputed_total)", "tokens computed twice"),
            ),
        ),
        Panel(
            "Refused messages per second",
            "Of older attempts or processes, or without a valid token.",
            "ops",
            (
                (zero(rate("baton_stale_messages_total", "kind")), "stale {{kind}}"),
                (zero(rate("baton_rejected_calls_total", "reason")), "rejected {{reason}}"),
            ),
        ),
    ),
)

TENANTS = Board(
    "baton-tenants",
    "Baton: tenants",
    "Ten tenants with the most of each; without API keys there is one, without a name.",
    (
        Panel(
            "Requests per second",
            "By tenant and outcome.",
            "reqps",
            ((f"topk(10, {rate('baton_tenant_requests_total', 'tenant, outcome')})", "{{tenant}} {{outcome}}"),),
        ),
        Panel(
            "Output tokens per second",
            "By tenant.",
            "short",
            ((f"topk(10, {rate(of('baton_tenant_tokens_total', 'kind', 'output'), 'tenant')})", "{{tenant}}"),),
        ),
        Panel(
            "Prompt tokens per second",
            "By tenant; cached ones are a part of them.",
            "short",
            (
                (
                    f"topk(10, {rate(of('baton_tenant_tokens_total', 'kind', 'prompt|cached'), 'tenant, kind')})",
                    "{{tenant}} {{kind}}",
                ),
            ),
        ),
        Panel(
            "Time to first token, p95",
            "By tenant.",
            "s",
            ((f"topk(10, {quantile(0.95, 'baton_tenant_ttft_seconds', 'tenant')})", "{{tenant}}"),),
        ),
        Panel(
            "Refused per second",
            "By reason and tenant.",
            "reqps",
            ((zero(rate('baton_admission_total{decision="refused"}', "reason, tenant")), "{{reason}} {{tenant}}"),),
        ),
        Panel(
            "Share of prompts found in the cache",
            "By tenant; tenants share no cache.",
            "percentunit",
            (
                (
                    f"{rate(of('baton_tenant_tokens_total', 'kind', 'cached'), 'tenant')} / "
                    f"{rate(of('baton_tenant_tokens_total', 'kind', 'prompt'), 'tenant')}",
                    "{{tenant}}",
                ),
            ),
        ),
    ),
)
