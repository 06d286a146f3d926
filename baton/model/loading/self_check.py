"""Checks at load that paged, chunked, batched attention gives the model's own logits.

Two prompts go through the stock forward pass with eager attention, one by one. Then they go side by side through pages,
in uneven chunks and single tokens. They are longer than a page and than the sliding windows, where those are short
enough, and take both ways through latents. Of transformers' model types 29 run on pages and are wrong (recurrent
states, chunked masks, shifted positions); an allow-list and this check both keep them out.

Where two decoders can serve a model their pages are compared, too. Attention knows only differences of positions, so
logits do not show a decoder that counts from one. But no other worker could continue from its pages.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from baton.domain.arithmetic import ceil_div
from baton.kv.geometry import CacheLayer, KVGeometry, LatentGeometry
from baton.model.attention.base import Segment, plan_step
from baton.model.attention.latent import MAX_ABSORBED_FLOAT32_TOKENS, max_absorbed_tokens
from baton.model.attention.layers import ObservedLayer
from baton.model.decoders.base import Decoder
from baton.model.errors import UnsupportedModel
from baton.model.storage import PageStorage

MAX_PROMPT_TOKENS = 384
MAX_FLOAT32_COPY_PARAMETERS = 128_000_000
FLOAT32_BOUND = 1e-3
LOW_PRECISION_BOUND = 0.15
"""Bound without a float32 copy, which would separate rounding from error: a multiple of the rounding seen (0.03-0.07).
"""


class VerificationBits(enum.StrEnum):
    """Logits of a token in a segment of up to 16, against those of the token alone.

    EXACT: the same bits. ROUNDING: they differ by rounding.
    """

    EXACT = "exact"
    ROUNDING = "rounding"


@dataclass(frozen=True, slots=True)
class ReferenceLogits:
    """Prompts of different lengths, and the stock model's logits [tokens, vocab_size] after each of their tokens.

    `rounding`: their median gap to float32 logits; None where it is unknown.
    """

    prompts: tuple[tuple[int, ...], ...]
    stock: tuple[torch.Tensor, ...]
    exact: tuple[torch.Tensor, ...]
    rounding: float | None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The largest gap and its bound, in standard deviations of the logits."""

    gap: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.gap <= self.bound  # a NaN fails


def reference_logits(
    model: torch.nn.Module, layers: Sequence[ObservedLayer], vocab_size: int, page_size: int, device: str
) -> ReferenceLogits:
    """Runs the stock model, which must use its own eager attention."""
    prompts = _prompts(layers, vocab_size, page_size)
    stock = tuple(_stock_logits(model, prompt, device) for prompt in prompts)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if stock[0].dtype == torch.float32 and next(model.parameters()).dtype == torch.float32:
        return ReferenceLogits(prompts, stock, stock, None)
    if num_parameters > MAX_FLOAT32_COPY_PARAMETERS:
        return ReferenceLogits(prompts, stock, stock, None)
    wide = copy.deepcopy(model).float()
    exact = tuple(_stock_logits(wide, prompt, device) for prompt in prompts)
    return ReferenceLogits(prompts, stock, exact, _median_gap(torch.cat(stock), torch.cat(exact)))


DecoderFactory = Callable[[PageStorage], Decoder]
"""Makes a decoder of the model under check over a storage of its geometry."""


def check_logits(
    make_decoder: DecoderFactory, geometry: KVGeometry, reference: ReferenceLogits, device: str
) -> CheckResult:
    """Runs the prompts through pages and compares logits. The paged hook must be set."""
    return gap_result(*paged_logits(make_decoder, geometry, reference, device), geometry.dtype, reference.rounding)


def gap_result(ours: torch.Tensor, wanted: torch.Tensor, dtype: str, rounding: float | None = None) -> CheckResult:
    """Compares logits [tokens, vocab_size] of a model of `dtype`. `rounding`: as in `ReferenceLogits`."""
    if dtype == "float32":
        return CheckResult(_max_gap(ours, wanted), FLOAT32_BOUND)
    bound = LOW_PRECISION_BOUND if rounding is None else 1.5 * rounding + 0.01
    return CheckResult(_median_gap(ours, wanted), bound)


def check_pages(
    ours: DecoderFactory, theirs: DecoderFactory, geometry: KVGeometry, reference: ReferenceLogits, device: str
) -> CheckResult:
    """Runs the longest prompt through both decoders and compares their pages: the largest median gap of a layer.

    A token's gap is the root mean square difference, relative to the root mean square of what `theirs` wrote.
    """
    mine, other = (_written_kv(make_decoder, geometry, reference.prompts[0], device) for make_decoder in (ours, theirs))
    gaps = [
        ((a - b).square().mean(-1).sqrt() / b.square().mean(-1).sqrt()).median()
        for a, b in zip(mine, other, strict=True)
    ]
    bound = FLOAT32_BOUND if geometry.dtype == "float32" else LOW_PRECISION_BOUND
    return CheckResult(torch.stack(gaps).max().item(), bound)


def require_passed(result: CheckResult, model_type: str) -> None:
    """Raises `UnsupportedModel` with the figures unless the check passed."""
    if not result.passed:
        raise UnsupportedModel(
            f"{model_type}: logits over pages differ from the stock model's by {result.gap:.2g} standard deviations, "
            f"more than {result.bound:.2g}: it would answer wrongly, so it is not served. Try dtype float32; if it "
            "still differs, this architecture is not supported."
        )


def _prompts(layers: Sequence[ObservedLayer], vocab_size: int, page_size: int) -> tuple[tuple[int, ...], ...]:
    reaches = [layer.window for layer in layers if layer.window is not None and layer.window < MAX_PROMPT_TOKENS // 2]
    if _keep_latents(layer.geometry for layer in layers):
        reaches.append(page_size + MAX_ABSORBED_FLOAT32_TOKENS)
    longest = min(MAX_PROMPT_TOKENS, max([2 * page_size, *reaches]) + page_size + 3)
    generator = torch.Generator().manual_seed(0)
    lengths = (longest, page_size + 5)
    return tuple(tuple(torch.randint(vocab_size, (n,), generator=generator).tolist()) for n in lengths)


def _stock_logits(model: torch.nn.Module, prompt: Sequence[int], device: str) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([prompt], device=device), use_cache=False).logits
    return logits[0].float()


def paged_logits(
    make_decoder: DecoderFactory, geometry: KVGeometry, reference: ReferenceLogits, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [tokens, vocab_size] after the last token of every chunk, float32, and the expected ones."""
    page_size = geometry.page_size
    tables = _scattered_tables(reference.prompts, page_size)
    storage = PageStorage.allocate(geometry, sum(map(len, tables)) + 1, device)
    decoder = make_decoder(storage)
    ours, wanted = [], []
    chunk = max_absorbed_tokens(geometry) + 1 if _keep_latents(geometry.layers) else page_size + 5
    for chunks in _steps([len(prompt) for prompt in reference.prompts], page_size, chunk):
        ids: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        keep: list[int] = []
        for row, start, end in chunks:
            segments.append(Segment(len(ids), start, end - start, tables[row]))
            ids += reference.prompts[row][start:end]
            positions += range(start, end)
            keep.append(len(ids) - 1)
            wanted.append(reference.exact[row][end - 1])
        flat_ids, flat_positions, places = (torch.tensor(x, device=device) for x in (ids, positions, keep))
        step = plan_step(segments, page_size, device)
        ours.append(decoder.forward(flat_ids, flat_positions, step, places).float())
    return torch.cat(ours), torch.stack(wanted)


def _written_kv(
    make_decoder: DecoderFactory, geometry: KVGeometry, prompt: Sequence[int], device: str
) -> list[torch.Tensor]:
    """K and V of every layer after `prompt`, each [tokens, num_kv_heads * head_dim], float32."""
    (table,) = _scattered_tables([prompt], geometry.page_size)
    storage = PageStorage.allocate(geometry, len(table) + 1, device)
    ids, positions = torch.tensor(prompt, device=device), torch.arange(len(prompt), device=device)
    step = plan_step([Segment(0, 0, len(prompt), table)], geometry.page_size, device)
    make_decoder(storage).forward(ids, positions, step, positions[-1:])
    sides = [side for layer in range(len(geometry.layers)) for side in (storage.keys(layer), storage.values(layer))]
    return [side[table].flatten(1, 2).transpose(1, 2).flatten(0, 1)[: len(prompt)].flatten(1).float() for side in sides]


def _scattered_tables(prompts: Sequence[Sequence[int]], page_size: int) -> list[list[int]]:
    """Interleaved page tables in descending order: pages are never adjacent, and page 0 is unused."""
    tables: list[list[int]] = [[] for _ in prompts]
    counts = [ceil_div(len(prompt), page_size) for prompt in prompts]
    next_page = sum(counts)
    while next_page:
        for table, count in zip(tables, counts, strict=True):
            if len(table) < count:
                table.append(next_page)
                next_page -= 1
    return tables


def _keep_latents(layers: Iterable[CacheLayer]) -> bool:
    return any(isinstance(layer, LatentGeometry) for layer in layers)


def _steps(lengths: Sequence[int], page_size: int, chunk: int) -> list[list[tuple[int, int, int]]]:
    """For each step the (row, start, end) of its chunks: uneven ones, and three single tokens at the end.

    The second chunk has `chunk` tokens: latents are expanded for so many.
    """
    cuts = []
    for length in lengths:
        edges = [0, *range(max(1, page_size - 3), length - 3, chunk), *range(length - 3, length + 1)]
        cuts.append(list(pairwise(edges)))
    num_steps = max(map(len, cuts))
    return [[(row, *cut[step]) for row, cut in enumerate(cuts) if step < len(cut)] for step in range(num_steps)]


def _max_gap(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((ours - wanted).abs().amax(-1) / wanted.std(-1)).max().item()


def _median_gap(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    """Median of the tokens' gaps: rounding can send a few tokens to other experts, an error moves all."""
    return ((ours - wanted).square().mean(-1).sqrt() / wanted.std(-1)).median().item()
