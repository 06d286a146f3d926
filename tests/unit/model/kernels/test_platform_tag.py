"""The tag of a wheel: systems that cannot load its libraries do not install it."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from baton.model.kernels.build import BUILT_DIR
from baton.model.kernels.platform_tag import platform_tag

LINUX = "linux-x86_64"


def library(directory: Path, *versions: str) -> Path:
    """A file with names of symbol versions, as a library has them."""
    path = directory / f"{len(list(directory.iterdir()))}.so"
    path.write_bytes(b"\x7fELF\0" + b"\0".join(version.encode() for version in versions) + b"\0")
    return path


@pytest.mark.parametrize(
    ("versions", "tag"),
    [
        (("GLIBC_2.2.5", "GLIBC_2.14"), "manylinux_2_17_x86_64"),
        (("GLIBC_2.2.5", "GLIBC_2.27", "GLIBC_2.3"), "manylinux_2_27_x86_64"),
        (("GLIBC_2.17", "GLIBCXX_3.4", "GLIBCXX_3.4.19", "CXXABI_1.3"), "manylinux_2_17_x86_64"),
        (("GLIBC_2.17", "GLIBCXX_3.4.20"), "manylinux_2_24_x86_64"),
        (("GLIBC_2.27", "GLIBCXX_3.4.30", "CXXABI_1.3.9"), "manylinux_2_35_x86_64"),
        (("GLIBC_2.17", "CXXABI_1.3.13"), "manylinux_2_34_x86_64"),
        (("GLIBC_2.38", "GLIBCXX_3.4.30"), "manylinux_2_38_x86_64"),
        (("GLIBC_2.17", "GLIBCXX_3.4.99"), "linux_x86_64"),
        (("musl",), "linux_x86_64"),
    ],
)
def test_the_tag_is_that_of_the_newest_symbol(tmp_path: Path, versions: tuple[str, ...], tag: str):
    assert platform_tag([library(tmp_path, *versions)], LINUX) == tag


def test_the_most_demanding_library_decides(tmp_path: Path):
    old, new = library(tmp_path, "GLIBC_2.2.5"), library(tmp_path, "GLIBC_2.28")
    assert platform_tag([old, new, old], LINUX) == "manylinux_2_28_x86_64"
    assert platform_tag([old, new], "linux-aarch64") == "linux_aarch64"
    assert platform_tag([old], "macosx-11.0-arm64") == "macosx_11_0_arm64"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64", reason="not glibc on x86-64")
def test_the_libraries_of_this_checkout_run_where_they_were_built():
    built = sorted(BUILT_DIR.glob("*.so"))
    if not built:
        pytest.skip("no kernels here")
    tag = platform_tag(built)
    assert tag.startswith("manylinux_2_")
    assert int(tag.split("_")[2]) <= int(platform.libc_ver()[1].split(".")[1])
