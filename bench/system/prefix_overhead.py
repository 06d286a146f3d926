"""CPU time that the prefix cache adds to a prompt without a hit: keys, matching, adopting and evicting.

Called by `bench.system.prefix_cache`. Uses the workers' own tables, over a pool that is full of other prompts' pages.
The time of the same prompt without a cache (allocating and releasing pages) is subtracted.
"""

from __future__ import annotations

import itertools
import random
import time

from baton.domain.arithmetic import ceil_div
from baton.kv.page_table import PageTable
from baton.kv.pages import Hold, PagePool
from baton.kv.prefix_cache import PrefixCache

POOL_PROMPTS = 4
_VOCAB_SIZE = 2048


def bookkeeping_s(num_tokens: int, page_size: int, num_prompts: int) -> list[float]:
    """CPU seconds of each of `num_prompts` prompts without a hit."""
    rng = random.Random(num_tokens)
    num_pages = ceil_div(num_tokens, page_size)
    cache = PrefixCache(PagePool(POOL_PROMPTS * num_pages))
    names = itertools.count()
    for _ in range(POOL_PROMPTS):
        _with_cache(cache, _prompt(rng, num_tokens, next(names)), page_size)
    without = PrefixCache(PagePool(POOL_PROMPTS * num_pages))
    seconds = []
    for _ in range(num_prompts):
        prompt = _prompt(rng, num_tokens, next(names))
        seconds.append(_with_cache(cache, prompt, page_size) - _without_cache(without, num_tokens, page_size))
    return seconds


def _prompt(rng: random.Random, num_tokens: int, name: int) -> tuple[int, ...]:
    """Tokens with a unique first page."""
    return (name, *rng.choices(range(_VOCAB_SIZE), k=num_tokens - 1))


def _with_cache(cache: PrefixCache, prompt: tuple[int, ...], page_size: int) -> float:
    began_s = time.thread_time()
    table = PageTable(cache, page_size, "", Hold.LIVE)
    num_found = table.match_tokens(prompt[:-1])
    has_room = table.extend(len(prompt))
    table.cache_full_pages(prompt, len(prompt))
    table.release()
    seconds = time.thread_time() - began_s
    if num_found or not has_room:
        raise RuntimeError(f"a unique prompt hit {num_found} tokens, or did not fit")
    return seconds


def _without_cache(cache: PrefixCache, num_tokens: int, page_size: int) -> float:
    began_s = time.thread_time()
    table = PageTable(cache, page_size, "", Hold.LIVE)
    table.extend(num_tokens)
    table.release()
    return time.thread_time() - began_s
