"""Runs of the simulation over the real Lua scripts."""

import pytest

from simulation.nodes.lua_store import LuaStore
from simulation.policies import PolicyClasses
from simulation.report import describe
from simulation.run import run
from simulation.scenario_generator import generate_scenario


@pytest.mark.parametrize("seed", [2, 5, 8, 11, 14, 17, 23])
def test_seeds_hold_over_the_scripts_of_redis(seed: int):
    result = run(generate_scenario(seed), PolicyClasses(store=LuaStore))
    if result.violation is not None:
        pytest.fail(describe(result))


@pytest.mark.parametrize("seed", [7, 8, 14])
def test_a_run_is_the_same_over_memory_and_over_the_scripts(seed: int):
    scenario = generate_scenario(seed)
    in_memory, in_scripts = run(scenario), run(scenario, PolicyClasses(store=LuaStore))
    assert in_memory.outcomes == in_scripts.outcomes
    assert in_memory.trace.digest() == in_scripts.trace.digest()
