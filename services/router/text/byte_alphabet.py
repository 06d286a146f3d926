"""The printable alphabet of byte-level tokenizers. Used by `text_model` and `token_lower_bound`; pure."""

from __future__ import annotations


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's table: character -> byte. Printable bytes stand for themselves, others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
