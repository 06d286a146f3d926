"""`python -m tests.clients PYTHON`: other projects' clients against a cluster of this machine.

PYTHON: an interpreter that has them; `make test-clients` makes one. Further arguments go to its pytest. The shapes of
what the clients sent go to the directory of `--record`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from baton.bundled import MODEL_DIR
from tests.clients.recorder import ShapeRecorder, recording
from tests.cluster import Cluster

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 1800.0


def main() -> int:
    """Exit status of the clients' pytest."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients")
    parser.add_argument("python", type=Path)
    parser.add_argument("--record", type=Path, metavar="DIRECTORY")
    known, rest = parser.parse_known_args()
    recorder = ShapeRecorder()
    with tempfile.TemporaryDirectory() as logs, Cluster(Path(logs)) as cluster, recording(cluster.url, recorder) as url:
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "BATON_CLIENTS_URL": url,
            "BATON_CLIENTS_MODEL": str(MODEL_DIR),
            "HF_HUB_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        command = [known.python.absolute(), "-m", "pytest", "-c", HERE / "pytest.ini", f"--confcutdir={HERE}", HERE]
        status = subprocess.run([*command, *rest], env=environment, timeout=TIMEOUT_S, check=False).returncode
    if known.record is not None:
        recorder.write(known.record)
    return status


if __name__ == "__main__":
    sys.exit(main())
