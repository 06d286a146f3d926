"""Checks of Redis against a real server that is set up wrongly in every way it can be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis import Redis

from baton.services.cli.doctor.redis_server import RedisFacts, read_facts, server_results, unreachable
from baton.services.cli.doctor.results import CheckStatus, DoctorResult
from baton.store.store import StoreUnavailable
from tests.redis_server import running_redis

OK, WARN, FAIL = CheckStatus


@pytest.fixture(scope="module")
def server():
    with running_redis(durable=True) as redis:
        yield redis


@pytest.fixture
def configured(server):
    """Sets options of the server for one test."""
    with Redis.from_url(server.url) as client:
        before = client.config_get("*")
        changed = []

        def configure(**options: str) -> None:
            for name, value in options.items():
                changed.append(name.replace("_", "-"))
                client.config_set(changed[-1], value)

        yield configure
        for name in changed:
            client.config_set(name, before[name])


async def results(url: str) -> dict[str, DoctorResult]:
    return {result.name: result for result in server_results(url, await read_facts(url))}


async def test_a_good_server_passes(server):
    found = await results(server.url)
    assert {result.status for result in found.values()} == {OK}
    assert set(found) == {f"redis{part}" for part in ("", " role", " access", " eviction", " persistence", " clock")}


async def test_a_server_that_evicts_fails(server, configured):
    configured(maxmemory="100mb", maxmemory_policy="allkeys-lru")
    assert (await results(server.url))["redis eviction"].status is FAIL


async def test_a_server_that_forgets_is_a_warning(server, configured):
    configured(appendonly="no")
    assert (await results(server.url))["redis persistence"].status is WARN


async def test_a_server_that_refuses_us_is_told_from_a_silent_one(server, configured):
    configured(requirepass="secret")
    with pytest.raises(StoreUnavailable) as refused:
        await read_facts(server.url)
    result = unreachable(server.url, refused.value)
    assert result.status is FAIL
    assert "user:password" in result.fix
    with pytest.raises(StoreUnavailable) as silent:
        await read_facts("redis://127.0.0.1:1/0")
    assert "start a redis-server" in unreachable("redis://127.0.0.1:1/0", silent.value).fix


async def facts_of(server) -> RedisFacts:
    return await read_facts(server.url)


@pytest.mark.parametrize(
    ("name", "info", "status"),
    [
        ("redis", {"redis_version": "6.0.16"}, FAIL),
        ("redis", {"redis_version": "7.0.15"}, OK),
        ("redis role", {"role": "slave"}, FAIL),
        ("redis role", {"cluster_enabled": 1}, FAIL),
    ],
)
async def test_old_servers_replicas_and_clusters_fail(server, name, info, status):
    facts = await facts_of(server)
    found = {result.name: result for result in server_results(server.url, replace(facts, info={**facts.info, **info}))}
    assert found[name].status is status


@pytest.mark.parametrize(("skew_s", "status"), [(0.2, OK), (-2.0, WARN), (2.0, WARN), (-4000.0, FAIL)])
async def test_clocks_must_agree(server, skew_s, status):
    facts = replace(await facts_of(server), skew_s=skew_s, error_s=0.001)
    (clock,) = [result for result in server_results(server.url, facts) if result.name == "redis clock"]
    assert clock.status is status


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("redis://10.0.0.7:6379/0", WARN),
        ("redis://:secret@10.0.0.7:6379/0", OK),
        ("redis://127.0.0.1/0", OK),
        ("unix:///run/redis.sock", OK),
    ],
)
async def test_a_server_open_to_other_machines_is_a_warning(server, url, status):
    (access,) = [result for result in server_results(url, await facts_of(server)) if result.name == "redis access"]
    assert access.status is status
    assert "secret" not in access.line().replace("--cluster-secret-file", "")
