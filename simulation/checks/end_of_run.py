"""Checks at the end of a run: the store agrees with what the clients received (I8, I9), tenant by tenant.

Called by `run`. Data that the store has lost need not be there. A call with several owners may have ended differently
than its client saw: then it only must have ended.
"""

from __future__ import annotations

from baton.domain.errors import AnswerLost, Draining
from baton.domain.lifecycle import RequestState
from baton.services.router.edge.http_errors import RequestNotFound
from baton.services.router.resume import LookupUnavailable
from baton.services.router.takeover.call_ownership import STORE_WAIT_S
from baton.store.store import CallRecord, CallStatus, SequenceRecord
from simulation.checks.invariants import Violation
from simulation.clients.client import GRACE_S, ClientOutcome, SimClient
from simulation.cluster import SimCluster
from simulation.nodes.router import SimRouter
from simulation.scenario import Scenario

STRANGER = "stranger"
"""A tenant without a call."""


async def check_store(cluster: SimCluster, deadline_s: float, clients: list[SimClient]) -> None:
    """Raises `Violation`."""
    for client in clients:
        _check_lost(cluster, client)
        call = await cluster.store.get_call(client.call_id)
        if call is None:
            _check_missing(cluster, client)
            continue
        if call.body and call.tenant != client.plan.tenant:
            raise Violation(
                "tenant", f"is {call.tenant!r}'s in the store, not {client.plan.tenant!r}'s", client.plan.name
            )
        await _check_not_read(cluster, client)
        if call.status is CallStatus.OPEN:
            raise Violation("I9", f"no router has ended it; it is {call.owner}'s", client.plan.name)
        records = [await cluster.store.get(sequence) for sequence in call.sequence_ids]
        if call.status is CallStatus.ENDED:
            _check_sequences_ended(records)
        if _has_one_owner(cluster, client, call):
            _check_states(client, records, cluster.store_server.wiped_at_s)
            _check_lateness(client, deadline_s)


def check_only_drains(scenario: Scenario, clients: list[SimClient]) -> None:
    """No request fails because processes leave cleanly. Raises `Violation`."""
    for client in clients:
        failed = client.outcome in (ClientOutcome.FAILED, ClientOutcome.LOST, ClientOutcome.NOT_FOUND)
        if failed and client.code not in scenario.capacity_failures:
            raise Violation("drain", f"{client.outcome} {client.code}", client.plan.name)
        if client.outcome is ClientOutcome.REFUSED and client.code not in scenario.allowed_refusals(client.plan):
            raise Violation("drain", f"is refused: {client.code}", client.plan.name)


async def _check_not_read(cluster: SimCluster, client: SimClient) -> None:
    """No router gives a call to a tenant whose it is not."""
    for router in (node for node in cluster.nodes.values() if isinstance(node, SimRouter) and node.process.alive):
        try:
            await router.resume(client.call_id, "", STRANGER)
        except (RequestNotFound, LookupUnavailable, Draining):
            continue
        raise Violation("tenant", f"{router.process.name} gives it to another tenant", client.plan.name)


def _check_sequences_ended(records: list[SequenceRecord | None]) -> None:
    """All sequences have ended, including those taken over in any state."""
    for record in records:
        if record is not None and not record.state.terminal:
            raise Violation("I9", f"its call has ended, it is {record.state.value}", record.id)


def _check_lost(cluster: SimCluster, client: SimClient) -> None:
    """A call is lost only if its owner has ended, and the store has lost its data or never had them.

    Does not see a call that an unharmed owner runs and another router calls unknown, right after the store's loss:
    `tests/unit/store/test_ownership.py` and `tests/unit/router/takeover/test_loss_watcher.py` do.
    """
    if client.outcome is not ClientOutcome.NOT_FOUND and client.code != AnswerLost.code:
        return
    owner, entered_at_s = cluster.owners.get(client.call_id, (None, 0.0))
    if owner is None or entered_at_s > client.ended_at_s:
        return
    if cluster.was_well(owner, client.ended_at_s):
        raise Violation("lost", f"is lost, and its owner {owner} is well", client.plan.name)
    if cluster.store_server.wiped_at_s < client.plan.at_s:
        raise Violation("lost", "is lost, and the store has lost nothing", client.plan.name)


def _check_missing(cluster: SimCluster, client: SimClient) -> None:
    if (
        client.outcome is ClientOutcome.FINISHED
        and client.ended_at_s > cluster.store_server.wiped_at_s
        and _is_router_running(cluster, client)
    ):
        raise Violation("I9", "was answered, and is not in the store", client.plan.name)


def _is_router_running(cluster: SimCluster, client: SimClient) -> bool:
    return client.router is not None and client.router is cluster.router(client.router.process.name)


def _has_one_owner(cluster: SimCluster, client: SimClient, call: CallRecord) -> bool:
    """True if only one router has written this call: the one that its client used."""
    return (
        call.epoch == 1
        and client.num_connections == 1
        and client.ended_at_s > cluster.store_server.wiped_at_s
        and _is_router_running(cluster, client)
    )


def _check_states(client: SimClient, records: list[SequenceRecord | None], wiped_at_s: float) -> None:
    """A choice that had ended when the store lost everything need not be written again.

    A call that ends before its router knows of the loss leaves a tombstone, which names no sequences.
    """
    states = [record.state if record is not None else None for record in records]
    wiped_until_s = wiped_at_s + STORE_WAIT_S
    match client.outcome:
        case ClientOutcome.FINISHED:
            agrees = all(  # its end may arrive late: headers wait for the store
                state is RequestState.FINISHED or (state is None and client.answer.finished[choice] <= wiped_until_s)
                for choice, state in enumerate(states)
            )
        case ClientOutcome.FAILED:
            agrees = RequestState.FAILED in states or (not states and client.ended_at_s <= wiped_until_s)
        case ClientOutcome.HUNG_UP if client.began_at_s is None:  # while the answer's headers waited for the store
            agrees = all(state in (RequestState.CANCELLED, RequestState.FINISHED) for state in states)
        case ClientOutcome.HUNG_UP:
            agrees = all(
                state is RequestState.CANCELLED or choice in client.answer.finished
                for choice, state in enumerate(states)
            )
        case _:
            agrees = True
    if not agrees:
        raise Violation("I9", f"{client.outcome} for the client, {states} in the store", client.plan.name)


def _check_lateness(client: SimClient, deadline_s: float) -> None:
    late_s = client.ended_at_s - client.connected_at_s - deadline_s - GRACE_S
    if late_s > 0:
        raise Violation("I8", f"hears its end {late_s:.3f} s too late", client.plan.name)
