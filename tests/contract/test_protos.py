"""The committed stubs equal the output of the pinned protoc for `protos/`."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

NO_WHEEL = sys.version_info >= (3, 14) and find_spec("grpc_tools") is None
ROOT = Path(__file__).resolve().parents[2]
STUBS = ROOT / "baton" / "rpc" / "gen"


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.suffix in {".py", ".pyi"}}


@pytest.mark.skipif(NO_WHEEL, reason="the pinned protoc has no wheel for this Python; others compare the stubs")
def test_committed_stubs_match_the_protos(tmp_path: Path):
    # In its own process, as `make proto` does.
    command = [sys.executable, str(ROOT / "scripts" / "generate_protos.py"), str(tmp_path / "gen")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    committed, fresh = contents(STUBS), contents(tmp_path / "gen")
    assert sorted(committed) == sorted(fresh), "run `make proto`"
    assert [name for name in fresh if committed[name] != fresh[name]] == [], "run `make proto`"
