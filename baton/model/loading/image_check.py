"""The self-check with an image: a prompt with rows in the middle, stock forward pass against chunks that cut them.

Where the tokens of an image see all of it, no chunk cuts it, but one begins in its middle, as behind a cached prefix.

Rows are random numbers of the size of token embeddings. What a vision tower gives does not matter here; where the rows
go and which positions they have does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from baton.domain.arithmetic import ceil_div
from baton.domain.media.positions import axis_positions
from baton.domain.media.span import IDENTITY_BYTES, MediaGrid, MediaRules, MediaSpan
from baton.kv.geometry import KVGeometry
from baton.model.attention.base import Segment, plan_step
from baton.model.decoders.base import Decoder
from baton.model.loading.self_check import CheckResult, gap_result
from baton.model.storage import PageStorage
from baton.model.vision.embedding import Embeds
from baton.model.vision.text_model import VisionTextModel, block_masks, stock_inputs

GRID = MediaGrid(3, 5)
NUM_TEXT_TOKENS = 7
"""Before the image, and behind it."""


@dataclass(frozen=True, slots=True)
class ImageLogits:
    """A prompt's ids and positions, its rows, and the stock model's logits [tokens, vocab_size], float32.

    `has_block`: the rows see each other.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    embeds: Embeds
    logits: torch.Tensor
    has_block: bool = False


def image_reference(model: VisionTextModel, vocab_size: int, depth: int, rules: MediaRules, device: str) -> ImageLogits:
    """Runs the stock model, which must use its own eager attention. `depth`: layers that get DeepStack rows."""
    has_block = rules.block_rows is not None
    span = MediaSpan(NUM_TEXT_TOKENS, GRID.height * GRID.width, bytes(IDENTITY_BYTES), GRID)
    num_tokens = span.end + NUM_TEXT_TOKENS
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (num_tokens,), generator=generator).to(device)
    table = model.get_input_embeddings()(ids)
    rows = [torch.randn(span.num_tokens, table.shape[1], generator=generator).to(table) for _ in range(1 + depth)]
    size = table.std()
    embeds = Embeds(
        torch.arange(span.first, span.end, device=device), rows[0] * size, tuple(r * size for r in rows[1:])
    )
    axes = torch.tensor(axis_positions(0, num_tokens, [span]), device=device)
    positions = axes if rules.has_grid else torch.arange(num_tokens, device=device)
    with torch.inference_mode():
        inputs = stock_inputs(model, ids, positions, embeds)
        if has_block:
            inputs["attention_mask"] = block_masks(model, inputs, span.first, span.end)
        logits = model(**inputs).logits[0].float()
    return ImageLogits(ids, positions, embeds, logits, has_block)


def check_image(
    make_decoder: Callable[[PageStorage], Decoder], geometry: KVGeometry, reference: ImageLogits, device: str
) -> CheckResult:
    """Runs the prompt through pages in chunks that cut the image, and compares logits. The paged hook must be set."""
    num_tokens, page_size = len(reference.ids), geometry.page_size
    table = list(range(ceil_div(num_tokens, page_size), 0, -1))
    storage = PageStorage.allocate(geometry, len(table) + 1, device)
    decoder, ours = make_decoder(storage), []
    first, end_of_image = NUM_TEXT_TOKENS, num_tokens - NUM_TEXT_TOKENS
    chunks = list(pairwise([0, first + 4, first + 5, first + 11, num_tokens - 2, num_tokens - 1, num_tokens]))
    if reference.has_block:
        chunks = [(0, end_of_image + 2), (first + 5, end_of_image + 2), (end_of_image + 2, num_tokens)]
    for start, end in chunks:
        blocks = ((first, end_of_image),) if reference.has_block and start < end_of_image else ()
        step = plan_step([Segment(0, start, end - start, table, blocks)], page_size, device)
        every = torch.arange(end - start, device=device)
        positions = reference.positions[..., start:end].contiguous()
        embeds = embeds_within(reference.embeds, start, end)
        ours.append(decoder.forward(reference.ids[start:end], positions, step, every, embeds=embeds).float())
    expected = torch.cat([reference.logits[start:end] for start, end in chunks])
    return gap_result(torch.cat(ours), expected, geometry.dtype)


def embeds_within(embeds: Embeds, start: int, end: int) -> Embeds | None:
    """Those for the places [start, end), counted from `start`; None if there are none."""
    inside = (embeds.places >= start) & (embeds.places < end)
    if not inside.any():
        return None
    deep = tuple(rows[inside] for rows in embeds.deep)
    return Embeds(embeds.places[inside] - start, embeds.rows[inside], deep)
