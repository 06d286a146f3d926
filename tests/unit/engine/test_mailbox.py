"""The mailbox: bounded for new work, ordered, and woken by its close."""

from __future__ import annotations

import threading

from baton.engine.mailbox import Mailbox


def test_commands_are_taken_in_order_and_all_at_once():
    mailbox: Mailbox[int] = Mailbox(8)
    for command in (1, 2, 3):
        assert mailbox.try_put(command)
    mailbox.put(4)
    assert mailbox.take_all(0.0) == [1, 2, 3, 4]
    assert mailbox.take_all(0.0) == []


def test_a_full_mailbox_refuses_new_work_and_accepts_answers():
    mailbox: Mailbox[str] = Mailbox(1)
    assert mailbox.try_put("work")
    assert not mailbox.try_put("more work")
    mailbox.put("abort")
    assert mailbox.take_all(0.0) == ["work", "abort"]
    assert mailbox.try_put("more work")


def test_a_closed_mailbox_accepts_no_command():
    mailbox: Mailbox[str] = Mailbox(4)
    assert mailbox.try_put("before")
    mailbox.close()
    mailbox.close()
    assert not mailbox.try_put("after")
    mailbox.put("after")
    assert mailbox.closed
    assert mailbox.take_all(None) == ["before"]
    assert mailbox.take_all(None) == []


def test_a_wait_ends_with_the_first_command():
    assert _woken_by(lambda mailbox: mailbox.put("abort")) == ["abort"]


def test_a_wait_ends_when_the_mailbox_closes():
    assert _woken_by(lambda mailbox: mailbox.close()) == []


def test_commands_of_many_writers_keep_each_writers_order():
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
