"""Pools of equal bytes with and without window slots, of published shapes whose layers partly have a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.kv.geometry import KVGeometry, LayerGeometry, PageWindow
from baton.kv.windows.plan import AUTO_WINDOWS, PoolPlan, auto_share, plan_pool

PAGE_SIZE, CONTEXT = 16, 131_072
GIB = 1 << 30


@dataclass(frozen=True)
class WindowedShape:
    """`num_windowed` layers with a window and `num_full` others."""

    heads: int
    dim: int
    num_windowed: int
    num_full: int
    window: int

    def geometry(self, page_size: int = PAGE_SIZE) -> KVGeometry:
        """Its pages in bfloat16."""
        layers = (LayerGeometry(self.heads, self.dim, self.dim),) * (self.num_windowed + self.num_full)
        plain = KVGeometry.of_layers(layers, "bfloat16", page_size)
        return plain.with_window_part(self.window, tuple(range(self.num_windowed)))


SHAPES = {
    "gemma-3-27b": WindowedShape(16, 128, 52, 10, 1024),
    "gemma-3-1b": WindowedShape(1, 256, 22, 4, 512),
    "gpt-oss-20b": WindowedShape(8, 64, 12, 12, 128),
}


@dataclass(frozen=True)
class PoolArm:
    """One pool of a shape. `name`: the value of `--window-slots`, or what else was tried."""

    name: str
    plan: PoolPlan
    window: PageWindow

    @property
    def by_pages(self) -> PageWindow:
        """The window over pages of one token, each of which stands for all tokens of a page."""
        return replace(self.window, num_tokens=self.window.num_tokens // self.window.page_size, page_size=1)


def arms(shape: str, num_pages: int, num_windows: Sequence[int] = (), page_size: int = PAGE_SIZE) -> list[PoolArm]:
    """Pools with the bytes of `num_pages` whole pages: without slots, with those of `auto`, and for other sequences.

    `num_windows`: lengths of these, in windows.
    """
    geometry = SHAPES[shape].geometry(page_size)
    window = PageWindow.of(geometry)
    if window is None:
        raise ValueError(f"{shape} has no window part")
    num_bytes = num_pages * geometry.page_bytes
    found = [PoolArm("off", PoolPlan(num_pages), window)]
    for name, count in (("auto", AUTO_WINDOWS), *((f"for {count} windows", count) for count in num_windows)):
        share = auto_share(window, CONTEXT, count)
        found.append(PoolArm(name, plan_pool(geometry, share, 0, num_bytes=num_bytes), window))
    return found
