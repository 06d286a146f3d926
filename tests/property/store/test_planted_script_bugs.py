"""Each rule of the Lua scripts is taken out, and a test of the contract fails: it would be noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from baton.domain.lifecycle import RequestState
from baton.store.store import RecordLost
from simulation.nodes.lua_store import LuaStore
from simulation.runtime.lua_redis import LuaRedis, Reply
from tests.contract import test_store_ballots as ballots
from tests.contract import test_store_calls as calls
from tests.contract.stores import RARE


@dataclass(frozen=True)
class PlantedScriptBug:
    """A rule of a script, what replaces it, and the test of the contract that fails then."""

    rule: str
    replacement: str
    test: Callable[[Any], Awaitable[None]]


PLANTED = {
    "put: lower epochs win": PlantedScriptBug(
        "held_epoch > epoch or (held_epoch == epoch and held_tag >= tag)",
        "held_epoch == epoch and held_tag >= tag",
        lambda store: ballots.test_a_put_never_replaces_a_higher_ballot(store, (3, 0)),
    ),
    "put: the tag is ignored": PlantedScriptBug(
        "held_epoch == epoch and held_tag >= tag",
        "held_epoch == epoch",
        lambda store: ballots.test_a_put_replaces_a_call_of_a_lower_ballot(store, (2, 4)),
    ),
    "put: no lease is started": PlantedScriptBug(
        "redis.call('SET', KEYS[4], '0', 'NX', 'PX', ARGV[6])",
        "",
        lambda store: calls_without_lease(store),
    ),
    "end: any ballot ends a call": PlantedScriptBug(
        "if held_epoch > epoch or (held_epoch == epoch and held_tag > tag) then\n  return 0",
        "if held_epoch > epoch then\n  return 0",
        lambda store: ballots.test_only_the_stored_ballot_claims_a_call_and_no_lower_ends_it(store, (2, 4)),
    ),
    "end: a rolled-back call keeps its ballot": PlantedScriptBug(
        ", 'epoch', ARGV[2], 'owner_tag', ARGV[3])",
        ")",
        lambda store: ballots.test_only_the_stored_ballot_claims_a_call_and_no_lower_ends_it(store, (3, 5)),
    ),
    "claim: the tag is not compared": PlantedScriptBug(
        "or whole(held[2] or '0') ~= tonumber(ARGV[3]) then",
        "then",
        lambda store: ballots.test_only_the_stored_ballot_claims_a_call_and_no_lower_ends_it(store, (2, 6)),
    ),
    "claim: no floor": PlantedScriptBug(
        "math.max(tonumber(held[1] or 0), tonumber(ARGV[7]))",
        "tonumber(held[1] or 0)",
        ballots.test_a_claim_goes_above_the_floor_and_above_its_sequences,
    ),
    "claim: the epochs of sequences are ignored": PlantedScriptBug(
        "epoch = math.max(epoch, math.floor(((whole(request[2]) or 1) - 1) / per_epoch) + 1)",
        "",
        ballots.test_a_claim_goes_above_the_floor_and_above_its_sequences,
    ),
    "claim: a seed replaces a stored call": PlantedScriptBug(
        "not (held[1] or ARGV[15])",
        "not ARGV[15]",
        ballots.test_a_claim_goes_above_the_floor_and_above_its_sequences,
    ),
    "advance: the tag is ignored": PlantedScriptBug(
        "(given_tag < tag or (given_tag == tag and given < expected))",
        "given < expected",
        ballots.test_events_of_other_ballots_are_refused_with_what_was_seen,
    ),
    "advance: epochs are compared after tags": PlantedScriptBug(
        "if epoch < due or (epoch == due and",
        "if given_tag < tag or (given_tag == tag and epoch < due) or (epoch == due and",
        ballots.test_events_of_other_ballots_are_refused_with_what_was_seen,
    ),
    "put request: an end is taken back": PlantedScriptBug(
        "and not cjson.decode(ARGV[7])[held[3]]",
        "",
        ballots.test_a_put_request_replaces_lower_attempts_only,
    ),
    "put request: the tag is ignored": PlantedScriptBug(
        "(held_tag < tag or (held_tag == tag and held_attempt < attempt))",
        "held_attempt < attempt",
        ballots.test_a_put_request_replaces_lower_attempts_only,
    ),
    "journal: the tag is ignored": PlantedScriptBug(
        "(held_tag > tag or (held_tag == tag and held_attempt > attempt))",
        "held_attempt > attempt",
        ballots.test_a_journal_write_of_a_higher_ballot_raises_the_record,
    ),
    "journal: a higher attempt does not fence": PlantedScriptBug(
        "redis.call('HSET', request, 'attempt', attempt, 'owner_tag', tag)",
        "",
        ballots.test_a_journal_write_of_a_higher_ballot_raises_the_record,
    ),
    "journal: a claim that was lost does not resume": PlantedScriptBug(
        "column[stored[3]] then",
        "false then",
        lambda store: ballots.test_a_journal_write_of_a_higher_ballot_resumes_the_record(store, RequestState.DECODING),
    ),
    "journal: every attempt resumes": PlantedScriptBug(
        "(held_epoch ~= epoch or held_tag ~= tag) and",
        "",
        ballots.test_a_journal_write_of_a_later_attempt_keeps_the_state,
    ),
    "put request: the name is compared in spite of a tag": PlantedScriptBug(
        "(tag ~= 0 or held[5] == ARGV[5])",
        "held[5] == ARGV[5]",
        ballots.test_an_owner_tag_identifies_an_owner_whatever_the_name,
    ),
    "put request: the name is not compared": PlantedScriptBug(
        "(tag ~= 0 or held[5] == ARGV[5]) and",
        "",
        ballots.test_a_put_request_replaces_lower_attempts_only,
    ),
    "lease: a late renewal counts": PlantedScriptBug(
        "math.max(before, tonumber(ARGV[2]))",
        "tonumber(ARGV[2])",
        ballots.test_a_renewal_returns_the_last_one_and_the_generation,
    ),
    "lease: every renewal draws a generation": PlantedScriptBug(
        "redis.call('SET', KEYS[2], ARGV[3], 'NX')",
        "redis.call('SET', KEYS[2], ARGV[3])",
        ballots.test_a_renewal_returns_the_last_one_and_the_generation,
    ),
    "claim: sequences are not fenced": PlantedScriptBug(
        "'attempt', attempt, 'owner_tag', ARGV[5], 'failure_code'",
        "'failure_code'",
        calls.test_a_claim_resumes_sequences_and_fences_earlier_attempts,
    ),
}


async def calls_without_lease(store: LuaStore) -> None:
    await store.put_call(ballots.CALL)
    assert await store.list_orphans() == []


class _MutatedRedis(LuaRedis):
    """Runs scripts with one rule replaced. `num_replaced` counts the runs of a script that has it."""

    def __init__(self, rule: str, replacement: str) -> None:
        super().__init__(lambda: 1e9)
        self.num_replaced = 0
        self._rule, self._replacement = rule, replacement

    def run(self, source: str, keys: list[Any], args: list[Any]) -> Reply:
        self.num_replaced += self._rule in source
        return super().run(source.replace(self._rule, self._replacement), keys, args)


async def _check(bug: PlantedScriptBug, replacement: str) -> int:
    server = _MutatedRedis(bug.rule, replacement)
    store = LuaStore(RARE, server=server)
    try:
        await bug.test(store)
    finally:
        await store.close()
    return server.num_replaced


@pytest.mark.parametrize("bug", PLANTED.values(), ids=PLANTED)
def test_a_script_without_its_rule_is_noticed(bug: PlantedScriptBug) -> None:
    assert asyncio.run(_check(bug, bug.rule)) > 0
    with pytest.raises((AssertionError, pytest.fail.Exception, RecordLost)):
        asyncio.run(_check(bug, bug.replacement))
