"""What masks cost: a decode step of rows with a JSON Schema against the same step without.

    python -m bench.engine.masks [--shapes bundled m150] [--rows 1 8] [--tokens 96] [--seed 0]

Every row goes through the runner twice at each position, in a random order, plain and constrained; both write the
same KV, and the constrained token goes on. Times are the CPU time of one compute thread on one core, which other
processes disturb least. `m150` has random weights and a made-up vocabulary of its size: texts of 1 to 8 characters.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.bundled import MODEL_DIR
from baton.domain.constraint import Constraint, GrammarPhase
from baton.domain.ids import AttemptId, PageId, RequestId
from baton.domain.request import EngineRequest, SamplingParams, StopParams
from baton.engine.batch import Batch, Row, SampleSpec
from baton.engine.masks import MaskFiller
from baton.engine.runner import ModelRunner
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.sources import json_schema_grammar
from baton.grammar.tokenizer import GrammarTokenizer
from baton.model.cpu import configure_threads
from baton.model.loading.loader import LoadedModel, load_model
from baton.model.storage import PageStorage
from baton.settings.process import limit_cores, usable_cores
from bench.harness.model_shapes import SHAPES
from bench.harness.random_models import save_random_model
from bench.harness.signals import run_command

PAGE_SIZE, PROMPT_TOKENS = 16, 128
KINDS = ["string", "integer", "boolean", "number"] * 3
ITEM = {
    "type": "object",
    "properties": {
        f"field_{i}": {"type": kind} for i, kind in enumerate(["string", "integer", "boolean", "number"] * 3)
    },
    "required": [f"field_{i}" for i in range(12)],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 50}
"""Long enough that no row ends while it is measured."""


def made_up_tokenizer(directory: Path, vocab_size: int, seed: int) -> None:
    """A `tokenizer.json` of `vocab_size` texts over bytes, written to `directory`."""
    draw, alphabet = random.Random(seed), sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = dict.fromkeys(alphabet)
    letters = 'abcdefghijklmnopqrstuvwxyz0123456789_.,:;"{}[]- '.replace(" ", "Ġ")
    while len(texts) < vocab_size - 1:
        texts["".join(draw.choices(letters, k=draw.randint(2, 8)))] = None
    tokenizer = Tokenizer(models.BPE({text: token for token, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": vocab_size - 1}))


class MaskedRows:
    """Rows of one model over one pool, which decode under a constraint."""

    def __init__(self, directory: Path, loaded: LoadedModel, num_rows: int, num_tokens: int, seed: int) -> None:
        vocab_size = loaded.config.vocab_size
        tokenizer = GrammarTokenizer.of_directory(directory, vocab_size)
        pages_a_row = (PROMPT_TOKENS + num_tokens) // PAGE_SIZE + 1
        storage = PageStorage.allocate(loaded.geometry, num_rows * pages_a_row)
        self.runner = ModelRunner(loaded, storage, masks=MaskFiller(GrammarCompiler(tokenizer)))
        constraint = Constraint((GrammarPhase(json_schema_grammar(SCHEMA)),), eos=tokenizer.eos)
        draw, self._rows = random.Random(seed), list[tuple[EngineRequest, list[int], list[PageId]]]()
        for number in range(num_rows):
            prompt = [draw.randrange(vocab_size - 1) for _ in range(PROMPT_TOKENS)]
            request = EngineRequest(
                AttemptId(RequestId(f"row-{number}"), 1),
                tuple(prompt),
                len(prompt),
                SamplingParams(temperature=1.0, seed=seed + number),
                StopParams(num_tokens, stop_token_ids=tokenizer.eos),
                constraint=constraint,
            )
            pages = [PageId(number * pages_a_row + page) for page in range(pages_a_row)]
            self._rows.append((request, prompt, pages))
        self._append(self.batch(constrained=True, start=0))

    def batch(self, *, constrained: bool, start: int | None = None) -> Batch:
        """The next step, of the last token of each row."""
        rows = []
        for request, history, pages in self._rows:
            of = request if constrained else replace(request, constraint=None)
            begin = len(history) - 1 if start is None else start
            rows.append(Row(of.id, history[begin:], begin, pages, SampleSpec.of(of, history)))
        return Batch(tuple(rows))

    def step(self, draw: random.Random) -> tuple[float, float]:
        """CPU seconds of a plain and of a constrained step, in a random order; rows go on with the constrained one."""
        seconds = {True: 0.0, False: 0.0}
        for constrained in draw.sample([True, False], 2):
            batch = self.batch(constrained=constrained)
            began = time.thread_time()
            output = self.runner.run(batch)
            seconds[constrained] = time.thread_time() - began
            if output.failures:
                raise SystemExit(f"a row failed: {next(iter(output.failures.values()))}")
            if constrained:
                done = output
        for (_, history, _), sampled in zip(self._rows, done.sampled, strict=True):
            history.append(sampled[0].token)
        return seconds[False], seconds[True]

    def _append(self, batch: Batch) -> None:
        for (_, history, _), sampled in zip(self._rows, self.runner.run(batch).sampled, strict=True):
            history.append(sampled[0].token)


def measure(shape: str, row_counts: Sequence[int], num_tokens: int, seed: int) -> None:
    """Prints a line for each number of rows."""
    with tempfile.TemporaryDirectory() as folder:
        directory = MODEL_DIR
        if shape != "bundled":
            directory = Path(folder)
            save_random_model(SHAPES[shape], directory, seed=seed)
            vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
            made_up_tokenizer(directory, vocab_size, seed)
        loaded = load_model(directory)
        for num_rows in row_counts:
            rows, draw = MaskedRows(directory, loaded, num_rows, num_tokens, seed), random.Random(seed)
            times = [rows.step(draw) for _ in range(num_tokens)][8:]
            ratios = [constrained / plain for plain, constrained in times]
            low, middle, high = statistics.quantiles(ratios, n=4)
            whole = sum(constrained for _, constrained in times) / sum(plain for plain, _ in times)
            plain_ms = 1e3 * statistics.median(plain for plain, _ in times)
            print(
                f"{shape}, vocabulary {loaded.config.vocab_size}, {num_rows} rows: {middle:.3f} ({low:.3f} to "
                f"{high:.3f}), all steps {whole:.3f}, plain step {plain_ms:.2f} ms",
                flush=True,
            )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["bundled", "m150"], choices=("bundled", *SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    limit_cores([usable_cores()[-1]])
    configure_threads(1)
    with torch.inference_mode():
        for shape in flags.shapes:
            measure(shape, flags.rows, flags.tokens, flags.seed)


if __name__ == "__main__":
    run_command(main)
