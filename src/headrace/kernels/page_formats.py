"""Formats of pages of keys and values, and their sizes. See `pages.py` for how they lie."""

from __future__ import annotations

F16, Q8, Q4 = 0, 1, 2
FORMAT_NAMES = ("f16", "q8", "q4")
FORMAT_BITS = 63
"""The low bits of a page's address that hold its format code."""


def head_bytes(page_format: int, width: int, page_tokens: int) -> int:
    """Bytes of one layer and KV head in a page: keys, then values; scales, where there are any, included."""
    return (4 * width, 2 * width + 4, width + 8)[page_format] * page_tokens
