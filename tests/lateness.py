"""What makes a failure one that the test's own body did not find: it was late, or it was unclean.

Late: the test waited in vain, and saw nothing that was wrong; a test of real processes, a browser among them, may be
late because two other test processes share its cores. Unclean: the body passed, and its set-up or clean-up did not, or
something was collected as garbage meanwhile that perhaps another test had left open. `scripts/test.sh` names such tests
and runs them three times more, alone; they must pass each time. Any other failure is final. Hooks for pytest are at the
end.
"""

from __future__ import annotations

import os
import subprocess
import traceback
from collections.abc import Generator
from pathlib import Path

import httpx2
import pytest

LATE_FILE_VARIABLE = "LATE_TESTS_FILE"
MAX_LATE_TESTS = 6
"""More late tests than these are no accident of a busy machine."""
PROCESS_FOLDERS = ("chaos", "exactness", "integration", "page", "service")
"""Folders whose tests wait for real processes or real time."""
PROPERTY = "late"


class Late(AssertionError):
    """A condition was not met in time."""


LATE_ERRORS = (Late, TimeoutError, subprocess.TimeoutExpired, httpx2.TimeoutException)
BROWSER = "playwright"
"""The package that drives the browser; not imported here, as it need not be installed."""
SEEN_BY_BROWSER = ("strict mode violation", "has been closed")
"""What its `expect` says if it did not wait."""


def in_time(measured_s: float, limit_s: float, what: str) -> None:
    """Raises `Late` if `measured_s` is more than `limit_s`."""
    if measured_s > limit_s:
        raise Late(f"{measured_s:.2f} s instead of {limit_s:g} s: {what}")


LEFTOVER_ERRORS = (pytest.PytestUnraisableExceptionWarning, pytest.PytestUnhandledThreadExceptionWarning)
"""Raised in the test that runs when an object is collected or a thread ends, whichever test that was of."""


def met(condition: object, what: str) -> None:
    """Raises `Late` unless `condition` holds: things that a test lets happen together came one after another."""
    if not condition:
        raise Late(f"did not meet: {what}")


def is_late(error: BaseException) -> bool:
    """True if every exception in `error`, which may be a group, is one of `LATE_ERRORS` or its like of a browser."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_late, error.exceptions))
    return isinstance(error, LATE_ERRORS) or _is_late_in_browser(error)


def _is_late_in_browser(error: BaseException) -> bool:
    """True if a page, or `expect` of what it shows, waited until its deadline. A plain `assert` waits for nothing."""
    kind = type(error)
    if kind.__name__ == "TimeoutError" and kind.__module__.partition(".")[0] == BROWSER:
        return True
    if not isinstance(error, AssertionError) or any(words in str(error) for words in SEEN_BY_BROWSER):
        return False
    raised_in = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(raised_in) and raised_in[-1].partition(".")[0] == BROWSER


def is_leftover(error: BaseException) -> bool:
    """True if every exception in `error`, which may be a group, is one of `LEFTOVER_ERRORS`."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_leftover, error.exceptions))
    return isinstance(error, LEFTOVER_ERRORS)


def is_unclean(call: pytest.CallInfo[None]) -> bool:
    """True if a part of a test failed that is not its body, or only by what was left."""
    return call.excinfo is not None and (call.when != "call" or is_leftover(call.excinfo.value))


class LatenessPlugin:
    """Marks late and unclean failures in reports, and writes their ids to `LATE_TESTS_FILE` if no other test failed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._late: list[str] = []
        self._num_others = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.excinfo is not None and (self._is_late(item, call.excinfo.value) or is_unclean(call)):
            report.user_properties.append((PROPERTY, True))
        return report

    def _is_late(self, item: pytest.Item, error: BaseException) -> bool:
        return item.path.relative_to(self._root).parts[0] in PROCESS_FOLDERS and is_late(error)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        if (PROPERTY, True) in [tuple(entry) for entry in report.user_properties]:
            if report.nodeid not in self._late:
                self._late.append(report.nodeid)
        else:
            self._num_others += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._num_others += report.failed

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        path = os.environ.get(LATE_FILE_VARIABLE)
        if not path or hasattr(session.config, "workerinput"):
            return
        rerun = self._late if not self._num_others and len(self._late) <= MAX_LATE_TESTS else []
        Path(path).write_text("".join(f"{nodeid}\n" for nodeid in rerun))
