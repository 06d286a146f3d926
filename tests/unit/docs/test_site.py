"""The site of the documentation builds without a warning, shows every page, and asks no other host for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from scripts.site_links import without_outside_links

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Warnings (a link or an anchor that leads nowhere) are errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages_of(nav: Any) -> Iterator[str]:
    """The paths in mkdocs' navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(part)


def test_every_page_has_a_place_in_the_navigation():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    shown = set(pages_of(yaml.safe_load(settings[settings.index("\nnav:") :])["nav"]))
    listed = {str(path.relative_to(DOCS)) for path in [*DOCS.glob("*.md"), *DOCS.glob("tutorials/*.md")]}
    assert listed <= shown
    assert shown <= listed | {"adr/README.md"}


def test_every_page_is_built(site):
    for page in DOCS.rglob("*.md"):
        name = "index" if page.name == "README.md" else page.stem
        assert (site / page.relative_to(DOCS).parent / f"{name}.html").is_file(), page


def test_a_reader_loads_nothing_from_another_host(site):
    pages = {str(page.relative_to(site)): _foreign(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    assert len(pages) > 50
    assert {name: tags for name, tags in pages.items() if tags} == {}


def _foreign(html: str) -> list[str]:
    """Tags that fetch from another host; `rel="canonical"` and the like fetch nothing."""
    tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", html)
    return [tag for tag in tags if re.search(r"(?:src|href)=\"?(?:https?:)?//", tag) and "canonical" not in tag]


def test_links_to_other_folders_become_text_and_others_stay():
    text = "[a](../README.md) [b](../../x/y.py#z) [c](other.md#d) [e](https://h/../f) ![g](images/h.png) [i](#j)"
    found = without_outside_links(text, "page.md")
    assert found == "a b [c](other.md#d) [e](https://h/../f) ![g](images/h.png) [i](#j)"
    assert without_outside_links("[up](../page.md)", "adr/0001.md") == "[up](../page.md)"
