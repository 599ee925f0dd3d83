"""Formats of pages of keys and values: their codes, and where everything lies in one layer and head of a page.

`D` is the head width, `P` the tokens of a page (both multiples of 32), `W` the width of a group of value dimensions that
share a scale, `N` = D / W. A layer and head of a page is:

    f16   keys      [P / 16][D][16] float16        16 tokens side by side, for one dimension after the other
          values    [D / 16][P][16] float16        16 dimensions side by side, for one token after the other
    q8    steps     [D] short floats               key = step * number
          keys      [P / 16][D][16] int8
          scales    [N][P] float16                 value = scale * number
          values    [D / 16][P][16] int8
    q4    minimums  [D] float16                    key = minimum + step * number
          steps     [D] short floats
          keys      [P / 16][D / 2][16] bytes      low half: even dimensions, high half: odd dimensions
          steps     [N][P] short floats            value = step * (number - zero / 16)
          zeros     [N][P] bytes
          values    [D / 16][P / 2][16] bytes      low half: even tokens, high half: odd tokens

filled up with zeros to a multiple of 64 bytes. Keys are scaled per dimension over the tokens of the page, since some of
their dimensions are large and hardly vary from token to token; values per token. A short float is the upper byte of a
positive float16 without its sign: 5 bits of exponent, 3 of fraction.

The address of a page is tagged with its format: pages are 64-byte aligned, so the low 6 bits are free for the code.
"""

from __future__ import annotations

F16, Q8, Q4 = 0, 1, 2
FORMAT_NAMES = ("f16", "q8", "q4")
"""Names for people, by code."""
FORMAT_BITS = 63
"""The bits of a page's address that hold its format."""
_GROUP_WIDTH = 64
_ALIGNMENT = 64


def value_group_width(width: int) -> int:
    """W: the least multiple of 32, from 64 on, that divides D; D if there is none."""
    if width % _GROUP_WIDTH == 0:
        return _GROUP_WIDTH
    group = _GROUP_WIDTH
    while group < width and width % group != 0:
        group += 32
    return width if group > width else group


def key_bytes(page_format: int, width: int, page_tokens: int) -> int:
    """Bytes of the keys of one layer and head in a page, with all that belongs to them."""
    if page_format == F16:
        return 2 * width * page_tokens
    if page_format == Q8:
        return width + width * page_tokens
    return 3 * width + width * page_tokens // 2


def used_bytes(page_format: int, width: int, page_tokens: int) -> int:
    """Bytes of one layer and head in a page that hold something: keys, then values."""
    keys = key_bytes(page_format, width, page_tokens)
    if page_format == F16:
        return keys + 2 * width * page_tokens
    scales = 2 * page_tokens * (width // value_group_width(width))
    if page_format == Q8:
        return keys + scales + width * page_tokens
    return keys + scales + width * page_tokens // 2


def head_bytes(page_format: int, width: int, page_tokens: int) -> int:
    """Bytes from one layer and head in a page to the next, a multiple of 64."""
    return (used_bytes(page_format, width, page_tokens) + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
