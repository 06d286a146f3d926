"""Alerts use series that exist; each has a runbook, fires in a test, and is silent in others."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from baton.telemetry.metrics import declared
from tests.unit.docker.stack import DOCKER, ROOT, read_yaml

PROMETHEUS = DOCKER / "prometheus"
ALERTS = [rule for group in read_yaml(PROMETHEUS / "alerts.yml")["groups"] for rule in group["rules"]]
RECORDED = [rule for group in read_yaml(PROMETHEUS / "recording.yml")["groups"] for rule in group["rules"]]
TESTS = ("alerts_test.yml", "budgets_test.yml")
CASES = [case for name in TESTS for case in read_yaml(PROMETHEUS / name)["tests"]]
CHECKS = [(case["name"], check) for case in CASES for check in case["alert_rule_test"]]
SILENT = (
    "no alert after a clean drain or a scale-in of decode-1",
    "no alert in a rolling restart of decode-1",
    "no alert after a clean drain of encode-1",
)
BUDGETS = ("BatonErrorBudgetSlow", "BatonErrorBudgetTrickle", "BatonFirstTokenBudgetSlow")
"""Look back over hours; what a drain changes for minutes cannot reach them."""

SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
OF_PROMETHEUS = {"up", "process_start_time_seconds"}

each_alert = pytest.mark.parametrize("alert", ALERTS, ids=lambda rule: rule["alert"])


def promtool() -> str:
    """The path of promtool: on PATH, or installed by `make promtool`. CI requires it."""
    beside_python = str(Path(sys.executable).parent)
    found = shutil.which("promtool") or shutil.which("promtool", path=beside_python)
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no promtool: `make promtool` takes Debian's")
    return found


@pytest.mark.parametrize(
    "command",
    [
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["check", "rules", "alerts.yml", "recording.yml"],
        *(["test", "rules", name] for name in TESTS),
    ],
    ids=lambda words: words[-1],
)
def test_promtool_accepts(command):
    done = subprocess.run(
        [promtool(), *command], cwd=PROMETHEUS, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def own_series() -> set[str]:
    families = [(family, SUFFIXES[family.type]) for metric in declared() for family in metric.describe()]
    return {family.name + suffix for family, suffixes in families for suffix in suffixes}


@pytest.mark.parametrize("rule", [*ALERTS, *RECORDED], ids=lambda rule: rule.get("alert") or rule["record"])
def test_an_expression_names_series_that_exist(rule):
    recorded = {each["record"] for each in RECORDED}
    words = set(re.findall(r"\b(?:\w+:)?baton[\w:]*|\bup\b|\bprocess_\w+", rule["expr"]))
    assert words
    assert words <= own_series() | recorded | OF_PROMETHEUS


@each_alert
def test_an_alert_has_a_section_in_the_runbook(alert):
    page, _, anchor = alert["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^## (\w+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor == alert["alert"].lower()
    assert alert["alert"] in headings
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert len(alert["annotations"]["summary"]) > 20


def test_the_runbook_has_no_section_without_an_alert():
    text = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    assert sorted(headings) == sorted(rule["alert"] for rule in ALERTS)


@each_alert
def test_an_alert_fires_in_one_test_and_not_in_another(alert):
    fires = {bool(check.get("exp_alerts")) for _, check in CHECKS if check["alertname"] == alert["alert"]}
    assert fires == {True, False}


@pytest.mark.parametrize("case", SILENT)
def test_every_alert_is_silent_when_a_worker_goes_as_planned(case):
    silent = {check["alertname"] for name, check in CHECKS if name == case and not check.get("exp_alerts")}
    assert silent == {rule["alert"] for rule in ALERTS} - {*BUDGETS}
    assert {rule["alert"] for rule in ALERTS} >= {*BUDGETS}


@pytest.mark.parametrize("name", ["BatonProcessDown", "BatonRestartLoop"])
def test_alerts_on_processes_cover_every_job_that_is_scraped(name):
    (alert,) = [rule for rule in ALERTS if rule["alert"] == name]
    (jobs,) = re.findall(r'job=~"([^"]+)"', alert["expr"])
    scraped = {each["job_name"] for each in read_yaml(PROMETHEUS / "prometheus.yml")["scrape_configs"]}
    assert set(jobs.split("|")) == scraped


def test_prometheus_loads_every_file_of_rules():
    files = read_yaml(PROMETHEUS / "prometheus.yml")["rule_files"]
    written = {path.name for path in PROMETHEUS.glob("*.yml")} - {"prometheus.yml", *TESTS}
    assert {Path(name).name for name in files} == written


def test_recorded_names_say_level_metric_and_operation():
    assert all(re.fullmatch(r"\w+:baton_\w+:\w+|baton:\w+:\w+", rule["record"]) for rule in RECORDED)
