"""Image files for a message: what is read, and why the others are not."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest
from PIL import Image

from baton.services.cli.chat.image_file import read_image_part
from baton.services.router.vision.limits import ImageLimits


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
def test_the_url_says_what_the_file_is_and_not_its_name(tmp_path: Path, format: str) -> None:
    file = tmp_path / "picture.gif"
    Image.new("RGB", (3, 2), "blue").save(file, format)
    part = read_image_part(file)
    data = base64.b64encode(file.read_bytes()).decode()
    assert part == {"type": "image_url", "image_url": {"url": f"data:image/{format};base64,{data}"}}


def test_a_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_image_part(Path("~/a.png")) == read_image_part(tmp_path / "a.png")


def test_others_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello")
    (tmp_path / "large").write_bytes(bytes(ImageLimits().max_image_bytes + 1))
    os.mkfifo(tmp_path / "pipe")
    Image.new("RGB", (2, 2)).save(tmp_path / "moving", "gif")
    Image.new("RGB", (401, 2)).save(tmp_path / "narrow", "png")
    for name, words in (
        ("empty", "is empty"),
        ("text", "send PNG, JPEG or WebP"),
        ("large", "more than 10 MiB"),
        ("moving", "is GIF"),
        ("narrow", "401 x 2 pixels"),
        ("none", "No such file"),
        ("", "is no regular file"),
        ("pipe", "is no regular file"),
    ):
        with pytest.raises(ValueError, match=words):
            read_image_part(tmp_path / name)
    with pytest.raises(ValueError, match="nobody-here"):
        read_image_part(Path("~nobody-here/a.png"))
