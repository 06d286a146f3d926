"""The prefix cache: pages kept after use, found by their tokens, evicted leaf by leaf in the order of a policy.

A node is exactly one page, and its key is the chained digest of its whole prefix (`baton.kv.keys`). So the tree lies
flat in one dictionary and no edge is ever split. Sharing KV along a token tree is SGLang's RadixAttention; chained page
keys are vLLM's. Two rules keep it simple:

* Holds are closed towards the root: the holder of a cached page holds all pages before it (`insert` swaps a duplicate
  for the cached page). So every cached, unheld page can be evicted, in some order.
* `touch` goes from the deepest page to the root, so an unheld ancestor is younger than its descendants.

Only settled pages enter: `insert` hashes those that have no digest yet, unless digests are off. `quarantine` takes out
a page with all that was computed from it.

Events announce what other workers can be given: no windowless page, and none behind a page that is not announced.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.domain.errors import Broken
from baton.domain.ids import PageId, PageKey
from baton.kv.events.event import EMPTY, PageContent
from baton.kv.events.source import EventSource
from baton.kv.eviction import NO_PRIORITY, EvictionPolicy, EvictionQueue, PageUse
from baton.kv.geometry import PageWindow
from baton.kv.page_digests import PageHasher, PageState
from baton.kv.pages import Hold, Owner, PagePool


@dataclass(slots=True)
class _Node:
    page: PageId
    parent: PageKey | None
    num_children: int = 0
    is_foreign: bool = False
    is_announced: bool = False
    use: PageUse = field(default_factory=PageUse)


class PrefixCache:
    """Prefix cache over one pool, and the only allocator that evicts."""

    def __init__(
        self, pool: PagePool, hasher: PageHasher | None = None, policy: EvictionPolicy = EvictionPolicy.LRU
    ) -> None:
        """`hasher` None: digests are off."""
        self.pool = pool
        self.hasher = hasher
        self.events: EventSource | None = None  # set before the first page
        self.on_evict: Callable[[PageKey], None] | None = None  # while the page has its bytes
        self.window: PageWindow | None = None  # set before the first page, if pages have a window part
        self._nodes: dict[PageKey, _Node] = {}
        self._leaves = EvictionQueue(policy)
        self._num_uses = 0
        pool.on_evictable = self._add_leaf
        self._keys: list[PageKey | None] = [None] * pool.num_pages  # of the cached pages, by page
        self._wrong: dict[PageId, None] = {}

    @property
    def num_available(self) -> int:
        """Number of pages that `allocate` can take now."""
        return self.pool.num_free + self.pool.num_cached

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, keys: Sequence[PageKey], hold: Hold, next_position: int | None = None) -> list[PageId]:
        """Cached pages of the longest prefix of `keys` that can be used, each held once for `hold`.

        `next_position`: of the first token that is computed over the sequence; None: the one behind the match. Windows
        that reach to it need the window part of their pages (`PageWindow`).
        """
        pages: list[PageId] = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            pages.append(node.page)
        if self.window is not None:
            del pages[self.window.num_usable(pages, self.pool.digests.is_windowless, next_position) :]
        self.touch(keys[: len(pages)])
        self.pool.hold(pages, hold)
        return pages

    def num_matching(self, keys: Sequence[PageKey]) -> int:
        """Number of leading pages that `match` finds. Neither holds nor touches them.

        A page is cached only after those before it, so few of the keys are looked up where pages have no window part.
        """
        num_cached = bisect_left(keys, True, key=lambda key: key not in self._nodes)
        if self.window is None:
            return num_cached
        pages = [self._nodes[key].page for key in keys[:num_cached]]
        return self.window.num_usable(pages, self.pool.digests.is_windowless, None)

    def num_givable(self, pages: Sequence[PageId]) -> int:
        """Number of leading `pages` that any other worker can use: that have all their parts.

        With window slots those behind which a sequence can go on: importers are told which window parts there are.
        """
        if self.window is None:
            return len(pages)
        if self.pool.windows is not None:
            return self.window.num_usable(pages, self.pool.digests.is_windowless, None)
        return next((at for at, page in enumerate(pages) if self.pool.digests.is_windowless(page)), len(pages))

    def reached(self, pages: Sequence[PageId]) -> Sequence[PageId]:
        """Those of the leading `pages` of a sequence whose window parts, in slots, the token behind them reads."""
        if self.window is None or self.pool.windows is None:
            return ()
        return pages[self.window.first_page(len(pages) * self.window.page_size) :]

    def insert(
        self,
        parent: PageKey | None,
        keys: Sequence[PageKey],
        pages: Sequence[PageId],
        hold: Hold,
        contents: Sequence[PageContent] = (),
        *,
        foreign: bool = False,
    ) -> list[PageId]:
        """Enters filled pages that follow the cached page `parent` (None: the root).

        `contents`: of these pages, for readers of events; without any they learn the keys. `pages[i]` has the KV that
        `keys[i]` names and is held for `hold`, like `parent`. Returns the pages to use from now on. A page that was
        cached already replaces its duplicate: the hold moves to the cached page, and the duplicate is freed. If the
        cached one was damaged, its duplicate and the pages behind it settle, do not enter, and the result is shorter
        (`take_wrong`). If the cached one lacks the window part that its duplicate has, the duplicate takes its place,
        or if the cached one is held (`is_held_windowless`), the result is shorter as well. With window slots it is
        shorter before a duplicate that is pinned, too. `foreign`: the pages were not computed here.
        """
        nodes, pairs = self._nodes, zip(keys, pages, strict=True)
        self.settle([page for key, page in pairs if key not in nodes or self._lacks_window(key, page)])
        used: list[PageId] = []
        for key, page, content in zip(keys, pages, contents or itertools.repeat(EMPTY), strict=False):
            if key in nodes and self._blocks(key, page):
                break
            new = _Node(page, parent, is_foreign=foreign)
            used.append(self._insert_one(key, new, hold, content))
            parent = key
        if len(used) < len(pages):
            self.settle(pages[len(used) :])
        self.touch(keys[: len(used)])
        return used

    def take_wrong(self) -> list[PageId]:
        """Takes the damaged pages that `insert` met, for the caller to quarantine."""
        wrong, self._wrong = self._wrong, {}
        return list(wrong)

    def settle(self, pages: Sequence[PageId]) -> None:
        """Takes the digests of those of `pages`, all completely written, that have none."""
        digests = self.pool.digests
        if self.hasher is not None and (new := digests.unsettled(pages)):
            digests.set_all(new, self.hasher.digests(new))

    def digests(self, pages: Sequence[PageId]) -> list[int]:
        """Kept digests of `pages`; the bytes of those that have none are hashed now. Empty if digests are off."""
        if self.hasher is None:
            return []
        digests = self.pool.digests
        new = [page for page in pages if not digests.is_settled(page)]
        found = dict(zip(new, self.hasher.digests(new), strict=True)) if new else {}
        return [found[page] if page in found else digests.digest(page) for page in pages]

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Makes the cached pages of a chain the most recently used; the first page becomes the youngest."""
        nodes = self._nodes
        for key in reversed(keys):
            node = nodes.get(key)
            if node is not None:  # not quarantined meanwhile
                self._num_uses += 1
                node.use.last_use = self._num_uses

    def count_hits(self, keys: Sequence[PageKey]) -> None:
        """Counts a request that uses the cached pages of a chain, for the eviction policy."""
        for key in keys:
            node = self._nodes.get(key)
            if node is not None:
                node.use.num_hits += 1

    def raise_priority(self, keys: Sequence[PageKey], priority: int) -> None:
        """Tells that a request of `priority` uses the cached pages of a chain, which begins with the first page."""
        if priority == NO_PRIORITY:
            return
        for key in keys:
            node = self._nodes.get(key)
            if node is not None:
                node.use.priority = max(node.use.priority, priority)

    def page_of(self, key: PageKey) -> PageId:
        """Page of a cached key. Raises `KeyError` for any other."""
        return self._nodes[key].page

    def find(self, key: PageKey) -> PageId | None:
        """Page of a cached key; None for any other."""
        node = self._nodes.get(key)
        return None if node is None else node.page

    def parent_of(self, key: PageKey) -> PageKey | None:
        """Key of the page before a cached one; None for the first. Raises `KeyError` for any other."""
        return self._nodes[key].parent

    def key_of(self, page: PageId) -> PageKey | None:
        """Key of a cached page; None for any other."""
        return self._keys[page]

    def is_held_windowless(self, key: PageKey, page: PageId) -> bool:
        """True if `key` is cached without the window part that `page` has, in a page that does not give way to it."""
        return self.pool.windows is None and self._lacks_window(key, page) and self._is_held(key)

    def quarantine(self, key: PageKey) -> list[PageKey]:
        """Takes out a page and all its descendants; unheld ones are freed, held ones condemned.

        Returns their keys, `key` first; none if it is not cached. Walks all nodes: faults are rare.
        """
        if key not in self._nodes:
            return []
        taken = self._subtree(key)
        for one in reversed(taken):
            self.pool.digests.condemn(self._nodes[one].page)
            self._remove(one)
        return taken

    def foreign(self, key: PageKey) -> list[PageKey]:
        """Keys of the foreign pages among a cached page and its descendants, parents before children."""
        return [one for one in self._subtree(key) if self._nodes[one].is_foreign] if key in self._nodes else []

    def allocate(self, num_pages: int, hold: Hold) -> list[PageId] | None:
        """Takes `num_pages` pages held for `hold`, evicting as needed, also for those that retire. None: too few."""
        if num_pages > self.num_available:
            return None
        while (num_lacking := num_pages - self.pool.num_free) > 0 and self.pool.num_cached:
            self._evict(min(num_lacking, self.pool.num_cached))
        return self.pool.allocate(num_pages, hold)

    def clear(self) -> int:
        """Evicts every unheld page; returns their number."""
        num_pages, events = self.pool.num_cached, self.events
        if events is not None and num_pages and num_pages == len(self._nodes):  # one event for all pages
            events.cleared()
            self.events = None
        self._evict(num_pages)
        self.events = events
        return num_pages

    def check(self) -> None:
        """Walks every page. Raises `Broken` unless the tree, its holds and the pool agree."""
        if len({node.page for node in self._nodes.values()}) != len(self._nodes):
            raise Broken("one page is cached under two keys")
        self.check_pages(0, self.pool.num_pages)
        children: dict[PageKey, int] = {}
        for node in self._nodes.values():
            if node.parent is not None:
                children[node.parent] = children.get(node.parent, 0) + 1
        for key, node in self._nodes.items():
            if node.num_children != children.get(key, 0):
                raise Broken(f"page {node.page} counts {node.num_children} children, has {children.get(key, 0)}")
            if self._use_of_leaf(key) is not None and key not in self._leaves:
                raise Broken(f"page {node.page} can be evicted and is in no order of eviction")

    def check_pages(self, start: int, stop: int) -> None:
        """The part of `check` that concerns single pages, for pages [start, stop). Children are not counted."""
        for page in range(start, stop):
            key = self._keys[page]
            if self.pool.is_cached(PageId(page)) != (key is not None):
                raise Broken(f"page {page} is cached for the pool or for the tree, not for both")
            if key is not None:
                self._check_node(key, page)

    def _check_node(self, key: PageKey, page: int) -> None:
        node = self._nodes.get(key)
        if node is None or node.page != page:
            raise Broken(f"page {page} is not where its key leads")
        self._check_state(node.page)
        if node.parent is None:
            return
        if node.parent not in self._nodes:
            raise Broken(f"page {page} is cached without the page before it")
        if self._is_held(key) and not self._is_held(node.parent):
            raise Broken(f"page {page} is held, the page before it is not")

    def _check_state(self, page: PageId) -> None:
        state = self.pool.digests.state(page)
        if state is not PageState.SETTLED and (self.hasher is not None or state is not PageState.NONE):
            raise Broken(f"page {page} is cached and {state.name}")

    def _is_held(self, key: PageKey) -> bool:
        return self.pool.owner(self._nodes[key].page) != Owner.CACHED

    def _is_damaged(self, key: PageKey, page: PageId) -> bool:
        """True if `key` is cached in another page whose bytes differ from its digest. Records that page."""
        node = self._nodes.get(key)
        if node is None or node.page == page or self.hasher is None:
            return False
        if self.hasher.digests([node.page])[0] == self.pool.digests.digest(node.page):
            return False
        self._wrong[node.page] = None
        return True

    def _lacks_window(self, key: PageKey, page: PageId) -> bool:
        """True if `key` is cached without the window part that `page` has."""
        node, digests = self._nodes.get(key), self.pool.digests
        return node is not None and digests.is_windowless(node.page) and not digests.is_windowless(page)

    def _blocks(self, key: PageKey, page: PageId) -> bool:
        """True if `page` cannot be entered for `key`, which is cached."""
        if self._is_damaged(key, page) or self.is_held_windowless(key, page):
            return True
        is_duplicate = self.pool.windows is not None and self._nodes[key].page != page
        return is_duplicate and self.pool.has_hold(page, Hold.PINNED)  # another worker may read its slot, by number

    def _replace(self, key: PageKey, node: _Node, page: PageId) -> None:
        """Puts `page`, which has all parts, in the place of the unheld page of `key`, which is freed."""
        old, node.page = node.page, page
        self._keys[old], self._keys[page] = None, key
        self.pool.set_cached(page, True)
        self.pool.set_cached(old, False)

    def _insert_one(self, key: PageKey, new: _Node, hold: Hold, content: PageContent) -> PageId:
        page, parent, node = new.page, new.parent, self._nodes.get(key)
        if node is None:
            self._nodes[key] = node = new
            self._keys[page] = key
            if parent is not None:
                self._nodes[parent].num_children += 1
            self.pool.set_cached(page, True)
        elif self._lacks_window(key, page) and self.pool.windows is None:
            self._replace(key, node, page)
        elif node.page != page:
            if self.pool.windows is not None:
                self.pool.windows.replace(page, node.page)
            self.pool.hold([node.page], hold)
            self.pool.drop([page], hold)
        self._announce(key, node, content)
        return node.page

    def _announce(self, key: PageKey, node: _Node, content: PageContent) -> None:
        """Announces a page that is not announced yet, if others can be given it."""
        if node.is_announced:
            return
        follows = node.parent is None or self._nodes[node.parent].is_announced
        node.is_announced = follows and not self.pool.digests.is_windowless(node.page)
        if self.events is not None:
            if node.is_announced:
                self.events.stored(key, node.parent, content)
            else:
                self.events.withheld()

    def _evict(self, num_pages: int) -> None:
        """Frees `num_pages` unheld pages, leaves first. Raises `Broken` if there are too few."""
        for _ in range(num_pages):
            key = self._leaves.pop(self._use_of_leaf)
            if key is None:
                raise Broken("a page can be evicted and is in no order of eviction")
            if self.on_evict is not None:
                self.on_evict(key)
            self._remove(key)

    def _use_of_leaf(self, key: PageKey) -> PageUse | None:
        """Use of a page that can be evicted now; None for any other."""
        node = self._nodes.get(key)
        if node is None or node.num_children or self.pool.owner(node.page) != Owner.CACHED:
            return None
        return node.use

    def _add_leaf(self, page: PageId) -> None:
        """Ranks an unheld page for eviction, if no page depends on it."""
        key = self._keys[page]
        if key is not None and (use := self._use_of_leaf(key)) is not None:
            self._leaves.push(key, use)

    def _remove(self, key: PageKey) -> None:
        """Removes a node without children."""
        node = self._nodes.pop(key)
        self._leaves.forget(key)
        self._keys[node.page] = None
        if node.parent is not None:
            parent = self._nodes[node.parent]
            parent.num_children -= 1
            self._add_leaf(parent.page)
        self.pool.set_cached(node.page, False)
        if self.events is not None and node.is_announced:
            self.events.removed(key)

    def _subtree(self, key: PageKey) -> list[PageKey]:
        """`key` and all its descendants, parents before children."""
        children: dict[PageKey, list[PageKey]] = {}
        for child, node in self._nodes.items() if self._nodes[key].num_children else ():
            if node.parent is not None:
                children.setdefault(node.parent, []).append(child)
        taken = [key]
        for one in taken:  # grows while it is read
            taken += children.get(one, ())
        return taken
