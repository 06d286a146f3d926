"""The reckoning at the end of a run, when all is quiet: does the book say what the clients have seen? (I8, I9)

Called by `world`. What the book has lost it need not know, and a call that changed hands may have ended otherwise than
its client saw: then only that it has ended counts.
"""

from __future__ import annotations

from baton.domain.lifecycle import RequestState
from baton.state.base import CallRecord, CallStatus, RequestRecord
from services.router.api.custody import ENTRY_PATIENCE_S
from simulation.client import GRACE_S, Client, Outcome
from simulation.cluster import Cluster
from simulation.oracle import Violation
from simulation.scenario import Scenario


async def check_book(cluster: Cluster, deadline_s: float, clients: list[Client]) -> None:
    """Raises `Violation`."""
    for client in clients:
        call = await cluster.book.get_call(client.call_id)
        if call is None:
            _check_missing(cluster, client)
            continue
        if call.status is CallStatus.OPEN:
            raise Violation("I9", f"nobody has ended it; it is {call.owner}'s", client.plan.name)
        records = [await cluster.book.get(job) for job in call.jobs]
        if call.status is CallStatus.ENDED:
            _check_jobs_ended(records)
        if _answered_by_one(cluster, client, call):
            _check_states(client, records, cluster.book_host.lost_at_s)
            _check_lateness(client, deadline_s)


def check_gently_treated(scenario: Scenario, clients: list[Client]) -> None:
    """Processes that leave cleanly make nobody's request fail. Raises `Violation`."""
    for client in clients:
        failed = client.outcome in (Outcome.FAILED, Outcome.LOST, Outcome.FORGOTTEN)
        if failed and client.code not in scenario.failures_for_want_of_room:
            raise Violation("drain", f"{client.outcome} {client.code}", client.plan.name)
        if client.outcome is Outcome.REFUSED and client.code not in scenario.excuses:
            raise Violation("drain", f"is refused: {client.code}", client.plan.name)


def _check_jobs_ended(records: list[RequestRecord | None]) -> None:
    """Also those that another router took over, in whatever state they were."""
    for record in records:
        if record is not None and not record.state.terminal:
            raise Violation("I9", f"its call has ended, it is {record.state.value}", record.id)


def _check_missing(cluster: Cluster, client: Client) -> None:
    if (
        client.outcome is Outcome.FINISHED
        and client.ended_at_s > cluster.book_host.lost_at_s
        and _router_lives(cluster, client)
    ):
        raise Violation("I9", "was answered, and is not in the book", client.plan.name)


def _router_lives(cluster: Cluster, client: Client) -> bool:
    return client.router is not None and client.router is cluster.router(client.router.process.name)


def _answered_by_one(cluster: Cluster, client: Client, call: CallRecord) -> bool:
    """Whether the book has heard of this call from one router only, the one that its client has heard it from."""
    return (
        call.epoch == 1
        and client.num_connections == 1
        and client.ended_at_s > cluster.book_host.lost_at_s
        and _router_lives(cluster, client)
    )


def _check_states(client: Client, records: list[RequestRecord | None], lost_at_s: float) -> None:
    """A choice that had ended when the book lost everything need not be written again."""
    states = [record.state if record is not None else None for record in records]
    match client.outcome:
        case Outcome.FINISHED:
            forgotten = lost_at_s + ENTRY_PATIENCE_S  # its end may have been heard late: headers wait for the book
            agrees = all(
                state is RequestState.FINISHED or (state is None and client.answer.finished[choice] <= forgotten)
                for choice, state in enumerate(states)
            )
        case Outcome.FAILED:
            agrees = RequestState.FAILED in states
        case Outcome.HUNG_UP if client.began_at_s is None:  # while the answer's headers waited for the book
            agrees = all(state in (RequestState.CANCELLED, RequestState.FINISHED) for state in states)
        case Outcome.HUNG_UP:
            agrees = all(
                state is RequestState.CANCELLED or choice in client.answer.finished
                for choice, state in enumerate(states)
            )
        case _:
            agrees = True
    if not agrees:
        raise Violation("I9", f"{client.outcome} for the client, {states} in the book", client.plan.name)


def _check_lateness(client: Client, deadline_s: float) -> None:
    late_s = client.ended_at_s - client.plan.at_s - deadline_s - GRACE_S
    if late_s > 0:
        raise Violation("I8", f"hears its end {late_s:.3f} s too late", client.plan.name)
