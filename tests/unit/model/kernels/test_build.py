"""Building, finding and refusing kernel libraries; the highest level's sources on narrower registers."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.model.kernels import build as building
from baton.model.kernels.build import (
    SUFFIX_INDEX,
    BuildFailed,
    BuildResult,
    BuildSpec,
    IsaLevel,
    build,
    build_specs,
    is_current,
    source_digest,
)
from baton.model.kernels.library import KernelsUnavailable, available_levels, open_kernels
from baton.model.kernels.platform_tag import platform_tag
from baton.model.linears.int8 import Int8Linear
from baton.model.linears.panels import PanelLinear
from baton.model.loading.kernel_check import first_wrong_kernel
from scripts import build_kernels
from tests.kernels import kernel_levels

ROOT = Path(__file__).resolve().parents[4]
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, building.COMPILERS)), reason="no C++ compiler")
needs_avx2 = pytest.mark.skipif(IsaLevel.AVX2 not in kernel_levels(), reason="no AVX2 here")
PORTABLE = build_specs()[0]
AVX512_DOT = ("-DBATON_BF16_DOT", "-DBATON_INT8_DOT")
QUICK_PORTABLE = BuildSpec(PORTABLE.level, PORTABLE.vector_bytes, (*PORTABLE.flags, "-O1"))
"""Compiles in a quarter of the time. All other tests open the fully optimized libraries."""


@needs_compiler
def test_kernels_exist_where_there_is_a_compiler():
    """Otherwise all kernel tests would be skipped unnoticed."""
    assert PORTABLE.level in available_levels()
    assert all(is_current(spec) for spec in (*build_specs(), SUFFIX_INDEX)), "make kernels"


@pytest.mark.slow
@needs_compiler
def test_a_library_embeds_the_digest_of_its_sources(tmp_path: Path):
    build(QUICK_PORTABLE, tmp_path / "new" / "made.so")
    assert source_digest(QUICK_PORTABLE).encode() in (tmp_path / "new" / "made.so").read_bytes()
    assert first_wrong_kernel(open_kernels(QUICK_PORTABLE, tmp_path / "new" / "made.so")) is None
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["made.so"]
    with pytest.raises(KernelsUnavailable, match="other sources"):
        open_kernels(BuildSpec(IsaLevel.PORTABLE, 16, ("-DOTHER",)), tmp_path / "new" / "made.so")


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(building, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(BuildFailed, match=r"no C\+\+ compiler was found"):
        build(PORTABLE, tmp_path / "made.so")
    with pytest.raises(BuildFailed, match="cannot run /no/such/compiler"):
        build(PORTABLE, tmp_path / "made.so", "/no/such/compiler")
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_a_failed_build_keeps_the_old_library(tmp_path: Path):
    (tmp_path / "made.so").write_bytes(b"old")
    with pytest.raises(BuildFailed, match="failed: "):
        build(BuildSpec(IsaLevel.PORTABLE, 16, ("-march=no-such-machine",)), tmp_path / "made.so")
    assert (tmp_path / "made.so").read_bytes() == b"old"


def test_a_file_that_is_no_library_is_refused(tmp_path: Path):
    with pytest.raises(KernelsUnavailable, match="not built"):
        open_kernels(PORTABLE, tmp_path / "missing.so")
    (tmp_path / "junk.so").write_bytes(b"junk")
    with pytest.raises(KernelsUnavailable, match="do not load"):
        open_kernels(PORTABLE, tmp_path / "junk.so")


def test_the_build_imports_only_the_standard_library():
    """The build runs before anything is installed."""
    program = (
        "import sys; sys.path.insert(0, '.'); before = set(sys.modules); import baton.model.kernels.build;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    command = [sys.executable, "-S", "-c", program]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == ["baton"]


class QuietApplication:
    """Hatchling's interface to a hook."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, message: str) -> None:
        self.warnings.append(message)

    def display_info(self, message: str) -> None:
        assert "native kernels" in message


def run_hook(
    version: str, outcomes: list[BuildResult], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], list[str]]:
    """Runs the build hook on given results; returns its build data and warnings."""
    monkeypatch.setattr(building, "build_all", lambda compiler: outcomes)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    application, build_data = QuietApplication(), {"artifacts": [], "pure_python": True}
    hook = module.KernelsHook(str(ROOT), {}, None, None, str(ROOT), "wheel", application)
    hook.initialize(version, build_data)
    hook.finalize(version, build_data, "made.whl")
    return build_data, application.warnings


@needs_compiler
def test_a_wheel_with_kernels_is_for_one_platform_and_any_python(monkeypatch: pytest.MonkeyPatch):
    outcomes = [BuildResult(PORTABLE, True, None), BuildResult(build_specs()[-1], False, "no such flag")]
    told, warnings = run_hook("standard", outcomes, monkeypatch)
    assert told["artifacts"] == ["/baton/model/kernels/built/portable.so"]
    assert not told["pure_python"]
    assert told["tag"] == f"py3-none-{platform_tag([PORTABLE.path])}"
    assert warnings[0].endswith("slower code runs instead: no such flag")
    assert warnings[1:] == [f"WARNING: built without {build_specs()[-1].name}; workers are slower"]


def test_an_installation_without_a_compiler_succeeds(monkeypatch: pytest.MonkeyPatch):
    told, warnings = run_hook("editable", [BuildResult(r, False, "no compiler") for r in build_specs()], monkeypatch)
    assert told == {"artifacts": [], "pure_python": True}
    assert len(warnings) == len(build_specs()) + 1
    assert "portable kernels" in warnings[-1]


def test_a_build_that_requires_kernels_fails_without_one(monkeypatch: pytest.MonkeyPatch):
    outcomes = [BuildResult(PORTABLE, True, None), BuildResult(SUFFIX_INDEX, False, "g++ took longer than 900 s")]
    monkeypatch.setenv("REQUIRE_KERNELS", "1")
    with pytest.raises(RuntimeError, match="missing: suffix index"):
        run_hook("standard", outcomes, monkeypatch)
    run_hook("standard", outcomes[:1], monkeypatch)
    monkeypatch.setenv("REQUIRE_KERNELS", "")
    run_hook("standard", outcomes, monkeypatch)


def test_the_last_line_of_a_build_names_missing_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    outcomes = [BuildResult(build_specs()[-1], False, "g++ took longer than 900 s"), BuildResult(PORTABLE, True, None)]
    monkeypatch.setattr(build_kernels, "build_all", lambda compiler: iter(outcomes))
    build_kernels.main()
    lines = capsys.readouterr().out.splitlines()
    assert "g++ took longer than 900 s" in lines[0]
    assert lines[-2].startswith(f"WARNING: missing: {build_specs()[-1].level.value} kernels;")
    monkeypatch.setattr(build_kernels, "build_all", lambda compiler: iter(outcomes[1:]))
    build_kernels.main()
    assert "WARNING" not in capsys.readouterr().out


@needs_compiler
@needs_avx2
@pytest.mark.slow
def test_the_highest_level_is_right_on_narrower_registers(tmp_path: Path):
    """Compiles vectors of 64 bytes with bfloat16 and int8 dot products for AVX2.

    This covers all of the AVX512 level's source except its two instructions, which are spelled out, and the compiler's
    output for it.
    """
    wide = BuildSpec(IsaLevel.AVX512_BF16, 64, ("-mavx2", "-mfma", *AVX512_DOT, "-Wno-psabi", "-O1"))
    build(wide, tmp_path / "wide.so")
    kernels = open_kernels(wide, tmp_path / "wide.so")
    assert (kernels.panel_outputs, kernels.head_dim_multiple) == (32, 16)
    assert first_wrong_kernel(kernels) is None
    ones, most = torch.ones(3, 960), torch.full((5, 960), -1.0)
    torch.testing.assert_close(Int8Linear(kernels, most, None)(ones), ones @ most.T, rtol=1e-6, atol=0.0)
    x, weight = torch.randn(9, 96, generator=torch.Generator().manual_seed(0)), torch.ones(5, 96)
    product = PanelLinear(kernels, weight.bfloat16(), None)(x.bfloat16())
    torch.testing.assert_close(
        product.float(), x.bfloat16().float().sum(1, keepdim=True).expand(9, 5), rtol=1e-2, atol=0.05
    )
