"""Planted bugs of the README's own promises: kills cost a pause, cancel leaks nothing, waits end, labels are true."""

from __future__ import annotations

from tests.planted.runner import PlantedBug

SURVIVAL, CANCEL, LEASES, DURABLE = "kills cost a pause", "cancel leaks nothing", "pins and leases", "durable is true"
CALLERS, WORKER_ID, INPUT = "callers without the secret", "a worker's id is its own", "bad input is answered"
WAITS, LABELS, READERS = "every wait ends", "labels are true", "clients that do not read"
REPLIES = "replies are the worker's"

DISPATCH, DECODE, HANDOFF = "services/router/dispatch", "services/decode", "baton/engine/handoff"
RETRIES = "tests/service/dispatch/test_retries.py tests/service/dispatch/test_link_failures.py"
EXPORTS, IMPORTS = "tests/unit/engine/handoff/test_kv_export.py", "tests/unit/decode/test_import_table.py"
DURABILITY = "tests/unit/store/test_durability.py"
UNREAD = "tests/unit/router/streaming tests/service/http/test_slow_readers.py"
HTTP = "tests/service/http/test_http_protocol.py tests/service/http/test_errors.py"
CALL_TOKENS = "tests/unit/rpc/test_call_token.py tests/unit/rpc/test_auth_interceptor.py"
REPLY_TAGS, TAG_TESTS = "baton/rpc/replies/reply_tags.py", "tests/unit/rpc/test_reply_tags.py"
LOST_TOO_EARLY = "tests/unit/domain/test_liveness.py tests/unit/router/dispatch/test_workers.py"
SUSPICIONS = "tests/unit/router/dispatch/suspicion"
IDS = "tests/unit/worker/identity/test_worker_id.py tests/unit/worker/test_registration.py"

RESTARTS, EMBEDDED = "a killed Redis comes back", "tests/unit/cli/test_embedded_redis.py"

PROMISE_BUGS = (
    PlantedBug(
        SURVIVAL, "the next attempt forgets what was sent", f"{DISPATCH}/tracked_request.py",
        "tokens = (*sequence.prompt_tokens, *self._emitted)", "tokens = tuple(sequence.prompt_tokens)", RETRIES,
    ),
    PlantedBug(
        SURVIVAL, "a gap in the tokens is passed on", f"{DISPATCH}/tracked_request.py",
        "if token.index != index:", "if False:", RETRIES,
    ),
    PlantedBug(
        SURVIVAL, "the failed worker is chosen again", f"{DISPATCH}/tracked_request.py",
        "self.avoided = failure.avoid(self.avoided, self._pair)", "pass", RETRIES,
    ),
    PlantedBug(
        SURVIVAL, "a worker that answers stays suspected", f"{DISPATCH}/suspicions.py",
        "del self._until[incarnation]", "pass", SUSPICIONS,
    ),
    PlantedBug(
        SURVIVAL, "a worker that fails again and again is trusted each time", f"{DISPATCH}/suspicions.py",
        "del self._until[incarnation]\n            self._firm_until[incarnation] = now + self._ttl_s",
        "del self._until[incarnation]", SUSPICIONS,
    ),
    PlantedBug(
        SURVIVAL, "a router that slept misses those that are not back yet", "baton/domain/liveness.py",
        "(not announced or (self._was_away and not away_before))", "not announced", LOST_TOO_EARLY,
    ),
    PlantedBug(
        SURVIVAL, "an announcement that the store lost counts as expired", "baton/domain/liveness.py",
        "            if now - renewed_at < self._early_s:\n", "            if False:\n", LOST_TOO_EARLY,
    ),
    PlantedBug(
        SURVIVAL, "another model goes on with an answer", f"{DISPATCH}/tracked_request.py",
        'return self._fingerprint if self._emitted or self.sequence.fingerprint else ""', 'return ""',
        "tests/service/dispatch/test_required_fingerprint.py",
    ),
    PlantedBug(
        SURVIVAL, "failures of a long answer add up", f"{DISPATCH}/attempt.py",
        "self._tracked.num_failures = 0", "pass", RETRIES,
    ),
    PlantedBug(
        SURVIVAL, "workers that never had the request count", f"{DISPATCH}/dispatcher.py",
        "failure.counted = False  # a request", "pass  # a request", RETRIES,
    ),
    PlantedBug(
        SURVIVAL, "a reader goes on in another journal", "services/router/takeover/journal_reader.py",
        "if not position.continues(part):", "if False:", "tests/unit/router/takeover/test_journal_reader.py",
    ),
    PlantedBug(
        CANCEL, "a hang-up aborts nothing", f"{DISPATCH}/attempt.py",
        "self._aborts.send(self._request.id, worker, self._abort_reason)", "pass",
        "tests/service/dispatch/test_dispatcher.py",
    ),
    PlantedBug(
        CANCEL, "an aborted import keeps its reservation", f"{DECODE}/import_table.py",
        "self.num_reserved_pages -= kv_import.num_reserved\n        kv_import.num_reserved = 0\n        "
        "kv_import.queued_pulls.clear()", "kv_import.queued_pulls.clear()", IMPORTS,
    ),
    PlantedBug(
        CANCEL, "pages are freed under a read", f"{DECODE}/import_table.py",
        "if kv_import.in_flight:\n            return\n        kv_import.advance(ImportEvent.DRAINED)",
        "kv_import.advance(ImportEvent.DRAINED)", IMPORTS,
    ),
    PlantedBug(
        CANCEL, "an aborted export keeps its pins", f"{HANDOFF}/kv_export.py",
        "self._pool.drop(export.pages, Hold.PINNED)", "pass", EXPORTS,
    ),
    PlantedBug(
        CANCEL, "a cancelled request keeps its slot", f"{DISPATCH}/dispatcher.py",
        "self._admission.release(tracked)", "pass", "tests/service/dispatch/test_dispatcher.py",
    ),
    PlantedBug(
        CANCEL, "a disconnect is not watched", "services/router/edge/disconnect.py",
        "self._connection.on_lost = self._on_lost", "self._connection.on_lost = None",
        "tests/unit/router tests/service/http",
    ),
    PlantedBug(
        LEASES, "a lease never ends", f"{HANDOFF}/kv_export.py",
        "o.lease_ends_at is not None and o.lease_ends_at <= now]", "False]", EXPORTS,
    ),
    PlantedBug(
        LEASES, "the end of an export is forgotten", "baton/worker/handoff/handoff_log.py",
        "self._ends.remember(id, end, asyncio.get_running_loop().time())", "pass",
        "tests/unit/worker/handoff/test_handoff_log.py",
    ),
    PlantedBug(
        LEASES, "a watch of a forgotten end is silent", "baton/worker/handoff/handoff_log.py",
        "return not self._is_coming(id) and self._ends.has_forgotten(since)", "return False",
        "tests/unit/worker/handoff/test_handoff_log.py",
    ),
    PlantedBug(
        LEASES, "a repeated call that is cancelled ends its attempt", "services/prefill/loop.py",
        "[] if added.call.refused else self._handle(Abort(added.request.id, reason))",
        "self._handle(Abort(added.request.id, reason))",
        "tests/unit/prefill/test_live_budgets.py",
    ),
    PlantedBug(
        LEASES, "a repeated call ends its attempt", "services/prefill/outbox.py",
        "if seen == id:", "if False:", "tests/unit/prefill/test_outbox.py",
    ),
    PlantedBug(
        LEASES, "a renewal does not tell what has ended", f"{HANDOFF}/kv_export.py",
        "ended.append(id)", "pass", EXPORTS,
    ),
    PlantedBug(
        LEASES, "a late commit is valid", f"{HANDOFF}/kv_export.py",
        "return self._ended.get(id) is ExportState.COMMITTED", "return True", EXPORTS,
    ),
    PlantedBug(
        LEASES, "a commit without an answer is valid", f"{DECODE}/import_policy.py",
        "if valid is None and self._imports.is_proven(id):", "if valid is None:",
        "tests/unit/decode/test_import_policy.py",
    ),
    PlantedBug(
        LEASES, "an abandoned export commits", f"{HANDOFF}/kv_export.py",
        "self._end(export, ExportEvent.ABORT)\n            return False",
        "self._end(export, ExportEvent.ABORT)\n            return True", EXPORTS,
    ),
    PlantedBug(
        DURABLE, "a failing disk is durable", "baton/store/durability.py",
        ' and info.get("aof_last_write_status") == "ok"', "", DURABILITY,
    ),
    PlantedBug(
        DURABLE, "an evicting store is durable", "baton/store/durability.py",
        "evicts or info.get", "info.get", DURABILITY,
    ),
    PlantedBug(
        DURABLE, "everysec is durable", "baton/store/durability.py",
        'in ("always", "no")', 'in ("always", "no", "everysec")', DURABILITY,
    ),
    PlantedBug(
        DURABLE, "an outage leaves the last reading", "baton/store/durability.py",
        "self._set(Durability.ROUTER)\n        self._doubt.set()", "self._doubt.set()", DURABILITY,
    ),
    PlantedBug(
        DURABLE, "a reading from before the doubt counts", "baton/store/durability.py",
        "if not self._doubt.is_set():", "if True:", DURABILITY,
    ),
    PlantedBug(
        DURABLE, "a store that does not answer keeps its level", "baton/store/durability.py",
        "level, wait_s = Durability.ROUTER, self._retry_s", "level, wait_s = self._level, self._retry_s", DURABILITY,
    ),
    PlantedBug(
        READERS, "unread output has no bound", "services/router/streaming/unread_buffer.py",
        "while self._num_bytes > self._max_bytes:", "while False:", UNREAD,
    ),
    PlantedBug(
        READERS, "unread logprobs have no bound", "services/router/streaming/unread_buffer.py",
        "if self._num_logprob_bytes > MAX_UNREAD_LOGPROB_BYTES:", "if False:", UNREAD,
    ),
    PlantedBug(
        READERS, "the client that reads is hung up", "services/router/streaming/unread_buffer.py",
        "next(iter(self._buffers)).overflow()", "next(reversed(self._buffers)).overflow()", UNREAD,
    ),
    PlantedBug(
        READERS, "a slot waits for its client", f"{DISPATCH}/dispatcher.py",
        "self._admission.leave(tracked)  #", "pass  #",
        "tests/service/dispatch/test_dispatcher.py tests/service/http/test_slow_readers.py",
    ),
    PlantedBug(
        READERS, "no write times out", "services/router/edge/http_protocol.py",
        "if self._num_stalled_checks >= _WRITE_CHECKS:", "if False:",
        "tests/service/http/test_http_protocol.py tests/service/http/test_slow_readers.py",
    ),
    PlantedBug(
        CALLERS, "a call token works twice", "baton/rpc/call_token.py",
        "if not bit or self.seen & bit:", "if not bit:", CALL_TOKENS,
    ),
    PlantedBug(
        CALLERS, "a token for the predecessor works", "baton/rpc/call_token.py",
        "if audience != self._incarnation:", "if False:", CALL_TOKENS,
    ),
    PlantedBug(
        CALLERS, "a token does not name its method", "baton/rpc/call_token.py",
        'b"".join((b"header\\0", header, method.encode()))', 'b"".join((b"header\\0", header))', CALL_TOKENS,
    ),
    PlantedBug(
        CALLERS, "calls without a token are served", "baton/rpc/auth_interceptor.py",
        "if token is CallTokenFault.MISSING and self._rules.open:", "if token is CallTokenFault.MISSING:", CALL_TOKENS,
    ),
    PlantedBug(
        CALLERS, "calls older than the window are served", "baton/rpc/call_token.py",
        "if self.newest - number < WINDOW_CALLS else 0", "if True else 0", CALL_TOKENS,
    ),
    PlantedBug(
        REPLIES, "a tag may be missing", REPLY_TAGS,
        "return reply if hmac", "return tagged if _FIELD not in tagged else reply if hmac", TAG_TESTS,
    ),
    PlantedBug(
        REPLIES, "a tag fits any call", REPLY_TAGS,
        "blake2b(token[:HEADER_BYTES], key=key", 'blake2b(b"", key=key', TAG_TESTS,
    ),
    PlantedBug(
        REPLIES, "a tag fits any place in its call", REPLY_TAGS,
        "keyed.update(_NUMBER.pack(next(self._numbers)))", "pass", TAG_TESTS,
    ),
    PlantedBug(
        REPLIES, "a tag covers no bytes", REPLY_TAGS, "keyed.update(reply)", "pass", TAG_TESTS,
    ),
    PlantedBug(
        REPLIES, "any key makes tags", REPLY_TAGS, "key=key, digest_size", 'key=b"k", digest_size', TAG_TESTS,
    ),
    PlantedBug(
        REPLIES, "callers ask for no tags", "baton/rpc/channel_pool.py",
        "            reply_key(self.trust),\n", "", f"{TAG_TESTS} tests/service/test_forged_replies.py",
    ),
    PlantedBug(
        WORKER_ID, "a held id is free", "baton/worker/identity/worker_id.py",
        " and await _is_announced_again(registry, held, watch_s):", " and False:", IDS,
    ),
    PlantedBug(
        WORKER_ID, "a dead holder keeps the id", "baton/worker/identity/worker_id.py",
        " and await _is_announced_again(registry, held, watch_s):", ":", IDS,
    ),
    PlantedBug(
        WORKER_ID, "an ended predecessor is watched", "baton/worker/identity/worker_id.py",
        " and held.incarnation != ended", "", "tests/unit/worker/identity/test_incarnation_file.py",
    ),
    PlantedBug(
        WORKER_ID, "a worker that another follows has left", "baton/domain/departures.py",
        "            if holders.get(record.id, incarnation) != incarnation:", "            if False:",
        "tests/unit/domain/test_departures.py",
    ),
    PlantedBug(
        WORKER_ID, "two ports of a host share an id", "baton/worker/identity/worker_id.py",
        'suffix = "" if port == usual_port else', 'suffix = "" if port else', IDS,
    ),
    PlantedBug(
        WORKER_ID, "a worker whose id was taken goes on", "baton/worker/registration.py",
        "self._on_lost(RegistrationLoss.TAKEN)", "pass", IDS,
    ),
    PlantedBug(
        WORKER_ID, "a replaced worker goes on", "baton/worker/registration.py",
        "self._on_lost(RegistrationLoss.REPLACED)", "pass", IDS,
    ),
    PlantedBug(
        INPUT, "a body has no bound", "services/router/edge/body.py",
        "if len(body) > max_body_bytes:", "if False:", "tests/service/http/test_errors.py tests/unit/router",
    ),
    PlantedBug(
        INPUT, "a compressed body is parsed", "services/router/edge/body.py",
        'if encoding not in ("", "identity"):', "if False:", "tests/service/http/test_edges.py",
    ),
    PlantedBug(
        INPUT, "a head has no bound", "services/router/edge/http_protocol.py",
        "if num_bytes > MAX_HEAD_BYTES:", "if False:", "tests/fuzz/test_wire.py",
    ),
    PlantedBug(
        INPUT, "a refusal dies with its connection", "services/router/edge/lingering_close.py",
        "if self._is_read() or not self._transport.can_write_eof():", "if True:", HTTP,
    ),
    PlantedBug(
        INPUT, "a refused body may go on for ever", "services/router/edge/lingering_close.py",
        "if self._num_bytes > MAX_LINGER_BYTES:", "if False:", HTTP,
    ),
    PlantedBug(
        WAITS, "a queue has no deadline", f"{DISPATCH}/dispatcher.py",
        "async with asyncio.timeout_at(tracked.deadline):", "async with asyncio.timeout_at(None):",
        "tests/service/dispatch/test_admission.py tests/service/dispatch/test_overload.py",
    ),
    PlantedBug(
        WAITS, "a request without its model keeps its slot", f"{DISPATCH}/admission.py",
        "self._wake(self.queue.suspend(slot, asyncio.get_running_loop().time()))", "pass",
        "tests/service/dispatch/test_required_fingerprint.py",
    ),
    PlantedBug(
        WAITS, "a suspended request never gets a slot again", f"{DISPATCH}/admission.py",
        "self.queue.resume(tracked.slot)", "pass",
        "tests/service/dispatch/test_required_fingerprint.py",
    ),
    PlantedBug(
        "fairness", "a resumed request is charged again", "services/router/admission/fair_queue.py",
        "if slot.started_at is None:", "if True:", "tests/unit/router/admission/test_suspended_slots.py",
    ),
    PlantedBug(
        WAITS, "a reply of a reservation is awaited for ever", f"{DISPATCH}/sessions/session_or_call.py",
        "min(gives_up_at, deadline), stream.cancel", "gives_up_at, stream.cancel",
        "tests/unit/router/dispatch/sessions/test_send_reserve.py",
    ),
    PlantedBug(
        WAITS, "a reservation waits for ever", f"{DISPATCH}/reserve.py",
        "async with asyncio.timeout_at(search.deadline)", "async with asyncio.timeout_at(None)",
        "tests/service/dispatch/test_admission.py",
    ),
    PlantedBug(
        WAITS, "a read of pages is never late", "baton/transfer/puller.py",
        "if now > active.deadline:", "if False:", "tests/unit/transfer/test_puller.py",
    ),
    PlantedBug(
        WAITS, "a store that is silent holds its caller", "baton/store/redis/client.py",
        "async with asyncio.timeout(self._timeout_s + wait_s):", "async with asyncio.timeout(None):",
        "tests/unit/store/redis tests/contract/test_store_calls.py",
    ),
    PlantedBug(
        WAITS, "a head may take for ever", "services/router/edge/http_protocol.py",
        'self._reject(HeadTooSlow(f"the request\'s head did not arrive within {HEAD_TIMEOUT_S:g} s"))', "pass", HTTP,
    ),
    PlantedBug(
        LABELS, "a write's transport is a read's", "baton/transfer/ucx_report.py",
        "if in_read:", "if True:", "tests/unit/transfer/test_ucx_report.py",
    ),
    PlantedBug(
        LABELS, "one of two transports is shown", "baton/transfer/ucx_report.py",
        'if len(found) == 1 and "?" not in found else None', "if found else None",
        "tests/unit/transfer/test_ucx_report.py",
    ),
    PlantedBug(
        LABELS, "a rollback keeps the shown durability", "baton/store/durability.py",
        "self._doubt.set()", "pass", DURABILITY,
    ),
    PlantedBug(
        LABELS, "a host's durability is shown for a restart's", "baton/store/durability.py",
        'int(config.get("min-replicas-to-write", 0)) > 0', "True", DURABILITY,
    ),
    PlantedBug(
        LABELS, "a departed worker keeps its series", "baton/worker/handoff/links.py",
        "self._series.remove(departed)", "pass", "tests/unit/worker/handoff/test_link_series.py",
    ),
    PlantedBug(
        "nothing ignored", "an alias silently wins over its target", "services/router/openai/field_table/table.py",
        "elif target != value:", "elif False:", "tests/contract/test_request_fields.py",
    ),
    PlantedBug(
        "room to grow", "a full reserve keeps the free pages of half a row", "baton/kv/growth.py",
        "math.ceil((row.num_tokens + rest) /", "math.ceil((row.num_tokens + rest / 2) /",
        "tests/unit/decode/test_growth.py",
    ),
    PlantedBug(
        "sealed store", "every id has one key", "baton/store/seal.py",
        'id.encode() + b"\\x01"', 'b"\\x01"', "tests/unit/store/test_seal.py",
    ),
    PlantedBug(
        RESTARTS, "a killed server stays away", "services/cli/processes/embedded_redis.py",
        "# back-off\n            try:", "\n            await asyncio.Event().wait()\n            try:",
        EMBEDDED,
    ),
    PlantedBug(
        RESTARTS, "it comes back empty", "services/cli/processes/embedded_redis.py",
        "server_arguments(folder, durable=True)", "server_arguments(folder, durable=False)",
        EMBEDDED,
    ),
    PlantedBug(
        RESTARTS, "a restart that fails is the last", "services/cli/processes/embedded_redis.py",
        "except (OSError, RuntimeError) as error:", "except RuntimeError as error:",
        EMBEDDED,
    ),
    PlantedBug(
        RESTARTS, "it has no pauses", "services/cli/processes/restart_budget.py",
        "min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (num_ends - 2)) if num_ends > 1 else 0.0", "0.0",
        EMBEDDED,
    ),
    PlantedBug(
        RESTARTS, "its pauses become ever longer", "services/cli/processes/restart_budget.py",
        "min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (num_ends - 2))", "FIRST_PAUSE_S * 2.0 ** (num_ends - 2)",
        EMBEDDED,
    ),
    PlantedBug(
        RESTARTS, "its end is taken for that of a service", "services/cli/processes/supervisor.py",
        "if child.command.watched]", "]", EMBEDDED,
    ),
    PlantedBug(
        RESTARTS, "each end is told for ever", "services/cli/processes/embedded_redis.py",
        "elif not is_told:", "else:", EMBEDDED,
    ),
    PlantedBug(
        RESTARTS, "an end that is long ago counts", "services/cli/processes/restart_budget.py",
        "if now - at < WINDOW_S", "if True", EMBEDDED,
    ),
    PlantedBug(
        RESTARTS, "a stopped server holds up the end", "services/cli/processes/supervisor.py",
        "min(grace_s, child.command.stop_s)", "grace_s",
        EMBEDDED,
    ),
)  # fmt: skip
