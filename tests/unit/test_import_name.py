"""The services have one import name, in a checkout and in a wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_folder_itself_cannot_be_imported():
    """A second name would be a second set of classes. The folder is importable where the checkout is on the path."""
    program = "import sys; sys.path.insert(0, '.'); import services.router"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "the package is called baton.services" in done.stderr


def test_the_link_is_relative():
    assert (ROOT / "baton" / "services").readlink() == Path("../services")


def test_a_wheel_holds_one_top_level_package(tmp_path: Path):
    """Built without the kernels' hook, which compiles."""
    program = (
        "import sys; from hatchling.builders.wheel import WheelBuilder\n"
        "class Plain(WheelBuilder):\n"
        "    def get_build_hooks(self, directory): return {}\n"
        "print(next(Plain('.').build(directory=sys.argv[1], versions=['standard'])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    names = zipfile.ZipFile(done.stdout.split()[-1]).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"baton"}
    assert "baton/services/router/app.py" in names
    assert "baton/services/router/ui/vendor/THIRD_PARTY_LICENSES" in names
