"""What the load says about its tenants: who loses too much, and which labels name nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.services.router.admission.tenants_file import read_tenants
from baton.services.router.edge.api_keys import ApiKeys
from chaos.checks.tenant_shares import OVERLOADED, TenantShares, wrong_labels
from chaos.clients.tenants import make_tenants, write_files
from chaos.testbed.metrics import parse_metrics

TENANTS = make_tenants()
STEADY, FLOOD = TENANTS[0], TENANTS[-1]


def shares(tenant: str, num_asked: int, num_lost: int) -> TenantShares:
    counted = TenantShares()
    for number in range(num_asked):
        counted.record(tenant, OVERLOADED if number < num_lost else "", 0 if number < num_lost else 8)
    return counted


@pytest.mark.parametrize(
    ("num_asked", "num_lost", "is_wrong"), [(50, 1, False), (50, 2, True), (1000, 10, False), (1000, 11, True)]
)
def test_a_steady_tenant_loses_at_most_one_of_a_hundred(num_asked: int, num_lost: int, is_wrong: bool):
    assert bool(shares(STEADY.name, num_asked, num_lost).problems(TENANTS)) is is_wrong


def test_what_a_flood_loses_is_its_own():
    assert shares(FLOOD.name, 100, 90).problems(TENANTS) == []


def test_a_cluster_without_workers_is_no_loss_to_others():
    counted = TenantShares()
    for _ in range(100):
        counted.record(STEADY.name, "no_workers", 0)
    assert counted.problems(TENANTS) == []


def test_labels_name_tenants_with_keys():
    line = 'baton_admission_%s{decision="admitted",reason="",tenant="%s"} %s'
    begins = [line % ("total", "", "0.0"), line % ("created", "", "1.7e9")]
    good = parse_metrics("\n".join([line % ("total", STEADY.name, "3.0"), *begins]))
    bad = parse_metrics(line % ("total", "", "1.0"))
    assert wrong_labels({"router-0": good}, TENANTS) == []
    assert wrong_labels({"router-0": good, "router-1": bad}, TENANTS) == ["router-1 counts requests of ''"]


def test_routers_read_the_files(tmp_path: Path):
    files = write_files(TENANTS, tmp_path)
    keys = ApiKeys.read(Path(str(files["api-keys-file"])))
    assert [keys.tenant_of(one.key) for one in TENANTS] == [one.name for one in TENANTS]
    limits = read_tenants(Path(str(files["tenants-file"])))
    assert [limits.limits_of(one.name).weight for one in TENANTS] == [one.weight for one in TENANTS]
    assert limits.limits_of(FLOOD.name).max_slots == FLOOD.max_slots
