"""Runs of the simulation over the real Lua scripts."""

import pytest

from simulation.nodes.lua_store import LuaStore
from simulation.policies import PolicyClasses
from simulation.report import describe
from simulation.run import run
from simulation.scenario_generator import generate_scenario


@pytest.mark.parametrize("seed", [2, 5, 11, 17, 23])
def test_seeds_hold_over_the_scripts_of_redis(seed: int):
    result = run(generate_scenario(seed), PolicyClasses(store=LuaStore))
    if result.violation is not None:
        pytest.fail(describe(result))


def test_a_run_is_the_same_over_memory_and_over_the_scripts():
    scenario = generate_scenario(7)
    in_memory, in_scripts = run(scenario), run(scenario, PolicyClasses(store=LuaStore))
    assert in_memory.outcomes == in_scripts.outcomes
    assert in_memory.trace.digest() == in_scripts.trace.digest()
