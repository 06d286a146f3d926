"""OpenVINO's server beside a pipeline of ours: events and their order, ends, cancelled requests, and `BenchClient`."""

import asyncio
import enum
import time

from baton.services.cli.bench.client.bench_client import BenchClient, RequestTemplate
from baton.services.cli.bench.options import ApiEndpoint
from baton.services.cli.bench.results.records import PlannedRequest
from bench.peers.openvino_server import CompletionsServer, PipelineRunner


class Reason(enum.Enum):
    NONE = 0
    LENGTH = 2


class Output:
    def __init__(self, ids: list[int], reason: Reason) -> None:
        self.generated_ids = ids
        self.finish_reason = reason


class Handle:
    def __init__(self, first: int, num_tokens: int) -> None:
        self.left = list(range(first, first + num_tokens))
        self.ready: list[Output] = []
        self.is_cancelled = False

    def can_read(self) -> bool:
        return bool(self.ready)

    def read(self) -> dict[int, Output]:
        return {0: self.ready.pop(0)}

    def cancel(self) -> None:
        self.is_cancelled = True
        self.left = []


class Pipeline:
    """A token of every request a step; the ids count up from the prompt's first one."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.widths: list[int] = []

    def add(self, _number: int, prompt: list[int], max_tokens: int) -> Handle:
        self.handles.append(Handle(prompt[0], max_tokens))
        return self.handles[-1]

    def has_non_finished_requests(self) -> bool:
        return any(handle.left for handle in self.handles)

    def step(self) -> None:
        running = [handle for handle in self.handles if handle.left]
        self.widths.append(len(running))
        for handle in running:
            id = handle.left.pop(0)
            handle.ready.append(Output([id], Reason.NONE if handle.left else Reason.LENGTH))


def make_engine() -> tuple[Pipeline, PipelineRunner]:
    pipeline = Pipeline()
    return pipeline, PipelineRunner(pipeline, lambda made, *asked: made.add(*asked))


def test_requests_run_together_and_end_once():
    pipeline, engine = make_engine()
    told: dict[str, list[list[int]]] = {"a": [], "b": []}
    engine.submit([10], 3, told["a"].append)
    engine.submit([20], 2, told["b"].append)
    for _ in range(5):
        engine.step()
    assert told == {"a": [[10], [11], [12], []], "b": [[20], [21], []]}
    assert pipeline.widths == [2, 2, 1]


def test_a_cancelled_request_gets_no_token_more():
    pipeline, engine = make_engine()
    told: list[list[int]] = []
    cancel = engine.submit([10], 5, told.append)
    engine.step()
    cancel()
    engine.step()
    assert told == [[10]]
    assert pipeline.handles[0].is_cancelled
    assert pipeline.widths == [1]


def test_a_request_that_the_pipeline_drops_ends():
    pipeline, engine = make_engine()
    told: list[list[int]] = []
    engine.submit([10], 5, told.append)
    engine.step()
    pipeline.handles[0].left = []
    engine.step()
    assert told == [[10], []]


async def test_our_client_reads_its_answers():
    _, engine = make_engine()
    stepping = asyncio.create_task(engine.run())
    server = await asyncio.start_server(CompletionsServer(engine.submit).handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    template = RequestTemplate("m", ApiEndpoint.COMPLETIONS, temperature=0.0, ignore_eos=True, continuous_usage=False)
    async with (
        server,
        BenchClient(f"http://127.0.0.1:{port}", api_key=None, timeout_s=30.0, clock=time.perf_counter) as client,
    ):
        assert await client.first_model() == "m"
        answers = [
            await client.measure(template, PlannedRequest(0, 0.0, (7, 8, 9), num_tokens), lambda _: None)
            for num_tokens in (4, 1)
        ]
    for answer, num_tokens in zip(answers, (4, 1), strict=True):
        assert answer.failure is None
        assert (answer.num_prompt_tokens, answer.num_output_tokens) == (3, num_tokens)
        assert len(answer.deliveries) == num_tokens
    assert not stepping.done()
    stepping.cancel()
