"""Attention over gathered keys and values: tiles of queries, and rows of one query each.

Pure functions of tensors, called by `torch_backend`. Query heads that share a KV head are rows of one matrix
(grouped-query attention without repeating K and V). CPUs without bfloat16 arithmetic compute tiles in float32, which is
faster there and more exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from baton.model.attention.base import AttentionCall
from baton.model.cpu import has_bfloat16_arithmetic
from baton.model.to_device import int64_tensor

TILE_TOKENS = 128


def working_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of score matrices of `dtype` inputs on `device`."""
    slow = dtype == torch.bfloat16 and device.type == "cpu" and not has_bfloat16_arithmetic()
    return torch.float32 if slow else dtype


def attend_rows(
    call: AttentionCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Attention of one query a row: `query` [rows, num_heads, dim], `keys`, `values` [rows, num_kv_heads, slots, dim].

    `bias` [rows, 1, 1, slots] is 0 for visible slots and -inf for others. Returns [rows, num_heads, v_head_dim].
    """
    num_rows, num_heads, _ = query.shape
    packed = query.reshape(num_rows, keys.shape[1], -1, query.shape[-1])  # [rows, kv_heads, group, dim]
    if call.is_plain:
        out = scaled_dot_product_attention(packed, keys, values, attn_mask=bias, scale=call.scale)
    else:
        scores = _scores(call, packed.float(), keys.float()) + bias
        sinks = None if call.sinks is None else call.sinks.view(keys.shape[1], -1, 1)
        out = (_softmax(scores, sinks) @ values.float()).to(query.dtype)
    return out.reshape(num_rows, num_heads, -1)


def attend_chunk(
    call: AttentionCall,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    keys_start: int,
    first_key: int = 0,
    visible_ends: Sequence[int] | None = None,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of queries at positions [start, start + tokens): `query` [tokens, num_heads, dim].

    Queries from `first_key` on see no key before it. `visible_ends`: one past the last key that each query sees; None:
    its own. `tree` [tokens, tokens], bool: those of the new keys that each query sees; None: all up to its own.

    `keys` and `values` [num_kv_heads, slots, dim] hold positions [keys_start, start + tokens). Returns [tokens,
    num_heads, v_head_dim].
    """
    num_tokens, num_heads, dim = query.shape
    num_kv_heads = keys.shape[0]
    dtype = working_dtype(query.dtype, query.device)
    keys, values = keys.to(dtype), values.to(dtype)
    packed = (
        query.to(dtype).reshape(num_tokens, num_kv_heads, -1, dim).permute(1, 2, 0, 3)
    )  # [kv_heads, group, tokens, .]
    out = query.new_empty(num_tokens, num_heads, values.shape[-1])
    if tree is not None:
        tile = _attend_tile(call, packed, keys, values, start, keys_start, first_key, None, tree)
        return tile.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, -1).to(query.dtype)
    for first in range(0, num_tokens, TILE_TOKENS):
        last = min(num_tokens, first + TILE_TOKENS)
        low = keys_start if call.window is None else max(keys_start, start + first - call.window + 1)
        ends = None if visible_ends is None else visible_ends[first:last]
        seen = slice(low - keys_start, (start + last if ends is None else max(ends)) - keys_start)
        tile = _attend_tile(
            call, packed[:, :, first:last], keys[:, seen], values[:, seen], start + first, low, first_key, ends
        )
        out[first:last] = tile.permute(2, 0, 1, 3).reshape(last - first, num_heads, -1)
    return out


def _attend_tile(
    call: AttentionCall,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    keys_start: int,
    first_key: int,
    ends: Sequence[int] | None,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of `query` [kv_heads, group, tokens, dim] over `keys` [kv_heads, slots, dim].

    Both end together, or the keys with the last of `ends`.
    """
    num_kv_heads, group, num_tokens, dim = query.shape
    flat = query.reshape(num_kv_heads, group * num_tokens, dim)
    scores = _scores(call, flat, keys).view(num_kv_heads, group, num_tokens, -1)
    if tree is None:
        _hide(scores, start, keys_start, call.window, ends)
    else:
        scores[..., -num_tokens:].masked_fill_(~tree, -torch.inf)
    if first_key > keys_start:
        scores[..., max(0, first_key - start) :, : first_key - keys_start] = -torch.inf
    sinks = None if call.sinks is None else call.sinks.view(num_kv_heads, group, 1, 1)
    weights = _softmax(scores, sinks).reshape(num_kv_heads, group * num_tokens, -1)
    return (weights @ values).view(num_kv_heads, group, num_tokens, -1)


def _hide(scores: torch.Tensor, start: int, keys_start: int, window: int | None, ends: Sequence[int] | None) -> None:
    """Masks scores with -inf in place: keys that are not visible yet, and keys `window` or more before the query."""
    num_tokens = scores.shape[-2]
    positions = torch.arange(start, start + num_tokens, device=scores.device)[:, None]
    if ends is None:
        scores[..., -num_tokens:].masked_fill_(positions < positions.T, -torch.inf)
    else:
        places = torch.arange(keys_start, keys_start + scores.shape[-1], device=scores.device)
        scores.masked_fill_(places >= int64_tensor(ends, scores.device)[:, None], -torch.inf)
    if window is None:
        return
    num_old = start + num_tokens - window - keys_start  # keys before the last query's window
    if num_old > 0:
        old = torch.arange(keys_start, keys_start + num_old, device=scores.device)[None]
        scores[..., :num_old].masked_fill_(old <= positions - window, -torch.inf)


def _scores(call: AttentionCall, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    scores = (query * call.scale) @ keys.transpose(-1, -2)
    return scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last axis. `sinks` broadcast over the other axes and only add to the denominator."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
