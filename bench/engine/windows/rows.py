"""How many rows a decode pool holds with window slots and without them, from equal bytes.

    python -m bench.engine.windows.rows [--shapes gemma-3-27b gpt-oss-20b] [--gib 20] [--steps 250] [--warmup 250]
        [--lengths 512 1024 2048 8192] [--windows 4] [--max-rows 64] [--open] [--azure CSV] [--mooncake JSONL]

Runs decode's import policy, import table, scheduler, page pool and swap space as they are, as in
`bench.engine.growth_reserve`: under endless arrivals, first come first served. A row of a length has that many tokens
of prompt and output together, at most 128 of them output. With `--open` clients ask for no number of output tokens.
Nothing is computed, so the figures are the same on every machine. At most 64 rows run, the default. `--windows`: pools
for sequences of other lengths than `auto` is for.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from baton.kv.growth import GrowthPolicy
from baton.services.cli.bench.workload.traces import TraceRow, read_azure, read_mooncake
from bench.engine.growth_reserve import GrowthLoad, GrowthTotals, simulate
from bench.engine.windows.pools import GIB, PAGE_SIZE, SHAPES, PoolArm, arms

MAX_OUTPUT = 128


def rows_of(length: int) -> list[TraceRow]:
    """One kind of request, of `length` tokens in all."""
    num_output = min(MAX_OUTPUT, length // 2)
    return [TraceRow(0.0, length - num_output, num_output)]


def load_of(
    name: str, rows: list[TraceRow], arm: PoolArm, most_tokens: int, max_rows: int, *, is_open: bool
) -> GrowthLoad:  # fmt: skip
    """The requests, in order and again, on a pool. Those of more than `most_tokens` are left out."""
    lengths = [(row.num_input_tokens, max(2, row.num_output_tokens)) for row in rows]
    lengths = [one for one in lengths if sum(one) <= most_tokens]
    most = None if is_open else max(num_output for _, num_output in lengths)
    plan = arm.plan
    return GrowthLoad(
        name,
        lambda _, number: lengths[number % len(lengths)],
        plan.num_pages,
        most,
        arm.window,
        plan.num_slots,
        max_rows,
    )


def compare(
    rows: list[TraceRow],
    pools: list[PoolArm],
    num_steps: int,
    num_warmup: int,
    max_rows: int = 64,
    *,
    is_open: bool = False,
) -> dict[str, GrowthTotals]:
    """Totals by pool."""
    most_tokens = min(arm.plan.num_pages for arm in pools) * PAGE_SIZE
    loads = {arm.name: load_of(arm.name, rows, arm, most_tokens, max_rows, is_open=is_open) for arm in pools}
    return {name: simulate(GrowthPolicy.NONE, load, num_steps, num_warmup) for name, load in loads.items()}


def main() -> None:
    """Prints one table a shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["gemma-3-27b", "gpt-oss-20b"])
    parser.add_argument("--gib", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--warmup", type=int, default=250)
    parser.add_argument("--lengths", nargs="*", type=int, default=[512, 1024, 2048, 8192])
    parser.add_argument("--windows", nargs="*", type=int, default=[4])
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--open", action="store_true")
    parser.add_argument("--azure", type=Path)
    parser.add_argument("--mooncake", type=Path)
    options = parser.parse_args()
    loads = {f"{length:,} tokens": rows_of(length) for length in options.lengths}
    if options.azure:
        loads["Azure conversation"] = read_azure(options.azure)
    if options.mooncake:
        loads["Mooncake conversation"] = read_mooncake(options.mooncake)
    for shape in options.shapes:
        pools = arms(shape, int(options.gib * GIB) // SHAPES[shape].geometry().page_bytes, options.windows)
        sizes = ", ".join(f"{arm.name}: {arm.plan.num_pages:,} pages, {arm.plan.num_slots} slots" for arm in pools)
        print(f"{shape}, {options.gib:g} GiB; {sizes}\n")
        print("| rows of | slots | rows in a step | tokens | finished | preemptions each | ratio of rows |")
        print("|---" * 7 + "|")
        for name, rows in loads.items():
            found = compare(rows, pools, options.steps, options.warmup, options.max_rows, is_open=options.open)
            for arm, totals in found.items():
                ratio = totals.mean_rows / found["off"].mean_rows
                counts = f"{totals.mean_rows:.1f} | {totals.num_tokens:,} | {totals.num_finished:,}"
                print(f"| {name} | {arm} | {counts} | {totals.preemptions_each:.2f} | {ratio:.2f} |", flush=True)
        print()


if __name__ == "__main__":
    main()
