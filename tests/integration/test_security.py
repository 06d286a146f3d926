"""A cluster of real processes with a secret and certificates serves only holders of both."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis import Redis

from baton.domain.ids import Incarnation
from baton.domain.trust import ClusterTrust
from baton.rpc.channel import open_sync_channel, with_call_tokens
from baton.rpc.gen import common_pb2, handoff_pb2, handoff_pb2_grpc, prefill_pb2_grpc
from baton.services.router.settings import RouterSettings
from baton.settings.trust import read_trust
from tests.certificates import Certificate, CertificateAuthority
from tests.cluster import START_TIMEOUT_S, Cluster, Process, eventually, links_in, plain_client

pytestmark = pytest.mark.integration

DEADLINE_S = 10.0
LOST = grpc.StatusCode.UNAVAILABLE


@dataclass
class SecuredCluster:
    cluster: Cluster
    directory: Path
    authority: CertificateAuthority
    secret: Path

    @property
    def prefill(self) -> Process:
        return self.cluster.processes["prefill-0"]

    def trust(self, secret: Path | None, certificate: Certificate | None) -> ClusterTrust:
        files: dict[str, Any] = {"cluster_secret_file": secret, **(certificate.settings if certificate else {})}
        return read_trust(RouterSettings(**files))


def secret_file(directory: Path, name: str) -> Path:
    path = directory / name
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return path


def flags(secret: Path, certificate: Certificate) -> dict[str, Any]:
    named = {"cluster_secret_file": secret, **certificate.settings}
    return {name.replace("_", "-"): path for name, path in named.items()}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    directory = tmp_path_factory.mktemp("security")
    authority, secret = CertificateAuthority.make(directory), secret_file(directory, "cluster.secret")
    of = {role: flags(secret, authority.issue(role)) for role in ("prefill", "decode", "router")}
    with Cluster(
        directory,
        transport="stream",
        prefill_flags=of["prefill"],
        decode_flags=of["decode"],
        router_flags=of["router"],
    ) as cluster:
        yield SecuredCluster(cluster, directory, authority, secret)


@contextmanager
def prefill_channel(secured: SecuredCluster, trust: ClusterTrust) -> Iterator[Any]:
    """A channel of a caller with `trust`. The incarnation is a guess, which differs from a wrong secret."""
    channel = open_sync_channel(f"127.0.0.1:{secured.prefill.port}", trust, ())
    try:
        yield with_call_tokens(channel, trust, Incarnation(1))
    finally:
        channel.close()


def refusal(secured: SecuredCluster, trust: ClusterTrust) -> tuple[grpc.StatusCode, str]:
    with prefill_channel(secured, trust) as channel, pytest.raises(grpc.RpcError) as refused:
        prefill_pb2_grpc.PrefillStub(channel).Abort(common_pb2.AbortRequest(), timeout=DEADLINE_S)
    return refused.value.code(), str(refused.value.details())


def health(secured: SecuredCluster, worker: Process) -> int:
    """What a probe hears that has a certificate, and no secret."""
    trust = secured.trust(None, secured.authority.issue("probe"))
    with open_sync_channel(f"127.0.0.1:{worker.port}", trust, ()) as channel:
        return int(
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S).status
        )


def test_workers_with_secret_and_certificate_move_pages_over_tls(secured: SecuredCluster) -> None:
    cluster = secured.cluster
    answer = cluster.complete("The conductor hands over the baton", max_tokens=8, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 8
    assert cluster.bytes_moved > 0
    assert cluster.tokens_recomputed == 0
    assert list(links_in(cluster.processes["decode-0"].log.read_text())) == ["stream"]
    for process in cluster.workers():
        assert health(secured, process) == health_pb2.HealthCheckResponse.SERVING
        assert cluster.metric(process.name, "baton_rejected_calls_total") == 0
    cluster.wait_pages_free(5.0)


def test_redis_and_the_logs_hold_no_prompt_in_clear(secured: SecuredCluster) -> None:
    cluster, prompt = secured.cluster, "The heron keeps its diary in the reeds"
    answer = cluster.complete(prompt, max_tokens=16, ignore_eos=True)
    text = answer["choices"][0]["text"]
    with Redis(unix_socket_path=cluster.redis.url.removeprefix("unix://")) as redis:
        keys, held = list(redis.scan_iter()), b""
        for key in keys:
            match redis.type(key):
                case b"hash":
                    held += repr(redis.hgetall(key)).encode()
                case b"stream":
                    held += repr(redis.xrange(key)).encode()
    assert b"sealed" in held
    assert b"journal" in b"".join(keys)
    for process in cluster.processes.values():
        held += process.log.read_bytes()
    for secret in (prompt, "heron", text):
        assert secret.encode() not in held
        assert repr(secret)[1:-1].encode() not in held
    assert cluster.metric("router-0", "baton_store_unsealed_total") == 0


def test_a_foreign_certificate_gets_no_connection(secured: SecuredCluster, tmp_path: Path) -> None:
    stranger = CertificateAuthority.make(tmp_path).issue("stranger")
    trust = secured.trust(secured.secret, secured.authority.issue("visitor"))
    assert trust.tls is not None
    unknown = secured.trust(secured.secret, stranger)
    assert unknown.tls is not None
    shows_unknown = type(trust.tls)(unknown.tls.certificate, unknown.tls.key, trust.tls.authorities)
    assert refusal(secured, secured.trust(secured.secret, None))[0] is LOST
    assert refusal(secured, unknown)[0] is LOST
    assert refusal(secured, ClusterTrust(trust.secret, shows_unknown))[0] is LOST
    anonymous = grpc.ssl_channel_credentials(trust.tls.authorities)
    with grpc.secure_channel(f"127.0.0.1:{secured.prefill.port}", anonymous) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            prefill_pb2_grpc.PrefillStub(channel).Abort(common_pb2.AbortRequest(), timeout=DEADLINE_S)
        assert refused.value.code() is LOST


def test_a_call_without_the_secret_is_rejected_and_counted(secured: SecuredCluster) -> None:
    certificate = secured.authority.issue("insider")
    code, details = refusal(secured, secured.trust(None, certificate))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "no token" in details
    code, details = refusal(secured, secured.trust(secret_file(secured.directory, "wrong.secret"), certificate))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "cluster secrets of caller and worker differ" in details
    code, details = refusal(secured, secured.trust(secured.secret, certificate))
    assert "earlier incarnation" in details
    read = handoff_pb2.ReadPagesRequest(pages=[0])
    with prefill_channel(secured, secured.trust(None, certificate)) as channel, pytest.raises(grpc.RpcError) as refused:
        next(handoff_pb2_grpc.HandoffStub(channel).ReadPages(read, timeout=DEADLINE_S))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    counts = {
        reason: secured.cluster.metric("prefill-0", "baton_rejected_calls_total", reason=reason)
        for reason in ("missing", "forged", "other_incarnation", "replayed")
    }
    assert counts == {"missing": 2, "forged": 1, "other_incarnation": 1, "replayed": 0}
    assert "call_rejected" in secured.prefill.log.read_text()


def test_processes_with_another_secret_stay_outside_with_a_reason(secured: SecuredCluster) -> None:
    cluster = secured.cluster
    wrong = flags(secret_file(secured.directory, "other.secret"), secured.authority.issue("outsider"))
    cluster.decode_flags, cluster.router_flags = wrong, wrong
    decode, router = cluster.start("decode", "decode-1"), cluster.start("router", "router-1")
    why = "is not trusted: a cluster secret here, another one there"

    def unready() -> str | None:
        try:
            with plain_client(timeout=5.0) as client:
                answer = client.get(f"{router.url}/ready")
        except httpx2.TransportError:
            return None
        assert answer.status_code == 503
        return answer.text if "prefill-0" in answer.text and "decode-0" in answer.text else None

    assert why in eventually(unready, START_TIMEOUT_S, "the strange router says why it is not ready")
    eventually(lambda: "link_failed" in decode.log.read_text(), START_TIMEOUT_S, "the strange worker says why")
    assert why in decode.log.read_text()
    assert "worker_untrusted" in router.log.read_text()
    assert cluster.metric("decode-1", "baton_link_state") == 0
    assert health(secured, decode) == health_pb2.HealthCheckResponse.NOT_SERVING
    before = cluster.metric("decode-1", "baton_prompt_tokens_total")
    for n in range(4):
        cluster.complete(f"Request number {n}", max_tokens=2)
    assert cluster.metric("decode-1", "baton_prompt_tokens_total") == before
    eventually(lambda: "decode-1 at" in cluster.processes["router-0"].log.read_text(), 5.0, "the router names it")


def test_an_unusable_secret_ends_a_service_at_once(secured: SecuredCluster, tmp_path: Path) -> None:
    short = tmp_path / "short.secret"
    short.write_text("short")
    short.chmod(0o600)
    cluster = secured.cluster
    cluster.router_flags = {"cluster-secret-file": short}
    router = cluster.start("router", "router-2")
    router.expected_running = False
    assert router.popen.wait(START_TIMEOUT_S) == 2
    assert "at least 32 are needed" in router.tail()
