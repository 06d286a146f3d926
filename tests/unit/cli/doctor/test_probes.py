"""Probes in child processes: good answers, crashes, hangs, and what the doctor makes of them."""

from __future__ import annotations

import pytest

from baton.services.cli.doctor.probes import ProbeAnswer, ask_loopback, engine_results, loopback_result, run_probe
from baton.services.cli.doctor.results import CheckStatus
from baton.transfer.nixl_agent import nixl_available

OK, WARN, FAIL = CheckStatus
PROBE = "tests.unit.cli.doctor.crashing_probe"
ENGINE = {"torch": "2.13.0", "level": "avx2", "note": "avx2 kernels", "bfloat16": False, "huge_fraction": 1.0}
PULLED = {"path": "nixl/ucx (cma)", "bytes": 64 << 20, "seconds": 0.01, "pages": 128}


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [("crash", "killed by SIGILL"), ("complain", "exit code 1: no such library"), ("hang", "no answer within 1 s")],
)
async def test_a_probe_that_dies_or_hangs_is_an_answer(behaviour, error):
    deadline_s = 1.0 if behaviour == "hang" else 30.0
    assert await run_probe(PROBE, behaviour, deadline_s=deadline_s) == ProbeAnswer(None, error)


async def test_lines_of_libraries_are_skipped():
    assert await run_probe(PROBE, "chatter", marker="mark ") == ProbeAnswer({"a": 1})


@pytest.mark.parametrize(
    ("changes", "statuses"),
    [
        ({}, [OK, OK, OK]),
        ({"level": None, "note": "no native kernels: portable kernels are not built"}, [FAIL, OK, OK]),
        ({"note": "portable kernels; not avx2: rms_norm differs"}, [WARN, OK, OK]),
        ({"huge_fraction": 0.1}, [OK, OK, WARN]),
        ({"huge_fraction": None}, [OK, OK]),
        ({"file_huge_fraction": 1.0}, [OK, OK, OK, OK]),
    ],
)
def test_the_kernels_in_use_are_judged(changes, statuses):
    assert [result.status for result in engine_results(ProbeAnswer(ENGINE | changes))] == statuses


@pytest.mark.parametrize(
    ("share", "words"), [(1.0, "100% of a mapped"), (0.0, "0% of a mapped file of 16 MiB: weights stay")]
)
def test_pages_of_files_are_told(share, words):
    *_, result = engine_results(ProbeAnswer(ENGINE | {"file_huge_fraction": share}))
    assert words in result.found


def test_an_engine_that_does_not_start_fails():
    (result,) = engine_results(ProbeAnswer(None, "killed by SIGILL"))
    assert result.status is FAIL
    assert "SIGILL" in result.found


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (ProbeAnswer(PULLED), OK, "6.2 GiB/s over nixl/ucx (cma), all digests match"),
        (ProbeAnswer(PULLED | {"path": "nixl/ucx (tcp)"}), WARN, "should be cma"),
        (ProbeAnswer({"error": "corrupt", "path": "?"}), FAIL, "corrupt"),
        (ProbeAnswer(None, "killed by SIGSEGV"), FAIL, "SIGSEGV"),
    ],
)
def test_the_loopback_is_judged(answer, status, words):
    result = loopback_result(answer)
    assert result.status is status
    assert words in result.found


@pytest.mark.slow
@pytest.mark.skipif(nixl_available() is not None, reason="NIXL is not installed")
@pytest.mark.parametrize(("arguments", "statuses"), [((), {OK, WARN}), (("--corrupt",), {FAIL})])
async def test_a_real_loopback_finds_a_flipped_bit(arguments, statuses):
    result = loopback_result(await ask_loopback(*arguments))
    assert result.status in statuses
    assert ("all digests match" in result.found) is not bool(arguments)
    assert ("do not match their digest" in result.found) is bool(arguments)
