"""Compiles the constraint of a new request before it is admitted, in threads, so that a wrong one gets a 400.

Not for calls that are taken over: another router has checked them. What was found before is answered from memory. The
library is loaded with the first constraint.

The library does not bound the time of every grammar, and a thread cannot be stopped: a check that overruns its CPU time
is refused, and its thread is left to itself, as is that of a client that hung up. There are few such threads, or no
new constraint is checked.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future

from baton.domain.errors import ConstraintFailed, FailedConstraint, Overloaded
from baton.grammar import sources
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.deep_stack import DeepThread
from baton.grammar.tokenizer import GrammarTokenizer
from baton.services.router.openai.constraint.reader import RequestedConstraint
from baton.services.router.text.text_model import TextModel
from baton.telemetry import metrics

MAX_RUNNING, MAX_WAITING = 2, 8
MAX_LEFT = 4
"""Threads for whose checks nobody waits any more. While there are so many, none begins; those that had begun may still
join them."""

MAX_CHECK_S = 3.0
"""CPU time of one check, the load of the tokenizer apart. More than the limits of what may be answered."""

POLL_S = 0.05
RETRY_AFTER_S = 1.0


class ConstraintChecker:
    """Owned by one event loop."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._running = asyncio.Semaphore(MAX_RUNNING)
        self._num_open = 0
        self._left: set[_Check] = set()
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    async def check(self, requested: RequestedConstraint) -> None:
        """Raises `ConstraintFailed`, or `Overloaded` while too many others are checked."""
        try:
            if self._compiler is not None and self._compiler.known(requested.value):
                return
        except ConstraintFailed as error:
            raise await asyncio.to_thread(_explained, requested, error) from None
        self._refuse_by_those_left(requested)
        if self._num_open >= MAX_RUNNING + MAX_WAITING:
            raise _overloaded()
        self._num_open += 1
        try:
            async with self._running:
                self._refuse_by_those_left(requested)  # others were left meanwhile
                await self._run(_Check(self, requested))
        finally:
            self._num_open -= 1

    def _refuse_by_those_left(self, requested: RequestedConstraint) -> None:
        self._left = {each for each in self._left if not each.outcome.done()}
        if any(each.overran() and each.requested.value == requested.value for each in self._left):
            raise _overrun(requested)
        if len(self._left) >= MAX_LEFT:
            raise _overloaded()

    async def _run(self, check: _Check) -> None:
        """Waits for a check until its CPU time is over."""
        check.start()
        outcome = asyncio.wrap_future(check.outcome)
        try:
            while not (await asyncio.wait([outcome], timeout=POLL_S))[0]:
                if check.overran():
                    raise _overrun(check.requested)
            outcome.result()
        finally:
            if not outcome.done():
                self._left.add(check)
                outcome.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else reads it

    def compile(self, requested: RequestedConstraint, compiler: GrammarCompiler) -> None:
        """One check, in its thread. Raises `ConstraintFailed`."""
        began = time.thread_time()
        try:
            compiler.check(requested.value)
        except ConstraintFailed as error:
            raise _explained(requested, error) from None
        finally:
            metrics.GRAMMAR_COMPILE_SECONDS.observe(time.thread_time() - began)

    def loaded(self) -> GrammarCompiler:
        """The compiler; the first call reads the tokenizer. Raises `ConstraintFailed`."""
        with self._lock:
            if self._compiler is None:
                try:
                    tokenizer = GrammarTokenizer(
                        self._text.tokenizer_json(), self._text.vocab_size, self._text.eos_token_ids
                    )
                except ValueError as error:
                    why = f"the output of this model cannot be constrained: {error}"
                    raise ConstraintFailed(why, FailedConstraint.COMPILE) from None
                self._compiler = GrammarCompiler(tokenizer)
            return self._compiler


def _explained(requested: RequestedConstraint, error: ConstraintFailed) -> ConstraintFailed:
    """What the client gets; counted as a failure."""
    metrics.CONSTRAINT_FAILURES_TOTAL.labels(error.reason.value).inc()
    known = sources.explain(requested.schema, error)
    return ConstraintFailed(f"{requested.param}: {known}", known.reason, param=requested.param)


def _overloaded() -> Overloaded:
    return Overloaded("too many constraints are being checked", retry_after_s=RETRY_AFTER_S)


def _overrun(requested: RequestedConstraint) -> ConstraintFailed:
    why = f"the constraint is too complex: it took more than {MAX_CHECK_S:g} s to compile"
    return ConstraintFailed(f"{requested.param}: {why}", FailedConstraint.TOO_COMPLEX, param=requested.param)


class _Check:
    """One check and its thread, which the end of the process does not wait for."""

    def __init__(self, checker: ConstraintChecker, requested: RequestedConstraint) -> None:
        self.requested = requested
        self.outcome: Future[None] = Future()
        self._checker = checker
        self._began: tuple[int, float] | None = None  # clock of the thread, and its time when the compiler was there

    def start(self) -> None:
        """Starts the thread."""
        DeepThread(self._run, "constraint-check").start()

    def overran(self) -> bool:
        """True if the check runs and has used up its time, whether or not somebody waits for it."""
        return self._cpu_s() > MAX_CHECK_S

    def _cpu_s(self) -> float:
        """CPU time of the check; 0 before it has begun, and after its end."""
        if self._began is None or self.outcome.done():
            return 0.0
        clock, began = self._began
        try:
            return time.clock_gettime(clock) - began
        except OSError:  # the thread has ended
            return 0.0

    def _run(self) -> None:
        self.outcome.set_running_or_notify_cancel()
        try:
            compiler = self._checker.loaded()
            self._began = time.pthread_getcpuclockid(threading.get_ident()), time.thread_time()
            self._checker.compile(self.requested, compiler)
        except BaseException as error:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(None)
