"""Tags of a prompt's pages: made once, when a page settles, and kept with it; the tail's at the seal. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from baton.domain.ids import PageId, PageKey
from baton.domain.request import EngineRequest
from baton.kv.page_digests import PageDigests, PageTagger
from baton.kv.page_tags import page_identities, page_identity


class PromptTags:
    """Tags for one prefill worker's publications. `fingerprint`: the model that they bind."""

    def __init__(self, digests: PageDigests, tagger: PageTagger, page_size: int, fingerprint: str) -> None:
        self._digests = digests
        self._tagger = tagger
        self._page_size = page_size
        self._fingerprint = fingerprint

    def identities(self, request: EngineRequest) -> list[bytes]:
        """Identities of the pages of a prompt, in order."""
        return page_identities(request, self._page_size, self._fingerprint)

    def identities_of_keys(self, keys: Sequence[PageKey]) -> list[bytes]:
        """Identities of full pages, by their keys."""
        return [page_identity(key, self._fingerprint) for key in keys]

    def settle(self, pages: Sequence[PageId], identities: Sequence[bytes]) -> None:
        """Tags those of `pages` that have settled and have no tag yet."""
        kept = self._digests
        pairs = zip(pages, identities, strict=True)
        new = [(page, identity) for page, identity in pairs if kept.tag(page) is None and kept.is_settled(page)]
        if new:
            made = self._tagger.tags([page for page, _ in new], [identity for _, identity in new])
            for (page, _), tag in zip(new, made, strict=True):
                kept.keep_tag(page, tag)

    def announced(self, pages: Sequence[PageId], identities: Sequence[bytes]) -> tuple[bytes, ...]:
        """Tags to announce: the kept ones. Only a partial tail, which never settles, is tagged here."""
        return tuple(
            [
                self._digests.tag(page) or self._tagger.tags([page], [identity])[0]
                for page, identity in zip(pages, identities, strict=True)
            ]
        )
