"""A real Prometheus scrapes a cluster under load: every panel of every dashboard shows something, no alert fires."""

from __future__ import annotations

import contextlib
import json
import os
import random
import runpy
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from baton.services.cli.processes.ports import free_ports
from scripts.bundled_pictures import PictureSpec, draw
from tests.cluster import Cluster, eventually
from tests.lateness import Late
from tests.unit.test_bundled_vision_model import png_url

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "docker" / "prometheus"
CHECK = runpy.run_path(str(ROOT / "docker" / "check_dashboard.py"))
RATE_INTERVAL = "20s"
PATIENCE_S = 60.0


def prometheus_program() -> str:
    """The path of prometheus: on PATH, or unpacked by `make promtool`. CI requires it."""
    found = shutil.which("prometheus") or shutil.which("prometheus", path=str(Path(sys.executable).parent))
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no prometheus: `make promtool` takes Debian's")
    return found


def configuration(cluster: Cluster) -> dict:
    """Jobs and rules as in docker/prometheus, with the ports of this cluster and a scrape a second."""
    targets: dict[str, list[str]] = {}
    for process in cluster.processes.values():
        targets.setdefault(process.role, []).append(f"127.0.0.1:{process.metrics_port}")
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES / name) for name in ("recording.yml", "alerts.yml")],
        "scrape_configs": [{"job_name": job, "static_configs": [{"targets": found}]} for job, found in targets.items()],
    }


@contextmanager
def prometheus(cluster: Cluster, folder: Path) -> Iterator[str]:
    """A running server that scrapes `cluster`; yields its URL."""
    (port,) = free_ports(1)
    (folder / "prometheus.json").write_text(json.dumps(configuration(cluster)))  # JSON is YAML
    command = [
        prometheus_program(),
        f"--config.file={folder}/prometheus.json",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stderr=log, stdout=log) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


def answers(cluster: Cluster, name: str) -> bool:
    """True once a process serves its metrics."""
    try:
        return cluster.metric(name, "baton_media_held") >= 0
    except httpx2.TransportError:
        return False


def firing(url: str) -> list[str]:
    """Names of the alerts that fire; a pending one may be a loaded machine's."""
    with urllib.request.urlopen(f"{url}/api/v1/alerts", timeout=5) as reply:
        return [
            alert["labels"]["alertname"] for alert in json.load(reply)["data"]["alerts"] if alert["state"] == "firing"
        ]


def test_every_panel_has_a_value_under_load(tmp_path: Path):
    expressions = list(CHECK["targets"]())
    drafting = {"drafter": "ngram"}
    with (
        Cluster(tmp_path, model="bundled-vision", flags={"page-size": 8}, decode_flags=drafting) as cluster,
        contextlib.ExitStack() as stack,
    ):
        cluster.start("encode", "encode-0")
        eventually(lambda: answers(cluster, "encode-0"), PATIENCE_S, "the encode worker has metrics")
        url = stack.enter_context(prometheus(cluster, tmp_path))
        pictures = random.Random(1)
        missing = {target: "" for target in expressions}

        def accepted_drafts() -> float:
            """The panels of drafts must not show zeros only."""
            return cluster.metric("decode-0", "baton_draft_accepted_total")

        def images() -> dict[str, float]:
            """What the panels of images read: each must not show zeros only."""
            return {
                "used": cluster.metric("router-0", "baton_media_total", outcome="encoder_used"),
                "exported": cluster.metric("encode-0", "baton_media_total", outcome="exported"),
                "pulled": cluster.metric("prefill-0", "baton_media_total", outcome="pulled"),
                "held": cluster.metric("encode-0", "baton_media_held"),
                "bytes": cluster.metric("encode-0", "baton_media_held_bytes"),
                "steps": cluster.metric("encode-0", "baton_step_seconds_count", role="encode"),
            }

        def all_shown() -> bool:
            body = {"model": cluster.model_name, "prompt": "Once upon a time there was " * 4, "max_tokens": 24}
            body["logit_bias"] = {"100": 100}  # one token again and again, as an n-gram drafter likes it
            assert cluster.client.post("/v1/completions", json=body).status_code == 200
            picture = draw(PictureSpec("red", "circle", "on the left"), pictures, smallest=64)
            parts = [
                {"type": "image_url", "image_url": {"url": png_url(picture)}},
                {"type": "text", "text": "What is it?"},
            ]
            chat = {"model": cluster.model_name, "messages": [{"role": "user", "content": parts}], "max_tokens": 8}
            assert cluster.client.post("/v1/chat/completions", json=chat).status_code == 200
            for target in list(missing):
                found = CHECK["fault"](url, target, RATE_INTERVAL)
                if found is None:
                    del missing[target]
                else:
                    missing[target] = found
            return not missing and accepted_drafts() > 0 and min(images().values()) > 0

        try:
            eventually(all_shown, PATIENCE_S, "every panel shows something")
        except Late as late:
            shown = {f"{t.panel}: {t.expression}": why for t, why in missing.items()}
            raise Late(f"{accepted_drafts():.0f} accepted drafts; {images()}; missing: {shown}") from late
        assert len(expressions) > 60
        assert firing(url) == []
