"""Images on their way to workers: once to each process, before the prompt, again when they were lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.domain.errors import InvalidRequest, NeedMedia, NoWorkers, Overloaded
from baton.domain.worker import TEXT, WorkerBudgets
from baton.rpc.codec import decode_request
from baton.rpc.gen import prefill_pb2
from baton.rpc.media_upload import MAX_PART_BYTES
from baton.telemetry.metrics import REGISTRY
from tests.mock_workers import Fail, Phase, ScriptedAction
from tests.service.dispatch.dispatch_world import LIMITS, scripted, sequence, tokens
from tests.service.dispatch.media.vision_world import BLUE, PROCESSOR, RED, announce, image, seen, vision

pytestmark = pytest.mark.usefixtures("both_streams")


def uploads() -> float:
    return REGISTRY.get_sample_value("baton_media_uploads_total", {"outcome": "held"}) or 0.0


def uploaded_bytes() -> float:
    return REGISTRY.get_sample_value("baton_media_upload_bytes_total") or 0.0


async def test_a_file_comes_once_and_spans_go_to_both_workers():
    async with vision() as w:
        for name in ("a", "b"):
            assert tokens(await w.generate(seen(name, RED, BLUE, RED))) == scripted(5)
        headers = w.prefill.media.headers
        assert sorted(header.identity for header in headers) == sorted(image(data).identity for data in (RED, BLUE))
        assert [header.num_rows for header in headers] == [4, 4]
        assert {header.processor for header in headers} == {PROCESSOR}
        assert set(w.prefill.media.held.values()) == {RED, BLUE}
        spans = seen("a", RED, BLUE, RED).media
        assert [request.media for request in w.prefill.requests] == [spans, spans]
        assert [decode_request(message.request).media for message in w.decode.generates] == [spans, spans]


async def test_a_large_file_comes_in_parts():
    large = bytes(range(256)) * (2 * MAX_PART_BYTES // 256) + b"rest"
    before = uploads(), uploaded_bytes()
    async with vision() as w:
        for name in ("a", "b"):
            await w.generate(seen(name, large))
        assert list(w.prefill.media.held.values()) == [large]
    assert (uploads(), uploaded_bytes()) == (before[0] + 1, before[1] + len(large)), "a held image costs nothing"


async def test_images_of_another_salt_are_sent_again():
    async with vision() as w:
        for salt in ("one", "two"):
            await w.generate(seen(salt, RED, salt=salt))
        assert [header.salt for header in w.prefill.media.headers] == ["one", "two"]


async def test_a_lost_image_is_sent_again_and_the_answer_is_the_same():
    async with vision() as w:
        await w.generate(seen("a", RED))
        w.prefill.media.held.clear()
        sent = seen("b", RED, BLUE)
        assert tokens(await w.generate(sent)) == scripted(5)
        assert len(w.prefill.media.headers) == 3  # red, blue, and red again
        assert [request.id.attempt for request in w.prefill.requests] == [1, 1, 2]


async def test_a_new_process_gets_all_images():
    async with vision() as w:
        await w.generate(seen("a", RED))
        w.prefill.change_incarnation()
        await announce(w)
        await w.generate(seen("b", RED))
        assert len(w.prefill.media.headers) == 2


async def test_a_later_attempt_on_another_worker_brings_its_images():
    lose = (ScriptedAction(Phase.ACCEPT, Fail("worker_lost"), times=1),)
    async with vision(num_prefill=2, script=lose) as w:
        assert tokens(await w.generate(seen("a", RED))) == scripted(5)
        assert [len(prefill.media.headers) for prefill in w.cluster.prefills] == [1, 1]


async def test_equal_placeholders_have_other_page_keys():
    async with vision() as w:
        for name, data in (("a", RED), ("b", BLUE), ("c", RED)):
            await w.generate(seen(name, data))
        first, second, third = (list(message.page_keys) for message in w.decode.reservations)
        assert first == third
        assert first != second


async def test_a_refused_file_is_the_clients_mistake():
    async with vision() as w:
        for outcome in (prefill_pb2.MEDIA_OUTCOME_UNREADABLE, prefill_pb2.MEDIA_OUTCOME_TOO_LARGE):
            w.prefill.media.outcomes.append(outcome)
            with pytest.raises(InvalidRequest, match="the image is damaged") as refused:
                await w.generate(seen(f"a{outcome}", RED))
            assert refused.value.param == "messages[0].content[0].image_url.url"
        assert w.prefill.requests == []
        assert tokens(await w.generate(seen("b", RED))) == scripted(5)


async def test_another_count_fails_that_request_only():
    async with vision() as w:
        w.prefill.media.outcomes.append(prefill_pb2.MEDIA_OUTCOME_COUNT_DIFFERS)
        with pytest.raises(InvalidRequest, match="0 tokens when it is decoded, 4 by its header") as refused:
            await w.generate(seen("a", RED))
        assert refused.value.param == "messages[0].content[0].image_url.url"
        assert tokens(await w.generate(seen("b", RED))) == scripted(5)


async def test_a_worker_of_another_processor_is_left_for_another_one():
    async with vision(num_prefill=2) as w:
        outcomes: list[int] = [prefill_pb2.MEDIA_OUTCOME_OTHER_PROCESSOR]  # of the first upload, to either worker
        for prefill in w.cluster.prefills:
            prefill.media.outcomes = outcomes
        assert tokens(await w.generate(seen("a", RED))) == scripted(5)
        assert [len(prefill.media.headers) for prefill in w.cluster.prefills] == [1, 1]
        assert not w.workers.suspicions.any  # it is well, and serves text
        assert tokens(await w.generate(seen("b", RED))) == scripted(5)


@pytest.mark.parametrize("lacks", ["prefill", "decode", "processor"])
async def test_only_pairs_that_serve_images_get_any(lacks):
    async with vision() as w:
        if lacks == "processor":
            w.prefill.processor = "q" * 32
        else:
            (w.prefill if lacks == "prefill" else w.decode).modalities = (TEXT,)
        await announce(w)
        with pytest.raises(NoWorkers, match="serves images"):
            w.admit(seen("a", RED))
        assert tokens(await w.generate(sequence("b"))) == scripted(5)


async def test_decode_computes_no_prompt_with_images():
    async with vision() as w:
        w.decode.budgets = WorkerBudgets(prefill_tokens=512, rows=8)
        w.prefill.budgets = WorkerBudgets()
        await announce(w)
        with pytest.raises(NoWorkers, match="serves images"):
            w.admit(seen("a", RED))


async def test_a_taken_over_sequence_needs_its_images_on_a_worker():
    async with vision() as w:
        await w.generate(seen("a", RED))
        without = tuple(replace(file, data=None) for file in seen("b", RED).files)
        assert tokens(await w.generate(replace(seen("b", RED), files=without))) == scripted(5)
        w.prefill.media.held.clear()
        with pytest.raises(NeedMedia):
            await w.generate(replace(seen("c", RED), files=without))


async def test_the_memory_of_images_is_bounded_and_given_back():
    limits = replace(LIMITS, max_media_bytes=2 * len(RED))
    async with vision(limits=limits) as w:
        shared = seen("a", RED)
        held = [w.admit(shared), w.admit(replace(shared, id=sequence("a2").id)), w.admit(seen("b", BLUE))]
        with pytest.raises(Overloaded, match="too many images"):
            w.admit(seen("c", bytes(bytearray(RED))))
        for admitted in held:
            w.dispatcher.release(admitted)
        assert tokens(await w.generate(seen("d", RED))) == scripted(5)
        assert w.dispatcher._media_budget.num_bytes == 0


async def test_a_cancelled_upload_ends_with_its_request():
    async with vision() as w:
        w.prefill.media.hangs = True
        running = asyncio.create_task(w.generate(seen("a", RED)))
        async with asyncio.timeout(5):
            await w.prefill.media.arrived.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert w.dispatcher._media_budget.num_bytes == 0
        assert w.dispatcher._uploader._under_way == {}
