"""Both engines in one process with every scheduling feature on give the tokens of `generate()`, and each has acted.

Conversations of up to three turns come alone first, when decode still has what it answered. Then they arrive while
others run, with priorities and shared beginnings, and some are aborted.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from baton.domain.ids import AttemptId
from baton.domain.worker import WorkerRole
from baton.kv.pages import Owner
from baton.model.linears.packing import WeightLayout
from baton.model.loading.config import DtypeChoice
from baton.model.loading.loader import load_model
from baton.services.local.pair import PairLimits
from baton.telemetry import metrics
from tests import tiny_models
from tests.exactness.reference import Reference
from tests.exactness.together.full_pair import FullPair
from tests.exactness.windows.poison import poison_free_slots

pytestmark = pytest.mark.exactness

PAGE_SIZE = 8
LIMITS = PairLimits(num_pages=40, max_rows=8, token_budget=32)
MAX_STEPS = 4000
SEED = 1


@dataclass
class Talk:
    """One conversation; `tokens` are those of its turns so far."""

    name: str
    messages: deque[list[int]]
    num_tokens: int
    priority: int
    is_local: bool
    aborts_after: int | None = None
    tokens: list[int] = field(default_factory=list)
    num_answered: int = 0
    turn: int = 0


@dataclass
class Turn:
    """One request under way, and what it has answered."""

    talk: Talk
    prompt: list[int]
    answer: list[int] = field(default_factory=list)


def _talks(label: str) -> list[Talk]:
    """The same conversations under other names for another label."""
    rng = random.Random(SEED)

    def some(num_tokens: int) -> list[int]:
        return [rng.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(num_tokens)]

    shared, loop = some(5 * PAGE_SIZE), some(7)
    talks = []
    for number in range(14):
        first = shared + some(rng.randint(1, 20)) if number % 2 else (loop * 9)[: rng.randint(20, 60)]
        later = [some(rng.choice([1, PAGE_SIZE, 3 * PAGE_SIZE + 1])) for _ in range(rng.choice([0, 1, 2, 2]))]
        talks.append(
            Talk(
                f"{label}-{number}", deque([first, *later]), rng.choice([17, 26, 40]), rng.randint(-1, 1),
                is_local=number % 5 == 4, aborts_after=3 if number % 6 == 5 else None,
            )
        )  # fmt: skip
    return talks


class Replay:
    """Runs conversations on a pair; the next turn of one is sent when the last has ended."""

    def __init__(self, pair: FullPair, rng: random.Random) -> None:
        self._pair = pair
        self._rng = rng
        self._live: dict[AttemptId, Turn] = {}
        self.ended: list[Turn] = []

    def run(self, talks: list[Talk]) -> None:
        """Runs all turns to their ends."""
        waiting = deque(talks)
        for _ in range(MAX_STEPS):
            if waiting and self._rng.random() < 0.5 and self._send(waiting[0]):
                waiting.popleft()
            waiting += list(self._step())
            if not waiting and not self._live:
                return
        raise AssertionError(f"{len(waiting)} turns wait, {len(self._live)} run")

    def check_idle(self) -> None:
        """Both engines end what is left of aborted requests and imports, and hold nothing."""
        for _ in range(MAX_STEPS):
            if self._pair.prefill.num_requests == self._pair.decode.num_requests == 0:
                break
            assert not list(self._step())
        for pool in self._pair.pools:
            counts = pool.counts()
            assert counts[Owner.FREE] + counts[Owner.CACHED] == pool.num_pages, counts

    def _send(self, talk: Talk) -> bool:
        prompt = talk.tokens + talk.messages[0]
        id = self._pair.submit_turn(
            f"{talk.name}-{talk.turn}", tuple(prompt), talk.num_tokens, talk.priority, len(talk.tokens),
            local=talk.is_local and talk.turn == 0,
        )  # fmt: skip
        if id is None:
            return False
        talk.messages.popleft()
        talk.turn += 1
        self._live[id] = Turn(talk, prompt)
        return True

    def _step(self) -> Iterator[Talk]:
        """One turn of both engines; yields conversations that go on."""
        for part in self._pair.step():
            turn = self._live.get(part.id)
            if turn is None:
                continue  # its client has gone
            turn.answer += [one.token for one in part.tokens]
            talk = turn.talk
            if part.finish is None and (talk.aborts_after is None or len(turn.answer) < talk.aborts_after):
                continue
            del self._live[part.id]
            self.ended.append(turn)
            if part.finish is None:
                self._pair.abort_one(part.id)
            elif talk.messages:
                talk.tokens = turn.prompt + turn.answer
                yield talk


def _counts(pair: FullPair) -> Counter[str]:
    def cached(role: str, tier: str) -> int:
        return int(metrics.CACHED_TOKENS_TOTAL.labels(role, tier)._value.get())

    drafts, scheduler = pair.drafts.totals, pair.decode_scheduler
    return Counter(
        {
            "from the device": cached("prefill", "device"),
            "from the host tier": cached("prefill", "host"),
            "from the file tier": cached("prefill", "file"),
            "given back": int(metrics.IMPORTED_TOKENS_TOTAL.labels(WorkerRole.DECODE.value)._value.get()),
            "preempted": scheduler.num_preemptions,
            "local": scheduler.num_local_prompt_tokens,
            "drafts accepted": drafts.num_accepted,
            "drafts refused": drafts.num_drafts - drafts.num_accepted,
            "busy": pair.num_busy,
            "windowless": pair.num_windowless,
        }
    )


@pytest.mark.parametrize(
    ("family", "num_window_slots", "ahead"),
    [
        ("qwen3", None, False),
        ("qwen3", None, True),
        ("gemma3_text", None, False),
        ("gemma3_text", 24, False),
        ("gpt_oss", 24, False),
    ],
)
def test_all_scheduling_at_once_gives_the_models_tokens(
    family: str, num_window_slots: int | None, ahead: bool, tmp_path: Path
) -> None:
    directory, pages = tmp_path / "model", tmp_path / "pages"
    pages.mkdir()
    tiny_models.save_random_model(family, directory)
    model = load_model(directory, dtype=DtypeChoice.FLOAT32, page_size=PAGE_SIZE, layout=WeightLayout.PLAIN)
    pair = FullPair(model, replace(LIMITS, num_window_slots=num_window_slots), pages, ahead=ahead)
    if num_window_slots is not None:
        poison_free_slots(pair)
    before = _counts(pair)
    replay = Replay(pair, random.Random(SEED))
    for talk in _talks("alone")[-4:]:
        replay.run([talk])
    for label in ("cold", "warm"):
        replay.run(_talks(label))
    replay.check_idle()
    pair.close()
    reference = Reference(directory)
    for turn in replay.ended:
        assert turn.answer == reference.generate(turn.prompt, len(turn.answer)), turn.talk.name
    acted = _counts(pair) - before
    # Only models with windows have pages without window parts. Those are not given to others, unless they have slots.
    idle = {"windowless"} if family == "qwen3" else {"given back"} if num_window_slots is None else set()
    if ahead:
        idle |= {"drafts accepted", "drafts refused"}
        assert min(pair.num_ahead[role] for role in (WorkerRole.PREFILL, WorkerRole.DECODE)) > 10
    assert {name for name in before if not acted[name]} <= idle
