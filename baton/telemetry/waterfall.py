"""A request's trace as text: one line a stage, drawn over time. The terminal view of `RequestTrace`; pure.

Two time scales share the width: everything up to the batch takes 64 % of it, decoding the rest, so that a long answer
does not flatten its first token. The pull overlaps prefill and is drawn as an overlay (`~`), outside the sum.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.telemetry.request_trace import AttemptTrace, RequestTrace, SequenceTrace, Stage, StageTime

WIDTH = 60
FIRST_SHARE = 0.64
_NAME_CHARS = 14
_LATE = (Stage.DECODE, Stage.FINISH)


def waterfall(trace: RequestTrace, width: int = WIDTH) -> list[str]:
    """Lines without colour; `width` is that of the bars."""
    scale = _Scale(trace, width)
    attempt = _shown_attempt(trace)
    lines = [_title(trace), _route(trace)]
    for part in trace.stages:
        if part.duration_us:
            lines.append(_row(part.stage.value, part.duration_us, scale.bar(part, trace), _note(part.stage, trace)))
        if part.stage is Stage.PREFILL and attempt is not None:
            lines += _overlay(attempt, scale)
    lines += [f"choice {each.index}: {_choice(each)}" for each in trace.sequences if trace.n > 1]
    lines += [f"! {_ms(event.at_us)}: {event.text}" for event in trace.events]
    return lines


def worker_lines(attempt: AttemptTrace) -> list[str]:
    """The workers' times of one attempt, for a request without a trace."""
    lines = [f"attempt {attempt.attempt}: {attempt.prefill or '?'} > {attempt.decode or '?'}"]
    if (prefill := attempt.prefill_times) is not None:
        lines.append(
            f"  prefill   queue {_ms(prefill.queue_us)}, {_prefill(attempt)}, sealed at {_ms(prefill.seal_us)}"
        )
    if (pulled := attempt.import_times) is not None:
        lines.append(f"  transfer  {_transfer(attempt)}, committed at {_ms(pulled.commit_us)}")
    if (decode := attempt.decode_times) is not None:
        lines.append(
            f"  decode    {decode.steps} steps, {_ms(decode.step_us)} of steps, {_ms(decode.waited_us)} waiting"
        )
    return lines


class _Scale:
    """Columns of times: up to `_split_us` on the first share, the rest beyond it."""

    def __init__(self, trace: RequestTrace, width: int) -> None:
        self._width = width
        late = [part for part in trace.stages if part.stage in _LATE and part.duration_us]
        self._end_us = max(1, trace.e2e_us)
        self._split_us = late[0].start_us if late else self._end_us
        self._split = round(FIRST_SHARE * width) if late and self._split_us else 0 if late else width

    def column(self, us: int) -> int:
        if us <= self._split_us:
            return round(self._split * us / max(1, self._split_us))
        rest_us = max(1, self._end_us - self._split_us)
        return self._split + round((self._width - self._split) * (us - self._split_us) / rest_us)

    def draw(self, start_us: int, end_us: int, mark: str) -> str:
        start, end = min(self.column(start_us), self._width - 1), min(self.column(end_us), self._width)
        return " " * start + mark * max(1, end - start)

    def bar(self, part: StageTime, trace: RequestTrace) -> str:
        end_us = part.start_us + part.duration_us
        cells = list(self.draw(part.start_us, end_us, "#"))
        for event in trace.events:
            if part.start_us <= event.at_us <= end_us and self.column(event.at_us) < len(cells):
                cells[self.column(event.at_us)] = "!"
        return "".join(cells)


def _shown_attempt(trace: RequestTrace) -> AttemptTrace | None:
    """The last attempt that has prefill's times: the one that the stages are about, also after a replay."""
    attempts = trace.sequences[0].attempts if trace.sequences else ()
    return next((attempt for attempt in reversed(attempts) if attempt.prefill_times is not None), trace.last_attempt)


def _title(trace: RequestTrace) -> str:
    cached = f" ({trace.cached_tokens} cached)" if trace.cached_tokens else ""
    code = f" ({trace.code})" if trace.code else ""
    ttft = "" if trace.ttft_us is None else f"  TTFT {_ms(trace.ttft_us)}"
    tokens = f"{trace.prompt_tokens} prompt{cached} {trace.output_tokens} out"
    return f"{trace.id}: {trace.outcome.value}{code}  {tokens}{ttft}  E2E {_ms(trace.e2e_us)}"


def _route(trace: RequestTrace) -> str:
    attempt = trace.last_attempt
    pair = f"{attempt.prefill} > {attempt.decode}" if attempt is not None and attempt.decode else "no workers"
    facts = [trace.router, pair, trace.endpoint, f"HTTP {trace.status}" if trace.status else "running"]
    facts += ["client gone"] * trace.client_gone + ["durable"] * trace.durable
    facts += [f"tenant {trace.tenant}"] * bool(trace.tenant)
    facts += [f"x-request-id {trace.http_request_id}"] * bool(trace.http_request_id)
    return "  ".join(facts)


def _row(name: str, us: int, bar: str, note: str = "") -> str:
    return f"{name:<{_NAME_CHARS}}{_ms(us):>9} |{bar}{'  ' + note if note else ''}".rstrip()


def _note(stage: Stage, trace: RequestTrace) -> str:
    attempt, sequence = _shown_attempt(trace), trace.sequences[0] if trace.sequences else None
    if stage is Stage.PREFILL and attempt is not None and attempt.prefill_times is not None:
        return _prefill(attempt)
    if stage is Stage.RESERVE and attempt is not None and attempt.busy_replies:
        return f"{attempt.busy_replies} workers had no room"
    if stage is Stage.DECODE and sequence is not None and sequence.max_gap_us is not None:
        return f"longest gap {_ms(sequence.max_gap_us)} at token {sequence.max_gap_at_token}"
    return ""


def _overlay(attempt: AttemptTrace, scale: _Scale) -> Iterable[str]:
    """The pull, placed by the reservation: both workers get their calls then."""
    times = attempt.import_times
    if times is not None and attempt.reserve_us is not None:
        called_us = attempt.start_us + attempt.reserve_us
        bar = scale.draw(called_us + times.first_chunk_us, called_us + times.commit_us, "~")
        yield _row("~transfer", times.commit_us - times.first_chunk_us, bar, _transfer(attempt))


def _prefill(attempt: AttemptTrace) -> str:
    times = attempt.prefill_times
    if times is None:
        return ""
    cached = f", {times.cached_tokens} cached" if times.cached_tokens else ""
    return f"{times.computed_tokens} tokens{cached} in {len(times.chunks)} chunks, {_ms(times.compute_us)} of steps"


def _transfer(attempt: AttemptTrace) -> str:
    times = attempt.import_times
    if times is None:
        return ""
    again = f", {times.re_reads} pages read again" if times.re_reads else ""
    size = f"{times.bytes / 1e6:.1f} MB" if times.bytes >= 100_000 else f"{times.bytes / 1e3:.1f} kB"
    path = times.path or times.transport
    return f"{size} in {times.pages} pages, {path} {times.proof}, {_ms(times.exposed_us)} exposed{again}"


def _choice(sequence: SequenceTrace) -> str:
    first = "no token" if sequence.first_token_us is None else f"first token at {_ms(sequence.first_token_us)}"
    return f"{sequence.finish_reason or 'unfinished'}, {sequence.output_tokens} tokens, {first}"


def _ms(us: int) -> str:
    return f"{us / 1e6:.2f} s" if us >= 1_000_000 else f"{us / 1e3:.0f} ms" if us >= 10_000 else f"{us / 1e3:.1f} ms"
