"""Fetches the libraries of the page at their pinned versions, for maintainers: `python scripts/vendor_ui.py`.

Needs npm. Each package is compared with the sha512 of `services/router/ui/vendor/vendor.lock.json`; its files are
copied as they are, and their sha256 and licences are written beside them. `--update` takes new versions and hashes.
axe-core, which only tests use, goes to `tests/page/vendor`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UI = ROOT / "services" / "router" / "ui" / "vendor"
TESTS = ROOT / "tests" / "page" / "vendor"
LOCK = UI / "vendor.lock.json"

# package and version: (folder, licence, {file in the package: name here})
PACKAGES: dict[str, tuple[Path, str, dict[str, str]]] = {
    "htm@3.1.1": (UI, "LICENSE", {"preact/standalone.module.js": "preact-htm.js"}),
    "uplot@1.6.32": (
        UI,
        "LICENSE",
        {"dist/uPlot.iife.min.js": "uPlot.iife.min.js", "dist/uPlot.min.css": "uPlot.min.css"},
    ),
    "marked@18.2.1": (UI, "LICENSE", {"lib/marked.esm.js": "marked.esm.js"}),
    "dompurify@3.4.18": (UI, "LICENSE", {"dist/purify.min.js": "purify.min.js"}),
    "preact@11.2.0": (UI, "LICENSE", {}),  # its licence only: htm's standalone file holds preact
    "axe-core@4.14.1": (TESTS, "LICENSE", {"axe.min.js": "axe.min.js"}),
}


def main(update: bool) -> int:
    """Fetches all packages; returns 1 if a hash differs from the lock."""
    lock = json.loads(LOCK.read_text()) if LOCK.exists() and not update else {}
    made: dict[str, dict[str, object]] = {}
    licences: dict[Path, list[str]] = {UI: [], TESTS: []}
    for package, (folder, licence, files) in PACKAGES.items():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as place:
            archive = _pack(package, Path(place))
            integrity = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
            if not update and lock[package]["integrity"] != integrity:
                print(f"{package} is not what the lock says", file=sys.stderr)
                return 1
            with tarfile.open(archive) as members:
                contents = {name: _read(members, f"package/{name}") for name in (licence, *files)}
        for name, here in files.items():
            (folder / here).write_bytes(contents[name])
        hashes = {here: hashlib.sha256(contents[name]).hexdigest() for name, here in files.items()}
        made[package] = {"integrity": integrity, "files": hashes}
        licences[folder].append(f"=== {package}: {', '.join(files.values()) or 'within preact-htm.js'} ===\n\n")
        licences[folder].append(contents[licence].decode().strip() + "\n\n")
    LOCK.write_text(json.dumps(made, indent=2) + "\n")
    for folder, texts in licences.items():
        (folder / "THIRD_PARTY_LICENSES").write_text("".join(texts))
    return 0


def _pack(package: str, folder: Path) -> Path:
    """Downloads one package; returns its archive."""
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), package]
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.tgz"))


def _read(members: tarfile.TarFile, name: str) -> bytes:
    file = members.extractfile(name)
    assert file is not None, name
    return file.read()


if __name__ == "__main__":
    sys.exit(main("--update" in sys.argv[1:]))
