"""While the cluster secret is rotated, processes of neighbouring steps serve together and read each other's calls."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.cluster import START_TIMEOUT_S, Cluster, Process, eventually, is_ready, plain_client

pytestmark = pytest.mark.integration

PROMPT = "The conductor hands over the baton"


def secret_file(directory: Path, name: str, *secrets_in_it: str) -> dict[str, Path]:
    path = directory / name
    path.write_text("\n".join(secrets_in_it))
    path.chmod(0o600)
    return {"cluster-secret-file": path}


def status_of(router: Process, id: str) -> int:
    with plain_client(base_url=router.url, timeout=10.0) as client:
        return client.get(f"/v1/requests/{id}").status_code


def test_processes_of_neighbouring_steps_of_a_rotation_serve_together(tmp_path: Path) -> None:
    old, new = secrets.token_hex(32), secrets.token_hex(32)
    added, swapped = secret_file(tmp_path, "added", old, new), secret_file(tmp_path, "swapped", new, old)
    removed = secret_file(tmp_path, "removed", new)
    with Cluster(
        tmp_path, transport="stream", prefill_flags=added, decode_flags=swapped, router_flags=added
    ) as cluster:
        answer = cluster.complete(PROMPT, max_tokens=8, ignore_eos=True)
        assert cluster.bytes_moved > 0
        for worker in cluster.workers():
            assert "page_tags=True" in worker.log.read_text(), "pages travel in clear, so they are tagged"
        later = cluster.start("router", "router-1", swapped)
        last = cluster.start("router", "router-2", removed)
        eventually(lambda: is_ready(later), START_TIMEOUT_S, "the router with swapped secrets is ready")
        with plain_client(base_url=later.url, timeout=60.0) as client:
            body = {
                "model": cluster.model_name,
                "prompt": PROMPT,
                "max_tokens": 8,
                "ignore_eos": True,
                "temperature": 0,
            }
            again = client.post("/v1/completions", json=body)
        assert again.json()["choices"][0]["text"] == answer["choices"][0]["text"]
        for process in cluster.workers():
            assert cluster.metric(process.name, "baton_rejected_calls_total") == 0
        first_router = cluster.processes["router-0"]
        sealed_old, sealed_new = answer["id"], again.json()["id"]
        assert [status_of(router, sealed_old) for router in (first_router, later)] == [200, 200]
        assert [status_of(router, sealed_new) for router in (first_router, later)] == [200, 200]
        eventually(lambda: status_of(last, sealed_new) == 200, START_TIMEOUT_S, "the new secret alone opens new calls")
        assert status_of(last, sealed_old) == 404, "the old secret is removed"
        assert cluster.metric("router-2", "baton_store_unsealed_total", reason="unknown_key") >= 1
        assert not is_ready(last), "prefill still signs with the old secret"
