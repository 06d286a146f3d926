"""The planted bugs, by promise. Each removes one rule that a promise of the README or docs/protocol.md rests on."""

from __future__ import annotations

from tests.planted.runner import PlantedBug
from tests.planted.tables.chain_bugs import CHAIN_BUGS
from tests.planted.tables.checkpoint_bugs import CHECKPOINT_BUGS
from tests.planted.tables.constraint_bugs import CONSTRAINT_BUGS
from tests.planted.tables.event_bugs import EVENT_BUGS
from tests.planted.tables.media_bugs import MEDIA_BUGS
from tests.planted.tables.native_bugs import CORE_BUGS, LAYER_BUGS, SOFTMAX_BUGS
from tests.planted.tables.overlap_bugs import OVERLAP_BUGS
from tests.planted.tables.page_connection_bugs import PAGE_CONNECTION_BUGS
from tests.planted.tables.page_part_bugs import LATENT_BUGS, WINDOW_BUGS
from tests.planted.tables.prefill_bugs import PREFILL_BUGS
from tests.planted.tables.promise_bugs import PROMISE_BUGS
from tests.planted.tables.session_bugs import LINK_PORT_BUGS, LINK_SESSION_BUGS, SESSION_BUGS
from tests.planted.tables.speculation_bugs import SPECULATION_BUGS
from tests.planted.tables.tool_bugs import TOOL_BUGS

PAGES, OWNERSHIP, MESSAGES, IDENTITY = "right pages", "one owner", "messages", "identity"
SEAL, FAIRNESS, ROOM = "sealed store", "fairness", "room to grow"
CLIENTS = "nothing ignored"

KV, DECODE, PREFILL = "tests/unit/kv", "tests/unit/decode", "tests/unit/prefill"
STORE_CALLS = "tests/contract/test_store_ballots.py tests/contract/test_store_calls.py"


def bug(promise: str, name: str, file: str, before: str, after: str, tests: str) -> PlantedBug:
    return PlantedBug(promise, name, file, before, after, tests)


BUGS = (
    *EVENT_BUGS, *CONSTRAINT_BUGS,
    *WINDOW_BUGS, *LATENT_BUGS, *CHAIN_BUGS, *MEDIA_BUGS, *CHECKPOINT_BUGS, *CORE_BUGS,
    *LAYER_BUGS, *SOFTMAX_BUGS, *TOOL_BUGS, *SESSION_BUGS,
    *LINK_SESSION_BUGS, *LINK_PORT_BUGS, *PAGE_CONNECTION_BUGS, *PREFILL_BUGS, *PROMISE_BUGS, *SPECULATION_BUGS,
    *OVERLAP_BUGS,
    bug(
        CLIENTS, "a refused field is ignored", "services/router/openai/field_table/table.py",
        "given.add_error(name, field.meaning)", "pass",
        "tests/contract/test_request_fields.py",
    ),
    bug(
        CLIENTS, "true counts as the neutral 1", "services/router/openai/field_table/field.py",
        "value == neutral and isinstance(value, bool) == isinstance(neutral, bool)", "value == neutral",
        "tests/contract/test_request_fields.py",
    ),
    bug(
        CLIENTS, "a date in a prompt is not that of the call", "services/router/openai/validation.py",
        "chat = read_chat(fields, scalars, self._text, metadata.created_s, images)",
        "chat = read_chat(fields, scalars, self._text, 1_700_000_000, images)",
        "tests/unit/router/openai/test_template_fields.py",
    ),
    bug(
        CLIENTS, "an unknown field is nowhere named", "services/router/openai/validation.py",
        "unknown_fields=checked.unknown + chat.unread", "unknown_fields=()",
        "tests/service/http/test_unknown_fields.py",
    ),
    bug(
        ROOM, "rows are admitted without room to grow", "services/decode/import_policy.py",
        "not self._can_grow(id, max_new_tokens)", "False",
        f"{DECODE}/test_growth.py",
    ),
    bug(
        ROOM, "shared pages count as coming back", "baton/kv/growth.py",
        "num_returned = sum(row.num_own_pages for row in rows)", "num_returned = sum(row.num_pages for row in rows)",
        f"{DECODE}/test_growth.py",
    ),
    bug(
        ROOM, "the peak learns from no output", "baton/kv/growth.py",
        "self._lengths.append(num_output_tokens)", "pass",
        f"{DECODE}/test_growth.py",
    ),
    bug(
        ROOM, "the ratio does not rise by a preemption", "baton/kv/growth.py",
        "self._ratio = max(self._ratio, min(1.0, num_used / (num_most + 1)))", "pass",
        f"{DECODE}/test_growth.py",
    ),
    bug(
        IDENTITY, "another page format is explained by its other parts", "baton/domain/fingerprint.py",
        "if here.get(PAGE_FORMAT, OLDEST_PAGE_FORMAT) != there.get(PAGE_FORMAT, OLDEST_PAGE_FORMAT):", "if False:",
        "tests/unit/domain/test_fingerprint.py tests/unit/worker/handoff/test_hello.py",
    ),
    bug(
        IDENTITY, "the number of head groups is not in the fingerprint", "baton/kv/geometry.py",
        '            "kv_head_groups": str(self.group.head_groups),\n', "",
        f"{KV}/test_geometry.py tests/unit/worker/handoff/test_hello.py",
    ),
    bug(
        PAGES, "rows of a page are gathered as if it had one head group", "baton/model/storage.py",
        "* (self.geometry.group_stride // self._unit)", "* (num_kv_heads // num_groups * num_units)",
        "tests/unit/model/test_storage.py",
    ),
    bug(
        PAGES, "a row of the pool crosses the padding of a page", "baton/model/storage.py",
        "math.gcd(*sizes, *(", "math.gcd(*(",
        "tests/unit/model/test_storage.py",
    ),
    bug(
        PAGES, "flashinfer gets heads at two distances", "baton/model/attention/flashinfer_backend.py",
        "and head_groups in (1, layer.geometry.num_kv_heads)", "and head_groups",
        "tests/unit/model/attention/test_flashinfer_backend.py",
    ),
    bug(
        PAGES, "only the first part of a page has a digest", "baton/transfer/digest.py",
        "for part in parts], len(parts))", "for part in parts[:1] * len(parts)], len(parts))",
        "tests/unit/transfer/test_digest.py",
    ),
    bug(
        PAGES, "host memory has other parts than the pool", "baton/engine/pool/memory.py",
        "return PageMemory(num_slots, geometry.page_bytes, geometry.part_ends)",
        "return PageMemory(num_slots, geometry.page_bytes)",
        "tests/unit/engine/test_build.py",
    ),
    bug(
        MESSAGES, "a chunk may have fewer digests than parts", "baton/worker/handoff/handoff_calls.py",
        "if len(chunk.digests) not in (0, wanted):", "if False:",
        f"{DECODE}/test_handoff_client.py",
    ),
    bug(
        MESSAGES, "a tag fits another part of its page", "baton/kv/page_tags.py",
        "return identity + number.to_bytes(2)", "return identity + bytes(2)",
        f"{KV}/test_page_tags.py",
    ),
    bug(
        PAGES, "matched pages are not checked", "baton/kv/page_table.py",
        "wrong = checks.check_matched(self.pages)", "wrong = []",
        f"{PREFILL}/test_wrong_pages.py {KV}/test_page_checks.py",
    ),
    bug(
        PAGES, "quarantine keeps the descendants", "baton/kv/prefix_cache.py",
        "taken = self._subtree(key)", "taken = self._subtree(key)[:1]",
        f"{KV}/test_page_checks.py",
    ),
    bug(
        PAGES, "a settled page may be hashed anew", "baton/kv/page_digests.py",
        'if states[page]:\n                raise Broken(f"page {page} is {self.state(page).name} and cannot settle")',
        "if False:\n                raise Broken()",
        f"{KV}/test_page_digests.py",
    ),
    bug(
        PAGES, "a condemned page has a digest to publish", "baton/kv/page_digests.py",
        '!= _SETTLED:\n            raise Broken(f"page {page} is {self.state(page).name} and has',
        '== 0:\n            raise Broken(f"page {page} is {self.state(page).name} and has',
        f"{KV}/test_page_digests.py",
    ),
    bug(
        PAGES, "a row joins with unchecked pages", "services/decode/import_table.py",
        "and not kv_import.unchecked", "and True",
        f"{DECODE}/test_page_faults.py",
    ),
    bug(
        PAGES, "a source's quarantine is not obeyed", "services/decode/page_faults.py",
        "self.quarantine.add_keys(keys)", "self.quarantine.add_keys(())",
        f"{DECODE}/test_page_faults.py",
    ),
    bug(
        PAGES, "a tainted table enters its pages", "baton/kv/page_table.py",
        "        if self.is_tainted:\n            return\n", "",
        f"{KV} {PREFILL}/test_wrong_pages.py tests/property/test_pages.py tests/property/test_prefill_scheduler.py",
    ),
    bug(
        OWNERSHIP, "the epoch alone decides", "baton/domain/ids.py",
        "return self.epoch, self.owner_tag, self.attempt", "return self.epoch, 0, self.attempt",
        f"tests/unit/domain/test_request.py {DECODE}/test_import_policy.py",
    ),
    bug(
        OWNERSHIP, "nobody waits after a reset", "baton/store/ownership.py",
        "self._claims_from = now + patience_s(self._ttl_s)", "self._claims_from = now",
        "tests/unit/store/test_ownership.py",
    ),
    bug(
        OWNERSHIP, "a lease counts from its answer", "baton/store/ownership.py",
        "now, self._held_until = self._clock(), began + self._ttl_s",
        "now, self._held_until = self._clock(), self._clock() + self._ttl_s",
        "tests/unit/store/test_ownership.py",
    ),
    bug(
        PAGES, "pins are trusted from the answer to a renewal", "baton/worker/handoff/handoff_calls.py",
        "LeasesRenewed(renewed, sent_at + reply.lease_s)", "LeasesRenewed(renewed, monotonic_s() + reply.lease_s)",
        f"{DECODE}/test_handoff_client.py",
    ),
    bug(
        OWNERSHIP, "a returning client goes on with another answer", "services/router/streaming/sse_stream.py",
        "self._stream.digests[choice] != known", "False",
        "tests/unit/router/streaming/test_sse_stream.py",
    ),
    bug(
        OWNERSHIP, "an emptied store goes unnoticed", "baton/store/ownership.py",
        "if state.generation != self._generation:", "if False:",
        "tests/unit/store/test_ownership.py",
    ),
    bug(
        OWNERSHIP, "a rolled-back store goes unnoticed", "baton/store/ownership.py",
        "if state.number < self._last_number:", "if False:",
        "tests/unit/store/test_ownership.py",
    ),
    bug(
        OWNERSHIP, "a replica that lagged goes unnoticed", "baton/store/ownership.py",
        "if state.server != self._server else None", "if False else None",
        "tests/unit/store/test_ownership.py",
    ),
    bug(
        OWNERSHIP, "a call ends over a sequence that a rollback made live", "baton/store/redis/scripts/end_call.lua",
        "if state and not terminal[state] then", "if false then",
        "tests/unit/store/write_behind/test_writes_after_reset.py",
    ),
    bug(
        OWNERSHIP, "a write under way during a reset counts as written", "baton/store/write_behind/flusher.py",
        "        if self._queue.num_resets != num_resets:\n            self._queue.reset(sync)\n        else:",
        "        if False:\n            self._queue.reset(sync)\n        else:",
        "tests/unit/store/write_behind/test_writes_after_reset.py",
    ),
    bug(
        OWNERSHIP, "a rolled-back store keeps calls open that are over", "baton/store/write_behind/sync_queue.py",
        'for written in reversed(list(self._written)):',
        'for written in ():',
        "tests/unit/store/write_behind/test_writes_after_reset.py",
    ),
    bug(
        OWNERSHIP, "a call ends before its sequences", "baton/store/write_behind/call_sync.py",
        'if sequence.phase is not _DONE:',
        'if False:',
        "tests/unit/store/write_behind/test_writes_after_reset.py",
    ),
    bug(
        OWNERSHIP, "a sequence is put before its call", "baton/store/write_behind/sync_queue.py",
        'if isinstance(sync, RecordSync) and (sync.call in self._waiting or sync.call in self._rechecks):',
        'if False:',
        "tests/unit/store/write_behind/test_writes_after_reset.py",
    ),
    bug(
        OWNERSHIP, "a tombstone refuses its own call", "baton/store/write_behind/call_sync.py",
        'if found.ballot != desired.ballot:',
        'if (found.owner, found.ballot) != (desired.owner, desired.ballot):',
        "tests/unit/store/write_behind/test_writes_after_reset.py",
    ),
    bug(
        OWNERSHIP, "a lower ballot overwrites a call", "baton/store/redis/scripts/put_call.lua",
        "if held_epoch > epoch or (held_epoch == epoch and held_tag >= tag) then", "if false then",
        STORE_CALLS,
    ),
    bug(
        OWNERSHIP, "a claim ignores its floor", "baton/store/redis/scripts/claim_call.lua",
        "local epoch = math.max(tonumber(held[1] or 0), tonumber(ARGV[7]))", "local epoch = tonumber(held[1] or 0)",
        STORE_CALLS,
    ),
    bug(
        OWNERSHIP, "an old owner writes the journal", "baton/store/redis/scripts/write_journal.lua",
        "(held_tag > tag or (held_tag == tag and held_attempt > attempt))", "false",
        STORE_CALLS,
    ),
    bug(
        OWNERSHIP, "a live worker id is displaced", "baton/store/redis/scripts/announce.lua",
        "if held[1] and held[1] ~= ARGV[2] then", "if false then",
        "tests/contract/test_store_registry.py",
    ),
    bug(
        MESSAGES, "a damaged connection stays in use", "baton/rpc/channel.py",
        "return status not in _MEANT_WITHOUT_CODE", "return False",
        "tests/unit/rpc/test_damaged_connections.py tests/unit/transfer/test_stream.py",
    ),
    bug(
        MESSAGES, "a replaced connection cuts the calls under way", "baton/rpc/channel_pool.py",
        "if connection.num_calls == 0 and self._replaced", "if self._replaced",
        "tests/unit/rpc/test_damaged_connections.py",
    ),
    bug(
        MESSAGES, "a crashed gRPC server stays down", "baton/rpc/server.py",
        "            await self._start_again()\n", "            return\n",
        "tests/unit/rpc/test_damaged_connections.py",
    ),
    bug(
        MESSAGES, "the incarnation is not checked", "baton/rpc/auth_interceptor.py",
        "            check_incarnation(request, self._rules.incarnation)\n", "            pass\n",
        "tests/unit/rpc/test_auth_interceptor.py",
    ),
    bug(
        MESSAGES, "a body that its token does not cover is served", "baton/rpc/auth_interceptor.py",
        "if token is not None and not token.covers(body):", "if False:",
        "tests/unit/rpc/test_auth_interceptor.py tests/unit/rpc/test_call_token.py",
    ),
    bug(
        MESSAGES, "bytes are read without a budget", "baton/rpc/auth_interceptor.py",
        "if not self.budget.take(num_bytes):", "if False:",
        "tests/unit/rpc/test_auth_interceptor.py",
    ),
    bug(
        MESSAGES, "methods have no bound of their own", "baton/rpc/auth_interceptor.py",
        "if num_bytes > max_request_bytes(method):", "if False:",
        "tests/unit/rpc/test_auth_interceptor.py",
    ),
    bug(
        IDENTITY, "Hello ignores the fingerprint", "baton/worker/handoff/handoff_handlers.py",
        "        if difference is not None:\n            raise LinkBroken(difference)\n", "",
        "tests/unit/worker/handoff/test_hello.py",
    ),
    bug(
        IDENTITY, "one tensor is left out", "baton/model/loading/identity.py",
        'if name != "__metadata__":', 'if name != "__metadata__" and "layers.1." not in name:',
        "tests/unit/model/loading/test_identity.py",
    ),
    bug(
        IDENTITY, "the tokenizer is no part of a model", "baton/model/loading/identity.py",
        '"tokenizer": tokenizer,', '"tokenizer": "",',
        "tests/unit/model/loading/test_identity.py",
    ),
    bug(
        IDENTITY, "parts that do not give the digest are believed", "baton/domain/fingerprint.py",
        'return None if digest == self.digest else "fingerprint: differs from its own parts"', "return None",
        "tests/unit/domain/test_fingerprint.py",
    ),
    bug(
        IDENTITY, "a replayed registration is believed", "baton/domain/trust.py",
        "or record.announcement < self._newest.get(record.incarnation, 0)", "",
        "tests/unit/domain/test_trust.py",
    ),
    bug(
        IDENTITY, "the signature leaves out the links", "baton/domain/trust.py",
        'replace(record, signature="")', 'replace(record, signature="", links=())',
        "tests/unit/domain/test_trust.py",
    ),
    bug(
        SEAL, "a blob is not bound to its call", "baton/store/seal.py",
        "encode((kind.value, self._prefix, id))", 'encode((kind.value, self._prefix, ""))',
        "tests/unit/store/test_seal.py tests/contract/test_store_adversary.py",
    ),
    bug(
        SEAL, "a blob is not bound to its kind", "baton/store/seal.py",
        "msgspec.msgpack.encode((kind.value, self._prefix, id))", 'msgspec.msgpack.encode(("", self._prefix, id))',
        "tests/unit/store/test_seal.py",
    ),
    bug(
        SEAL, "clear bytes are accepted under a secret", "baton/store/seal.py",
        "if self.active:\n                raise SealError(SealFault.CLEAR)", "pass",
        "tests/unit/store/test_seal.py",
    ),
    bug(
        SEAL, "a removed key still opens", "baton/store/seal.py",
        "if key_id not in self._store_keys:\n            raise SealError(SealFault.UNKNOWN_KEY)",
        "key_id = key_id if key_id in self._store_keys else next(iter(self._store_keys), key_id)",
        "tests/unit/store/test_seal.py",
    ),
    bug(
        FAIRNESS, "an idle tenant is owed what it did not use", "services/router/admission/fair_queue.py",
        "tenant.service = max(tenant.service, self._least_service())", "pass",
        "tests/unit/router/admission/test_fair_queue.py",
    ),
    bug(
        FAIRNESS, "weights do not count", "services/router/admission/fair_queue.py",
        "        tenant.total_charge += charge\n        tenant.service += charge / tenant.limits.weight",
        "        tenant.total_charge += charge\n        tenant.service += charge",
        "tests/unit/router/admission/test_fair_queue.py",
    ),
    bug(
        FAIRNESS, "prompts cost nothing", "services/router/admission/fair_queue.py",
        "self.charge(slot, slot.spec.num_tokens)", "pass",
        "tests/unit/router/admission/test_fair_queue.py tests/unit/router/admission/test_admission_queue.py",
    ),
    bug(
        FAIRNESS, "a tenant's places are not bounded", "services/router/admission/fair_queue.py",
        "return self.limits.max_slots is not None and len(self.running) >= self.limits.max_slots", "return False",
        "tests/unit/router/admission",
    ),
    bug(
        FAIRNESS, "other routers' service is counted twice", "services/router/admission/fair_queue.py",
        "        tenant = self.tenant(name)\n        tenant.service += charge / tenant.limits.weight",
        "        tenant = self.tenant(name)\n        tenant.service += 2 * charge / tenant.limits.weight",
        "tests/unit/router/admission/test_fair_queue.py",
    ),
)  # fmt: skip
