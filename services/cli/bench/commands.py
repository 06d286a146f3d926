"""`baton bench serve` and `baton bench report`: from flags to a run, its file and its table.

Registered by `baton.services.cli.main`. The other commands of `baton bench` are in `experiments`. The table goes to
standard output, progress and remarks to standard error.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import uvloop
from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from baton import __version__
from baton.services.cli.bench.client.bench_client import BenchClient, RequestTemplate, warm_up
from baton.services.cli.bench.experiments import add_experiments
from baton.services.cli.bench.load_generator import run_load
from baton.services.cli.bench.options import ServeOptions, WordList
from baton.services.cli.bench.results.objectives import parse_objectives
from baton.services.cli.bench.results.records import PlannedRequest, RequestRow
from baton.services.cli.bench.results.run_file import RunFile, load, save
from baton.services.cli.bench.results.summary import lag_verdict, summarize
from baton.services.cli.bench.results.table import TableLayout, make_table
from baton.services.cli.bench.workload.plan import plan_requests, plan_warmups
from baton.settings.base import SettingsError

EXIT_NOT_VALID = 1

bench_app = App(name="bench", help="Measure an OpenAI server, this one or another; or Baton's own parts.")
add_experiments(bench_app)


@bench_app.command
def serve(*, options: Annotated[ServeOptions | None, Parameter(name="*")] = None) -> int:
    """Send a load to a server, measure every token, and print the table."""
    chosen = options or ServeOptions()
    chosen.check()
    shape = TableLayout.parse(chosen.percentile_metrics, chosen.metric_percentiles)
    parse_objectives(chosen.goodput)
    console = Console(stderr=True)
    with console.status("making prompts"):
        plan = plan_requests(chosen)
    run = uvloop.run(measure(chosen, plan, console))
    if chosen.save_result:
        console.print(f"saved {save(run, Path(chosen.result_dir))}", markup=False, highlight=False)
    return show([run], ["run"], shape, chosen.goodput, console)


@bench_app.command
def report(
    files: Annotated[list[Path], Parameter(help="Files of `baton bench serve --save-result`.")],
    /,
    *,
    goodput: Annotated[WordList | None, Parameter(help="Objectives; default: each run's own.")] = None,
    percentile_metrics: Annotated[str, Parameter(help="Which metrics are shown.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, Parameter(help="Which percentiles are shown.")] = "50,90,99",
) -> int:
    """Compute the table of saved runs anew, a column each."""
    shape = TableLayout.parse(percentile_metrics, metric_percentiles)
    return show([load(path) for path in files], [path.stem for path in files], shape, goodput, Console(stderr=True))


async def measure(options: ServeOptions, plan: Sequence[PlannedRequest], console: Console) -> RunFile:
    """Warms up, runs the plan and returns the run. Raises `TargetError`, `SettingsError`."""
    clock = time.perf_counter
    try:
        client = BenchClient(
            options.base_url, api_key=options.api_key, timeout_s=options.request_timeout_s, clock=clock
        )
    except ValueError as error:
        raise SettingsError(f"--base-url {options.base_url}", why=str(error), hint="Correct it.") from None
    async with client:
        with console.status("warming up"):
            model = options.model or await client.first_model()
            template = RequestTemplate.of(options, model)
            await warm_up(client, template, plan_warmups(options))
        started = datetime.datetime.now(datetime.UTC)
        with _ProgressBar(console, len(plan)) as bar:
            rows = await run_load(
                plan,
                lambda request: client.measure(template, request, bar.on_tokens),
                clock=clock,
                max_concurrency=options.max_concurrency,
                on_row=bar.on_row,
            )
    return RunFile(baton_version=__version__, started=started, model=model, options=options, rows=tuple(rows))


def show(
    runs: Sequence[RunFile], titles: Sequence[str], shape: TableLayout, goodput: Sequence[str] | None, console: Console
) -> int:
    """Prints the table of the valid runs and the reasons against the others; returns the exit code."""
    verdicts = [lag_verdict(run.rows, is_scheduled=run.options.is_scheduled) for run in runs]
    for title, verdict in zip(titles, verdicts, strict=True):
        if verdict is not None:
            console.print(f"{title}: {verdict}", markup=False, highlight=False)
    counted = [(t, run) for t, run, verdict in zip(titles, runs, verdicts, strict=True) if verdict is None]
    summaries = [
        summarize(run.rows, parse_objectives(run.options.goodput if goodput is None else goodput)) for _, run in counted
    ]
    for (title, _), summary in zip(counted, summaries, strict=True):
        for reason, num_requests in summary.failures:
            console.print(f"{title}: {num_requests} failed: {reason}", markup=False, highlight=False)
    if counted:
        Console().print(make_table([title for title, _ in counted], summaries, shape))
    return 0 if len(counted) == len(runs) else EXIT_NOT_VALID


class _ProgressBar:
    """Progress on the terminal. Counts every token and draws four times a second, so it costs the client little."""

    def __init__(self, console: Console, num_requests: int) -> None:
        columns = (
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
        )
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, refresh_per_second=4)
        self._num_tokens = 0
        self._task: TaskID = self._progress.add_task("", total=num_requests, tokens=0)

    def __enter__(self) -> _ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def on_tokens(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def on_row(self, row: RequestRow) -> None:
        self._progress.update(self._task, advance=1, tokens=self._num_tokens)
