"""The screen of `baton top`: everything that matters is a word, and nothing leaves the terminal's size."""

from __future__ import annotations

import msgspec
import pytest

from baton.services.cli.top.screen import BAR_CELLS, ScreenOptions, WorkerSelection, draw
from baton.services.router.cluster.snapshot import ClusterEvent, RouterRow
from tests.unit.cli.top.snapshots import SNAPSHOT, worker


def screen(snapshot=SNAPSHOT, keys=True, **options) -> list[str]:
    return draw(snapshot, ScreenOptions(**options), keys=keys).plain.split("\n")


def test_a_small_terminal_shows_every_section():
    lines = screen(width=100)
    text = "\n".join(lines)
    assert lines[0] == "baton top: m150  router-0  TTFT p95 312 ms  ITL p99 42 ms  errors 0.0 %  refused 2!  812 tok/s"
    assert " prefill prefill-0 ready        2      3   5.1k  62% [##^+---.....] 50 free" in lines
    assert " decode  decode-1  lost      gone for 4 s" in lines
    assert " prefill-0 > decode-0 up cma  9.2 GiB/s  30.0 MiB moved" in lines
    assert " prefill-0 > decode-1 broken tcp  idle (probe 0.8 GiB/s)  0.0 MiB moved  no route" in lines
    assert " chatcmpl-aaaa         decoding  prefill-0 > decode-0  57 out 2.5 s  812 prompt, 512 cached" in text
    assert "   4 s ago decode-1 is lost [2J" in lines
    assert "[q]uit" in lines[-1]


def test_an_encode_worker_shows_its_queue_and_embeddings():
    media = {"num_held": 9, "num_encoded": 7, "num_bytes": 96 << 20, "max_bytes": 256 << 20}
    encode = worker("encode-0", "encode", rows=0, total_pages=0, pages={}, hit_ratio=None, media=media)
    lines = screen(msgspec.structs.replace(SNAPSHOT, workers=(*SNAPSHOT.workers, encode)), width=100)
    assert " encode  encode-0  ready        -      3   5.1k    - [#####.......] 7 embeddings, 96.0/256 MiB" in lines
    assert [line.split()[0] for line in lines[2:6]] == ["prefill", "encode", "decode", "decode"]


def test_a_prefill_worker_shows_the_images_that_it_holds():
    media = {"num_held": 9, "num_encoded": 7, "num_bytes": 96 << 20, "max_bytes": 256 << 20}
    for held, shown in (({**media, "num_held": 0}, ""), (media, ", 9 images 96.0/256 MiB")):
        prefill = msgspec.structs.replace(SNAPSHOT.workers[0], media=held)
        lines = screen(msgspec.structs.replace(SNAPSHOT, workers=(prefill,)), width=120)
        assert f" prefill prefill-0 ready        2      3   5.1k  62% [##^+---.....] 50 free{shown}" in lines


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 12), (200, 60), (20, 8)])
def test_a_screen_has_exactly_the_terminals_size(width, height):
    many = msgspec.structs.replace(
        SNAPSHOT,
        workers=tuple(worker(f"decode-{number}", "decode") for number in range(30)),
        events=tuple(ClusterEvent(n, n, "x", "info", "word " * 40) for n in range(50)),
    )
    for snapshot in (SNAPSHOT, many):
        lines = screen(snapshot, width=width, height=height)
        assert len(lines) == height
        assert max(map(len, lines)) <= width


def test_what_does_not_fit_is_counted():
    many = msgspec.structs.replace(
        SNAPSHOT, events=tuple(ClusterEvent(n, n, "x", "info", f"event {n}") for n in range(50))
    )
    text = "\n".join(screen(many))
    assert " more" in text
    assert "event 49" in text, "the newest comes first"
    assert "event 0" in "\n".join(screen(many, keys=False)), "a listing has everything"


def test_the_first_key_cycles_through_orders():
    order = WorkerSelection.NAME
    seen = []
    for _ in WorkerSelection:
        seen.append(order)
        order = order.next
    assert (set(seen), order) == (set(WorkerSelection), WorkerSelection.NAME)
    by_rows = [
        line.split()[1] for line in screen(order=WorkerSelection.ROWS) if line.startswith((" decode ", " prefill "))
    ]
    assert by_rows[0] == "decode-0"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": (), "num_workers": 0}, "no worker is registered; start one"),
        ({"degraded": ("store",)}, "store away: running requests go on"),
        ({"scope": "own", "workers": ()}, "baton key --operator"),
        ({"requests": (), "num_requests": 0}, "no open requests"),
    ],
)
def test_unusual_states_are_said_in_words(changes, words):
    assert words in "\n".join(screen(msgspec.structs.replace(SNAPSHOT, **changes)))


def test_a_router_that_is_away_leaves_the_last_values_with_the_reason():
    lines = screen(problem="http://a does not answer", paused=True)
    assert "! http://a does not answer" in lines
    assert "PAUSED" in lines[-1]
    assert any("prefill-0 ready" in line for line in lines)


def test_a_bar_shows_an_owner_with_one_page_and_never_overflows():
    crowded = {"free": 0, "cached": 1000, "live": 1, "pinned": 1, "reserved": 1, "draining": 1, "retired": 1}
    snapshot = msgspec.structs.replace(SNAPSHOT, workers=(worker("w", "decode", pages=crowded, total_pages=1005),))
    (bar,) = [line[line.index("[") + 1 : line.index("]")] for line in screen(snapshot) if line.startswith(" decode  w")]
    assert len(bar) == BAR_CELLS
    assert set(bar) == set("#^+~x-")


def test_several_routers_are_counted_and_one_that_does_not_answer_is_named():
    routers = (*SNAPSHOT.routers, RouterRow("router-1", "ready", 1, 0, 0, 9.0), RouterRow("router-2", "silent"))
    text = draw(msgspec.structs.replace(SNAPSHOT, routers=routers), ScreenOptions(120), keys=False).plain
    assert "router-0 and 2 more" in text
    assert "! not shown: the requests of router-2 (silent)" in text
