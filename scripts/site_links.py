"""A hook of mkdocs: links to files outside docs/ become plain text on the site, where those files are not."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page with its source."""
    return without_outside_links(markdown, page.file.src_uri)


def without_outside_links(markdown: str, source: str) -> str:
    """`source`: the path of the page below docs/."""

    def replace(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        return link[1] if target.startswith("..") else link[0]

    return LINK.sub(replace, markdown)
