"""Compiles the constraint of a new request before it is admitted, in threads, so that a wrong one gets a 400.

Not for calls that are taken over: another router has checked them. Grammars that were refused are refused again from
memory. The library is loaded with the first constraint.
"""

from __future__ import annotations

import asyncio
import threading
import time

from baton.domain.errors import ConstraintFailed, FailedConstraint, Overloaded
from baton.grammar import sources
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.tokenizer import GrammarTokenizer
from baton.services.router.openai.constraint.reader import RequestedConstraint
from baton.services.router.text.text_model import TextModel
from baton.telemetry import metrics

MAX_RUNNING, MAX_WAITING = 2, 8
RETRY_AFTER_S = 1.0


class ConstraintChecker:
    """Owned by one event loop."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._running = asyncio.Semaphore(MAX_RUNNING)
        self._num_open = 0
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    async def check(self, requested: RequestedConstraint) -> None:
        """Raises `ConstraintFailed`, or `Overloaded` while too many others are checked."""
        if self._num_open >= MAX_RUNNING + MAX_WAITING:
            raise Overloaded("too many constraints are being checked", retry_after_s=RETRY_AFTER_S)
        self._num_open += 1
        try:
            async with self._running:
                await asyncio.to_thread(self._check, requested)
        finally:
            self._num_open -= 1

    def _check(self, requested: RequestedConstraint) -> None:
        began = time.thread_time()
        try:
            self._loaded().check(requested.value)
        except ConstraintFailed as error:
            metrics.CONSTRAINT_FAILURES_TOTAL.labels(error.reason.value).inc()
            known = sources.explain(requested.schema, error)
            raise ConstraintFailed(f"{requested.param}: {known}", known.reason, param=requested.param) from None
        finally:
            metrics.GRAMMAR_COMPILE_SECONDS.observe(time.thread_time() - began)

    def _loaded(self) -> GrammarCompiler:
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
