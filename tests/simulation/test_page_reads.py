"""Cuts of the simulated page network: begin, extension and end."""

import asyncio
from random import Random

from baton.domain.ids import Incarnation
from simulation.runtime.page_memory import SimMemory
from simulation.runtime.page_reads import PageNetwork
from simulation.runtime.process import SimProcess
from simulation.runtime.trace import Trace
from simulation.runtime.virtual_clock import VirtualLoop
from simulation.scenario import Noise

EARLY_S = 5e-10
"""Less than the resolution of an event loop's clock. A timer this much earlier makes the loop run later ones early."""


def run_cuts(start_s: float, durations_s: list[float]) -> list[bool]:
    """Returns whether the link is paused during the last cut, and a moment after its end."""
    loop = VirtualLoop()
    paused: list[bool] = []

    async def cut() -> None:
        process = SimProcess("prefill-0", Incarnation(1), Random(0), lambda process, error: None)
        decode = SimProcess("decode-0", Incarnation(2), Random(0), lambda process, error: None)
        network = PageNetwork(Noise(), Trace(loop.time))
        network.add_source(process, SimMemory(1, 8))
        (view,) = network.add_reader(decode).sources.values()
        await asyncio.sleep(start_s)
        loop.call_at(loop.time() + max(durations_s) - EARLY_S, lambda: None)
        for duration_s in durations_s:
            network.cut("prefill-0", "decode-0", duration_s)
        await asyncio.sleep(max(durations_s) / 2)
        paused.append(view.paused)
        await asyncio.sleep(max(durations_s))
        paused.append(view.paused)

    try:
        loop.run_until_complete(cut())
    finally:
        loop.close()
    return paused


def test_a_cut_ends_although_its_timer_runs_early():
    assert run_cuts(1.0, [1.6]) == [True, False]


def test_a_shorter_cut_does_not_end_a_longer_one():
    assert run_cuts(1.0, [2.0, 0.5]) == [True, False]
