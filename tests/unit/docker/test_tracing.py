"""The profile `tracing`: spans of routers and workers go where compose.yaml says, in a collector's own protocol."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from baton.services.router.settings import RouterSettings
from baton.telemetry.spans import SpanSink, otlp_exporter
from tests.unit.docker.stack import COMPOSE, DOCKER, ROOT, environment, read_yaml
from tests.unit.telemetry.test_spans import finished

ENDPOINT = re.compile(r"BATON_OTLP_ENDPOINT=(\S+) docker compose -f docker/compose.yaml --profile (\w+) up")


@contextmanager
def receiver() -> Iterator[tuple[str, list[tuple[str, ExportTraceServiceRequest]]]]:
    """The address of an OTLP receiver in this process, and what it got: path and message."""
    got: list[tuple[str, ExportTraceServiceRequest]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def router_settings(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> RouterSettings:
    for name, value in {**environment("router"), "BATON_OTLP_ENDPOINT": endpoint}.items():
        monkeypatch.setenv(name, value)
    return RouterSettings()


def test_without_the_variable_no_spans_are_made(monkeypatch):
    assert environment("router")["BATON_OTLP_ENDPOINT"] == ""
    assert router_settings(monkeypatch, "").otlp_endpoint is None


@pytest.mark.parametrize("page", ["docker/compose.yaml", "docs/operations.md"])
def test_the_documented_command_names_the_collector_and_its_profile(page, monkeypatch):
    found = ENDPOINT.search((ROOT / page).read_text(encoding="utf-8"))
    assert found is not None
    endpoint, profile = found.groups()
    collector = COMPOSE["services"][str(urlsplit(endpoint).hostname)]
    assert collector["profiles"] == [profile]
    assert urlsplit(endpoint).port == 4318, "OTLP over HTTP"
    assert router_settings(monkeypatch, endpoint).otlp_endpoint == endpoint


def test_spans_of_router_and_workers_arrive_by_the_settings_of_compose(monkeypatch):
    with receiver() as (url, got):
        settings = router_settings(monkeypatch, url)
        assert settings.otlp_endpoint is not None
        sink = SpanSink(otlp_exporter(settings.otlp_endpoint), settings.otlp_sample_ratio)
        sink(finished(), b"")
        sink.close()
    ((path, message),) = got
    assert path == "/v1/traces"
    spans: dict[str, set[str]] = {}
    for resource in message.resource_spans:
        facts = {each.key: each.value.string_value for each in resource.resource.attributes}
        names = {span.name for scope in resource.scope_spans for span in scope.spans}
        spans.setdefault(facts["service.name"], set()).update(names)
    assert spans == {
        "baton-router": {"request", "edge", "admit", "attempt 1", "reserve"},
        "baton-prefill": {"prefill"},
        "baton-decode": {"transfer", "decode"},
    }


def test_an_exemplar_leads_to_its_trace():
    prometheus, traces = read_yaml(DOCKER / "grafana" / "provisioning" / "datasources" / "prometheus.yaml")[
        "datasources"
    ]
    _, link = prometheus["jsonData"]["exemplarTraceIdDestinations"]
    assert link == {"name": "trace_id", "datasourceUid": traces["uid"]}
    page = urlsplit(traces["url"])
    assert page.hostname in COMPOSE["services"]
    assert COMPOSE["services"][page.hostname]["ports"] == [f"127.0.0.1:{page.port}:{page.port}"]


def test_an_exemplar_leads_to_the_waterfall_of_its_request():
    """Grafana takes `$${` in its files for `${`, and puts the variables of its environment in."""
    text = (DOCKER / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text(encoding="utf-8")
    found = re.search(r'{name: (\w+), url: "\${(\w+)}/(#/[a-z]+/)\$\${__value\.raw}"', text)
    assert found is not None
    label, variable, address = found.groups()
    assert f'"{label}": self.id' in (ROOT / "baton" / "telemetry" / "request_timer.py").read_text(encoding="utf-8")
    (port,) = COMPOSE["services"]["proxy"]["ports"]
    assert COMPOSE["services"]["grafana"]["environment"][variable] == f"http://{port.rpartition(':')[0]}"
    page = (ROOT / "services" / "router" / "ui" / "static" / "app.js").read_text(encoding="utf-8")
    assert f'view.startsWith("{address}")' in page
