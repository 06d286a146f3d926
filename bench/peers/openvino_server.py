"""Serves OpenVINO GenAI's continuous batching by the part of OpenAI's API that the comparison uses.

Runs in the openvino environment of `install.sh`, which has no code of Baton; OpenVINO has no server of its own in a
registry:

    DIRECTORY/openvino/bin/python bench/peers/openvino_server.py FILE.gguf --port 8000 --threads 2 --precision bf16

Takes `POST /v1/completions` with a prompt of token ids and `"stream": true`, and `GET /v1/models`, which answers once
the model is loaded. Each token is an event, whose text is the token's id: no time goes to detokenisation, which is in
OpenVINO's favour. A closed connection cancels its request. A step of the pipeline holds the interpreter, so it runs in
the event loop, and what came and what is to be sent is done between two steps: in a thread of its own, a step would
begin before the tokens of the last one had left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable
from typing import Any

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODEL_NAME = "m"
PASSES_BETWEEN_STEPS = 10
"""Passes of the event loop, which send the tokens of a step and read a request from its connection on."""


class PipelineRunner:
    """Steps a continuous-batching pipeline while it has requests. Owned by one event loop.

    `submit(prompt, max_tokens, on_tokens)` returns a function that cancels; `on_tokens` is called with new token ids,
    and with an empty list at the end.
    """

    def __init__(self, pipeline: Any, make_request: Callable[[Any, int, list[int], int], Any]) -> None:
        self._pipeline = pipeline
        self._make_request = make_request
        self._numbers = itertools.count()
        self._has_requests = asyncio.Event()
        self._running: dict[int, tuple[Any, Callable[[list[int]], None]]] = {}

    def submit(self, prompt: list[int], max_tokens: int, on_tokens: Callable[[list[int]], None]) -> Callable[[], None]:
        """Starts a request."""
        number = next(self._numbers)
        self._running[number] = (self._make_request(self._pipeline, number, prompt, max_tokens), on_tokens)
        self._has_requests.set()
        return lambda: self._cancel(number)

    async def run(self) -> None:
        """Steps forever."""
        while True:
            await self._has_requests.wait()
            self.step()
            for _ in range(PASSES_BETWEEN_STEPS):
                await asyncio.sleep(0)
            if not self._running:
                self._has_requests.clear()

    def step(self) -> None:
        """One step of the pipeline, and its tokens to those who wait for them."""
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        is_idle = not self._pipeline.has_non_finished_requests()
        for number, (handle, on_tokens) in list(self._running.items()):
            while handle.can_read():
                [output] = handle.read().values()
                on_tokens(list(output.generated_ids))
                if is_end(output.finish_reason):
                    del self._running[number]
                    on_tokens([])
                    break
            else:
                if is_idle and self._running.pop(number, None) is not None:
                    on_tokens([])

    def _cancel(self, number: int) -> None:
        found = self._running.pop(number, None)
        if found is not None:
            found[0].cancel()


def is_end(reason: Any) -> bool:
    """True for every finish reason of OpenVINO but the one of a request that goes on."""
    return getattr(reason, "name", "NONE") != "NONE"


def event(text: str, finish_reason: str | None, usage: dict[str, int] | None = None) -> bytes:
    """One server-sent event as an HTTP chunk."""
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    body: dict[str, Any] = {"object": "text_completion", "model": MODEL_NAME, "choices": [choice]}
    if usage is not None:
        body["usage"] = usage
    return chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class CompletionsServer:
    """Handles connections, one request at a time each."""

    def __init__(self, submit: Callable[..., Callable[[], None]]) -> None:
        self._submit = submit

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection until its end."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = [line.partition(b":") for line in head.lower().split(b"\r\n")]
                length = next((int(value) for name, _, value in fields if name == b"content-length"), 0)
                body = await reader.readexactly(length)
                if head.startswith(b"POST /v1/completions"):
                    await self._complete(json.loads(body), writer)
                else:
                    listed = json.dumps({"object": "list", "data": [{"id": MODEL_NAME, "object": "model"}]}).encode()
                    status = b"200 OK" if head.startswith((b"GET /v1/models", b"GET /health")) else b"404 Not Found"
                    writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(listed), listed))
                await writer.drain()

    async def _complete(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        tokens = asyncio.Queue[list[int]]()
        prompt, num_tokens = asked["prompt"], 0
        cancel = self._submit(prompt, asked["max_tokens"], tokens.put_nowait)
        try:
            writer.write(_HEAD)
            while ids := await tokens.get():
                num_tokens += len(ids)
                writer.write(b"".join(event(f"{id} ", None) for id in ids))
                await writer.drain()
                if writer.is_closing():
                    raise ConnectionResetError
        except (ConnectionError, asyncio.CancelledError):
            cancel()
            raise
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num_tokens}
        usage["total_tokens"] = len(prompt) + num_tokens
        writer.write(event("", "length", usage) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def load(model: str, threads: int, precision: str, rows: int, cache_gib: int) -> PipelineRunner:
    """Loads the model. Blocks until it is loaded."""
    import numpy as np  # in the peer's environment only
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = cache_gib, rows
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def make_request(pipeline: Any, number: int, prompt: list[int], max_tokens: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        return pipeline.add_request(number, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)

    return PipelineRunner(pipeline, make_request)


async def serve(engine: PipelineRunner, port: int) -> None:
    """Serves until the process ends."""
    server = await asyncio.start_server(CompletionsServer(engine.submit).handle, "127.0.0.1", port, limit=1 << 22)
    async with server:
        await engine.run()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--cache-gib", type=int, default=1)
    flags = parser.parse_args()
    engine = load(flags.model, flags.threads, flags.precision, flags.rows, flags.cache_gib)
    asyncio.run(serve(engine, flags.port))


if __name__ == "__main__":
    main()
