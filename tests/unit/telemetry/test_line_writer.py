"""The direct writer of a log line gives what structlog and `logging` give, or leaves the line to them."""

import re
import subprocess
import sys

import pytest
import structlog
from hypothesis import example, given
from hypothesis import strategies as st

from baton.telemetry.log_lines.line_writer import console_text

RENDERER = structlog.dev.ConsoleRenderer(colors=False)
STAMP = re.compile("[0-9-]{10}T[0-9:.]+Z")
HEAD = {"timestamp": "2026-11-28T09:31:53.057447Z", "level": "info", "event": "request_end", "logger": "baton"}
NAMES = st.text(st.characters(categories=["Ll", "Lu", "Nd"], include_characters="_"), min_size=1, max_size=12)
VALUES = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", " ", "a b", "a=b", "it's", 'say "x"', "tab\t", "line\nline", "\r", "\x1b[31m", "é", "\ud800"]),
    st.integers(),
    st.floats(),
    st.none(),
    st.booleans(),
    st.lists(st.integers(), max_size=3),
)

PROGRAM = """
import io, logging, structlog
from baton.telemetry import logs
logs.configure_logging("router", "{level}", "{fmt}")
log, writer, wrote = logs.get_logger(), logs._line_writer, []
write = writer.write
writer.write = lambda event, fields: wrote.append(write(event, fields)) or wrote[-1]
def both(fields):
    log.info("request_end", **fields)
    logs.log_info("request_end", fields)
{lines}
print(*wrote)
"""

AWKWARD = """
structlog.contextvars.bind_contextvars(http_request_id="a b", trace_id="ab" * 16)
both({"request_id": "r1", "e2e_s": 1e-07, "ttft_s": None, "code": "", "ok": True})
both({"http_request_id": "mine", "text": "line\\nline", "é": "\\ud800\\x1b\\"=' ", "big": 2**70, "nan": float("nan")})
both({"service": "other", "other": b"bytes", "set": {1}, "path": ("a", 1)})
both({"level": 1, "logger": 2, "timestamp": 3})
"""


def child(program: str, fmt: str = "json", level: str = "info") -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(fmt=fmt, level=level, lines=program)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)


def run(program: str, fmt: str = "json", level: str = "info") -> tuple[list[str], list[bool]]:
    """Lines without their timestamps, and for each call whether it was written directly."""
    done = child(program, fmt, level)
    stamped = done.stderr.splitlines()
    lines = [STAMP.sub("TIME", line) for line in stamped]
    assert all("TIME" in line for line in lines)
    return lines, wrote_of(done)


def wrote_of(done: subprocess.CompletedProcess[str]) -> list[bool]:
    return [word == "True" for word in done.stdout.split()]


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_lines_are_those_of_the_loggers(fmt: str):
    lines, wrote = run(AWKWARD, fmt)
    assert len(lines) == 8
    assert lines[::2] == lines[1::2]
    assert wrote == [True] * 4


@given(st.dictionaries(NAMES, VALUES, max_size=8))
@example({"request_id": "", "end": " "})
def test_console_text_is_that_of_structlog(fields: dict[str, object]):
    line = {**fields, **HEAD}
    if not {"exc_info", "exception", "stack", "logger_name"}.isdisjoint(line):
        return  # `write` leaves those to structlog
    assert console_text(dict(line)) == RENDERER(None, "info", dict(line))


def test_a_line_below_the_level_is_hidden():
    assert run('logs.log_info("request_end", {})', level="warning") == ([], [True])


@pytest.mark.parametrize(
    "change",
    [
        "logging.getLogger().addHandler(logging.NullHandler())",
        "logging.getLogger().handlers[0].addFilter(lambda record: False)",
        "logging.getLogger().handlers[0].setLevel(logging.ERROR)",
        "logging.getLogger().handlers[0].setFormatter(logging.Formatter('%(message)s'))",
        "logging.getLogger('baton').addFilter(lambda record: False)",
        "logging.getLogger('baton').addHandler(logging.NullHandler())",
        "logging.getLogger('baton').propagate = False",
        "structlog.configure(processors=[structlog.processors.KeyValueRenderer()])",
        "structlog.configure(logger_factory=lambda *names: logging.getLogger('x'))",
        "structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(0))",
        "structlog.contextvars.bind_contextvars(stack='s')",
        "capture = structlog.testing.capture_logs(); capture.__enter__()",
    ],
)
def test_whoever_changes_logging_gets_its_lines(change: str):
    program = "import structlog.testing\n" + change + '\nlogs.log_info("request_end", {"a": 1})'
    assert wrote_of(child(program)) == [False]


def test_a_disabled_logger_writes_nothing():
    assert run('logging.disable(logging.INFO)\nlogs.log_info("request_end", {})') == ([], [True])


def test_a_redirected_handler_gets_the_line():
    lines = """
target = io.StringIO()
logging.getLogger().handlers[0].setStream(target)
logs.log_info("request_end", {"a": 1})
assert '"a": 1' in target.getvalue() and target.getvalue().endswith("}\\n"), target.getvalue()
"""
    assert run(lines) == ([], [True])


def test_a_broken_stream_raises_no_error():
    lines = """
target = io.StringIO()
target.close()
logging.getLogger().handlers[0].setStream(target)
logging.raiseExceptions = False
logs.log_info("request_end", {"a": 1})
"""
    assert run(lines) == ([], [True])


def test_the_last_configuration_wins():
    lines = 'logs.configure_logging("other", "info", "console")\nlogs.log_info("request_end", {})'
    assert child(lines).stderr.endswith("[baton] service=other\n")
