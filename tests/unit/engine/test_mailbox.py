"""The mailbox: bounded for new work, in order, and awake when it closes."""

from __future__ import annotations

import threading

from baton.engine.mailbox import Mailbox


def test_first_in_first_out_and_emptied_whole():
    mailbox: Mailbox[int] = Mailbox(8)
    for command in (1, 2, 3):
        assert mailbox.try_put(command)
    mailbox.put(4)
    assert mailbox.take_all(0.0) == [1, 2, 3, 4]
    assert mailbox.take_all(0.0) == []


def test_new_work_is_refused_when_full_and_an_answer_is_not():
    mailbox: Mailbox[str] = Mailbox(1)
    assert mailbox.try_put("work")
    assert not mailbox.try_put("more work")
    mailbox.put("abort")
    assert mailbox.take_all(0.0) == ["work", "abort"]
    assert mailbox.try_put("more work")


def test_a_closed_mailbox_takes_nothing_more():
    mailbox: Mailbox[str] = Mailbox(4)
    assert mailbox.try_put("before")
    mailbox.close()
    mailbox.close()
    assert not mailbox.try_put("after")
    mailbox.put("after")
    assert mailbox.closed
    assert mailbox.take_all(None) == ["before"]
    assert mailbox.take_all(None) == []


def test_waiting_ends_when_something_arrives():
    assert _woken_by(lambda mailbox: mailbox.put("abort")) == ["abort"]


def test_waiting_ends_when_it_closes():
    assert _woken_by(lambda mailbox: mailbox.close()) == []


def test_many_writers_lose_nothing_and_keep_their_own_order():
    mailbox: Mailbox[tuple[int, int]] = Mailbox(10_000)

    def write(writer: int) -> None:
        for i in range(200):
            mailbox.put((writer, i))

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in writers:
        thread.start()
    taken: list[tuple[int, int]] = []
    while len(taken) < 800:
        commands = mailbox.take_all(10.0)
        assert commands, "a command was lost"
        taken += commands
    for thread in writers:
        thread.join(10.0)
    for writer in range(4):
        assert [i for one, i in taken if one == writer] == list(range(200))


def _woken_by(event) -> list[str]:
    mailbox: Mailbox[str] = Mailbox(4)
    taken: list[list[str]] = []
    reader = threading.Thread(target=lambda: taken.append(mailbox.take_all(10.0)))
    reader.start()
    event(mailbox)
    reader.join(5.0)
    assert not reader.is_alive(), "the reader slept on"
    return taken[0]
