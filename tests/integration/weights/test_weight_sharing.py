"""Processes of one host keep the weights once; measured by the kernel, not by themselves."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from baton.settings.choices import WeightSharingKind
from tests import tiny_models
from tests.integration.weights.weight_worker import IMPORTED, LOADED, PACKED, PACKING, WAIT, WeightWorker
from tests.kernels import kernel_levels

pytestmark = [
    pytest.mark.skipif(not kernel_levels(), reason="only weights of native kernels are shared"),
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="the kernel does not count memory"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 240 MiB of weights, so that they stand out from what a process needs anyway."""
    shape = tiny_models.small_shape(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4
    )
    config = transformers.LlamaConfig(**{**shape, "head_dim": 64})
    directory = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return tiny_models.add_tokenizer(directory)


@contextlib.contextmanager
def workers(model: Path, cache: Path, number: int, sharing: WeightSharingKind) -> Iterator[list[WeightWorker]]:
    started = [WeightWorker(model, cache, sharing) for _ in range(number)]
    try:
        for worker in started:
            worker.read(IMPORTED)
        yield started
    finally:
        for worker in started:
            worker.kill()


def load_all(started: list[WeightWorker]) -> list[dict[str, object]]:
    """What they say when all have loaded. They begin at once."""
    for worker in started:
        worker.go()
    return [worker.read(LOADED) for worker in started]


@pytest.mark.timeout(240)
def test_two_workers_that_start_at_once_keep_the_weights_once(model: Path, tmp_path: Path):
    with workers(model, tmp_path / "cache", 2, WeightSharingKind.ALWAYS) as pair:
        answers = load_all(pair)
        pss, file_pss = (sum(sizes) for sizes in zip(*((w.pss_bytes(), w.file_pss_bytes()) for w in pair), strict=True))
        events = [worker.events for worker in pair]
    with workers(model, tmp_path / "cache", 1, WeightSharingKind.OFF) as alone:
        private = load_all(alone)
        private_pss, private_file_pss = alone[0].pss_bytes(), alone[0].file_pss_bytes()
    num_bytes = private[0]["private"]
    assert isinstance(num_bytes, float)
    assert [answer["shared"] for answer in answers] == [num_bytes] * 2, "the label is what the mapping says"
    assert [answer["private"] for answer in answers] == [0.0] * 2
    assert private[0]["shared"] == 0.0
    assert sorted(events) == [[IMPORTED, PACKING, PACKED, LOADED], [IMPORTED, WAIT, LOADED]]
    assert len({answer["fingerprint"] for answer in (*answers, *private)}) == 1
    assert private_file_pss == 0
    assert num_bytes <= file_pss < 1.1 * num_bytes, "the weights are once in the memory of both together"
    assert pss < 2 * private_pss - 0.8 * num_bytes, "and nothing else has taken their place"


@pytest.mark.timeout(240)
def test_a_packer_that_is_killed_is_replaced(model: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    with workers(model, cache, 2, WeightSharingKind.ALWAYS) as (first, second):
        first.go()
        first.read(PACKING)
        first.popen.send_signal(signal.SIGSTOP)
        second.go()
        second.read(WAIT)
        first.kill()
        answer = second.read(LOADED)
    assert second.events == [IMPORTED, WAIT, PACKING, PACKED, LOADED]
    assert answer["private"] == 0.0
