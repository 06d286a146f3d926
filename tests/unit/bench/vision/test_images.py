"""The images experiment: its chats, the arithmetic of its table, and the router's cost, without a system."""

from __future__ import annotations

import random

import pytest

from baton.bundled import VISION_DIR
from bench.harness.rotations import Block
from bench.vision.chat_client import timed
from bench.vision.chats import ChatDraw, said, shown
from bench.vision.images import (
    EMBEDDING,
    LOCAL,
    PREFIX,
    QUIET,
    REMOTE,
    REST,
    ROUTER_IMAGE,
    ROUTER_TEXT,
    beside,
    cold,
    findings_of,
    parse,
    percentile,
)  # fmt: skip
from bench.vision.router_cost import ParsingTimer


def test_chats_are_seeded_and_never_the_same_twice() -> None:
    one, other = (ChatDraw(random.Random(3), 16) for _ in range(2))
    drawn = [(one.words(20), one.picture()) for _ in range(50)]
    assert drawn == [(other.words(20), other.picture()) for _ in range(50)]
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == 50
    assert len({words[:40] for words, _ in drawn}) == 50, "a prefix of one would be another's"


def test_the_table_compares_arms_of_one_rotation() -> None:
    times_s: dict[str, tuple[float, ...]] = {
        cold(LOCAL): (0.4, 0.5, 0.6), cold(REMOTE): (0.7,), EMBEDDING: (0.1,), PREFIX: (0.06,), REST: (0.05,),
        QUIET: (0.01, 0.02), beside(LOCAL): (0.01, 0.3), beside(REMOTE): (0.01, 0.1),
        ROUTER_IMAGE: (0.003,), ROUTER_TEXT: (0.001,),
    }  # fmt: skip
    blocks = [Block(0, arm, 1.0, 1.0, values) for arm, values in times_s.items()]
    found = {finding.name: finding.overall.median for finding in findings_of(blocks)}
    assert found["cold image, encoder in prefill: first token"] == pytest.approx(500)
    assert found["cached prefix / text of the rest"] == pytest.approx(1.2)
    assert found["cached embedding / cold image, encoder in prefill"] == pytest.approx(0.2)
    assert found["streams beside images, encoder in prefill: gap, p99"] == pytest.approx(300)
    assert found["router: CPU time of an image"] == pytest.approx(2)


def test_percentiles() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, percent) for percent in (50, 99, 100)] == [50, 99, 100]
    assert percentile([3.0], 50) == 3.0


def test_an_answer_is_timed_by_its_tokens() -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    answer = timed(1.0, [1.5, 1.7, 2.0], usage)
    assert (answer.first_s, answer.num_prompt, answer.num_cached) == (0.5, 9, 8)
    assert answer.gaps_s == pytest.approx((0.2, 0.3))
    for times, told in (([], usage), ([1.5], {})):
        with pytest.raises(RuntimeError):
            timed(1.0, times, told)


def test_the_router_takes_longer_with_an_image() -> None:
    cost, draw = ParsingTimer(VISION_DIR), ChatDraw(random.Random(0), 512)
    text, url = draw.words(20), draw.picture()
    seconds = [min(cost.seconds(chat) for _ in range(3)) for chat in (shown(text, url, text), said(f"{text} {text}"))]
    assert seconds[0] > seconds[1] > 0


def test_flags() -> None:
    assert parse(["--rotations", "2"]).rotations == 2
    assert parse([]).result is None
