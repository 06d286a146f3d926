"""One format for our log lines and those of libraries. Each test logs in a child process: logging is global."""

import json
import subprocess
import sys

PROGRAM = """
import logging
from baton.telemetry.logs import configure_logging, get_logger
configure_logging("router", "{level}", "{fmt}")
log = get_logger("baton.test").bind(request_id="r1")
log.debug("hidden")
log.info("sealed", attempt=2)
logging.getLogger("uvicorn.error").warning("theirs %s", 7)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def lines(level: str, fmt: str) -> list[str]:
    program = PROGRAM.format(level=level, fmt=fmt)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == ""
    return run.stderr.splitlines()


def test_json_lines_carry_service_fields_and_traceback():
    ours, theirs, failed = (json.loads(line) for line in lines("info", "json"))
    assert ours["event"] == "sealed"
    assert (ours["service"], ours["request_id"], ours["attempt"], ours["level"]) == ("router", "r1", 2, "info")
    assert (theirs["event"], theirs["logger"], theirs["service"]) == ("theirs 7", "uvicorn.error", "router")
    assert "ZeroDivisionError" in failed["exception"]


def test_lines_below_the_level_are_hidden():
    assert [json.loads(line)["event"] for line in lines("error", "json")] == ["failed"]


def test_console_lines_are_readable_without_colours_in_a_pipe():
    text = "\n".join(lines("info", "console"))
    assert "sealed" in text
    assert "request_id=r1" in text
    assert "\x1b[" not in text


def test_debug_lines_are_made_where_they_are_shown():
    program = """
from baton.telemetry.logs import configure_logging, shows_debug
from structlog.testing import capture_logs
shown = [shows_debug()]
for level in ("info", "debug"):
    configure_logging("router", level)
    shown.append(shows_debug())
configure_logging("router", "info")
with capture_logs():
    shown.append(shows_debug())
print(shown)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[True, False, True, True]"
