"""Planted bugs in sessions; a part of the table in `bugs`."""

from __future__ import annotations

from tests.planted.runner import PlantedBug

SESSIONS, TESTS = "sessions", "tests/property/session"
SESSION, OUTBOX, ACCEPTOR = "baton/session/session.py", "baton/session/outbox.py", "baton/session/acceptor.py"
METER, PUMP = "baton/session/meter.py", "baton/session/pump.py"
DIRECT = "tests/unit/session/test_direct_connection.py"
SERVED_STREAMS = "baton/worker/sessions/served_streams.py"
WORKER_SESSION = "services/router/dispatch/sessions/worker_session.py"
HANDSHAKE, TAGS = "baton/session/handshake.py", "baton/session/tags.py"


def _bug(name: str, file: str, before: str, after: str) -> PlantedBug:
    return PlantedBug(SESSIONS, name, file, before, after, TESTS)


LEAVING_TESTS = "tests/property/session/test_session.py tests/unit/session/test_meter.py"


def _leaving_bug(name: str, file: str, before: str, after: str) -> PlantedBug:
    return PlantedBug(SESSIONS, name, file, before, after, LEAVING_TESTS)


def _standing_bug(name: str, before: str, after: str) -> PlantedBug:
    return PlantedBug(SESSIONS, name, SESSION, before, after, "tests/unit/session/test_standing_still.py")


def _end_bug(name: str, file: str, before: str, after: str) -> PlantedBug:
    return PlantedBug(SESSIONS, name, file, before, after, DIRECT)


SESSION_BUGS = (
    _leaving_bug(
        "a goodbye that nobody hears has no end",
        SESSION,
        "self._leaves_by is not None and now >= self._leaves_by",
        "False",
    ),
    _leaving_bug("a goodbye is not heard", SESSION, 'if message.HasField("goodbye") and', "if False and"),
    _leaving_bug(
        "rows follow a goodbye",
        SESSION,
        "self._leaves_by is None:\n            self.outbox.post_row(row)",
        "True:\n            self.outbox.post_row(row)",
    ),
    _leaving_bug("a planned end counts as lost", METER, '"closed"', '"lost"'),
    _leaving_bug("a busy connection is never measured", SESSION, "probes = body is not None and", "probes = False and"),
    _bug("an older connection feeds the session", ACCEPTOR, "hello.connection <= found.connection", "False"),
    _bug(
        "a frame is acknowledged before it is applied",
        SESSION,
        "ack=self.last_applied_seq",
        "ack=self.last_applied_seq + 1",
    ),
    _bug(
        "a wrong tag is accepted",
        SESSION,
        "if not compare_digest(connection.received.tag(body), message.tag):",
        "if False:",
    ),
    _bug("the tag does not count frames", TAGS, 'mac.update(self._num_frames.to_bytes(8, "little"))', "pass"),
    _bug("both directions have one key", TAGS, "for side in (_DIALLER, _LISTENER)", "for side in (_DIALLER, _DIALLER)"),
    _bug("a replayed frame is applied again", SESSION, "if seq == self.last_applied_seq + 1:", "if seq:"),
    _bug("a gap is accepted", SESSION, "seq > self.last_applied_seq + 1 or", "False or"),
    _bug(
        "any role may send any message",
        SESSION,
        "if not self._accepts.issuperset(kinds):",
        "if False:",
    ),
    _bug("an ack of what was never sent is accepted", SESSION, "if frame.ack > self.outbox.last_seq:", "if False:"),
    _bug("nothing is sent again", SESSION, "self.outbox.rewind()", "pass"),
    _bug("a row joins one before another message", OUTBOX, "self._open_rows.pop(message.stream, None)", "pass"),
    _bug("the window has no end", OUTBOX, "return self.retained_bytes >= self._limits.window_bytes", "return False"),
    _bug("the resume time has no end", SESSION, "now >= self._gone_at", "False"),
    _bug("silence is not noticed", SESSION, "if now >= self._silent_at(connection):", "if False:"),
    _standing_bug("a process that stood still breaks its connections", "if connection.is_excused:", "if True:"),
    _standing_bug("a silent end is excused for ever", "if connection.is_excused:", "if False:"),
    _standing_bug(
        "an end that was stopped has no time to answer",
        "min(max(late_s, LOOK_AGAIN_S), self._limits.silent_s)",
        "LOOK_AGAIN_S",
    ),
    _standing_bug("nothing is read before the second look", "max(late_s, LOOK_AGAIN_S)", "late_s"),
    _standing_bug(
        "a ping that left late is answered too late",
        "return max(silent_at, connection.ping_sent_at + self._limits.silent_s - self._limits.ping_s)",
        "return silent_at",
    ),
    _standing_bug(
        "a frame after an excuse does not count",
        "connection.is_asked = connection.is_excused = False",
        "connection.is_asked = False",
    ),
    _standing_bug(
        "a process that stood still cannot dial again",
        "late_s > LOOK_AGAIN_S and not self._gone_is_excused",
        "False",
    ),
    _standing_bug("a session without a connection is excused for ever", " and not self._gone_is_excused", ""),
    _standing_bug(
        "only the first break is excused",
        "self._gone_at, self._gone_is_excused = now + self._limits.resume_s, False",
        "self._gone_at = now + self._limits.resume_s",
    ),
    _end_bug(
        "a session goes on without a frame that could not be made",
        SESSION,
        'self.lose(f"a frame could not be made: {type(error).__name__}")',
        "pass",
    ),
    _end_bug(
        "nobody hears that a frame could not be made",
        PUMP,
        'log.exception("session_frame_not_made")\n        self._changed()',
        'log.exception("session_frame_not_made")',
    ),
    _end_bug(
        "a session goes on without a frame that was not applied",
        PUMP,
        'self.session.lose(f"a frame could not be applied: {type(error).__name__}")',
        "pass",
    ),
    _end_bug(
        "a broken link of a handler passes for one of the connection",
        PUMP,
        "if isinstance(error, LinkBroken):",
        "if False:",
    ),
    _bug("pings are not answered", SESSION, "connection.pong_owed = frame.ping or connection.pong_owed", "pass"),
    _bug(
        "a lost session begins again under its number",
        ACCEPTOR,
        "hello.established or hello.session_id in self._ended",
        "False",
    ),
    _bug("a session lost here is forgotten", ACCEPTOR, "hello.session_id in self._ended", "False"),
    _bug("a captured Hello is enough", HANDSHAKE, "if proof.body or not same_tag(", "if proof.body and not same_tag("),
    _bug("the listener need not prove itself", HANDSHAKE, "or not same_tag(tag, message.tag)", ""),
    _bug("any secret dials", HANDSHAKE, "if same_tag(handshake_tag(key, _HELLO, body), message.tag)", "if True"),
    _bug("versions are not compared", HANDSHAKE, "if hello.protocol_version != PROTOCOL_VERSION:", "if False:"),
    _bug("incarnations are not compared", HANDSHAKE, "if hello.listener_incarnation != incarnation:", "if False:"),
    _bug(
        "two sessions of one dialler live",
        ACCEPTOR,
        'before.session.lose("its dialler has begun another session")',
        "pass",
    ),
    _bug("a prompt waits for all that came before", OUTBOX, "self._prompts.move_to_end(stream)", "pass"),
    _bug("an abort waits for its prompt", OUTBOX, "self._drop_prompts(message.stream)", "pass"),
    PlantedBug(
        SESSIONS,
        "a long prompt is in the open of its stream",
        WORKER_SESSION,
        "if 0 < len(tokens) <= self._max_open_tokens:",
        "if 0 < len(tokens):",
        "tests/unit/router/dispatch/sessions/test_worker_session.py",
    ),
    PlantedBug(
        SESSIONS,
        "a worker of the version before gets prompts in opens",
        "services/router/dispatch/sessions/worker_sessions.py",
        "opens_with_prompts=SESSION_PROMPTS in worker.capabilities",
        "opens_with_prompts=True",
        "tests/service/dispatch/test_sessions.py",
    ),
    PlantedBug(
        SESSIONS,
        "a prompt of an open has no bound",
        SERVED_STREAMS,
        "if num_tokens > self._max_prompt_tokens:",
        "if False:",
        "tests/unit/worker/sessions/test_served_streams.py",
    ),
    PlantedBug(
        SESSIONS,
        "prompts of opens are not counted",
        SERVED_STREAMS,
        "self._count_bytes(stream, TOKEN_BYTES * num_tokens)",
        "pass",
        "tests/unit/worker/sessions/test_served_streams.py",
    ),
    PlantedBug(
        SESSIONS,
        "every frame has an ack of its own",
        SESSION,
        "ack_s: float = 0.25",
        "ack_s: float = 0.0",
        "tests/unit/session/test_acks.py",
    ),
    PlantedBug(
        SESSIONS,
        "rows join over a gap",
        OUTBOX,
        "if not isinstance(waiting, pb.TokenRow) or waiting.first_index + len(waiting.tokens) != row.first_index:",
        "if not isinstance(waiting, pb.TokenRow):",
        "tests/unit/session/test_outbox.py",
    ),
    PlantedBug(
        SESSIONS,
        "plain tokens join over a gap",
        OUTBOX,
        "if type(waiting) is _PlainRow and waiting.first_index + len(waiting.tokens) == first_index:",
        "if type(waiting) is _PlainRow:",
        "tests/unit/session/test_outbox.py",
    ),
    PlantedBug(
        SESSIONS,
        "a row that follows a message leaves before it",
        OUTBOX,
        "if step is not None:\n                    parts.append",
        "if False:\n                    parts.append",
        "tests/unit/session/test_outbox.py",
    ),
    PlantedBug(
        SESSIONS,
        "frames are written without room",
        PUMP,
        "connection is not None and self._has_room and",
        "connection is not None and",
        DIRECT,
    ),
    PlantedBug(
        SESSIONS,
        "an error of a handler reaches the event loop",
        "baton/session/wires/socket_connection.py",
        "except BaseException as error:",
        "except LinkBroken as error:",
        f"{DIRECT}::test_an_error_of_a_taker_ends_the_hand_over_not_the_loop",
    ),
    PlantedBug(
        SESSIONS,
        "a frame behind the handshake's last bytes is lost",
        "baton/session/wires/socket_connection.py",
        "while self._received:\n            message = await",
        "while False:\n            message = await",
        DIRECT,
    ),
    PlantedBug(
        SESSIONS,
        "a token overtakes an event that the attempt's task has not sent",
        "baton/worker/streams.py",
        "if waiter is None or waiter.done():",
        "if waiter is None:",
        "tests/unit/worker/test_streams.py",
    ),
    PlantedBug(
        SESSIONS,
        "a stranger's connection is read",
        "baton/rpc/auth_interceptor.py",
        "        token = self._admit(method, details.invocation_metadata or ())",
        "        if method == SESSION_METHOD:\n            return handler\n"
        "        token = self._admit(method, details.invocation_metadata or ())",
        "tests/unit/rpc/test_session_auth.py",
    ),
)

LINKS = "imports outlive connections"
BREAKS = "tests/contract/links/test_breaks.py"
HANDOFFS = "tests/contract/links/test_handoffs.py"
ROLES = "tests/unit/session/test_roles.py"
LINK_SESSIONS = "tests/unit/worker/handoff/test_link_sessions.py"
IMPORTER, EXPORTER = "baton/worker/handoff/link_session.py", "baton/worker/handoff/served_link.py"


def _link_bug(name: str, file: str, before: str, after: str, tests: str) -> PlantedBug:
    return PlantedBug(LINKS, name, file, before, after, tests)


LINK_SESSION_BUGS = (
    _link_bug(
        "a lost session leaves its watches open", "baton/session/dialled_session.py",
        'stream.end(WorkerLost(f"the session with a worker has ended: {reason}"))', "pass", BREAKS,
    ),
    _link_bug("a reply of another kind is taken", IMPORTER, "if kind != stream.kind:", "if False:", BREAKS),
    _link_bug(
        "a cancelled watch goes on at its source", IMPORTER,
        "            self._has_ended = True\n            self._on_cancel()", "            self._has_ended = True",
        HANDOFFS,
    ),
    _link_bug("a watch outlives its session at the source", EXPORTER, "self._streams.close_all()", "[]", BREAKS),
    _link_bug(
        "a bug of a handler is answered with silence", EXPORTER,
        'self._fail(number, WorkerLost(f"an unexpected error: {type(error).__name__}"))', "pass", BREAKS,
    ),
    _link_bug(
        "a lease counts from the reply", "baton/worker/handoff/handoff_calls.py",
        "LeasesRenewed(renewed, sent_at + reply.lease_s)", "LeasesRenewed(renewed, monotonic_s() + reply.lease_s)",
        BREAKS,
    ),
    _link_bug(
        "a router may ask for pages", "baton/session/session.py",
        '"reserve", "prefill", "abort_attempt"})', '"reserve", "prefill", "abort_attempt", "link_request"})', ROLES,
    ),
    _link_bug(
        "a worker may open prompts", "baton/session/session.py",
        'IMPORTER_KINDS = frozenset({', 'IMPORTER_KINDS = ROUTER_KINDS | frozenset({', ROLES,
    ),
    _link_bug(
        "a router ends the session of a worker with its id", "baton/session/acceptor.py",
        "before = self._by_dialler.get((hello.role, hello.id))",
        "before = next((one for (_, id), one in self._by_dialler.items() if id == hello.id), None)", ROLES,
    ),
    _link_bug(
        "a link that is down is dialled", "baton/worker/handoff/links.py",
        "if link.in_session:", "if False:", LINK_SESSIONS,
    ),
    _link_bug(
        "a session outlives its link", "baton/worker/handoff/links.py",
        "self._peers.end(link.record.prefill_incarnation, reason)", "pass", LINK_SESSIONS,
    ),
    _link_bug(
        "a worker without the capability is asked in a session", "baton/worker/handoff/link_sessions.py",
        "SESSION_LINKS in worker.capabilities and", "", LINK_SESSIONS,
    ),
)  # fmt: skip

PORTS = "tests/contract/links/test_ports.py"
WIRES = "baton/session/wires/worker_wires.py"


def _port_bug(name: str, file: str, before: str, after: str, tests: str = PORTS) -> PlantedBug:
    return PlantedBug("links have sockets", name, file, before, after, tests)


LINK_PORT_BUGS = (
    _port_bug(
        "a link forgets the port that its source announces", "baton/worker/handoff/links.py",
        "            worker.session_address,\n        )", '            "",\n        )', LINK_SESSIONS,
    ),
    _port_bug(
        "a link is greeted by gRPC", "baton/worker/handoff/session_or_call.py",
        "in_session=in_session, session_address=port)", "in_session=in_session)", LINK_SESSIONS,
    ),
    _port_bug(
        "an importer dials no port", "baton/worker/handoff/link_sessions.py",
        "self._wires.get(address, incarnation, session_address)", 'self._wires.get(address, incarnation, "")',
    ),
    _port_bug("sessions are in clear beside certificates", WIRES, "None if trust.tls is not None else", ""),
    _port_bug(
        "a port that was not reached is forgotten with its session", WIRES,
        "wire = self._reaching.get(incarnation)", "wire: Wire | None = None",
    ),
    _port_bug(
        "ports of workers that left are kept", "baton/worker/handoff/link_sessions.py",
        "self._wires.retain(incarnations)", "pass",
    ),
    _port_bug(
        "a port that says nothing is dialled for ever", "baton/session/wires/socket_wire.py",
        "if self._num_unanswered >= MAX_UNANSWERED:", "if False:",
    ),
    _port_bug(
        "a port that is cut off ends the session", "baton/session/wires/socket_wire.py",
        "with contextlib.suppress(LinkBroken):\n                return await self._by_socket",
        "if True:\n                return await self._by_socket",
    ),
)  # fmt: skip
