"""Dashboards are generated, use existing metrics, and the script that checks them finds faults."""

import json
import re
import runpy
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from baton.telemetry.metrics import declared
from tests.unit.docker.stack import DOCKER, read_yaml

CHECK = runpy.run_path(str(DOCKER / "check_dashboard.py"))
BUILD = runpy.run_path(str(DOCKER / "grafana" / "build.py"))
BOARDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in CHECK["BOARDS"].glob("*.json")}
PANELS = [panel for board in BOARDS.values() for panel in board["panels"] if panel["type"] != "row"]
PROVISIONING = DOCKER / "grafana" / "provisioning"
EXPRESSIONS = [target.expression for target in CHECK["targets"]()]

NAME = re.compile(r"\b(?:\w+:)?baton[_:][\w:]*|\bprocess_\w+")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
# What Prometheus adds to every series.
ADDED_LABELS = {"instance", "job", "le"}
RECORDED = [
    (rule["record"], rule["expr"])
    for group in read_yaml(DOCKER / "prometheus" / "recording.yml")["groups"]
    for rule in group["rules"]
]


def series() -> dict[str, set[str]]:
    """Name of a series -> its labels, for all metrics of all services."""
    found = {
        family.name + suffix: set(metric._labelnames) | ADDED_LABELS
        for metric in declared()
        for family in metric.describe()
        for suffix in SUFFIXES[family.type]
    }
    for name, expression in RECORDED:
        found[name] = {label for labels in re.findall(r"by \(([^)]*)\)", expression) for label in labels.split(", ")}
    return found | {"process_start_time_seconds": ADDED_LABELS}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_only_metrics_and_labels_that_exist(expression):
    names = set(NAME.findall(expression))
    assert names
    assert names <= series().keys()
    grouped = re.findall(r"by \(([^)]*)\) \((?:\w+\()*(baton_\w+)", expression)
    matched = re.findall(r"(baton_\w+){([^}]*)}", expression)
    assert len(grouped) == expression.count(" by (")
    assert all(set(labels.split(", ")) <= series()[name] for labels, name in grouped)
    assert all(set(re.findall(r"(\w+)[=!]", labels)) <= series()[name] for name, labels in matched)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_legend_names_only_labels_that_the_panel_has(panel):
    for target in panel["targets"]:
        labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        names = NAME.findall(target["expr"])
        assert labels <= set.intersection(*(series()[name] for name in names))


def test_committed_dashboards_are_those_that_the_script_makes():
    made = {board.uid: BUILD["text"](board) for board in BUILD["BOARDS"]}
    assert made.keys() == BOARDS.keys()
    for uid, text in made.items():
        committed = (CHECK["BOARDS"] / f"{uid}.json").read_text(encoding="utf-8")
        assert text == committed, "run: python docker/grafana/build.py"
    assert BUILD["page"]() == BUILD["PAGE"].read_text(encoding="utf-8"), "run: python docker/grafana/build.py"


def test_there_is_a_dashboard_for_each_question():
    assert BOARDS.keys() == {"baton", *(f"baton-{name}" for name in "split requests cache reliability tenants".split())}
    exemplars = [target for panel in PANELS for target in panel["targets"] if target.get("exemplar")]
    assert any("baton_ttft_seconds" in target["expr"] for target in exemplars)
    assert all(panel["description"] for panel in PANELS)


def test_the_dashboard_shows_what_operators_ask_for():
    shown = " ".join(EXPRESSIONS)
    wanted = """
        requests_total requests_in_state admission_total ttft_seconds_bucket itl_seconds_bucket first_itl_seconds_bucket
        request_stage_seconds_sum kv_pages transfer_bytes_total transfer_seconds_bucket link_bandwidth_bytes_per_second
        transfer_exposed_seconds_bucket step_seconds_count preemptions_total retries_total aborts_total degraded
    """
    assert [name for name in wanted.split() if f"baton_{name}" not in shown] == []


@pytest.mark.parametrize("uid", sorted(BOARDS))
def test_panels_lie_side_by_side_and_use_the_provisioned_source(uid):
    source = read_yaml(PROVISIONING / "datasources" / "prometheus.yaml")["datasources"][0]
    cells: set[tuple[int, int]] = set()
    panels = BOARDS[uid]["panels"]
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        mine = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & mine
        cells |= mine
        assert panel["type"] == "row" or panel["datasource"] == {"type": source["type"], "uid": source["uid"]}
    assert len({panel["id"] for panel in panels}) == len(panels)


ANSWERS = {"good": ["NaN", "1.5"], "idle": ["NaN"], "none": []}


class FakePrometheus(BaseHTTPRequestHandler):
    """Answers the expressions of `ANSWERS` and returns an error for others."""

    def do_GET(self):
        expression = parse_qs(urlsplit(self.path).query)["query"][0]
        values = ANSWERS.get(expression)
        results = [{"metric": {}, "value": [0, value]} for value in values or []]
        self.send_response(400 if values is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"error": "parse error", "data": {"result": results}}).encode())

    def log_message(self, format, *args):
        """No access log."""


@pytest.fixture
def prometheus():
    with HTTPServer(("127.0.0.1", 0), FakePrometheus) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(timeout=5)


@pytest.mark.parametrize(
    ("expression", "found"), [("good", None), ("idle", "not a number"), ("none", "empty"), ("rate(", "parse error")]
)
def test_a_panel_that_shows_nothing_is_found(prometheus, expression, found):
    fault = CHECK["fault"](prometheus, CHECK["Target"]("panel", expression))
    assert (fault is None) if found is None else (found in fault)


def test_a_dashboard_that_shows_nothing_is_a_failure(prometheus, capsys):
    assert CHECK["main"]([prometheus]) == 1
    assert f"0 of {len(EXPRESSIONS)} expressions" in capsys.readouterr().out
    assert CHECK["main"]([]) == 2
