"""Signals: the first one drains, the second one ends the process."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from baton.rpc.shutdown import shutdown_event

STUBBORN = """
import asyncio
from baton.rpc.shutdown import shutdown_event

async def main():
    with shutdown_event() as event:
        print("ready", flush=True)
        await event.wait()
        print("draining", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""

AT_THE_EXCHANGE = """
import asyncio, os, signal
from baton.rpc.shutdown import shutdown_event

async def main():
    loop = asyncio.get_running_loop()
    remove = loop.remove_signal_handler

    def remove_and_signal(number):
        remove(number)
        os.kill(os.getpid(), number)

    with shutdown_event():
        loop.remove_signal_handler = remove_and_signal

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: print("ours", number, flush=True))
asyncio.run(main())
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_sets_the_event(number):
    with shutdown_event() as event:
        assert not event.is_set()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(event.wait(), 10)


def test_the_second_signal_ends_the_process():
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM


async def test_each_further_signal_makes_the_call_that_was_given():
    calls: asyncio.Queue[None] = asyncio.Queue()
    with shutdown_event(lambda: calls.put_nowait(None)) as event:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(event.wait(), 10)
        assert calls.empty()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            await asyncio.wait_for(calls.get(), 10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_handlers_of_before_are_back_afterwards(number):
    def handler(*_: object) -> None:
        raise AssertionError("no signal is sent")

    before = signal.signal(number, handler)
    try:
        with shutdown_event():
            assert signal.getsignal(number) is not handler
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_a_signal_while_handlers_are_exchanged_reaches_those_of_before():
    program = [sys.executable, "-c", AT_THE_EXCHANGE]
    ended = subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 0, ended.stderr
    *signals, mask = ended.stdout.splitlines()
    assert sorted(signals) == sorted(f"ours {number:d}" for number in (signal.SIGTERM, signal.SIGINT))
    assert mask == "set()"
