"""The engine thread: runs a loop until closed and reports a crash."""

from __future__ import annotations

import threading

from baton.domain.errors import Broken
from baton.engine.mailbox import Mailbox
from baton.engine.thread import EngineThread


class Loop:
    """A loop that takes commands: `broken` makes it raise, `stuck` blocks it until released."""

    def __init__(self) -> None:
        self.mailbox: Mailbox[str] = Mailbox(8)
        self.turned = threading.Event()
        self.released = threading.Event()

    def turn(self) -> bool:
        commands = self.mailbox.take_all(10.0)
        if self.mailbox.closed:
            return False
        self.turned.set()
        if "broken" in commands:
            raise Broken("page 3 is booked twice")
        if "stuck" in commands:
            self.released.wait(10.0)
        return True

    def close(self) -> None:
        self.mailbox.close()


def no_crash(error: BaseException) -> None:
    raise AssertionError(f"crashed: {error}")


def test_turns_until_stopped():
    loop = Loop()
    thread = EngineThread(loop, "engine", no_crash)
    thread.start()
    loop.mailbox.put("work")
    assert loop.turned.wait(10.0)
    assert thread.stop(10.0)


def test_a_loop_that_raises_is_reported_and_stops():
    loop, crashes, reported = Loop(), [], threading.Event()

    def on_crash(error: BaseException) -> None:
        crashes.append((error, threading.current_thread().name))
        reported.set()

    thread = EngineThread(loop, "engine", on_crash)
    thread.start()
    loop.mailbox.put("broken")
    assert reported.wait(10.0)
    assert thread.stop(10.0)
    ((error, name),) = crashes
    assert isinstance(error, Broken)
    assert name == "engine"


def test_stop_returns_false_for_a_step_that_outlasts_it():
    loop = Loop()
    thread = EngineThread(loop, "engine", no_crash)
    thread.start()
    loop.mailbox.put("stuck")
    assert loop.turned.wait(10.0)
    assert not thread.stop(0.01)
    loop.released.set()
    assert thread.stop(10.0)
