"""An answer is computed once for each checkpoint, kind of model and request, and never taken for another one's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.exactness.answers.reference_answers import FOLDER, checkpoint_digest, remembered


class Counted:
    """A model that counts its answers and never gives the same one twice."""

    def __init__(self) -> None:
        self.num_answers = 0

    def __call__(self) -> list[int]:
        self.num_answers += 1
        return [self.num_answers, 7]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return Counted()


def test_an_answer_is_computed_once(model: Counted, tmp_path: Path) -> None:
    answers = [remembered("reference", "digest", [1, 2], 2, model) for _ in range(3)]
    assert answers == [[1, 7]] * 3
    assert model.num_answers == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_every_part_of_a_request_makes_another_answer(model: Counted) -> None:
    asked = [("reference", "digest", [1, 2], 2), ("stock", "digest", [1, 2], 2), ("reference", "other", [1, 2], 2)]
    asked += [
        ("reference", "digest", [1, 2, 2], 2),
        ("reference", "digest", [12], 2),
        ("reference", "digest", [1, 2], 3),
    ]
    answers = [remembered(*request, model) for request in asked]
    assert answers == [[number + 1, 7] for number in range(len(asked))]


def test_nothing_is_kept_outside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER)
    model = Counted()
    assert [remembered("reference", "digest", [1], 2, model) for _ in range(2)] == [[1, 7], [2, 7]]


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text("{ }"),
        lambda folder: (folder / "config.json").rename(folder / "other.json"),
        lambda folder: (folder / "more").write_bytes(b""),
        lambda folder: (folder / "weights").write_bytes(b"\0\1\3"),
    ],
    ids=["config", "name", "one more", "weights"],
)
def test_any_other_file_is_another_checkpoint(change: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "weights").write_bytes(b"\0\1\2")
    before = checkpoint_digest(tmp_path)
    assert checkpoint_digest(tmp_path) == before
    change(tmp_path)
    assert checkpoint_digest(tmp_path) != before
