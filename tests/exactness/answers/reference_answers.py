"""Answers of reference models that a run of the tests has computed once, for all its processes and tests.

The key is the content of the checkpoint and all that was asked. The answers are files in a folder that `conftest.py`
makes for one run and removes after it, so that no run believes another one's libraries. Without it nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

FOLDER = "REFERENCE_ANSWERS_FOLDER"
"""Environment variable: the folder of this run."""


def checkpoint_digest(directory: Path) -> str:
    """Digest of names and contents of all files of a checkpoint."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()


def remembered(
    kind: str, checkpoint: str, prompt: Sequence[int], num_tokens: int, compute: Callable[[], list[int]]
) -> list[int]:
    """The answer of `compute`, which runs once for each `kind`, checkpoint digest, prompt and number of tokens."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return compute()
    asked = json.dumps([kind, checkpoint, list(prompt), num_tokens])
    path = Path(folder) / f"{hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()}.json"
    if path.exists():
        found: list[int] = json.loads(path.read_text())
        return found
    answer = compute()
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:  # another process may write the same
        json.dump(answer, file)
    Path(file.name).replace(path)
    return answer
