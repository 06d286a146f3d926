"""The digest of an image processor covers its files, and tells a missing one from an empty one."""

from __future__ import annotations

from pathlib import Path

from baton.settings.processor_digest import processor_digest


def test_the_digest_covers_every_file(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    assert processor_digest(tmp_path) == "", "no image processor"
    found = set()
    for name, text in [
        ("preprocessor_config.json", ""),
        ("preprocessor_config.json", "{}"),
        ("processor_config.json", ""),
        ("config.json", '{"image_token_id": 3}'),
    ]:
        (tmp_path / name).write_text(text)
        found.add(processor_digest(tmp_path))
    assert len(found) == 4
    assert {len(one) for one in found} == {32}
