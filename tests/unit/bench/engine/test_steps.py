"""The engine experiment on a tiny model: every arm runs the steps of its name, and findings follow from blocks."""

import dataclasses
import io

import pytest
from rich.console import Console

from baton.domain.errors import Broken
from baton.engine.batch import Batch
from baton.model.loading.config import DtypeChoice
from baton.model.loading.kernel_choice import KernelUse
from baton.model.loading.loader import DecoderChoice
from bench.engine.arms import DecodeArm, EnginePlan, HostArm, PrefillArm, findings_of, make_arms, needs_gemm
from bench.engine.bench_engine import BenchEngine, make_bench_engine, time_steps
from bench.engine.decode_loop import EffectSink, host_time_shares, pages_needed
from bench.engine.steps import measure, parse
from bench.harness.model_shapes import ModelShape
from bench.harness.random_models import save_random_model
from bench.harness.rotations import Block, TimedSamples
from bench.report import load_result, make_run_page

SHAPE = ModelShape("llama", 300, 32, 48, 2, 4, 2, 8, 2048, 1e4)
PAGE_SIZE = 16
PLAN = EnginePlan(
    (
        *(DecodeArm(num_rows, context, 0.0) for num_rows in (1, 3) for context in (16, 40)),
        DecodeArm(1, 16, 0.0, again=True),
        *(PrefillArm(num_tokens) for num_tokens in (32, 1024)),
        PrefillArm(1024, 64),
        *(HostArm(num_rows, 16, 2) for num_rows in (1, 3)),
    )
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> BenchEngine:
    return make_bench_engine(
        SHAPE,
        save_random_model(SHAPE, tmp_path_factory.mktemp("model")),
        dtype=DtypeChoice.FLOAT32,
        decoder=DecoderChoice.AUTO,
        kernels=KernelUse.AUTO,
        page_size=PAGE_SIZE,
        max_pool_bytes=1 << 30,
        num_pages_wanted=PLAN.num_pages,
        seed=0,
    )


def test_the_pool_holds_the_largest_arm(engine):
    assert engine.num_pages == 1024 // PAGE_SIZE
    needs = {arm.name: arm.num_pages(PAGE_SIZE) for arm in PLAN.arms}
    assert needs["decode 3 x 40"] == 9
    assert needs["prefill 1024 in chunks of 64"] == 64


def test_rows_see_their_context_on_pages_of_their_own(engine):
    batch = engine.decode_batch(3, 40)
    assert [row.start for row in batch.rows] == [39, 39, 39]
    pages = [page for row in batch.rows for page in row.pages]
    assert len(set(pages)) == len(pages) == 9
    assert all(row.sample is not None and len(row.sample.history) == 40 for row in batch.rows)
    assert batch.num_prompt_tokens == 0
    assert [len(sampled) for sampled in engine.runner.run(batch).sampled] == [1] * 3


def test_a_prompt_in_chunks_ends_in_the_token_of_a_prompt_in_one(engine):
    def run(batches: list[Batch]) -> list[int]:
        outputs = [engine.runner.run(batch) for batch in batches]
        return [one.token for output in outputs for sampled in output.sampled for one in sampled]

    whole, chunked = engine.prefill_batches(200, 200), engine.prefill_batches(200, 64)
    assert [batch.num_tokens for batch in whole] == [200]
    assert [batch.num_tokens for batch in chunked] == [64, 64, 64, 8]
    assert run(whole) == run(chunked)


def test_a_step_must_read_weights_and_context(engine):
    weights = 4 * engine.model.report.num_parameters
    token = 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim * 4
    assert engine.step_bytes(3, 40) == weights + 3 * 40 * token


def test_host_share_is_part_of_a_turn_and_effects_leave(engine):
    with EffectSink() as sink:
        shares = host_time_shares(engine, sink, num_rows=3, context=16, num_turns=4)
        assert sink.count() == (4 + 2) * 3
    assert len(shares) == 4
    assert all(0.0 < share < 1.0 for share in shares)
    assert pages_needed(PAGE_SIZE, 3, 16, 4) <= engine.num_pages


def test_a_broken_forward_pass_raises(engine, monkeypatch):
    class Failing:
        def forward(self, *_: object) -> None:
            raise Broken("no")

    monkeypatch.setattr("baton.model.loading.loader.LoadedModel.decoder", lambda *_: Failing())
    with EffectSink() as sink, pytest.raises(Broken):
        host_time_shares(engine, sink, num_rows=1, context=16, num_turns=1)


def test_every_arm_runs_and_has_findings(engine):
    with EffectSink() as sink:
        arms, skipped = make_arms(PLAN, engine, sink)
        assert skipped == []
        assert [name for name in arms if needs_gemm(name)] == [
            "prefill 32",
            "prefill 1024",
            "prefill 1024 in chunks of 64",
        ]
        blocks = [block_of(name, arm()) for name, arm in arms.items()]
    names = [finding.name for finding in findings_of(PLAN, engine, blocks)]
    assert names.count("decode 1 x 16: read / ceiling") == 1
    assert names.count("decode 1 x 16 again: step / first (A/A)") == 1
    assert len(names) == 4 * 3 + 1 + 2 * 3 + 2 + 2
    assert len(set(names)) == len(names)


def test_an_arm_that_does_not_fit_is_skipped_with_a_remark(engine):
    small = dataclasses.replace(engine, num_pages=8)
    with EffectSink() as sink:
        arms, skipped = make_arms(PLAN, small, sink)
    assert "decode 1 x 40" in arms
    assert {"decode 3 x 40", "prefill 1024"}.isdisjoint(arms)
    assert "decode 3 x 40: it takes a pool of" in skipped[0].text
    assert len(arms) + len(skipped) == len(PLAN.arms)


def test_figures_are_over_the_probe(engine):
    step = Block(0, "decode 1 x 16", 10e9, 10e9, (0.5, 0.1, 0.1), (0.1, 0.05, 0.05))
    again = Block(0, "decode 1 x 16 again", 10e9, 10e9, (0.11,), (0.11,))
    share = Block(0, "loop 1 x 16", 10e9, 10e9, (0.02, 0.03, 0.5))
    chunks = [
        Block(0, "prefill 1024", 1.0, 1.0, (3.0,), (2.0,)),
        Block(0, "prefill 1024 in chunks of 64", 1.0, 1.0, (4.0,), (4.0,)),
    ]
    found = {f.name: f.overall.median for f in findings_of(PLAN, engine, [step, again, share, *chunks])}
    assert found["decode 1 x 16: step"] == pytest.approx(100.0)
    assert found["decode 1 x 16: read / ceiling"] == pytest.approx(engine.step_bytes(1, 16) / 0.1 / 10e9)
    assert found["prefill 1024: arithmetic / ceiling"] == pytest.approx(SHAPE.prefill_flops(1024) / 3.0)
    assert found["prefill 1024 in chunks of 64: speed / in one"] == pytest.approx(0.75)
    assert found["prefill 1024 in chunks of 64: speed / in one, by CPU time"] == pytest.approx(0.5)
    assert found["decode 1 x 16: read / ceiling, by CPU time"] == 2 * found["decode 1 x 16: read / ceiling"]
    assert found["loop 1 x 16: host / turn"] == pytest.approx(0.03)
    assert found["decode 1 x 16 again: step / first (A/A)"] == pytest.approx(1.1)
    assert len(found) == 10


def test_steps_are_timed_at_least_min_steps_times():
    ran: list[int] = []
    timed = time_steps(lambda: ran.append(1), block_s=0.0, min_steps=3)
    assert len(timed.wall_s) == len(timed.cpu_s) == len(ran) == 3


def test_flags_are_read():
    options = parse(["--shape", "tiny", "--batches", "1", "2", "--parts", "decode"])
    assert (options.shape, options.batches, options.parts) == ("tiny", (1, 2), ("decode",))
    with pytest.raises(SystemExit):
        parse(["--shape", "huge"])


def block_of(name: str, taken: object) -> Block:
    if isinstance(taken, TimedSamples):
        return Block(0, name, 1.0, 1.0, taken.wall_s, taken.cpu_s)
    assert isinstance(taken, list)
    return Block(0, name, 1.0, 1.0, tuple(taken))


def test_a_whole_run_ends_in_the_table_of_goals(tmp_path):
    sizes = ["--batches", "1", "--contexts", "32", "--prefills", "512", "--turns", "1", "--block-s", "0"]
    places = ["--model-dir", str(tmp_path / "model"), "--result", str(tmp_path / "box.json")]
    options = parse(["--shape", "tiny", "--rotations", "1", *places, *sizes])
    run = measure(options, Console(file=io.StringIO()))
    assert (tmp_path / "model" / "model.safetensors").is_file()
    report = make_run_page("box", load_result(tmp_path / "box.json"))
    for name in (
        "decode 1 x 32: read / ceiling",
        "prefill 512: arithmetic / ceiling, by CPU time",
        "loop 1 x 32: host",
    ):
        assert name in report
    assert {"command", "machine", "model", "decoder", "kernels"} <= {remark.name for remark in run.remarks}
    assert "- model: tiny, random weights" in report
