"""Accuracy and speed of int8 weights against float32, with bfloat16 as a reference.

    python -m bench.engine.quantization [--shape qwen2.5-0.5b] [--parts error speed steps] [--sequences 4]
        [--rows 1 4 8 32 512] [--rotations 5] [--seed 0] [--result FILE]

Error: the bundled model on unseen text (`scripts/bundled_corpus.py` with another seed), and a
random model of the shape on random tokens. Every sequence goes through the worker's own decoder in one chunk: in
float32, in bfloat16, and with int8 weights and activations of either; next-token distributions are compared by token.

Speed: products with the shape's matrices on one core with one compute thread, over more matrices than any
cache holds; and whole decode steps of the random model, every row with 256 tokens of context. Times are the
thread's CPU time; a figure is the ratio of medians inside one rotation.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from baton.bundled import MODEL_DIR
from baton.model.attention.base import Segment, plan_step
from baton.model.cpu import configure_threads
from baton.model.kernels.library import Kernels
from baton.model.linears.linear import make_linear
from baton.model.linears.packing import panel_packer
from baton.model.loading.config import DtypeChoice
from baton.model.loading.kernel_choice import KernelUse, choose_kernels
from baton.model.loading.loader import LoadedModel, load_model
from baton.model.loading.quantization import Quantization, divergences
from baton.model.storage import PageStorage
from baton.settings.process import limit_cores, usable_cores
from bench.engine.bench_engine import time_steps
from bench.harness.ceilings import ReadProbe
from bench.harness.model_shapes import SHAPES, ModelShape
from bench.harness.random_models import save_random_model
from bench.harness.rotations import (
    Block,
    Finding,
    Remark,
    TimedSamples,
    command_remark,
    make_finding,
    rotate,
    save,
    table_of,
)
from scripts.bundled_corpus import documents
from scripts.train_bundled_model import EVAL_SEED_OFFSET

SEQUENCE_TOKENS = 256
BUNDLED_SEQUENCES = 64
WEIGHT_BYTES = 100_000_000
"""Bytes of int8 weights; more than any cache holds."""
BLOCK_S = 0.3
MIN_STEPS = 3
MAX_STEP_ROWS = 32

PARTS = ("error", "speed", "steps")
ARMS = {
    "bfloat16": (DtypeChoice.BFLOAT16, Quantization.NONE),
    "int8": (DtypeChoice.FLOAT32, Quantization.INT8),
    "int8, bfloat16": (DtypeChoice.BFLOAT16, Quantization.INT8),
}


@dataclass(frozen=True, slots=True)
class AccuracyLoss:
    """Differences of one model from float32, means over tokens. `mean_nll`: of the text's next token, in nats.

    `divergence`: KL divergence from float32's next-token distribution, in nats. `agreement`: share of tokens with the
    same argmax.
    """

    divergence: float
    agreement: float
    mean_nll: float
    mean_nll_float32: float

    @property
    def perplexity_change(self) -> float:
        """Relative to float32's perplexity."""
        return math.expm1(self.mean_nll - self.mean_nll_float32)


def loss_of(
    exact: Sequence[torch.Tensor], logits: Sequence[torch.Tensor], texts: Sequence[Sequence[int]]
) -> AccuracyLoss:
    """Computes the loss from logits [tokens, vocab_size] of each text, float32's and another model's."""
    divergence = torch.cat([divergences(a, b) for a, b in zip(exact, logits, strict=True)])
    agreement = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in zip(exact, logits, strict=True)])
    return AccuracyLoss(
        divergence.mean().item(), agreement.double().mean().item(), mean_nll(logits, texts), mean_nll(exact, texts)
    )


def mean_nll(logits: Sequence[torch.Tensor], texts: Sequence[Sequence[int]]) -> float:
    """Mean negative log likelihood of every token but the first, in nats."""
    each = [
        torch.nn.functional.cross_entropy(said[:-1].double(), torch.tensor(text[1:]), reduction="none")
        for said, text in zip(logits, texts, strict=True)
    ]
    return torch.cat(each).mean().item()


def bundled_texts(num_sequences: int) -> list[list[int]]:
    """Unseen text of the bundled model's corpus, as sequences of `SEQUENCE_TOKENS` tokens."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    stream = itertools.chain.from_iterable(tokenizer.encode(text).ids for text in documents(1 + EVAL_SEED_OFFSET))
    return [list(itertools.islice(stream, SEQUENCE_TOKENS)) for _ in range(num_sequences)]


def random_texts(vocab_size: int, num_sequences: int, seed: int) -> list[list[int]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[list[int]] = torch.randint(vocab_size, (num_sequences, SEQUENCE_TOKENS), generator=generator).tolist()
    return tokens


def logits_of(model: LoadedModel, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits after every token of every text: [tokens, vocab_size], float32."""
    num_pages = model.geometry.num_pages(SEQUENCE_TOKENS)
    decoder = model.decoder(PageStorage.allocate(model.geometry, num_pages))
    found = []
    for text in texts:
        places = torch.arange(len(text))
        step = plan_step([Segment(0, 0, len(text), list(range(num_pages)))], model.geometry.page_size)
        found.append(decoder.forward(torch.tensor(text), places, step, places).float())
    return found


def losses(directory: Path, texts: Sequence[Sequence[int]]) -> dict[str, AccuracyLoss]:
    """Losses of every arm, with one model in memory at a time. Raises `BatonError` for a model that cannot be
    loaded."""
    exact = logits_of(load_model(directory, dtype=DtypeChoice.FLOAT32), texts)
    return {
        name: loss_of(exact, logits_of(load_model(directory, dtype=dtype, quantization=quantization), texts), texts)
        for name, (dtype, quantization) in ARMS.items()
    }


def remarks_of(models: dict[str, dict[str, AccuracyLoss]]) -> list[Remark]:
    """Remarks for the saved run."""
    return [
        Remark(
            f"{model}, {arm}",
            f"KL {loss.divergence:.3g} nats, top-1 agreement {loss.agreement:.4f}, "
            f"perplexity {loss.perplexity_change:+.3%}",
        )
        for model, arms in models.items()
        for arm, loss in arms.items()
    ]


def loss_table(models: dict[str, dict[str, AccuracyLoss]]) -> Table:
    """A line a model and arm."""
    table = Table("model", "arm", "mean KL (nats)", "top-1 agreement", "perplexity", "its change")
    for model, arms in models.items():
        for arm, loss in arms.items():
            figures = (f"{loss.divergence:.2e}", f"{loss.agreement:.4f}", f"{math.exp(loss.mean_nll):.4f}")
            table.add_row(model, arm, *figures, f"{100 * loss.perplexity_change:+.2f} %")
    return table


def measure_losses(options: QuantizationOptions) -> dict[str, dict[str, AccuracyLoss]]:
    """Losses of the bundled model and of a random one."""
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(shape, Path(folder), seed=options.seed)
        texts = random_texts(shape.vocab_size, options.sequences, options.seed)
        return {
            "bundled": losses(MODEL_DIR, bundled_texts(BUNDLED_SEQUENCES)),
            f"random {options.shape}": losses(Path(folder), texts),
        }


def matrices(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """[out_features, in_features] of a layer's products in the lean decoder."""
    heads = shape.num_heads * shape.head_dim
    return {
        "qkv": (heads + 2 * shape.num_kv_heads * shape.head_dim, shape.hidden_size),
        "attention_out": (shape.hidden_size, heads),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
    }


Products = list[Callable[[torch.Tensor], torch.Tensor]]


def products_of(size: tuple[int, int], kernels: Kernels, seed: int) -> dict[str, Products]:
    """Products with many matrices of one size: float32 as in a worker, and int8."""
    generator = torch.Generator().manual_seed(seed)
    wide = [make_linear(torch.randn(size, generator=generator)) for _ in range(max(1, WEIGHT_BYTES // math.prod(size)))]
    narrow = [copy.copy(linear) for linear in wide]
    for linear in narrow:
        linear.quantize(kernels)
    for linear in wide:
        linear.pack(panel_packer(kernels))
    return {"float32": [*wide], "int8": [*narrow]}


def speed_blocks(options: QuantizationOptions, kernels: Kernels, console: Console) -> Iterator[tuple[str, list[Block]]]:
    """Yields name and blocks of every matrix and number of rows."""
    read = ReadProbe()
    for matrix, size in matrices(SHAPES[options.shape]).items():
        products = products_of(size, kernels, options.seed)
        for num_rows in options.rows:
            x = torch.randn(num_rows, size[1], generator=torch.Generator().manual_seed(num_rows))
            name = f"{matrix} {size[0]} x {size[1]}, {num_rows} rows"
            arms = {f"{name}: {arm}": timed(each(among, x)) for arm, among in products.items()}
            with torch.inference_mode():
                rotations = options.rotations
                yield name, rotate(arms, lambda _: read(), num_rotations=rotations, seed=options.seed, console=console)


def step_blocks(options: QuantizationOptions, console: Console) -> Iterator[tuple[str, list[Block]]]:
    """Yields name and blocks of decode steps of a random model, for each number of rows of a decode batch."""
    read = ReadProbe()
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(SHAPES[options.shape], Path(folder), seed=options.seed)
        models = {
            kind.value: load_model(Path(folder), dtype=DtypeChoice.FLOAT32, quantization=kind) for kind in Quantization
        }
    for num_rows in (rows for rows in options.rows if rows <= MAX_STEP_ROWS):
        name = f"decode step, {num_rows} rows"
        steps = {"float32": models["none"], "int8": models["int8"]}
        arms = {f"{name}: {arm}": timed(decode_step(model, num_rows)) for arm, model in steps.items()}
        blocks = rotate(arms, lambda _: read(), num_rotations=options.rotations, seed=options.seed, console=console)
        yield name, blocks


def decode_step(model: LoadedModel, num_rows: int) -> Callable[[], object]:
    """A step of one token for each of `num_rows` rows on pages of their own."""
    size, last = model.geometry.page_size, SEQUENCE_TOKENS - 1
    pages_a_row = model.geometry.num_pages(SEQUENCE_TOKENS)
    decoder = model.decoder(PageStorage.allocate(model.geometry, num_rows * pages_a_row))
    tables = [list(range(row * pages_a_row, (row + 1) * pages_a_row)) for row in range(num_rows)]
    segments = [Segment(row, last, 1, table) for row, table in enumerate(tables)]
    rows, positions = torch.arange(num_rows), torch.full((num_rows,), last)
    return lambda: decoder.forward(rows, positions, plan_step(segments, size), rows)


def each(products: Products, x: torch.Tensor) -> Callable[[], object]:
    """Runs all products once."""
    return lambda: [product(x) for product in products]


def timed(run: Callable[[], object]) -> Callable[[], TimedSamples]:
    """A block of passes, after a warm-up pass."""

    def block() -> TimedSamples:
        run()
        return time_steps(run, block_s=BLOCK_S, min_steps=MIN_STEPS)

    return block


def speed_of(name: str, blocks: Sequence[Block]) -> Finding:
    """Finding: float32's time over int8's."""

    def gain(group: tuple[Block, ...]) -> float:
        wide, narrow = (statistics.median(block.cpu_s) for block in group)
        return wide / narrow

    pair = (f"{name}: float32", f"{name}: int8")
    return make_finding(f"{name}: int8 over float32", "x", blocks, pair, gain, lambda block: block.has_steady_probe)


@dataclass(frozen=True, slots=True)
class QuantizationOptions:
    """One run's flags."""

    shape: str
    parts: tuple[str, ...]
    sequences: int
    rows: tuple[int, ...]
    rotations: int
    seed: int
    result: Path | None


def parse(arguments: Sequence[str] | None = None) -> QuantizationOptions:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=PARTS)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 32, 512])
    parser.add_argument("--rotations", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    flags = parser.parse_args(arguments)
    return QuantizationOptions(
        shape=flags.shape,
        parts=tuple(flags.parts),
        sequences=flags.sequences,
        rows=tuple(flags.rows),
        rotations=flags.rotations,
        seed=flags.seed,
        result=flags.result,
    )


def main() -> None:
    """Command line."""
    options, console = parse(), Console(width=160)
    limit_cores([usable_cores()[-1]])
    configure_threads(1)
    chosen = choose_kernels(KernelUse.AUTO, "cpu")
    if chosen.kernels is None:
        raise SystemExit(chosen.note)
    blocks: list[Block] = []
    findings: list[Finding] = []
    remarks = [command_remark("bench.engine.quantization"), Remark("kernels", chosen.note)]
    if "error" in options.parts:
        measured = measure_losses(options)
        remarks += remarks_of(measured)
        console.print(loss_table(measured))
    if "speed" in options.parts:
        for name, ran in speed_blocks(options, chosen.kernels, Console(stderr=True, quiet=True)):
            blocks += ran
            findings.append(speed_of(name, ran))
    if "steps" in options.parts:
        for name, ran in step_blocks(options, Console(stderr=True, quiet=True)):
            blocks += ran
            findings.append(speed_of(name, ran))
    if findings:
        console.print(table_of(findings))
    if options.result is not None:
        save(options.result, "quantization", blocks, findings, remarks)


if __name__ == "__main__":
    main()
