"""Shows a dozen metrics under the names that vLLM gives them, for dashboards and autoscalers made for it.

Computed at a scrape from our own metrics, so both always agree. Registered once by `known_series.start_series`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from baton.domain.lifecycle import RequestState
from baton.telemetry import metrics
from baton.telemetry.request_trace import Outcome

_ROUTER = "router"
_LABELS = ("model_name", "engine")
_ENGINE = "0"
_UNUSED_PAGES = ("free", "cached")
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": metrics.TTFT_SECONDS,
    "vllm:inter_token_latency_seconds": metrics.ITL_SECONDS,
    "vllm:e2e_request_latency_seconds": metrics.E2E_SECONDS,
    "vllm:request_time_per_output_token_seconds": metrics.TPOT_SECONDS,
}


class VllmSeries(Collector):
    """The aliases of one process. `role`: router, prefill or decode; `model`: the value of `model_name`.

    Workers have no requests of clients and no latencies, routers no pages.
    """

    def __init__(self, role: str, model: str) -> None:
        self._role = role
        self._labels = (model, _ENGINE)

    def describe(self) -> Iterable[Metric]:
        """No metric: names are not checked against others."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every alias with its present value."""
        yield from self._router() if self._role == _ROUTER else self._worker()

    def _router(self) -> Iterator[Metric]:
        queued = _total(metrics.QUEUED_REQUESTS)
        states = _samples(metrics.REQUESTS_IN_STATE)
        running = sum(each.value for each in states if each.labels["state"] != RequestState.QUEUED.value)
        yield self._gauge("vllm:num_requests_running", "Requests that are not queued.", running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the admission queue.", queued)
        tokens = {kind: _total(metrics.TENANT_TOKENS_TOTAL, "kind", kind) for kind in ("prompt", "output")}
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of requests that ended.", tokens["prompt"])
        yield self._counter("vllm:generation_tokens", "Output tokens of requests that ended.", tokens["output"])
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that finished.", labels=(*_LABELS, "finished_reason")
        )
        for each in _samples(metrics.REQUESTS_TOTAL):
            if each.labels["outcome"] == Outcome.FINISHED.value:
                success.add_metric((*self._labels, each.labels["code"]), each.value)
        yield success
        for name, histogram in _HISTOGRAMS.items():
            yield self._histogram(name, _samples(histogram))
        admitted = [each for each in _samples(metrics.REQUEST_STAGE_SECONDS) if each.labels["stage"] == "admit"]
        yield self._histogram("vllm:request_queue_time_seconds", admitted)

    def _worker(self) -> Iterator[Metric]:
        running, waiting = _total(metrics.BATCH_ROWS), _total(metrics.WAITING_REQUESTS)
        yield self._gauge("vllm:num_requests_running", "Rows of the last step.", running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that are in no batch yet.", waiting)
        pages = {each.labels["owner"]: each.value for each in _samples(metrics.KV_PAGES)}
        if num_pages := sum(pages.values()):
            unused = sum(pages.get(owner, 0.0) for owner in _UNUSED_PAGES)
            yield self._gauge("vllm:kv_cache_usage_perc", "Share of pages in use; 1 is all.", 1 - unused / num_pages)
        for name, counter, text in (
            ("prefix_cache_queries", metrics.PROMPT_TOKENS_TOTAL, "Prompt tokens looked for in the prefix cache."),
            ("prefix_cache_hits", metrics.CACHED_TOKENS_TOTAL, "Prompt tokens found in the prefix cache."),
            ("prompt_tokens", metrics.PROMPT_TOKENS_TOTAL, "Prompt tokens of accepted requests."),
            ("generation_tokens", metrics.GENERATED_TOKENS_TOTAL, "Tokens sampled."),
            ("num_preemptions", metrics.PREEMPTIONS_TOTAL, "Rows that lost their pages."),
            ("spec_decode_num_drafts", metrics.DRAFTS_TOTAL, "Proposals of draft tokens."),
            ("spec_decode_num_draft_tokens", metrics.DRAFT_TOKENS_TOTAL, "Draft tokens."),
            ("spec_decode_num_accepted_tokens", metrics.DRAFT_ACCEPTED_TOTAL, "Accepted draft tokens."),
        ):
            yield self._counter(f"vllm:{name}", text, _total(counter))
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by their place in the proposal, from 0.",
            labels=(*_LABELS, "position"),
        )
        for each in _samples(metrics.DRAFT_ACCEPTED_POSITION_TOTAL):
            accepted.add_metric((*self._labels, each.labels["position"]), each.value)
        yield accepted

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _histogram(self, name: str, samples: Iterable[Sample]) -> Metric:
        """All children of a histogram as one."""
        buckets: dict[str, float] = defaultdict(float)
        total = 0.0
        for each in samples:
            if each.name.endswith("_bucket"):
                buckets[each.labels["le"]] += each.value
            elif each.name.endswith("_sum"):
                total += each.value
        family = HistogramMetricFamily(name, "As Baton's histogram of the same time.", labels=_LABELS)
        if buckets:
            family.add_metric(self._labels, sorted(buckets.items(), key=lambda item: float(item[0])), total)
        return family


def _samples(metric: Collector) -> list[Sample]:
    return [
        each for family in metric.collect() for each in family.samples if not each.name.endswith(("_created", "_count"))
    ]


def _total(metric: Collector, label: str = "", value: str = "") -> float:
    chosen: Callable[[Sample], bool] = lambda each: not label or each.labels[label] == value  # noqa: E731
    return sum(each.value for each in _samples(metric) if chosen(each))
