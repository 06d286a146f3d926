"""State machine of a prefill worker, a decode worker, their clients and the clock.

Messages are late, reordered or lost; reads fail; attempts are aborted at any step; prefill restarts. `split_pair` has
the invariants.
"""

from __future__ import annotations

import itertools

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from baton.domain.ids import AttemptId, RequestId
from baton.domain.request import StopParams
from tests.property.machines.split_pair import Client, SplitPair
from tests.tiny_workers import assert_idle

MAX_STEPS_TO_END = 400
SHARED = [0, 1, 1, 0, 1, 0, 0, 1]
PROMPTS = st.builds(
    lambda num_shared, tail: SHARED[:num_shared] + tail,
    st.sampled_from([0, 2, 4, 8]),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
)


class SplitMachine(SplitPair, RuleBasedStateMachine):
    """Rules are actions of the network, the engines, the clients and the clock."""

    may_check_digests = True

    def __init__(self) -> None:
        super().__init__()
        self.names = itertools.count()

    @initialize(digests=st.booleans(), num_host_pages=st.sampled_from([0, 4]))
    def begin(self, digests: bool, num_host_pages: int) -> None:
        self.build(digests and self.may_check_digests, num_host_pages)

    # -- clients and their router

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 5), seed=st.integers(0, 3))
    def new_client(self, prompt: list[int], max_tokens: int, seed: int) -> None:
        name = RequestId(f"r{next(self.names)}")
        self.clients[name] = Client(prompt, StopParams(max_tokens), seed)
        self.start(name)

    @precondition(lambda self: self.stopped())
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        self.start(data.draw(st.sampled_from(self.stopped())))

    @precondition(lambda self: any(client.running for client in self.clients.values()))
    @rule(data=st.data(), gone=st.booleans())
    def hang_up(self, data: st.DataObject, gone: bool) -> None:
        """Ends an attempt: the client leaves, or the router will retry."""
        name = data.draw(st.sampled_from([name for name, client in self.clients.items() if client.running]))
        self.clients[name].done = gone
        self.stop(AttemptId(name, self.clients[name].attempt))

    # -- engines, network, clock

    @rule(num_steps=st.integers(1, 3))
    def prefill_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            batch = self.prefill.scheduler.schedule(self.now)
            if batch is not None:
                output = self.prefill.runner.run(batch)
                self.on_prefill_effects(self.prefill.scheduler.commit(batch, output, self.now))

    @precondition(lambda self: self.decode.scheduler.num_rows)
    @rule(num_steps=st.integers(1, 4))
    def decode_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.on_decode_effects(self.decode.import_policy.check_pages(self.now))
            batch = self.decode.scheduler.schedule(self.now)
            if batch is not None:
                output = self.decode.runner.run(batch)
                self.on_decode_effects(self.decode.scheduler.commit(batch, output, self.now))
            self.on_decode_effects(self.decode.scheduler.take_pending_effects())

    @precondition(lambda self: self.published)
    @rule(data=st.data(), count=st.integers(1, 3))
    def deliver_any_published(self, data: st.DataObject, count: int) -> None:
        id = data.draw(st.sampled_from(list(self.published)))
        for _ in range(min(count, len(self.published[id]))):
            self.deliver_published(id)

    @precondition(lambda self: self.pulls)
    @rule(data=st.data(), breaks=st.integers(0, 9))
    def end_any_pull(self, data: st.DataObject, breaks: int) -> None:
        self.end_pull(data.draw(st.sampled_from(self.pulls)), broken=breaks == 0)

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def deliver_message_to_prefill(self, data: st.DataObject) -> None:
        self.deliver_to_prefill(data.draw(st.sampled_from(self.messages)))

    @precondition(lambda self: self.messages)
    @rule(data=st.data(), reached=st.booleans())
    def drop_message_to_prefill(self, data: st.DataObject, reached: bool) -> None:
        self.drop_message(data.draw(st.sampled_from(self.messages)), reached)

    @precondition(lambda self: self.replies)
    @rule(data=st.data())
    def deliver_message_to_decode(self, data: st.DataObject) -> None:
        self.deliver_to_decode(data.draw(st.sampled_from(self.replies)))

    @precondition(lambda self: self.leased)
    @rule(arrives=st.booleans())
    def renew_leases(self, arrives: bool) -> None:
        self.renew()
        if arrives:
            self.deliver_to_prefill(self.messages[-1])

    @rule()
    def prefill_restarts(self) -> None:
        self.restart_prefill()

    @rule(dt=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, dt: float) -> None:
        self.now += dt
        self.on_prefill_effects(self.prefill.scheduler.expire(self.now))
        self.on_decode_effects(self.decode.import_policy.expire(self.now))
        self.on_decode_effects(self.decode.import_policy.check_pages(self.now))

    # -- the end

    def teardown(self) -> None:
        """Finishes all requests over a quiet network; then every page of both sides is freed."""
        for _ in range(MAX_STEPS_TO_END):
            if all(client.done for client in self.clients.values()):
                break
            self._quiet_round()
        for name, client in self.clients.items():
            assert client.done, f"{name} starved"
        self._drain_network()
        self.wait(1000.0)
        self._drain_network()
        assert_idle(self.prefill.cache)
        assert_idle(self.decode.cache)
        assert self.decode.host.num_free == self.decode.host.num_slots
        assert len(self.prefill.exports) == len(self.decode.imports) == self.decode.imports.num_draining == 0

    def _quiet_round(self) -> None:
        for name in self.stopped():
            self.start(name)
        self.prefill_steps(1)
        self._drain_network()
        self.decode_steps(1)
        self.wait(0.1)
        self.renew()

    def _drain_network(self) -> None:
        while self.published or self.pulls or self.messages or self.replies:
            for id in list(self.published):
                self.deliver_published(id)
            for pull in list(self.pulls):
                self.end_pull(pull, broken=False)
            for message in list(self.messages):
                self.deliver_to_prefill(message)
            for reply in list(self.replies):
                self.deliver_to_decode(reply)
