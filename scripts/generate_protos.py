"""Compiles `protos/baton/v1/*.proto` into the flat package `baton.rpc.gen`.

Called by `make proto` (into the tree) and by `tests/contract/test_protos.py` (into a temporary folder, to compare). The
compiler runs in a process of its own: it crashes beside NIXL's libraries.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
STUBS = ROOT / "baton" / "rpc" / "gen"
PACKAGE = "baton.rpc.gen"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
INIT = '"""Stubs generated from `protos/` by `make proto`; never edited by hand."""\n'
# protoc imports by the path of the .proto file; here all stubs are in one package.
PROTO_IMPORT = re.compile(r"^from baton\.v1 import ", re.MULTILINE)


def compile_protos(target: Path) -> None:
    """Runs the pinned protoc on every .proto file; `target` receives a tree `baton/v1/`."""
    sources = sorted(path.relative_to(PROTOS).as_posix() for path in PROTOS.glob("baton/v1/*.proto"))
    if not sources:
        raise SystemExit(f"no .proto files below {PROTOS}")
    outputs = [f"--{kind}={target}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *sources], cwd=PROTOS, check=True)


def has_services(stub: str) -> bool:
    """True if a gRPC stub holds more than protoc's preamble. A file without services has an empty stub."""
    return "class " in stub


def generate(target: Path) -> list[Path]:
    """Writes the stubs of every .proto file to `target`, removes stale ones, and returns the files written."""
    target.mkdir(parents=True, exist_ok=True)
    stubs = {"__init__.py": INIT}
    with tempfile.TemporaryDirectory() as scratch:
        compile_protos(Path(scratch))
        for path in sorted((Path(scratch) / "baton" / "v1").iterdir()):
            text = PROTO_IMPORT.sub(f"from {PACKAGE} import ", path.read_text())
            if not path.name.endswith("_pb2_grpc.py") or has_services(text):
                stubs[path.name] = text
    for old in target.iterdir():
        if old.name.endswith(SUFFIXES) and old.name not in stubs:
            old.unlink()
    for name, text in stubs.items():
        (target / name).write_text(text)
    return [target / name for name in stubs]


def main() -> None:
    """Command line: `generate_protos.py [OUTPUT_DIR]`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?", type=Path, default=STUBS, help="where the stubs go (default: %(default)s)")
    for path in generate(parser.parse_args().target):
        print(path)


if __name__ == "__main__":
    main()
