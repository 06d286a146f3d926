"""Planned requests: lengths, prefixes and traces, reproducible from a seed."""

import json
from collections import Counter
from typing import Any

import pytest

from baton.services.cli.bench.options import Dataset, ServeOptions
from baton.services.cli.bench.workload.plan import plan_requests, plan_warmups
from baton.services.cli.bench.workload.prompts import FIRST_ID, Vocabulary, as_text, block_prompt
from baton.services.cli.bench.workload.traces import TraceError, read_azure, read_mooncake, scaled_block_tokens
from baton.settings.base import SettingsError

MOONCAKE = [
    {"timestamp": 0, "input_length": 1500, "output_length": 160, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 1024, "output_length": 8, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 600, "output_length": 1, "hash_ids": [0, 9]},
    {"timestamp": 3000, "input_length": 512, "output_length": 32, "hash_ids": [7]},
]


def options(**changes: Any) -> ServeOptions:
    return ServeOptions(**{"num_prompts": 6, "random_input_len": 10, "random_output_len": 3, **changes})


@pytest.fixture
def mooncake(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in MOONCAKE))
    return str(path)


@pytest.fixture
def azure(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    return str(path)


def test_random_prompts_share_nothing_and_have_their_lengths():
    plan = plan_requests(options())
    assert [len(request.prompt) for request in plan] == [10] * 6
    assert {request.max_tokens for request in plan} == {3}
    assert len({request.prompt for request in plan}) == 6
    assert all(FIRST_ID <= token < 2048 for request in plan for token in request.prompt)
    assert [request.index for request in plan] == list(range(6))
    assert [request.arrival_s for request in plan] == [0.0] * 6


def test_a_plan_follows_from_its_options():
    assert plan_requests(options(request_rate=2.0)) == plan_requests(options(request_rate=2.0))
    assert plan_requests(options(seed=1)) != plan_requests(options(seed=2))


def test_prompts_do_not_depend_on_the_rate():
    slow, fast = plan_requests(options(request_rate=1.0)), plan_requests(options(request_rate=9.0))
    assert [request.prompt for request in slow] == [request.prompt for request in fast]
    assert slow[-1].arrival_s == 6.0


def test_prefixes_are_taken_in_turn():
    chosen = options(dataset_name=Dataset.SHARED_PREFIX, random_prefix_len=5, num_prefixes=2)
    prompts = [request.prompt for request in plan_requests(chosen)]
    assert [len(prompt) for prompt in prompts] == [15] * 6
    assert prompts[0][:5] == prompts[2][:5] == prompts[4][:5] != prompts[1][:5]
    assert len({prompt[5:] for prompt in prompts}) == 6


def test_warmups_share_no_prefix_with_the_run():
    warmups = plan_warmups(options(num_warmups=2))
    assert len(warmups) == 2
    assert not {w.prompt[:4] for w in warmups} & {r.prompt[:4] for r in plan_requests(options())}


def test_equal_blocks_are_equal_tokens(mooncake):
    chosen = options(dataset_name=Dataset.MOONCAKE, dataset_path=mooncake)
    first, second, third, fourth = [request.prompt for request in plan_requests(chosen)]
    assert [len(prompt) for prompt in (first, second, third, fourth)] == [1500, 1024, 600, 512]
    assert first[:1024] == second
    assert first[:512] == third[:512]
    assert first[512:600] != third[512:600]
    assert first[:512] != fourth


def test_scaled_lengths_keep_the_prefixes(mooncake):
    chosen = options(dataset_name=Dataset.MOONCAKE, dataset_path=mooncake, scale_length=1 / 16)
    plan = plan_requests(chosen)
    assert scaled_block_tokens(1 / 16) == 32
    assert [len(request.prompt) for request in plan] == [94, 64, 38, 32]
    assert [request.max_tokens for request in plan] == [10, 1, 1, 2]
    assert plan[0].prompt[:64] == plan[1].prompt
    assert plan[0].prompt[:32] == plan[2].prompt[:32]


def test_quantised_stamps_are_spread_over_their_slot_and_sped_up(mooncake):
    chosen = options(dataset_name=Dataset.MOONCAKE, dataset_path=mooncake, scale_rate=2.0)
    arrivals = [request.arrival_s for request in plan_requests(chosen)]
    assert 0.0 < arrivals[0] < arrivals[1] < 1.5 < arrivals[2] < arrivals[3] < 3.0


def test_a_shorter_plan_is_a_prefix_of_the_trace(mooncake):
    whole, first = (
        plan_requests(options(dataset_name=Dataset.MOONCAKE, dataset_path=mooncake, num_prompts=n)) for n in (4, 1)
    )
    assert first == whole[:1]
    assert first[0].arrival_s > 0.0


def test_a_given_rate_replaces_the_stamps(mooncake):
    chosen = options(dataset_name=Dataset.MOONCAKE, dataset_path=mooncake, request_rate=8.0)
    assert plan_requests(chosen)[-1].arrival_s == 0.5


def test_azure_rows_begin_at_zero(azure):
    plan = plan_requests(options(dataset_name=Dataset.AZURE, dataset_path=azure))
    assert [request.arrival_s for request in plan] == [0.0, pytest.approx(4.314579, abs=1e-5)]
    assert [(len(request.prompt), request.max_tokens) for request in plan] == [(374, 44), (396, 109)]


@pytest.mark.parametrize(("read", "text"), [(read_mooncake, "{}\n"), (read_azure, "a,b\n1,2\n"), (read_mooncake, "")])
def test_an_invalid_trace_is_refused(read, text, tmp_path):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=str(path)):
        read(path)


def test_missing_blocks_are_filled_with_own_tokens():
    prompt = block_prompt(Vocabulary(100, 0), 4, 10, block_ids=(1, 2), block_tokens=4)
    other = block_prompt(Vocabulary(100, 0), 5, 10, block_ids=(1, 2), block_tokens=4)
    assert len(prompt) == 10
    assert prompt[:8] == other[:8]
    assert prompt[8:] != other[8:]


def test_tokens_are_drawn_evenly():
    counts = Counter(Vocabulary(FIRST_ID + 4, 0).draw(8000, "x"))
    assert sorted(counts) == [4, 5, 6, 7]
    assert all(1850 < count < 2150 for count in counts.values())


def test_words_keep_prefixes():
    assert as_text((4, 5, 6)).split()[:2] == as_text((4, 5, 99)).split()[:2]
    assert len(as_text(range(50)).split()) == 50


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_prompts": 0}, "--num-prompts 0"),
        ({"request_rate": 0.0}, "--request-rate"),
        ({"burstiness": float("nan")}, "--burstiness"),
        ({"dataset_name": Dataset.AZURE}, "--dataset-path"),
        ({"base_url": "localhost:8000"}, "http://"),
        ({"num_warmups": -1}, "--num-warmups"),
    ],
)
def test_invalid_flags_are_refused(changes, words):
    with pytest.raises(SettingsError, match=words):
        options(**changes).check()


def test_a_vocabulary_without_ids_is_refused():
    with pytest.raises(SettingsError, match="--vocab-size 4"):
        plan_requests(options(vocab_size=4))


def test_an_infinite_rate_is_no_schedule():
    assert options(request_rate=float("inf")).request_rate is None
    assert not options(request_rate=float("inf")).is_scheduled
    assert options(dataset_name=Dataset.AZURE).is_scheduled
    options().check()
