"""Small integers in 32-bit words, and factors that groups of columns share. Used by the formats of packed integers."""

from __future__ import annotations

import torch

WORD_BITS = 32


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The unsigned fields of int32 `words` [..., n], the lowest bits first: uint8 [..., n * 32 / bits]."""
    per_word = WORD_BITS // bits
    fields = torch.empty(*words.shape, per_word, dtype=torch.uint8)
    for place in range(per_word):
        fields[..., place] = (words >> (bits * place)) & (2**bits - 1)  # the mask drops copies of the sign bit
    return fields.flatten(-2)


def group_of_columns(num_columns: int, group_size: int) -> torch.Tensor:
    """The group of each column: int64 [num_columns]."""
    return torch.arange(num_columns) // group_size


def dequantize_groups(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, groups: torch.Tensor
) -> torch.Tensor:
    """`(values - zeros) * scales` in float32, for integers [rows, columns] and factors [rows, number of groups].

    `groups` [columns]: the group of each column, in any order. `zeros` None: zero.
    """
    weight = values.to(torch.float32)
    if zeros is not None:
        weight -= zeros.to(torch.float32).index_select(1, groups)
    weight *= scales.to(torch.float32).index_select(1, groups)
    return weight


def check_groups(groups: torch.Tensor, num_groups: int) -> torch.Tensor:
    """`groups` as int64. Raises `ValueError` for one outside [0, num_groups)."""
    groups = groups.long()
    for group in (groups.amin().item(), groups.amax().item()):
        if not 0 <= group < num_groups:
            raise ValueError(f"g_idx names group {group}, and there are {num_groups}")
    return groups
